"""RowSlots: chooses the row of a batcher that a request gets, and the row whose prefix it can copy.

After a request has ended, its caches stay in its row until another request takes the row. If a prompt has a common
prefix with any row, busy or free, the caches of the prefix are copied, and only the rest of the prompt is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from praxis_lite.runs.prefix_store import count_common

LEAST_SHARED = 8  # Shorter prefixes are not copied, because reading a few tokens is faster.


@dataclasses.dataclass
class _Row:
  """A row of the state.

  Attributes:
    ids: the tokens in its caches, from the first token of a prompt on.
    last_used: a counter value, larger for rows that were released later.
  """

  ids: list[int] = dataclasses.field(default_factory=list)
  is_free: bool = True
  last_used: int = 0


class TakenRow(NamedTuple):
  """The row of a request.

  Attributes:
    source: the row whose prefix it copies; the row itself if it already has the prefix, None if no prefix is shared.
  """

  row: int
  source: int | None
  shared: int


class RowSlots:
  """The rows of a batcher; with `reuses_prefixes`, prompts copy prefixes from other rows."""

  def __init__(self, num_rows: int, reuses_prefixes: bool = True):
    self._rows = [_Row() for _ in range(num_rows)]
    self._reuses_prefixes = reuses_prefixes
    self._releases = 0

  @property
  def has_free(self) -> bool:
    return any(row.is_free for row in self._rows)

  def take(self, prompt: Sequence[int], kept: int = 0, plan: TakenRow | None = None) -> TakenRow:
    """Gives a free row to a prompt; the caller ensures that there is one.

    The best source is the row that has the longest prefix in common with the prompt. If it is free, it is taken, and no
    copy is needed. Otherwise the free row that was released first is taken, and the prefix is to be copied from the
    source. All but the last token of a prompt can be shared.

    Args:
      kept: the length of the prefix that a `PrefixStore` has. Rows that share fewer tokens are not used as a source.
      plan: the result of `plan` for this prompt, with no calls in between; None calls `plan`.
    """
    place = self.plan(prompt) if plan is None else plan
    if kept > place.shared:
      place = TakenRow(place.row, None, kept)
    self._rows[place.row].is_free = False
    self._rows[place.row].ids = list(prompt[: place.shared])
    return place

  def ids_of(self, row: int) -> list[int]:
    return list(self._rows[row].ids)

  def plan(self, prompt: Sequence[int]) -> TakenRow:
    """Returns what `take` would return for a prompt, without taking a row."""
    free = [i for i, row in enumerate(self._rows) if row.is_free]
    shared = [self._count_shared(row, prompt) for row in self._rows]
    best = max(range(len(shared)), key=lambda i: (shared[i], self._rows[i].is_free))
    if not shared[best]:
      return TakenRow(self._oldest(free), None, 0)
    return TakenRow(best if best in free else self._oldest(free), best, shared[best])

  def note_read(self, row: int, ids: Sequence[int]) -> None:
    """Records that the tokens `ids` were added to the caches of a row."""
    self._rows[row].ids += ids

  def release(self, row: int) -> None:
    """Makes a row free. Its caches are kept until another prompt takes the row."""
    self._releases += 1
    self._rows[row].is_free, self._rows[row].last_used = True, self._releases

  def _oldest(self, rows: Sequence[int]) -> int:
    return min(rows, key=lambda i: self._rows[i].last_used)

  def _count_shared(self, row: _Row, prompt: Sequence[int]) -> int:
    """Returns the length of the prefix of a prompt that a row can share; 0 if it is too short to copy."""
    if not self._reuses_prefixes:
      return 0
    count = count_common(row.ids, prompt[:-1])
    return count if count >= LEAST_SHARED else 0
