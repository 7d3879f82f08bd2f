"""Records that cannot be read: an error that names file and record, or rows of zero weight in their place.

With `on_bad_record='skip'`, a damaged record keeps its place: its row is all zeros and has zero weight, so it counts
nowhere. All other examples are where they would be without the damage, on any number of hosts and after any restart.
If the number of records is not known before they are read (TFRecord), the stream has only the intact ones.

Temporary failures are not damage: a system error while a file is read always ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from praxis_lite.common.errors import DataError, check_choice
from praxis_lite.inputs.base import BaseInput
from praxis_lite.inputs.rows import Rows, Struct, pad_rows


class BadRecord(NamedTuple):
  """A record, or a part of a file, that cannot be read.

  Attributes:
    file: the file.
    place: where in it, such as 'record 16', or '' for all of it.
    reason: what is wrong, in one line.
    records: how many records this is.
  """

  file: str
  place: str
  reason: str
  records: int = 1

  def __str__(self) -> str:
    return f'{self.place} of {self.file}: {self.reason}' if self.place else f'{self.file} {self.reason}'


class RecordsInput(BaseInput):
  """An input of files whose records may be damaged.

  Attributes:
    on_bad_record: what to do about a record that cannot be read: 'error' ends the run, 'skip' leaves it out.
    max_bad_records: with 'skip', how many bad records this process tolerates before it raises an error; None allows any
      number.
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
    """Counts a record that is left out, once. Raises DataError if none may be left out, or there are too many."""
    where = f'{self.label}.{field}'
    if not self.skips:
      raise DataError(f'{where}: {bad}')
    self._bad.setdefault((bad.file, bad.place), bad)
    count = sum(b.records for b in self._bad.values())
    if self.max_bad_records is not None and count > self.max_bad_records:
      raise DataError(
        f'{where}: {count} records cannot be read, and max_bad_records = {self.max_bad_records}; the last is {bad}'
      )


class BadRecordError(DataError):
  """A record cannot be read; `bad` says which one, and `where` is the field that names its file."""

  def __init__(self, where: str, bad: BadRecord):
    super().__init__(f'{where}: {bad}')
    self.where, self.bad = where, bad

  def __reduce__(self) -> tuple[Any, ...]:  # A worker sends it.
    return type(self), (self.where, self.bad)


def rows_of_each(example: Callable[[int], Rows], count: int, struct: Struct) -> tuple[Rows, list[BadRecord]]:
  """Returns `count` examples of `struct`, each read separately, with zeros for bad ones, and the list of bad ones."""
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
  """Whether a reading error means bad data. Failures of the system, which have an errno, do not."""
  return not (isinstance(error, OSError) and error.errno is not None)
