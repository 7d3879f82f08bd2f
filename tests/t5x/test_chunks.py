"""What the hosts of a mesh hold of arrays, and read of batches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.bridges.t5x.chunks import DataLayout, LocalChunker, LocalChunkInfo, get_data_layout
from praxis_lite.bridges.t5x.meshes import DescribedDevice, default_mesh
from praxis_lite.common.errors import ShardingError

SLICE = [
  DescribedDevice(
    id=2 * x + 8 * y + c,
    process_index=x // 2 + 2 * (y // 2),
    coords=(x, y, 0),
    core_on_chip=c,
    platform='tpu',
    device_kind='TPU v3',
  )
  for y in range(4)
  for x in range(4)
  for c in range(2)
]
MESH = default_mesh(4, devices=SLICE)


def mesh_of_hosts(shape: tuple[int, ...], names: tuple[str, ...], per_host: int = 1) -> Mesh:
  devices = [DescribedDevice(i, process_index=i // per_host) for i in range(int(np.prod(shape)))]
  return Mesh(np.array(devices, dtype=object).reshape(shape), names)


@pytest.mark.parametrize(
  ('process', 'data_chunk', 'rows', 'columns'),
  [
    (0, 0, slice(0, 32), slice(0, 4)),
    (1, 2, slice(64, 96), slice(8, 12)),
    (2, 1, slice(32, 64), slice(4, 8)),
    (3, 3, slice(96, 128), slice(12, 16)),
  ],
)
def test_chunks_of_a_32_core_slice(process: int, data_chunk: int, rows: slice, columns: slice) -> None:
  chunker = LocalChunker(MESH, process)
  assert chunker.chunk_ids == {'data': data_chunk, 'model': 0}
  assert chunker.get_local_chunk_info((128, 16), ['data', 'model']) == LocalChunkInfo((rows, slice(0, 16)), 0)
  assert chunker.get_local_chunk_info((128, 16), [None, 'model']).replica_id == data_chunk
  assert chunker.get_local_chunk_info((128, 16), ['model', 'data']).slice == (slice(0, 128), columns)


@pytest.mark.parametrize(
  'spec', [('data', 'model'), ('model', 'data'), (None, 'model'), (('data', 'model'), None), (None, None)]
)
def test_chunks_agree_with_where_jax_puts_the_shards(spec: Any) -> None:
  shape = (128, 32)
  placed: Any = NamedSharding(MESH, PartitionSpec(*spec)).devices_indices_map(shape)
  for process in range(4):
    info = LocalChunker(MESH, process).get_local_chunk_info(shape, spec)
    mine = np.zeros(shape, bool)
    for device, index in placed.items():
      if device.process_index == process:
        mine[index] = True
    chunk = np.zeros(shape, bool)
    chunk[info.slice] = True
    np.testing.assert_array_equal(mine, chunk)


@pytest.mark.parametrize(
  'mesh',
  [
    MESH,
    default_mesh(8, devices=SLICE),
    mesh_of_hosts((2, 2), ('data', 'model')),
    mesh_of_hosts((2, 2, 2), ('a', 'b', 'c'), per_host=2),
  ],
  ids=lambda mesh: 'x'.join(map(str, mesh.devices.shape)),
)
def test_rows_over_several_axes_are_right_or_refused(mesh: Mesh) -> None:
  for spec in itertools.chain.from_iterable(itertools.permutations(mesh.axis_names, n) for n in (1, 2, 3)):
    placed: Any = NamedSharding(mesh, PartitionSpec(spec)).devices_indices_map((64,))
    for process in {d.process_index for d in mesh.devices.flat}:
      rows = {i for d, index in placed.items() if d.process_index == process for i in np.arange(64)[index]}
      start, stop = min(rows), max(rows) + 1
      chunker = LocalChunker(mesh, process)
      if len(rows) == stop - start:
        whole = (slice(None), slice(0, 64))
        part = chunker.get_local_chunk_info((64,), [spec]).slice[0]
        assert part == slice(start, stop) or (part in whole and len(rows) == 64), (spec, process)
      else:
        with pytest.raises(ShardingError, match=f'rows of process {process} in dimension 0, .* not contiguous'):
          chunker.get_local_chunk_info((64,), [spec])


def test_scattered_rows_are_refused_with_the_order_that_would_do() -> None:
  with pytest.raises(ShardingError, match=r"dimension 0, split over \('model', 'data'\), are not contiguous"):
    LocalChunker(MESH, 0).get_local_chunk_info((32,), [('model', 'data')])


def test_shard_and_replica_ids_count_row_major() -> None:
  mesh = mesh_of_hosts((2, 2), ('replica', 'data'))
  chunkers = [LocalChunker(mesh, i) for i in range(4)]
  assert [c.get_shard_id(('replica', 'data')) for c in chunkers] == [0, 1, 2, 3]
  assert [c.get_replica_id(()) for c in chunkers] == [0, 1, 2, 3]
  assert [c.get_shard_id('data') for c in chunkers] == [0, 1, 0, 1]
  assert [c.get_replica_id('data') for c in chunkers] == [0, 0, 1, 1]
  assert [c.get_shard_id((('data', 'replica'),)) for c in chunkers] == [0, 2, 1, 3]


def test_sizes_that_do_not_divide_are_refused_not_cut() -> None:
  with pytest.raises(ShardingError, match='dimension 0 of size 127 does not divide by the 4 host chunks'):
    LocalChunker(MESH, 0).get_local_chunk_info((127, 16), ['data', None])


def test_hosts_that_are_scattered_or_absent_are_refused() -> None:
  scattered = Mesh(MESH.devices[[0, 2, 1, 3, 4, 5, 6, 7]], ('data', 'model'))
  with pytest.raises(ShardingError, match='not a contiguous block'):
    LocalChunker(scattered, 0)
  with pytest.raises(ShardingError, match='process 7 has no devices'):
    LocalChunker(MESH, 7)
  with pytest.raises(ShardingError, match=r"'date' is not an axis .* Did you mean 'data'"):
    LocalChunker(MESH, 0).get_shard_id('date')


def test_each_host_reads_its_share_of_the_batch() -> None:
  layouts = [get_data_layout(LocalChunker(MESH, p), ('data',), 32) for p in range(4)]
  assert [layout.shard_id for layout in layouts] == [0, 2, 1, 3]
  assert layouts[0] == DataLayout(32, 0, 4, True)
  assert get_data_layout(LocalChunker(MESH, 1), ('data',)) == DataLayout(8, 2, 4, True)


def test_hosts_in_one_model_row_read_the_same_share() -> None:
  mesh = mesh_of_hosts((2, 2), ('data', 'model'))
  layouts = [get_data_layout(LocalChunker(mesh, p), ('data',), 4) for p in range(4)]
  assert [(x.shard_id, x.is_first_host_in_replica_set) for x in layouts] == [
    (0, True),
    (0, False),
    (1, True),
    (1, False),
  ]


@pytest.mark.parametrize('batch_size', [0, 4, 12, -8])
def test_batches_that_do_not_divide_are_refused(batch_size: int) -> None:
  with pytest.raises(ValueError, match=f'batch size {batch_size} must be a positive multiple of 8'):
    get_data_layout(LocalChunker(MESH, 0), ('data',), batch_size)
