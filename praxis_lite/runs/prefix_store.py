"""PrefixStore: keeps caches of a batcher's rows that are overwritten, for later prompts with the same prefix.

It has slots for a number of rows. A row that is about to be overwritten is kept, unless a slot already has its tokens.
A row that is kept replaces a slot whose tokens are a prefix of the row's tokens, or else the least recently used slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


def count_common(ids: Sequence[int], others: Sequence[int]) -> int:
  """Returns the length of the common prefix of two rows."""
  most = min(len(ids), len(others))
  return next((i for i in range(most) if ids[i] != others[i]), most)


@dataclasses.dataclass
class _Place:
  """A slot of the store: the tokens of its row, and a counter, larger for slots that were used later."""

  ids: list[int] = dataclasses.field(default_factory=list)
  last_used: int = 0


class PrefixStore:
  """The slots and their tokens; the caller holds the caches themselves.

  Args:
    least: rows of fewer tokens are not kept, and shorter prefixes are not found.
  """

  def __init__(self, num_places: int, least: int):
    self._places = [_Place() for _ in range(num_places)]
    self._least, self._uses = least, 0

  def keep(self, ids: Sequence[int], but: int | None = None) -> int | None:
    """Returns the slot into which to copy a row with these tokens; None if the row need not be kept.

    The slot `but` is never chosen.
    """
    common = [count_common(place.ids, ids) for place in self._places]
    free = [i for i in range(len(self._places)) if i != but]
    if len(ids) < self._least or not free or max(common) == len(ids):
      return None
    extended = [i for i in free if common[i] == len(self._places[i].ids) >= self._least]
    number = extended[0] if extended else min(free, key=lambda i: self._places[i].last_used)
    self._places[number].ids = list(ids)
    self._use(number)
    return number

  def find(self, prompt: Sequence[int], more_than: int = 0) -> tuple[int, int] | None:
    """Returns the slot that has the longest prefix of a prompt (without its last token), and the length of the prefix.

    Args:
      more_than: the length of a prefix that is available elsewhere. Returns None if no slot has a longer one of at
        least `least` tokens.
    """
    shared = [count_common(place.ids, prompt[:-1]) for place in self._places]
    best = max(range(len(shared)), key=lambda i: shared[i], default=None)
    if best is None or shared[best] < self._least or shared[best] <= more_than:
      return None
    self._use(best)
    return best, shared[best]

  def _use(self, number: int) -> None:
    self._uses += 1
    self._places[number].last_used = self._uses
