"""Chooses the mesh for verification: the experiment's own, or a smaller one that shows the same faults.

XLA's partitioner groups devices by the sizes of axes, so its faults depend on how sizes divide each other: a product
can be wrong if another axis has size 3 or 5 and right if that axis has size 2, 4 or 6. A smaller mesh keeps as many of
these properties as possible:

    parity       odd axes stay odd, even axes stay even
    parts        a composite size stays composite, because a reshape can split such an axis in part: 64 becomes 4, 12
                 becomes 6
    odd factors  an even axis with an odd factor keeps an odd factor
    divisors     whether one axis divides another, and whether two axes have a common factor
    order        a larger axis does not become the smaller one

An axis of several devices never shrinks to one device, because even an axis that splits nothing can cause faults.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from praxis_lite.common.errors import ConfigError

MOST_DEVICES = 24  # On two cores, a small model on this many simulated devices compiles and runs in seconds.
# Penalties for a lost parity, lost parts and a lost odd factor of an axis. A lost relation of two axes costs 1.
_PRICES = 4, 2, 2


def small_mesh(sizes: Mapping[str, int], most_devices: int = MOST_DEVICES) -> dict[str, int]:
  """Returns the sizes of the mesh axes for the verification of an experiment.

  A mesh of 2 to `most_devices` devices keeps its sizes. On a mesh of one device, there is nothing to verify, so each of
  its last three axes gets size 2; if it has only one axis, that axis gets size 8.

  Raises:
    ConfigError: the axes need more than `most_devices` devices even with two devices each.
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
  # All meshes of at most `most_devices` devices, with axes from size 2 up to their real sizes.
  largest = most_devices // 2 ** (len(names) - 1)
  every = itertools.product(*(range(2, min(size, largest) + 1) for size in real))
  candidates = (small for small in every if math.prod(small) <= most_devices)
  best = min(candidates, key=lambda small: (_lost(real, small), math.prod(small), small))
  return {**sizes, **dict(zip(names, best))}


def _lost(real: Sequence[int], small: Sequence[int]) -> int:
  """Returns the total penalty for properties that a smaller mesh has lost."""
  pairs = list(zip(real, small))
  alone = sum(price * (a != b) for n, k in pairs for price, a, b in zip(_PRICES, _kind(n), _kind(k)))
  related = sum(
    _compare_divisors(n, m) != _compare_divisors(i, j) for (n, i), (m, j) in itertools.combinations(pairs, 2)
  )
  reversed_order = sum(n < m and i > j for (n, i), (m, j) in itertools.permutations(pairs, 2))
  return alone + related + reversed_order


def _kind(size: int) -> tuple[bool, bool, bool]:
  """Returns whether a size is odd, is composite, and has an odd factor."""
  has_parts = any(size % d == 0 for d in range(2, math.isqrt(size) + 1))
  return bool(size % 2), has_parts, size & (size - 1) != 0


def _compare_divisors(n: int, m: int) -> tuple[bool, bool]:
  """Returns whether either size divides the other, and whether they have a common factor."""
  return max(n, m) % min(n, m) == 0, math.gcd(n, m) > 1
