"""`praxis-lite predict --input=... --output=...`: predictions for many rows, resumable after any interruption."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from praxis_lite.cli.adapter_flags import (
  add_adapters_flag,
  folders_of_adapters,
  identities_of_adapters,
  read_adapters,
)
from praxis_lite.cli.command import configured_run
from praxis_lite.cli.command_flags import CommandFlags, add_on_damage, run_flags
from praxis_lite.cli.shards import (
  add_process_flags,
  check_process_flags,
  command_line,
  compute_shards,
  output_folder,
)
from praxis_lite.common.errors import DataError, UserError
from praxis_lite.common.figures import number_of

if TYPE_CHECKING:
  from praxis_lite.runs.bulk.job import ShardJob
  from praxis_lite.runs.bulk.results import ResultLedger
  from praxis_lite.training.experiment import ExperimentConfig

_OF_GENERATION = ('max_tokens', 'temperature', 'top_k', 'top_p', 'stop')


def predict_flags() -> CommandFlags:
  """Returns the flags of `predict`."""
  values = run_flags(seed='Seed for models that draw random numbers.', restores=True)
  add_on_damage(values)
  kinds = '.npz with arrays, .jsonl with an example on each line, images, .wav, or what a dataset of the run reads.'
  values.add_texts('files', f'The files: {kinds}', 'new.jsonl')
  what = (
    "predict: the model's predictions. evaluate: what it reports for each example with labels, such as the loss. Only "
    'with --output: score: probabilities of texts. generate: continuations of prompts. teach: probabilities from which '
    'another model learns.'
  )
  values.add_choice('what', what, ['predict', 'evaluate', 'score', 'generate', 'teach'], 'evaluate', 'predict')
  values.add_integer('batch_size', 'Number of examples to compute together.', 128, 32, least=1)
  _add_flags(values)
  return values


def check_single(values: CommandFlags) -> None:
  """Raises UserError if a flag, or a value of --what, is given that only `predict_many` uses."""
  of_many = CommandFlags()
  _add_flags(of_many)
  given = [f'what={values.what}'] if values.what in ('score', 'generate', 'teach') else []
  given += [name for name in of_many if values[name].present]
  if given:
    raise UserError(f'--{given[0]} needs --input and --output, as in --input=data/*.jsonl --output=predicted')


def _add_flags(values: CommandFlags) -> None:
  values.add_texts('input', 'Files of many rows, for --output: *.jsonl, *.txt or *.parquet.', "'data/*.parquet'")
  values.add_text('output', 'Folder, or URL, for the results of --input.', 'predicted')
  values.add_choice('format', 'Format of the files of --output.', ['jsonl', 'parquet'], 'parquet', 'jsonl')
  values.add_texts('keep', 'Field of a row to copy to its result.', 'id')
  values.add_integer(
    'shard_rows', 'Rows of a file of --output; an interruption loses unfinished files.', 10_000, 1000, least=1
  )
  values.add_integer('max_bad_rows', 'Number of rows that may fail; their result says why.', 10, 0, least=0)
  add_process_flags(values)
  add_adapters_flag(values, "The value 'adapter' of a row names it.")
  values.add_integer('max_tokens', 'To generate: tokens after a prompt; by default as in the config.', 200, least=1)
  values.add_number('temperature', 'To generate: by default as in the config.', '0.8')
  top_k = 'To generate: by default as in the config. To teach: tokens to store, by default 32.'
  values.add_integer('top_k', top_k, 40)
  values.add_number('top_p', 'To generate: by default as in the config.', '0.95')
  values.add_texts('stop', 'To generate: text that ends a continuation.', '";"')


def predict_many(values: CommandFlags) -> int:
  """Runs the command; returns its exit code."""
  check_process_flags(values)
  if values.files:
    raise UserError(f'{values.files[0]}: with --output, name files by --input')
  generates = [f'--{name}' for name in _OF_GENERATION if values[name].present]
  if values.what == 'teach':
    generates = [flag for flag in generates if flag != '--top_k']
  if generates and values.what != 'generate':
    raise UserError(f'{generates[0]} is a setting of --what=generate')

  from praxis_lite.runs.bulk.kept_values import check_keep

  check_keep(values.keep, values.what)
  config, job_log_dir = configured_run(values)
  ledger = _open_ledger(values, config, job_log_dir)

  def run(shards: Sequence[int], check: Callable[[], object]) -> None:
    _make_job(values, config, job_log_dir, ledger).run(shards, check)

  in_actors = functools.partial(make_worker, command_line(values))
  if not compute_shards('predict', values, ledger, run, in_actors, uses_gpus=True):
    return 0
  counts = ledger.check_complete()
  bad = f', {number_of(counts.bad, "bad one")}' if counts.bad else ''
  print(f'{number_of(counts.rows, "row")}{bad}: complete in {values.output}', file=sys.stderr)
  if counts.bad > values.max_bad_rows:
    raise DataError(f'--output={values.output} has {number_of(counts.bad, "bad row")}, more than --max_bad_rows')
  return 0


def make_worker(arguments: Sequence[str]) -> Callable[[int], None]:
  """Returns a function that computes a shard, in another process that has only the arguments of the command."""
  values = predict_flags()
  values(['predict', *arguments])
  config, job_log_dir = configured_run(values)
  job = _make_job(values, config, job_log_dir, _open_ledger(values, config, job_log_dir))
  return lambda number: job.run([number])


def _open_ledger(values: CommandFlags, config: ExperimentConfig, job_log_dir: str) -> ResultLedger:
  from praxis_lite.checkpoints.identity import checkpoint_identity
  from praxis_lite.common.config.text import fields_of, to_text
  from praxis_lite.common.foreign_text import is_secret, remove_secrets
  from praxis_lite.runs.bulk.results import ResultLedger

  step, seal = checkpoint_identity(job_log_dir, values.step, values.on_damage)
  fields = fields_of(to_text(config.roots()))
  settings: dict[str, Any] = {
    'step': step,
    'checkpoint': seal,
    # This includes the settings of the data, such as its tokenizer and how it reads texts and images.
    'config': {path: remove_secrets(value) for path, value in fields.items() if not is_secret(path)},
    **{name: values[name].value for name in ('what', 'batch_size', 'format', 'keep', 'seed')},
    **({name: values[name].value for name in _OF_GENERATION} if values.what == 'generate' else {}),
    **({'top_k': values.top_k} if values.what == 'teach' else {}),
    **identities_of_adapters(folders_of_adapters(values.adapters)),
  }
  return ResultLedger.open(values.output, output_folder(values.output), values.input, settings, values.shard_rows)


def _make_job(values: CommandFlags, config: ExperimentConfig, job_log_dir: str, ledger: ResultLedger) -> ShardJob:
  from praxis_lite.runs.bulk.job import ShardJob
  from praxis_lite.runs.bulk.kinds import Generation, make_compute
  from praxis_lite.runs.records.run_inputs import use_kept_vocabulary
  from praxis_lite.runs.restoring import restore_model

  step: int = ledger.plan.settings['step']
  ema: Literal['evaluate', 'decode'] = 'decode' if values.what == 'generate' else 'evaluate'
  config = use_kept_vocabulary(config, job_log_dir)
  model = restore_model(config, job_log_dir, step=step, seed=values.seed, on_damage=values.on_damage, use_ema=ema)
  if folders := folders_of_adapters(values.adapters):
    model = model.attach_adapters(read_adapters(folders, model, values.trust, ledger.plan.settings))
  generation: Generation = {'max_tokens': values.max_tokens, 'temperature': values.temperature}
  generation |= {'top_k': values.top_k, 'top_p': values.top_p, 'stop': values.stop, 'seed': values.seed}
  compute = make_compute(model, values.what, values.batch_size, generation, values.keep)
  return ShardJob(ledger, compute, batch_size=values.batch_size, keep=values.keep, most_bad=values.max_bad_rows)
