"""`praxis-lite tokenize`: writes a corpus as rows of tokens, resumable after any interruption."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from absl import flags

from praxis_lite.cli.command import Command, configured_experiment
from praxis_lite.cli.command_flags import CommandFlags, experiment_flags
from praxis_lite.cli.shards import (
  add_process_flags,
  check_process_flags,
  command_line,
  compute_shards,
  output_folder,
)
from praxis_lite.common.errors import UserError
from praxis_lite.common.figures import number_of

if TYPE_CHECKING:
  from praxis_lite.inputs import BaseTokenizer
  from praxis_lite.runs.bulk.ledger import Ledger
  from praxis_lite.runs.bulk.tokenizing import TokenizingJob


def _run(values: flags.FlagValues) -> int:
  given = cast(CommandFlags, values)
  check_process_flags(given)
  from praxis_lite.runs.bulk.tokenizing import check_token_files

  tokenizer = _tokenizer(given)
  ledger = _open_ledger(given, tokenizer)

  def run(shards: Sequence[int], check: Callable[[], object]) -> None:
    _make_job(given, tokenizer, ledger).run(shards, check)

  in_actors = functools.partial(make_tokenizing_worker, command_line(given))
  if not compute_shards('tokenize', given, ledger, run, in_actors, uses_gpus=False):
    return 0
  counts = check_token_files(ledger)
  rows = f'{number_of(counts.rows, "row")} of {number_of(values.seq_len, "token")}'
  print(f'{number_of(counts.documents, "document")}, {rows}: complete in {values.output}', file=sys.stderr)
  return 0


def make_tokenizing_worker(arguments: Sequence[str]) -> Callable[[int], None]:
  """Returns a function that tokenizes a shard, for a worker process that gets only the arguments of the command."""
  values = _flags()
  values(['tokenize', *arguments])
  tokenizer = _tokenizer(values)
  job = _make_job(values, tokenizer, _open_ledger(values, tokenizer))
  return lambda number: job.run([number])


def _tokenizer(values: CommandFlags) -> BaseTokenizer:
  from praxis_lite.common.devices import leave_accelerators_alone
  from praxis_lite.runs.prompts import tokenizer_of
  from praxis_lite.runs.records.record import has_record
  from praxis_lite.runs.records.run_inputs import use_kept_vocabulary

  leave_accelerators_alone()
  config = configured_experiment(values)
  directory = next((path for path in (values.job_log_dir, values.exp) if path and has_record(path)), None)
  if directory is not None:
    config = use_kept_vocabulary(config, directory)
  tokenizer = tokenizer_of(config, directory)
  if tokenizer is None:
    raise UserError('no dataset of the config has a tokenizer; name another experiment or run by --exp')
  return tokenizer


def _open_ledger(values: CommandFlags, tokenizer: BaseTokenizer) -> Ledger:
  from praxis_lite.inputs.tokenized import FORMAT, tokenizer_settings
  from praxis_lite.runs.bulk.ledger import Ledger

  own = {name: values[name].value for name in ('seq_len', 'packing', 'field')}
  settings = {'what': 'tokenize', 'format': FORMAT, **own, **tokenizer_settings(tokenizer)}
  return Ledger.open(values.output, output_folder(values.output), values.input, settings, values.shard_rows)


def _make_job(values: CommandFlags, tokenizer: BaseTokenizer, ledger: Ledger) -> TokenizingJob:
  from praxis_lite.runs.bulk.tokenizing import TokenizingJob

  return TokenizingJob(ledger, tokenizer, field=values.field, seq_len=values.seq_len, packing=values.packing)


def _flags() -> CommandFlags:
  values = experiment_flags()
  values.add_texts('input', 'Files of documents, a row each: *.jsonl, *.txt or *.parquet.', "'corpus/*.parquet'")
  values.add_text('output', 'Folder, or URL, for the rows of tokens.', 'tokens')
  values.add_text('field', 'Field of a row that is the text of a document.', 'content', 'text')
  values.add_integer('seq_len', 'Tokens in a row.', 2048, 1024, least=1)
  packing = 'concat: rows of one stream of all documents. packed: each document has segments of its own.'
  values.add_choice('packing', packing, ['concat', 'packed'], 'packed', 'concat')
  rows = 'Documents of a file of --output; an interruption loses unfinished files.'
  values.add_integer('shard_rows', rows, 50_000, 10_000, least=1)
  add_process_flags(values)
  return values


COMMAND = Command(
  'tokenize',
  'write a corpus as rows of tokens',
  'tokenize the documents of many files with the tokenizer of an experiment or a run, and write rows of tokens for '
  'TokenizedInput to ArrayRecord files. After an interruption, the same command continues; an incomplete folder is an '
  'error when it is read.',
  "praxis-lite tokenize --exp=runs/llama --input='corpus/*.parquet' --output=tokens --seq_len=2048 --processes=4",
  _flags(),
  _run,
)
