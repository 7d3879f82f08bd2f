"""Meshes of 2 to 24 devices, with axes of 2 to 6 in any order."""

from __future__ import annotations

import math

import numpy as np

from tools.hunt.cases import MeshSizes

MOST_DEVICES = 24
AXES = 'abcd'
_SIZES = (2, 2, 2, 3, 3, 4, 5, 6)


def draw_mesh(rng: np.random.Generator, most_devices: int = MOST_DEVICES) -> MeshSizes:
  """Draws one to four axes 'a', 'b', ..., each of size 2 to 6. Splits leave some of them unused."""
  number = min(int(rng.choice([1, 2, 2, 3, 3, 3, 4, 4])), most_devices.bit_length() - 1)
  while True:
    sizes = [int(rng.choice(_SIZES)) for _ in range(number)]
    if math.prod(sizes) <= most_devices:
      return tuple(zip(AXES, sizes))
