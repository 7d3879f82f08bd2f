"""RandomAccessInput: an input whose examples can be read in any order, by number.

Shuffling is a permutation per epoch, computed from (seed, epoch) when the epoch begins, so restoring costs nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from praxis_lite.inputs.base import BaseInput
from praxis_lite.inputs.rows import Rows


class RandomAccessInput(BaseInput):
  """An input over a known number of examples. Subclasses give `num_examples`, `example_struct` and `rows`."""

  def __post_init__(self) -> None:
    super().__post_init__()
    self._order: tuple[int, np.ndarray] | None = None

  @property
  def num_examples(self) -> int:
    """Examples in an epoch, over all hosts."""
    raise NotImplementedError

  def rows(self, indices: np.ndarray) -> Rows:
    """Returns the examples of these numbers, [n] with n > 0, in that order, as `canonical_rows` returns them."""
    raise NotImplementedError

  def read(self, epoch: int, position: int, count: int, start: int, stop: int) -> tuple[Rows | None, int]:
    available = max(0, min(count, self.num_examples - position))
    stop = min(stop, available)
    if start >= stop:
      return None, available
    if self.shuffle:
      indices = self._epoch_order(epoch)[position + start : position + stop]
    else:
      indices = np.arange(position + start, position + stop)
    return self.rows(indices), available

  def batches_per_epoch(self) -> int:
    whole, rest = divmod(self.num_examples, self.batch_size)
    return whole + bool(rest and not self.drop_remainder)

  def identity(self) -> dict[str, Any]:
    return {**super().identity(), 'num_examples': self.num_examples}

  def _epoch_order(self, epoch: int) -> np.ndarray:
    if self._order is None or self._order[0] != epoch:
      self._order = (epoch, permutation(self.num_examples, self.seed, epoch))
    return self._order[1]


def permutation(n: int, *seeds: int) -> np.ndarray:
  """Returns a random order of range(n) that depends on `seeds` alone.

  Numpy promises the raw bits of a bit generator for ever, but not the permutations that its `Generator` makes of them.
  """
  bits = np.random.Philox(np.random.SeedSequence(seeds)).random_raw(n)
  return np.argsort(bits, kind='stable')
