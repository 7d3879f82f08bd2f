"""RowSlots: which row of a batcher a request gets, and what of its prompt is known there already.

A row keeps what its last request has left in the caches until another request takes it. A prompt that begins like the
tokens of any row, busy or free, takes over that beginning, and only the rest is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from praxis_lite.runs.prefix_store import count_common

LEAST_SHARED = 8  # Copying a row costs more than reading a few tokens.


@dataclasses.dataclass
class _Row:
  """A row of the state.

  Attributes:
    ids: the tokens that its caches hold, beginning with the first of a prompt.
    is_free: whether no request has it.
    last_used: larger for rows that were released later.
  """

  ids: list[int] = dataclasses.field(default_factory=list)
  is_free: bool = True
  last_used: int = 0


class TakenRow(NamedTuple):
  """The row of a request.

  Attributes:
    row: its number.
    source: the row whose first tokens it takes over; itself if it holds them already, None if there are none.
    shared: the number of these tokens.
  """

  row: int
  source: int | None
  shared: int


class RowSlots:
  """The rows of a batcher.

  Args:
    num_rows: their number.
    reuses_prefixes: whether prompts take over tokens of other rows.
  """

  def __init__(self, num_rows: int, reuses_prefixes: bool = True):
    self._rows = [_Row() for _ in range(num_rows)]
    self._reuses_prefixes = reuses_prefixes
    self._releases = 0

  @property
  def has_free(self) -> bool:
    return any(row.is_free for row in self._rows)

  def take(self, prompt: Sequence[int], kept: int = 0, plan: TakenRow | None = None) -> TakenRow:
    """Gives a free row to a prompt; the caller ensures that there is one.

    A free row that holds the longest shared beginning is taken itself; otherwise the one that was released first. All
    but the last token of a prompt can be shared.

    Args:
      prompt: its tokens.
      kept: how many first ones a `PrefixStore` gives; a row that shares fewer is not a source then.
      plan: what `plan` has just returned for this prompt; None calls it.
    """
    place = self.plan(prompt) if plan is None else plan
    if kept > place.shared:
      place = TakenRow(place.row, None, kept)
    self._rows[place.row].is_free = False
    self._rows[place.row].ids = list(prompt[: place.shared])
    return place

  def ids_of(self, row: int) -> list[int]:
    """Returns the tokens that the caches of a row hold."""
    return list(self._rows[row].ids)

  def plan(self, prompt: Sequence[int]) -> TakenRow:
    """Returns what `take` would return for a prompt, without giving it a row."""
    free = [i for i, row in enumerate(self._rows) if row.is_free]
    shared = [self._count_shared(row, prompt) for row in self._rows]
    best = max(range(len(shared)), key=lambda i: (shared[i], self._rows[i].is_free))
    if not shared[best]:
      return TakenRow(self._oldest(free), None, 0)
    return TakenRow(best if best in free else self._oldest(free), best, shared[best])

  def note_read(self, row: int, ids: Sequence[int]) -> None:
    """Notes that the caches of a row hold these further tokens."""
    self._rows[row].ids += ids

  def release(self, row: int) -> None:
    """Makes a row free. What its caches hold stays, until another prompt takes it."""
    self._releases += 1
    self._rows[row].is_free, self._rows[row].last_used = True, self._releases

  def _oldest(self, rows: Sequence[int]) -> int:
    return min(rows, key=lambda i: self._rows[i].last_used)

  def _count_shared(self, row: _Row, prompt: Sequence[int]) -> int:
    """Returns how many first tokens of a prompt a row can give, 0 if they are too few to copy."""
    if not self._reuses_prefixes:
      return 0
    count = count_common(row.ids, prompt[:-1])
    return count if count >= LEAST_SHARED else 0
