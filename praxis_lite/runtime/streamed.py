"""Arrays that are read in parts: neither the host nor a device need hold one whole.

A checkpoint can be written from them, as `streamed_writes.py` does, and read as them:

    files of another format -> a part -> checkpoint          each part is read, written and forgotten
    checkpoint -> a part -> files of another format
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

Box = tuple[slice, ...]  # One range with start and stop for each dimension.

# Bytes of an array that are read, and written, at once.
PART_BYTES = 16 << 20


class StreamedArray(abc.ABC):
  """An array that is somewhere else, and is read in parts.

  Attributes:
    shape, dtype: of the whole.
  """

  shape: tuple[int, ...]
  dtype: np.dtype

  @abc.abstractmethod
  def read(self, box: Box) -> np.ndarray:
    """Returns a copy of a part."""

  def part_shape(self, sizes: Sequence[int], part_bytes: int = PART_BYTES) -> tuple[int, ...]:
    """Returns the shape in which to read a box of these sizes, of about `part_bytes` at most; by default whole rows."""
    shape = list(sizes)
    for axis, size in enumerate(sizes):
      below = math.prod(sizes[axis + 1 :]) * self.dtype.itemsize
      shape[axis] = max(1, min(size, part_bytes // max(below, 1)))
      if shape[axis] > 1:
        break
    return tuple(shape)

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def nbytes(self) -> int:
    return self.size * self.dtype.itemsize


def boxes(box: Box, part_shape: Sequence[int]) -> Iterator[Box]:
  """Yields the boxes of this shape, or smaller at the end, that make up `box`."""
  starts = [range(b.start, b.stop, step) for b, step in zip(box, part_shape)]
  for corner in itertools.product(*starts):
    yield tuple(slice(at, min(at + step, b.stop)) for at, step, b in zip(corner, part_shape, box))


def whole(shape: Sequence[int]) -> Box:
  """Returns the box of a whole array."""
  return tuple(slice(0, size) for size in shape)
