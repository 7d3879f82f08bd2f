"""Finds which part of a split array the devices of one host hold, and which part of each batch the host reads.

The devices of a host form a contiguous block of the mesh, its chunk. The number of chunks along each mesh axis and the
position of the host's chunk determine which slice of an array the host holds, how many hosts hold the same slice, and
the host's number among them. On the mesh {'data': 8, 'model': 4} of four hosts with 2 x 4 devices each:

    host 1, chunk ids {'data': 2, 'model': 0}
    array (128, 16) split ('data', 'model'):   rows 64:96, all 16 columns, replica 0
    array (128, 16) split (None, 'model'):     everything, replica 2 of 4
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from praxis_lite.common.errors import ShardingError
from praxis_lite.sharding.padding import num_parts
from praxis_lite.sharding.specs import all_axes

# One entry of a spec: the mesh axes that split a dimension.
Entry = str | tuple[str, ...] | None
SpecLike = PartitionSpec | Sequence[Entry]


class LocalChunkInfo(NamedTuple):
  """The part of an array that a host holds.

  Attributes:
    slice: the host's part, one slice per dimension.
    replica_id: the host's number among the hosts that hold the same part.
  """

  slice: tuple[slice, ...]
  replica_id: int


class LocalChunker:
  """The chunk of one host.

  Args:
    global_mesh, process_index: the mesh, and the host; this process by default.

  Attributes:
    num_chunks, chunk_ids: number of chunks along each mesh axis, and this host's number along it.

  Raises:
    ShardingError: the host has no devices in the mesh, or they are not a contiguous block of it.
  """

  def __init__(self, global_mesh: Mesh, process_index: int | None = None):
    self.global_mesh = global_mesh
    self.process_index = jax.process_index() if process_index is None else process_index
    owners = _owners(global_mesh)
    places = np.argwhere(owners == self.process_index)
    if not len(places):
      raise ShardingError(f'process {self.process_index} has no devices in the mesh {dict(global_mesh.shape)}')
    low, sides = places.min(axis=0), np.ptp(places, axis=0) + 1
    if math.prod(sides.tolist()) != len(places) or any(low % sides) or any(owners.shape % sides):
      raise ShardingError(
        f'the devices of process {self.process_index} are not a contiguous block of the mesh '
        f'{dict(global_mesh.shape)}; each host must hold one: arrange it as get_mesh does with tile_by_host_if_needed'
      )
    self._sides, self.num_chunks, self.chunk_ids = (
      dict(zip(global_mesh.axis_names, values.tolist())) for values in (sides, owners.shape // sides, low // sides)
    )

  def get_local_chunk_info(self, global_shape: Sequence[int], mesh_axes: SpecLike) -> LocalChunkInfo:
    """Returns the host's part of an array.

    Args:
      global_shape: shape of the array, padded if it is uneven.
      mesh_axes: a spec: for each dimension a mesh axis, a tuple of them or None.

    Raises:
      ShardingError: a dimension does not divide by its chunks, or the host's part of a dimension is not contiguous.
    """
    return LocalChunkInfo(
      tuple(self._slice(size, entry, i) for i, (size, entry) in enumerate(zip(global_shape, mesh_axes, strict=True))),
      self.get_replica_id(mesh_axes),
    )

  def get_shard_id(self, mesh_axes: str | SpecLike) -> int:
    """Returns the number of the host's part, row-major, among all parts of an array that is split over these axes."""
    return self._number(self._flatten(mesh_axes))

  def get_replica_id(self, mesh_axes: str | SpecLike) -> int:
    """Returns the host's number, row-major, among the hosts with the same part of an array split over these axes."""
    used = self._flatten(mesh_axes)
    return self._number([axis for axis in self.num_chunks if axis not in used])

  def get_num_shards(self, mesh_axes: str | SpecLike) -> int:
    """Returns the number of different parts, over all hosts, of an array that is split over these axes."""
    return math.prod(self.num_chunks[axis] for axis in self._flatten(mesh_axes))

  def _slice(self, size: int, entry: Entry, dim: int) -> slice:
    axes = self._flatten([entry])
    if not axes:
      return slice(None)
    # Parts are numbered row-major. So a host with several parts along one axis must hold all parts along later axes.
    several = [i for i, axis in enumerate(axes) if self._sides[axis] > 1]
    if several and any(self.num_chunks[axis] > 1 for axis in axes[several[0] + 1 :]):
      raise ShardingError(
        f'the rows of process {self.process_index} in dimension {dim}, split over {tuple(axes)}, are not contiguous; '
        'put first the axes along which hosts are split'
      )
    chunks = self.get_num_shards([entry])
    if size % chunks:
      raise ShardingError(
        f'dimension {dim} of size {size} does not divide by the {chunks} host chunks of {entry!r}; pad it to a multiple'
      )
    start = self.get_shard_id([entry]) * (size // chunks)
    return slice(start, start + size // chunks)

  def _number(self, axes: Sequence[str]) -> int:
    number = 0
    for axis in axes:
      number = number * self.num_chunks[axis] + self.chunk_ids[axis]
    return number

  def _flatten(self, mesh_axes: str | SpecLike) -> list[str]:
    entries = [mesh_axes] if isinstance(mesh_axes, str) else mesh_axes
    axes = all_axes(entries)
    num_parts(tuple(axes), self.global_mesh)  # Raises an error if the mesh lacks one of them.
    return axes


@functools.lru_cache(maxsize=8)
def _owners(mesh: Mesh) -> np.ndarray:
  return np.vectorize(lambda d: d.process_index, otypes=[int])(mesh.devices)


class DataLayout(NamedTuple):
  """A host's share of the data.

  Attributes:
    batch_size: size of the global batch.
    shard_id, num_shards: the share that this host reads, and the number of shares.
    is_first_host_in_replica_set: whether the host is the first, in the order of the mesh, that reads this share.
  """

  batch_size: int
  shard_id: int
  num_shards: int
  is_first_host_in_replica_set: bool


def get_data_layout(chunker: LocalChunker, data_axes: Sequence[str], batch_size: int | None = None) -> DataLayout:
  """Returns which part of the global batch the host of `chunker` reads, if `data_axes` split the batch.

  By default, the global batch has one example for each part of these axes.

  Raises:
    ShardingError: the batch size is not a multiple of the number of parts along the data axes.
  """
  data_mesh_size = num_parts(tuple(data_axes), chunker.global_mesh)
  num_shards = chunker.get_num_shards(data_axes)
  batch_size = data_mesh_size if batch_size is None else batch_size
  if batch_size < 1 or batch_size % data_mesh_size:
    nearest = max(data_mesh_size, round(batch_size / data_mesh_size) * data_mesh_size)
    raise ShardingError(
      f'batch size {batch_size} must be a positive multiple of {data_mesh_size}, the size of the data axes '
      f'{tuple(data_axes)!r}; the nearest is {nearest}, or pad the batch with examples of zero weight'
    )
  return DataLayout(batch_size, chunker.get_shard_id(data_axes), num_shards, chunker.get_replica_id(data_axes) == 0)
