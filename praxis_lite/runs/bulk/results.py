"""ResultLedger: a ledger whose files have a result for each row, as JSON Lines or Parquet."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from praxis_lite.common.errors import DataError, first_line
from praxis_lite.common.files import parse_json
from praxis_lite.inputs.tables import import_pyarrow
from praxis_lite.runs.bulk.ledger import Ledger

Result = dict[str, Any]


class Counts(NamedTuple):
  """How many rows a finished output has, and how many of them are bad: they could not be computed."""

  rows: int
  bad: int


class ResultLedger(Ledger):
  """The results in a folder: for each shard a file, in the format that the settings of the plan name."""

  def finish(self, number: int, results: Sequence[Result]) -> None:
    """Writes the results of a shard: one for each row, with its number as `row`.

    Raises:
      DataError: a row is missing, or values of a column do not fit together in a file of Parquet.
    """
    self._check(number, [result['row'] for result in results])
    self.write(number, _to_bytes(results, self._format))

  def check_complete(self) -> Counts:
    """Reads and counts all results; raises DataError if a row is missing, occurs twice, or is not in its place."""
    self.check_all_there()
    rows = bad = 0
    for number in range(len(self.plan.shards)):
      numbers, num_bad = self._read_numbers(number)
      self._check(number, numbers)
      rows, bad = rows + len(numbers), bad + num_bad
    return Counts(rows, bad)

  def _read_numbers(self, number: int) -> tuple[list[int], int]:
    """Returns the numbers of the rows in the file of a shard, and how many of them are bad."""
    data = self.read(number)
    try:
      if self._format == 'jsonl':
        lines = [parse_json(line) for line in data.splitlines()]
        return [line['row'] for line in lines], sum('error' in line for line in lines)
      table = import_pyarrow().parquet.read_table(io.BytesIO(data), columns=['row', 'error'])
      return table['row'].to_pylist(), len(table) - table['error'].null_count
    except (ValueError, KeyError, TypeError, OSError) as error:  # Arrow raises such errors.
      raise DataError(
        f'{self.path_of(number)} is damaged: {first_line(error)}; remove the file, and start again'
      ) from None

  def _check(self, number: int, rows: Sequence[int]) -> None:
    shard = self.plan.shards[number]
    if list(rows) != list(range(shard.first, shard.first + shard.num_rows)):
      raise DataError(
        f'{self.path_of(number)}: expected rows {shard.first} to {shard.first + shard.num_rows - 1}, each '
        f'once and in order, and it has {len(rows)}; remove the file, and start again'
      )


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
