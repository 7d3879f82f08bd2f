"""Which part of a split array the devices of one host hold.

The devices of a host form a contiguous block of the mesh, its chunk. Along each mesh axis there are `num_chunks` of
them, and a host has a `chunk_id` on each. From these follow the slice of any array that the host holds, how many
hosts hold the same slice, and which of them it is. On the mesh {'data': 8, 'model': 4} of four hosts with 2 x 4
devices each:

    host 1, chunk ids {'data': 2, 'model': 0}
    array (128, 16) split ('data', 'model'):   rows 64:96, all 16 columns, replica 0
    array (128, 16) split (None, 'model'):     everything, replica 2 of 4

Which part of each global batch one host has to read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from praxis_lite.errors import ShardingError, did_you_mean
from praxis_lite.partitioning.padding import num_parts
from praxis_lite.partitioning.specs import spec_axes


class LocalChunkInfo(NamedTuple):
  """What a host holds of an array.

  Attributes:
    slice: the host's part, one slice per dimension.
    replica_id: its number among the hosts that hold the same part.
  """

  slice: tuple[slice, ...]
  replica_id: int


class LocalChunker:
  """The chunk of one host.

  Args:
    global_mesh: the mesh.
    process_index: the host; this process by default.

  Attributes:
    num_chunks: number of chunks along each mesh axis.
    chunk_ids: this host's number along each mesh axis.

  Raises:
    ShardingError: the host has no devices in the mesh, or they are not a contiguous block of it.
  """

  def __init__(self, global_mesh: Mesh, process_index: int | None = None):
    process_index = jax.process_index() if process_index is None else process_index
    self.global_mesh = global_mesh
    owner = np.vectorize(lambda d: d.process_index, otypes=[int])(global_mesh.devices)
    places = np.argwhere(owner == process_index)
    if not len(places):
      raise ShardingError(f'process {process_index} has no devices in the mesh {dict(global_mesh.shape)}')
    low, sides = places.min(axis=0), np.ptp(places, axis=0) + 1
    if math.prod(sides.tolist()) != len(places) or any(low % sides) or any(owner.shape % sides):
      raise ShardingError(
        f'the devices of process {process_index} are not a contiguous block of the mesh {dict(global_mesh.shape)}; '
        'arrange the mesh so that each host holds one, as get_mesh does'
      )
    self.num_chunks = {a: int(n) for a, n in zip(global_mesh.axis_names, owner.shape // sides)}
    self.chunk_ids = {a: int(i) for a, i in zip(global_mesh.axis_names, low // sides)}

  def get_local_chunk_info(self, global_shape: Sequence[int], mesh_axes: Sequence[Any]) -> LocalChunkInfo:
    """Returns the host's part of an array.

    Args:
      global_shape: shape of the array, padded if it is uneven.
      mesh_axes: a spec: for each dimension a mesh axis, a tuple of them or None.

    Raises:
      ShardingError: a dimension does not divide by the number of its chunks.
    """
    return LocalChunkInfo(
      tuple(self._slice(size, entry, i) for i, (size, entry) in enumerate(zip(global_shape, mesh_axes, strict=True))),
      self.get_replica_id(mesh_axes),
    )

  def get_shard_id(self, mesh_axes: Any) -> int:
    """The host's number, row-major, among the different parts of an array split over these axes."""
    return self._number(self._flatten(mesh_axes))

  def get_replica_id(self, mesh_axes: Any) -> int:
    """The host's number among the hosts with the same part: its number over the axes that are not used."""
    used = self._flatten(mesh_axes)
    return self._number([axis for axis in self.num_chunks if axis not in used])

  def get_num_shards(self, mesh_axes: Any) -> int:
    """How many different parts hosts hold of an array split over these axes."""
    return math.prod(self.num_chunks[axis] for axis in self._flatten(mesh_axes))

  def _slice(self, size: int, entry: Any, dim: int) -> slice:
    if not spec_axes(entry):
      return slice(None)
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

  def _flatten(self, mesh_axes: Any) -> list[str]:
    entries = [mesh_axes] if isinstance(mesh_axes, str) else mesh_axes
    axes = [axis for entry in entries for axis in spec_axes(entry)]
    for axis in axes:
      if axis not in self.num_chunks:
        raise ShardingError(
          f'{axis!r} is not an axis of the mesh {dict(self.global_mesh.shape)}.{did_you_mean(axis, self.num_chunks)}'
        )
    return axes


class DataLayout(NamedTuple):
  """A host's share of the data.

  Attributes:
    batch_size: size of the global batch.
    shard_id: the share this host reads.
    num_shards: into how many shares hosts split the batch.
    is_first_host_in_replica_set: whether no host of a smaller index reads the same share.
  """

  batch_size: int
  shard_id: int
  num_shards: int
  is_first_host_in_replica_set: bool


def get_data_layout(chunker: LocalChunker, data_axes: Sequence[str], batch_size: int | None = None) -> DataLayout:
  """Returns the share of the host of `chunker`.

  Args:
    chunker: the host's chunk of the mesh.
    data_axes: the mesh axes that the batch dimension is split over.
    batch_size: size of the global batch; by default one example for each part of the mesh's data axes.

  Raises:
    ShardingError: the batch size does not divide by the parts of the data axes, or by the shares of hosts.
  """
  data_mesh_size = num_parts(tuple(data_axes), chunker.global_mesh)
  num_shards = chunker.get_num_shards(data_axes)
  batch_size = data_mesh_size if batch_size is None else batch_size
  for divisor, what in ((data_mesh_size, 'the size of the data axes'), (num_shards, 'the number of data shards')):
    if batch_size < 1 or batch_size % divisor:
      raise ShardingError(
        f'batch size {batch_size} must be a positive multiple of {divisor}, {what} {tuple(data_axes)!r}; the nearest '
        f'is {max(divisor, round(batch_size / divisor) * divisor)}, or pad the batch with examples of zero weight'
      )
  return DataLayout(batch_size, chunker.get_shard_id(data_axes), num_shards, chunker.get_replica_id(data_axes) == 0)
