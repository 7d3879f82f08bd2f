"""`praxis-lite agree`: compares what a language model computes in training, decoding and after an export."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from absl import flags

from praxis_lite.cli.command import Command, configured_run, say_how_config_differs
from praxis_lite.cli.command_flags import CommandFlags, add_on_damage, run_flags
from praxis_lite.cli.prompt_files import read_prompts
from praxis_lite.common.errors import UserError, first_line
from praxis_lite.common.foreign_text import printable

if TYPE_CHECKING:
  from praxis_lite.runs.forced_tokens import KnownTexts
  from praxis_lite.runs.trained import TrainedModel


def _run(values: flags.FlagValues) -> int:
  config, job_log_dir = configured_run(values)

  from praxis_lite.bridges.hf.agreement import agree
  from praxis_lite.common.processes import is_primary_process
  from praxis_lite.runs.records.run_inputs import use_kept_vocabulary
  from praxis_lite.runs.restoring import restore_model

  config = use_kept_vocabulary(config, job_log_dir)
  model = restore_model(config, job_log_dir, step=values.step, on_damage=values.on_damage)
  if model.layer.score_limits() is None:
    raise UserError(f'agree compares language models; the model of this run is a {type(model.layer).__name__}')
  texts = _texts(model, values)
  python = values.python or sys.executable
  lines = (lambda line: print(printable(line), flush=True)) if is_primary_process() else (lambda line: None)
  compared = agree(model, texts, cache_dtype=values.cache_dtype, python=python, progress=lines)
  wrong = [each.name for each in compared if not each.is_right]
  lines(f'these differ from the training step: {"; ".join(wrong)}' if wrong else 'all agree')
  say_how_config_differs(values, config)
  return int(bool(wrong))


def _texts(model: TrainedModel, values: flags.FlagValues) -> KnownTexts:
  """Returns what to compare: --prompts, or else rows of a dataset of the run, or else random tokens."""
  from praxis_lite.runs.forced_tokens import random_texts, texts_of_batch, texts_of_tokens
  from praxis_lite.runs.prompts import encode_prompt
  from praxis_lite.runs.records.run_inputs import build_datasets

  limits = model.layer.score_limits()
  assert limits is not None
  if values.prompts:
    if limits.start_id is not None:
      raise UserError('--prompts: a model with sources needs pairs of texts; leave it out to compare those of the run')
    rows = []
    for prompt in read_prompts(values.prompts)[: values.rows]:
      if prompt.kind == 'messages':
        raise UserError(f'{prompt.where}: expected a text, or prompt_ids')
      if prompt.kind == 'prompt_ids':
        rows.append(prompt.value)
      elif model.tokenizer is None:
        raise UserError(f'{prompt.where}: the run has no tokenizer; name ids, as in {{"prompt_ids": [1, 2, 3, 4]}}')
      else:
        rows.append(encode_prompt(model.tokenizer, prompt.value, prompt.where))
    return texts_of_tokens(rows, values.tokens)
  try:
    inputs = build_datasets(model.config.datasets).inputs
    data = next((data for data in inputs if not data.is_training), None) or next(iter(inputs))
    return texts_of_batch(next(data), limits, values.rows, values.tokens)
  except (UserError, StopIteration, OSError) as error:
    why = first_line(error) if str(error) else 'the run has no data'
    print(f'note: comparing random tokens: {why}', file=sys.stderr)
    return random_texts(limits, values.rows, values.tokens)


def _flags() -> CommandFlags:
  values = run_flags(restores=True)
  add_on_damage(values)
  prompts = 'File with texts to compare, as for decode; by default the first rows of the evaluation data of the run.'
  values.add_text('prompts', prompts, 'texts.txt')
  values.add_integer('rows', 'The largest number of texts.', 8, 5, least=1)
  values.add_integer('tokens', 'The largest number of tokens of a text.', 256, 64, least=4)
  values.add_choice('cache_dtype', 'Also decode with caches of this dtype.', ['int8', 'bfloat16'], 'int8')
  values.add_text('python', 'A Python that has transformers and PyTorch, if this one lacks them.', '/opt/hf/bin/python')
  return values


COMMAND = Command(
  'agree',
  'compare training, decoding and export',
  'compare the log-probabilities of a language model in the training step, in evaluation, in cached decoding, in a '
  'batcher, on one device, and after an export, by praxis_lite and by transformers, token by token. The first layer '
  'that differs is named, and the exit code is 1 if one does.',
  'praxis-lite agree runs/1',
  _flags(),
  _run,
  bare='job_log_dir',
)
