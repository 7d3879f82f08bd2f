"""PrefixStore: what rows of a batcher held before other requests took them, for later prompts that begin like it.

It has places for a number of rows. A row that is about to be overwritten is kept, unless a place holds its tokens
already; it takes the place of a beginning of itself, or of what no prompt has used for the longest time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


def count_common(ids: Sequence[int], others: Sequence[int]) -> int:
  """Returns how many first tokens two rows have in common."""
  most = min(len(ids), len(others))
  return next((i for i in range(most) if ids[i] != others[i]), most)


@dataclasses.dataclass
class _Place:
  """A place of the store.

  Attributes:
    ids: the tokens of the row that it keeps.
    last_used: larger for rows that were kept or taken later; 0 for a place that was never used.
  """

  ids: list[int] = dataclasses.field(default_factory=list)
  last_used: int = 0


class PrefixStore:
  """The places, and which tokens they hold; the caches themselves are with the caller.

  Args:
    num_places: how many rows are kept.
    least: rows of fewer tokens are not kept, and shorter beginnings not found.
  """

  def __init__(self, num_places: int, least: int):
    self._places = [_Place() for _ in range(num_places)]
    self._least, self._uses = least, 0

  def keep(self, ids: Sequence[int], but: int | None = None) -> int | None:
    """Returns the place where the caller is to keep a row with these tokens; None if it need not be kept.

    Args:
      ids: the tokens.
      but: a place that is read next, and so not taken.
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
    """Returns the place with the longest beginning of a prompt, and its length, of all but the last token.

    Args:
      prompt: the tokens.
      more_than: how many of them are known elsewhere; None is returned if no place has more.
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
