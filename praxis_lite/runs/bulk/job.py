"""ShardJob: computes the shards of a ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from praxis_lite.common.errors import DataError, UserError, error_summary
from praxis_lite.common.figures import number_of
from praxis_lite.runs.bulk.input_files import Row, read_part
from praxis_lite.runs.bulk.kept_values import KeptValues, refuse_name
from praxis_lite.runs.bulk.kinds import Compute
from praxis_lite.runs.bulk.results import ResultLedger


class ShardJob:
  """Computes shards.

  Args:
    keep: the names of the values of a row that are copied into its result.
    most_bad: how many rows may be bad; with more, the job fails.
  """

  def __init__(
    self, ledger: ResultLedger, compute: Compute, *, batch_size: int, keep: Sequence[str] = (), most_bad: int = 0
  ):
    self._ledger, self._compute = ledger, compute
    self._batch_size, self._keep, self._most_bad = batch_size, keep, most_bad
    self._kept: dict[int, dict[str, Any]] = {}  # The values to copy into results, by the number of the row.
    self.num_bad = 0

  def run(self, shards: Iterable[int], check: Callable[[], object] = lambda: None) -> None:
    """Computes shards, and writes each when it is finished; calls `check` before each batch, and before it writes.

    Raises:
      DataError: a file has changed, or there are more bad rows than allowed.
      UserError: the model or a setting does not fit the work.
    """
    for number in shards:
      rows = list(read_part(self._ledger.plan.shards[number]))
      results: dict[int, dict[str, Any]] = {}
      good = []
      self._kept.clear()
      kept = KeptValues(self._keep, self._ledger.plan.settings['format'])
      for row in rows:
        if error := self._keep_values(row, kept):
          results[row.number] = self._bad(row, error)
        else:
          good.append(row)
      for start in range(0, len(good), self._batch_size):
        check()
        for row, result in zip(group := good[start : start + self._batch_size], self._compute_batch(group)):
          results[row.number] = result
      check()
      self._ledger.finish(number, [results[row.number] for row in rows])

  def _keep_values(self, row: Row, kept: KeptValues) -> str:
    """Stores the values of a row that will be copied into its result; returns what is wrong with the row, or ''."""
    try:
      self._kept[row.number] = {} if row.values is None else kept.select(row.values)
    except DataError as error:
      return str(error)
    return row.error

  def _compute_batch(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the results of rows; if a batch fails, computes each row alone to find the bad ones."""
    try:
      found = self._compute([row.values or {} for row in rows], rows[0].number)
      return [self._result_of(row, result) for row, result in zip(rows, found, strict=True)]
    except DataError as error:
      if len(rows) == 1:
        return [self._bad(rows[0], str(error))]
    except UserError:  # The model or a setting is wrong: every row would fail.
      raise
    except (TypeError, ValueError) as error:  # A library raised this about an unexpected value.
      if len(rows) == 1:
        return [self._bad(rows[0], error_summary(error))]
    return [self._compute_batch([row])[0] for row in rows]

  def _result_of(self, row: Row, result: Mapping[str, Any]) -> dict[str, Any]:
    if taken := next((name for name in self._keep if name in result), None):
      raise refuse_name(taken)
    return {'row': row.number, **self._kept.get(row.number, {}), **result}

  def _bad(self, row: Row, error: str) -> dict[str, Any]:
    """Returns the result of a bad row; raises DataError if there are too many."""
    self.num_bad += 1
    if self.num_bad > self._most_bad:
      too_many = f' ({number_of(self.num_bad, "bad row")}, and --max_bad_rows={self._most_bad})'
      remedy = '; --max_bad_rows=10 allows some' if not self._most_bad else too_many
      raise DataError(f'{row.where}: {error}{remedy}')
    return self._result_of(row, {'error': f'{row.where}: {error}'})
