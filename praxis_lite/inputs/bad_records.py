"""Handles records that cannot be read: with an error that names file and record, or with rows of zero weight.

With `on_bad_record='skip'`, the row of a damaged record is all zeros, with zero weight, so it has no effect. The other
examples keep their positions, on any number of hosts and after any restart. TFRecord files are different: their number
of records is not known before they are read, so damaged records are dropped from the stream.

A system error while reading is not damage, because it may be temporary; it always ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from praxis_lite.common.errors import DataError, check_choice
from praxis_lite.common.figures import number_of
from praxis_lite.inputs.base import BaseInput
from praxis_lite.inputs.rows import Rows, Struct, pad_rows


class BadRecord(NamedTuple):
  """A record, or a part of a file, that cannot be read. `reason` says in one line why."""

  file: str
  place: str  # Such as 'record 16'; '' for the whole file.
  reason: str
  records: int = 1  # The number of records that cannot be read.

  def __str__(self) -> str:
    return f'{self.place} of {self.file}: {self.reason}' if self.place else f'{self.file} {self.reason}'


class RecordsInput(BaseInput):
  """An input from files whose records may be damaged.

  Attributes:
    on_bad_record: what to do about a record that cannot be read: 'error' ends the run, 'skip' leaves it out.
    max_bad_records: with 'skip', the largest number of bad records in this process; one more is an error. None sets no
      limit.
  """

  on_bad_record: str = 'error'
  max_bad_records: int | None = 100

  def __post_init__(self) -> None:
    super().__post_init__()
    check_choice(f'{self.label}.on_bad_record', self.on_bad_record, ('error', 'skip'))
    if self.max_bad_records is not None:
      self.check_at_least(max_bad_records=0)
    self._bad: dict[tuple[str, str], BadRecord] = {}

  @property
  def bad_records(self) -> list[BadRecord]:
    return list(self._bad.values())

  @property
  def skips(self) -> bool:
    """Whether records that cannot be read are left out."""
    return self.on_bad_record == 'skip'

  def leave_out(self, bad: BadRecord, field: str = 'path') -> None:
    """Counts a bad record if it is new. Raises DataError if not `skips`, or if more records are bad than allowed."""
    where = f'{self.label}.{field}'
    if not self.skips:
      raise DataError(f'{where}: {bad}')
    self._bad.setdefault((bad.file, bad.place), bad)
    count = sum(b.records for b in self._bad.values())
    if self.max_bad_records is not None and count > self.max_bad_records:
      raise DataError(
        f'{where}: {number_of(count, "record")} cannot be read, and max_bad_records = {self.max_bad_records}; '
        f'the last is {bad}'
      )


class BadRecordError(DataError):
  """A record cannot be read; `bad` says which one, and `where` is the path of the config field that names the file."""

  def __init__(self, where: str, bad: BadRecord):
    super().__init__(f'{where}: {bad}')
    self.where, self.bad = where, bad

  def __reduce__(self) -> tuple[Any, ...]:  # For pickling in a worker process.
    return type(self), (self.where, self.bad)


def rows_of_each(example: Callable[[int], Rows], count: int, struct: Struct) -> tuple[Rows, list[BadRecord]]:
  """Reads `count` examples one by one; returns their rows, and a list of bad records, whose rows are zeros."""
  rows = pad_rows(None, count, struct)
  bad = []
  for i in range(count):
    try:
      row = example(i)
    except BadRecordError as e:
      bad.append(e.bad)
    else:
      jax.tree.map(lambda to, x, i=i: to.__setitem__(i, x[0]), rows, row)
  return rows, bad


def is_damage(error: Exception) -> bool:
  """Whether an error while reading means bad data: any error except a system error, that is, one with an errno."""
  return not (isinstance(error, OSError) and error.errno is not None)
