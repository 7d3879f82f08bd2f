"""Inputs whose examples can be read by number, in any order: `RandomAccessInput`, and `ArrayInput` for arrays.

Each epoch is shuffled by a permutation computed from (seed, epoch) when it begins, so a restore costs nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.errors import DataError
from praxis_lite.inputs.base import CountedInput
from praxis_lite.inputs.rows import Rows, Struct, canonical_rows, resolve_source


class RandomAccessInput(CountedInput):
  """An input with a known number of examples. Subclasses define `num_examples`, `example_struct` and `rows`."""

  def __post_init__(self) -> None:
    super().__post_init__()
    self._order: tuple[int, np.ndarray] | None = None

  def rows(self, indices: np.ndarray) -> Rows:
    """Returns the examples with these indices, [n], n > 0, in this order and in the form of `canonical_rows`."""
    raise NotImplementedError

  def read(self, epoch: int, position: int, count: int, start: int, stop: int) -> tuple[Rows | None, int]:
    available = max(0, min(count, self.num_examples - position))
    stop = min(stop, available)
    if start >= stop:
      return None, available
    return self.rows_at(epoch, np.arange(position + start, position + stop)), available

  def rows_at(self, epoch: int, places: np.ndarray) -> Rows:
    """Returns the examples at these positions of an epoch, [n], n > 0, in this order."""
    if not self.shuffle:
      return self.rows(places)
    if self._order is None or self._order[0] != epoch:
      self._order = (epoch, self.new_order(epoch))
    return self.rows(self._order[1][places])

  def new_order(self, epoch: int) -> np.ndarray:
    """Returns the shuffled order of the examples in an epoch."""
    return permutation(self.num_examples, self.seed, epoch)


class ArrayInput(RandomAccessInput):
  """Batches of rows of arrays.

  Attributes:
    arrays: a dict (possibly nested) of arrays with the examples in dimension 0; or a function without arguments, or the
      `Config` of one, that returns such a dict when the data is first needed. 64-bit arrays become 32-bit.

  Raises (when the data is first needed):
    DataError: there are no examples, or `canonical_rows` rejects the arrays.
  """

  arrays: Config | Callable[[], Rows] | Rows = REQUIRED

  @functools.cached_property
  def _data(self) -> Rows:
    data = canonical_rows(resolve_source(self.arrays), f'{self.label}.arrays')
    if not len(data['weights']):
      raise DataError(f'{self.label}.arrays: there are no examples')
    return data

  @property
  def num_examples(self) -> int:
    return len(self._data['weights'])

  def rows_in_memory(self) -> Rows:
    return self._data

  def example_struct(self) -> Struct:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self._data)

  def rows(self, indices: np.ndarray) -> Rows:
    return jax.tree.map(lambda x: x[indices], self._data)


# -------------------------------------------------------------------- random numbers that do not depend on history


def permutation(n: int, *seeds: int) -> np.ndarray:
  """Returns a random order of range(n) that depends only on `seeds`."""
  # NumPy guarantees that the raw bits of a bit generator never change, but not the permutations of `Generator`.
  bits = np.random.Philox(np.random.SeedSequence(seeds)).random_raw(n)
  return np.argsort(bits, kind='stable')


def random_bits(seeds: tuple[int, ...], indices: np.ndarray) -> np.ndarray:
  """Returns 64 random bits for each index, as uint64 in the shape of `indices`.

  `seeds` select a stream, and an index selects an element of it. Neither may be negative. SplitMix64 (Steele, Lea and
  Flood, 2014) is a bijection of a counter, so each element is computed without the others.
  """
  start = np.random.SeedSequence(seeds).generate_state(1, np.uint64)
  z = np.asarray(indices, np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start.reshape((1,) * np.ndim(indices))
  z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return z ^ (z >> np.uint64(31))


def uniform(seeds: tuple[int, ...], indices: np.ndarray) -> np.ndarray:
  """Returns numbers in [0, 1), float64, from `random_bits` of the same arguments."""
  return (random_bits(seeds, indices) >> np.uint64(11)).astype(np.float64) * 2.0**-53
