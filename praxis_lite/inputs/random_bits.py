"""Random numbers by number: the i-th one of a stream without the ones before it.

SplitMix64 (Steele, Lea and Flood, 2014) is a bijection of a counter, so it is its own random access.
"""

from __future__ import annotations

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def random_bits(seeds: tuple[int, ...], indices: np.ndarray) -> np.ndarray:
  """Returns 64 random bits for each index, uint64 of the shape of `indices`.

  Args:
    seeds: which stream; integers that are not negative.
    indices: integers that are not negative, of any shape.
  """
  start = np.random.SeedSequence(seeds).generate_state(1, np.uint64)
  z = np.asarray(indices, np.uint64) * _GAMMA + start.reshape((1,) * np.ndim(indices))
  z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return z ^ (z >> np.uint64(31))


def uniform(bits: np.ndarray) -> np.ndarray:
  """Returns numbers in [0, 1), float64, from 64 random bits each."""
  return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
