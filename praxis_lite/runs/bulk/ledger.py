"""Ledger: the plan of a bulk prediction, and which of its shards are finished: those whose files exist."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from praxis_lite.common.errors import DataError, first_line
from praxis_lite.common.files import parse_json
from praxis_lite.inputs.tables import import_pyarrow
from praxis_lite.runs.bulk.output_folder import OutputFolder, check_not_input
from praxis_lite.runs.bulk.plan import PLAN, ShardPlan, check_unchanged, make_plan

_PART = 'part-'
FORMATS = ('jsonl', 'parquet')
Result = dict[str, Any]


class Counts(NamedTuple):
  """How many rows a finished output has, and how many of them are bad: they could not be computed."""

  rows: int
  bad: int


class Ledger:
  """The results in a folder.

  Args:
    output: the path or URL of the folder.
    plan: the plan of the results.
    folder: the folder, opened.

  Attributes:
    output: as above.
    plan: as above.
  """

  def __init__(self, output: str, plan: ShardPlan, folder: OutputFolder):
    self.output, self.plan, self._folder = output, plan, folder
    self._format: str = plan.settings['format']

  @classmethod
  def open(
    cls, output: str, folder: OutputFolder, paths: Sequence[str], settings: Mapping[str, Any], shard_rows: int
  ) -> Ledger:
    """Returns the ledger of an output folder; makes and writes its plan, if there is none.

    Args:
      output: the path or URL of the folder.
      folder: the folder.
      paths: files of the input, see `list_inputs`.
      settings: the settings that results depend on; `format` is one of `FORMATS`.
      shard_rows: the largest number of rows in a shard.

    Raises:
      DataError: the folder has results of another input or of other settings, files of something else, or a damaged
        plan.
    """
    settings = {**settings, 'shard_rows': shard_rows}
    names = folder.names()
    if PLAN not in names:
      if names:
        raise DataError(f'--output={output} has files and no {PLAN}, such as {names[0]}; name an empty folder')
      plan = make_plan(paths, settings, shard_rows)
      check_not_input(output, [file.file for file in plan.files])
      folder.create(PLAN, plan.to_bytes())
    plan = ShardPlan.from_bytes(folder.read(PLAN), f'{output}/{PLAN}')
    check_unchanged(plan, paths, settings, f'--output={output}')
    return cls(output, plan, folder)

  def remaining_shards(self) -> list[int]:
    """Returns the numbers of the shards that have no file yet."""
    there = set(self._folder.names())
    return [number for number in range(len(self.plan.shards)) if self._name(number) not in there]

  def finish(self, number: int, results: Sequence[Result]) -> None:
    """Writes the results of a shard: one for each row, with its number as `row`.

    Raises:
      DataError: a row is missing, or values of a column do not fit together in a file of Parquet.
    """
    self._check(number, [result['row'] for result in results])
    self._folder.clean(self._name(number))
    self._folder.write(self._name(number), _to_bytes(results, self._format))

  def check_complete(self) -> Counts:
    """Reads all results, and counts them.

    Raises:
      DataError: a row is missing, occurs twice, or is not in its place.
    """
    if missing := self.remaining_shards():
      raise DataError(f'{self.output}: {len(missing)} of {len(self.plan.shards)} shards are missing')
    rows = bad = 0
    for number in range(len(self.plan.shards)):
      found = self._read_numbers(number)
      self._check(number, found.numbers)
      rows, bad = rows + len(found.numbers), bad + found.bad
    return Counts(rows, bad)

  def _read_numbers(self, number: int) -> _Numbers:
    data = self._folder.read(self._name(number))
    read = _read_lines if self._format == 'jsonl' else _read_table
    try:
      return read(data)
    except (ValueError, KeyError, TypeError, OSError) as error:  # Arrow raises these errors, too.
      where = f'{self.output}/{self._name(number)}'
      raise DataError(f'{where} is damaged: {first_line(error)}; remove the file, and start again') from None

  def _check(self, number: int, rows: Sequence[int]) -> None:
    shard = self.plan.shards[number]
    if list(rows) != list(range(shard.first, shard.first + shard.num_rows)):
      raise DataError(
        f'{self.output}/{self._name(number)}: expected rows {shard.first} to {shard.first + shard.num_rows - 1}, each '
        f'once and in order, and it has {len(rows)}; remove the file, and start again'
      )

  def _name(self, number: int) -> str:
    return f'{_PART}{number:05}.{self._format}'


class _Numbers(NamedTuple):
  numbers: list[int]
  bad: int


def _read_lines(data: bytes) -> _Numbers:
  lines = [parse_json(line) for line in data.splitlines()]
  return _Numbers([line['row'] for line in lines], sum('error' in line for line in lines))


def _read_table(data: bytes) -> _Numbers:
  table = import_pyarrow().parquet.read_table(io.BytesIO(data), columns=['row', 'error'])
  return _Numbers(table['row'].to_pylist(), len(table) - table['error'].null_count)


def _to_bytes(results: Sequence[Result], format: str) -> bytes:
  if format == 'jsonl':
    return ''.join(f'{json.dumps(result)}\n' for result in results).encode()
  pa = import_pyarrow()
  written = io.BytesIO()
  names = dict.fromkeys([*(name for result in results for name in result if name != 'error'), 'error'])
  columns = {}
  for name in names:
    values = [result.get(name) for result in results]
    try:  # The column of errors has texts, even if no row is bad.
      columns[name] = pa.array(values, pa.string()) if name == 'error' else pa.array(values)
    except (pa.ArrowException, TypeError, OverflowError) as error:
      raise DataError(f'{name!r}: its values do not fit in one column of Parquet: {first_line(error)}') from None
  pa.parquet.write_table(pa.table(columns), written)
  return written.getvalue()
