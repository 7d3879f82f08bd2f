"""Arrays that are read in parts, so that neither the host nor a device needs to hold a whole array.

A checkpoint can be written from such arrays (`orbax/handlers.py`), and read as such arrays:

    files of another format -> a part -> checkpoint          each part is read, written and forgotten
    checkpoint -> a part -> files of another format
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from praxis_lite.checkpoints.orbax.on_disk import array_specs
from praxis_lite.common.errors import CheckpointError, error_summary
from praxis_lite.common.files import check_plain_below

if TYPE_CHECKING:
  import tensorstore as ts

Box = tuple[slice, ...]  # One range with start and stop for each dimension.

# Bytes of an array that are read or written at once.
PART_BYTES = 16 << 20


class StreamedArray(abc.ABC):
  """An array in a file, which is read in parts."""

  shape: tuple[int, ...]
  dtype: np.dtype

  @abc.abstractmethod
  def read(self, box: Box) -> np.ndarray:
    """Returns a copy of the part of the array in `box`."""

  def part_shape(self, sizes: Sequence[int], part_bytes: int = PART_BYTES) -> tuple[int, ...]:
    """Returns a shape for parts of a box of these sizes: as many whole rows as `part_bytes` allow, or part of a row."""
    shape = [max(1, size) for size in sizes]
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
  """Yields boxes that tile `box`: of shape `part_shape`, or smaller at the ends of `box`."""
  starts = [range(b.start, b.stop, step) for b, step in zip(box, part_shape)]
  for corner in itertools.product(*starts):
    yield tuple(slice(at, min(at + step, b.stop)) for at, step, b in zip(corner, part_shape, box))


def whole_box(shape: Sequence[int]) -> Box:
  """Returns the box of a whole array."""
  return tuple(slice(0, size) for size in shape)


class StoredArray(StreamedArray):
  """An array of a checkpoint. It is stored with padding, but read without it. Error messages call it `where`."""

  def __init__(self, store: ts.TensorStore, shape: tuple[int, ...], where: str):
    self.shape, self.dtype = shape, np.dtype(store.dtype.numpy_dtype)
    self._store, self._where = store, where

  def part_shape(self, sizes: Sequence[int], part_bytes: int = PART_BYTES) -> tuple[int, ...]:
    """Returns the shape of parts to read: the file's chunks, or smaller parts if a chunk exceeds `part_bytes`."""
    if _chunk_bytes(self._store) > part_bytes:
      return super().part_shape(sizes, part_bytes)
    return tuple(max(1, min(size, n)) for size, n in zip(sizes, _chunk_shape(self._store)))

  def read(self, box: Box) -> np.ndarray:
    """Returns a copy of the part of the array in `box`; raises CheckpointError if the file cannot be read."""
    try:
      return np.asarray(self._store[box].read().result())
    except ValueError as error:
      raise CheckpointError(f'{self._where} cannot be read ({error_summary(error)})') from error


class CastArray(StreamedArray):
  """An array whose parts are cast to another dtype when they are read."""

  def __init__(self, array: StreamedArray, dtype: np.dtype):
    self.shape, self.dtype, self._array = array.shape, dtype, array

  def part_shape(self, sizes: Sequence[int], part_bytes: int = PART_BYTES) -> tuple[int, ...]:
    return self._array.part_shape(sizes, part_bytes)

  def read(self, box: Box) -> np.ndarray:
    return self._array.read(box).astype(self.dtype)


def stored_arrays(folder: str, shapes: Mapping[str, Sequence[int] | None]) -> dict[str, StreamedArray]:
  """Returns arrays of a checkpoint by name.

  If a stored chunk is larger than the parts that are read, it stays in memory until another chunk is read. `folder` has
  the arrays of a step. `shapes` has the true shape of each array by its name; None stands for the stored shape, which
  includes padding.

  Raises:
    CheckpointError: the checkpoint has no such array, or it cannot be read.
  """
  import tensorstore as ts

  def wait_until_open(context: ts.Context) -> dict[str, ts.TensorStore]:
    futures = {name: ts.open(spec, open=True, read=True, context=context) for name, spec in specs.items()}
    return {name: future.result() for name, future in futures.items()}

  try:
    check_plain_below(folder)
    specs = array_specs(folder, shapes)
    stores = wait_until_open(ts.Context())
    largest = max((_chunk_bytes(store) for store in stores.values()), default=0)
    stores = wait_until_open(ts.Context({'cache_pool': {'total_bytes_limit': largest + PART_BYTES}}))
  except (OSError, ValueError) as error:
    raise CheckpointError(f'{folder} cannot be read ({error_summary(error)})') from error
  true_shapes = {name: tuple(stores[name].shape if shape is None else shape) for name, shape in shapes.items()}
  return {name: StoredArray(stores[name], shape, f'{folder}: {name}') for name, shape in true_shapes.items()}


def _chunk_shape(store: ts.TensorStore) -> tuple[int, ...]:
  return tuple(size or 1 for size in store.chunk_layout.read_chunk.shape or ())


def _chunk_bytes(store: ts.TensorStore) -> int:
  return math.prod(_chunk_shape(store)) * store.dtype.numpy_dtype.itemsize
