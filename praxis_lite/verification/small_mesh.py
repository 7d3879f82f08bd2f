"""The mesh that an experiment is verified on: its own, or a smaller one on which the same faults show.

XLA's partitioner groups devices by the sizes of axes, so its faults depend on how sizes divide each other: a product
that is wrong beside an axis of 3 or 5 is right beside one of 2, 4 or 6. A smaller mesh keeps, as far as it fits,

    parity       an odd axis stays odd, an even one even
    parts        an axis that is no prime, and so can be split in part, as by a reshape, stays so: 64 becomes 4, 12
                 becomes 6
    odd factors  an even axis that 3 or 5 divides keeps such a factor
    divisors     an axis divides another one, equals it, or has no common factor with it, if it really does
    order        a larger axis is no smaller than another one

No axis of more than one device becomes one of a single device: also an axis that splits nothing makes faults.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from praxis_lite.errors import ConfigError

# As many simulated devices compile and run a small model in seconds on two cores.
MOST_DEVICES = 24
# What it costs to lose each part of an axis's kind; what is lost between two axes costs 1.
_PRICES = 4, 2, 2


def small_mesh(sizes: Mapping[str, int], most_devices: int = MOST_DEVICES) -> dict[str, int]:
  """Returns the sizes of the mesh axes with which an experiment is verified.

  A mesh of at most `most_devices` stays as it is. On a mesh of one device there is nothing to verify: each of its last
  three axes becomes 2, or 8 where it is the only one.

  Raises:
    ConfigError: even with two devices each, the axes need more devices.
  """
  if math.prod(sizes.values()) == 1:
    split = list(sizes)[-3:]
    return {**sizes, **dict.fromkeys(split, {1: 8, 2: 2, 3: 2}[len(split)])}
  if math.prod(sizes.values()) <= most_devices:
    return dict(sizes)
  names = [name for name, size in sizes.items() if size > 1]
  real = [sizes[name] for name in names]
  if 2 ** len(names) > most_devices:
    raise ConfigError(
      f'task.ici_mesh_shape: {len(names)} axes of more than one device need at least {2 ** len(names)} simulated '
      f'devices to be verified, and {most_devices} are allowed; pass --devices={2 ** len(names)}'
    )
  best = min(_candidates(real, most_devices), key=lambda small: (_lost(real, small), math.prod(small), small))
  return {**sizes, **dict(zip(names, best))}


def _candidates(real: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
  """All smaller sizes of some axes whose product is at most `most`."""
  if not real:
    yield ()
    return
  first, *rest = real
  for size in range(2, min(first, most // 2 ** len(rest)) + 1):
    for others in _candidates(rest, most // size):
      yield (size, *others)


def _lost(real: Sequence[int], small: Sequence[int]) -> int:
  """How much of what makes faults a smaller mesh has lost."""
  alone = sum(price * (a != b) for n, k in zip(real, small) for price, a, b in zip(_PRICES, _kind(n), _kind(k)))
  pairs = itertools.combinations(zip(real, small), 2)
  return alone + sum(_between(n, m) != _between(i, j) for (n, i), (m, j) in pairs) + _disorder(real, small)


def _disorder(real: Sequence[int], small: Sequence[int]) -> int:
  """A price for each pair of axes of which the smaller one has become the larger."""
  pairs = itertools.permutations(zip(real, small), 2)
  return sum(n < m and i > j for (n, i), (m, j) in pairs)


def _kind(size: int) -> tuple[bool, bool, bool]:
  """Whether a size is odd, has parts, and has an odd factor."""
  has_parts = any(size % d == 0 for d in range(2, math.isqrt(size) + 1))
  return bool(size % 2), has_parts, size & (size - 1) != 0


def _between(n: int, m: int) -> tuple[bool, bool]:
  """How two sizes divide each other: whether one divides the other, and whether they have a factor in common."""
  return max(n, m) % min(n, m) == 0, math.gcd(n, m) > 1
