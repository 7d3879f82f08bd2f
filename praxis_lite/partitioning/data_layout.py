"""Which part of each global batch one host has to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from praxis_lite.errors import ShardingError
from praxis_lite.partitioning.chunks import LocalChunker
from praxis_lite.partitioning.padding import num_parts


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
