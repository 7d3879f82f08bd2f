"""Meshes are placed along the links of described hardware."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from praxis_lite.bridges.t5x.chunks import LocalChunker
from praxis_lite.bridges.t5x.meshes import (
  DescribedDevice,
  bounds_from_last_device,
  default_mesh,
  default_submesh,
  get_coords,
  get_cpu_mesh,
  get_gpu_mesh,
  get_mesh,
)
from praxis_lite.common.errors import ShardingError


def torus(sides: tuple[int, int, int, int], host: tuple[int, int, int] = (2, 2, 1), kind: str = 'TPU v3') -> list[Any]:
  """Chips of a slice, x fastest but for the cores, hosts numbered likewise."""
  gx, gy, gz, cores = sides
  hosts_x, hosts_y = -(-gx // host[0]), -(-gy // host[1])
  return [
    DescribedDevice(
      id=i,
      process_index=x // host[0] + hosts_x * (y // host[1] + hosts_y * (z // host[2])),
      coords=(x, y, z),
      core_on_chip=core,
      platform='tpu',
      device_kind=kind,
    )
    for i, (z, y, x, core) in enumerate(itertools.product(range(gz), range(gy), range(gx), range(cores)))
  ]


def hosts(num_hosts: int, per_host: int, platform: str = 'gpu') -> list[Any]:
  return [DescribedDevice(id=i, process_index=i // per_host, platform=platform) for i in range(num_hosts * per_host)]


def ids(mesh: Mesh) -> np.ndarray:
  return np.vectorize(lambda d: d.id)(mesh.devices)


def test_bounds_and_coordinates() -> None:
  corner = DescribedDevice(0, coords=(3, 3, 3), core_on_chip=1)
  assert bounds_from_last_device(corner) == (4, 4, 4, 2)
  assert bounds_from_last_device(jax.devices()[-1]) == (jax.process_count(), jax.local_device_count())
  assert bounds_from_last_device(hosts(2, 4)[-1], hosts(2, 4)) == (2, 4)
  assert get_coords(DescribedDevice(0, coords=(1, 0, 1), core_on_chip=1)) == (1, 0, 1, 1)
  assert get_coords(DescribedDevice(9, process_index=1), local_device_count=8) == (1, 1)


def test_default_mesh_of_a_32_core_slice_goes_host_by_host() -> None:
  mesh = default_mesh(4, devices=torus((4, 4, 1, 2)))
  assert dict(mesh.shape) == {'data': 8, 'model': 4}
  rows_of_process_0 = [row for row in mesh.devices if all(d.process_index == 0 for d in row)]
  assert [[d.id for d in row] for row in rows_of_process_0] == [[0, 1, 2, 3], [8, 9, 10, 11]]
  assert ids(mesh)[:, 0].tolist() == [0, 8, 16, 24, 4, 12, 20, 28]


@pytest.mark.parametrize(
  ('kind', 'bounds', 'submeshes'),
  [
    ('TPU v2', (4, 4, 1, 2), {1: (1, 1, 1, 1), 2: (1, 1, 1, 2), 4: (2, 1, 1, 2), 8: (2, 2, 1, 2), 16: (4, 2, 1, 2)}),
    ('TPU v3', (4, 4, 1, 2), {1: (1, 1, 1, 1), 2: (1, 1, 1, 2), 4: (2, 1, 1, 2), 8: (2, 2, 1, 2), 16: (4, 2, 1, 2)}),
    ('TPU v4', (2, 2, 4, 1), {1: (1, 1, 1, 1), 2: (1, 2, 1, 1), 4: (2, 2, 1, 1), 8: (4, 2, 1, 1), 16: (2, 2, 4, 1)}),
    ('TPU v4', (4, 4, 4, 1), {4: (4, 1, 1, 1), 8: (4, 2, 1, 1), 16: (4, 4, 1, 1)}),
    ('TPU v4', (8, 4, 4, 1), {4: (4, 1, 1, 1), 8: (4, 2, 1, 1), 16: (8, 2, 1, 1)}),
    ('TPU v4', (8, 8, 8, 1), {8: (1, 1, 8, 1), 16: (8, 2, 1, 1)}),
    ('TPU v4', (8, 8, 16, 1), {8: (1, 1, 8, 1), 16: (1, 1, 16, 1)}),
  ],
)
def test_default_submeshes(kind: str, bounds: Any, submeshes: dict[int, Any]) -> None:
  assert {n: default_submesh(n, kind, bounds) for n in submeshes} == submeshes


@pytest.mark.parametrize(('num', 'kind', 'bounds'), [(3, 'TPU v3', (4, 4, 1, 2)), (3, 'TPU v4', (4, 4, 4, 1))])
def test_no_default_submesh_asks_for_one(num: int, kind: str, bounds: Any) -> None:
  with pytest.raises(ValueError, match='model_parallel_submesh='):
    default_submesh(num, kind, bounds)
  with pytest.raises(ValueError, match='num_partitions=3'):
    default_mesh(3, devices=torus(bounds, kind=kind))


@pytest.mark.parametrize(
  ('submesh', 'side'), [((3, 1, 1, 2), 'side x = 3'), ((1, 1, 1, 4), 'side core = 4'), ((2, 1, 2, 2), 'side z = 2')]
)
def test_a_side_that_does_not_divide_is_named(submesh: Any, side: str) -> None:
  with pytest.raises(ShardingError, match=side):
    get_mesh(submesh, devices=torus((4, 4, 1, 2)))


@pytest.mark.parametrize(
  ('sides', 'cores'), [((4, 4, 1), 2), ((4, 4, 4), 1), ((8, 4, 4), 1), ((8, 8, 16), 1), ((2, 2, 4), 1)]
)
@pytest.mark.parametrize('num', [1, 2, 4, 8, 16])
def test_every_row_is_a_box_and_every_host_a_block(sides: tuple[int, int, int], cores: int, num: int) -> None:
  kind = 'TPU v3' if cores == 2 else 'TPU v4'
  devices = torus((*sides, cores), kind=kind)
  submesh = default_submesh(num, kind, (*sides, cores))
  if any(whole % part for whole, part in zip((*sides, cores), submesh)):
    with pytest.raises(ShardingError, match='does not divide'):
      default_mesh(num, devices=devices)
    return
  mesh = default_mesh(num, devices=devices)
  assert sorted(ids(mesh).reshape(-1).tolist()) == list(range(len(devices)))
  for row in mesh.devices:
    coords = np.array([(*d.coords, d.core_on_chip) for d in row])
    assert tuple(np.ptp(coords, axis=0) + 1) == submesh
  for process in {d.process_index for d in devices}:
    LocalChunker(mesh, process)  # Raises where the host is not a contiguous block.


def test_a_row_that_spans_the_torus_keeps_its_ring_in_one_piece() -> None:
  for row in get_mesh((4, 1, 1, 1), devices=torus((4, 4, 4, 1), kind='TPU v4')).devices:
    assert [d.coords[0] for d in row] == [0, 1, 2, 3]


def test_without_tiling_hosts_must_be_contiguous_all_the_same() -> None:
  devices = torus((4, 4, 1, 2))
  # A host has 2 x 2 chips. Rows of the submesh go along x first, then y: with one chip a row, a host's are 0, 1, 4, 5.
  with pytest.raises(ShardingError, match=r'process 0 are not a contiguous block .* tile_by_host_if_needed'):
    get_mesh((1, 1, 1, 2), devices=devices, tile_by_host_if_needed=False)
  mesh = get_mesh((2, 1, 1, 2), devices=devices, tile_by_host_if_needed=False)
  assert {LocalChunker(mesh, process).num_chunks['data'] for process in range(4)} == {4}


def test_model_fills_a_host_first_where_devices_have_no_places() -> None:
  assert ids(get_gpu_mesh(4, hosts(2, 8))).tolist() == np.arange(16).reshape(4, 4).tolist()
  assert ids(get_gpu_mesh(8, hosts(2, 8))).tolist() == np.arange(16).reshape(2, 8).tolist()
  assert ids(get_gpu_mesh(16, hosts(2, 8))).tolist() == [list(range(16))]
  assert ids(get_gpu_mesh(8, hosts(4, 4))).tolist() == np.arange(16).reshape(2, 8).tolist()
  assert dict(get_gpu_mesh(1, hosts(2, 8)).shape) == {'data': 16, 'model': 1}


@pytest.mark.parametrize('num', [0, 3, 12, 24, 32])
def test_gpu_partitions_must_fit_hosts(num: int) -> None:
  with pytest.raises(ShardingError, match=f'num_partitions={num} must divide the 8 devices'):
    get_gpu_mesh(num, hosts(2, 8))


def test_hosts_must_be_alike() -> None:
  with pytest.raises(ShardingError, match='equally many'):
    get_cpu_mesh(hosts(2, 8)[:-1])


def test_cpu_meshes_honour_the_number_of_partitions() -> None:
  assert dict(get_cpu_mesh().shape) == {'data': 1, 'model': 8}
  assert dict(default_mesh(2).shape) == {'data': 4, 'model': 2}
  assert dict(default_mesh(model_parallel_submesh=(1, 4)).shape) == {'data': 2, 'model': 4}
  with pytest.raises(ShardingError, match='2 sides'):
    get_mesh((1, 2), devices=torus((2, 2, 1, 1)))


def test_hybrid_meshes_add_a_replica_axis() -> None:
  mesh = default_mesh(ici_mesh_shape=(1, 2, 2), dcn_mesh_shape=(2, 1, 1))
  assert dict(mesh.shape) == {'replica': 2, 'data': 2, 'model': 2}
  assert ids(mesh).tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
  with pytest.raises(ShardingError, match='do not agree'):
    default_mesh(4, ici_mesh_shape=(1, 2, 2), dcn_mesh_shape=(2, 1, 1))
  with pytest.raises(ShardingError, match='needs ici_mesh_shape'):
    default_mesh(dcn_mesh_shape=(2, 1, 1))


@pytest.mark.parametrize(
  ('kwargs', 'message'),
  [({}, 'neither is'), ({'num_partitions': 4, 'model_parallel_submesh': (1, 2)}, 'num_partitions=4 does not agree')],
)
def test_exactly_one_way_to_say_the_model_parallelism(kwargs: dict[str, Any], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    default_mesh(**kwargs)


def test_meshes_take_the_arguments_of_t5x() -> None:
  assert dict(default_mesh(2, (1, 2)).shape) == {'data': 4, 'model': 2}
  devices = torus((4, 4, 1, 2), host=(2, 2, 1, 2))
  mesh = get_mesh((2, 1, 1, 2), devices=devices)
  local = [d for d in devices if d.process_index == 1]
  assert get_mesh((2, 1, 1, 2), devices, local) == get_mesh((2, 1, 1, 2), devices) == mesh
  assert get_mesh((2, 1, 1, 2), input_devices=devices, input_local_devices=local, tile_by_host_if_needed=True) == mesh
  assert get_mesh((1, 2), (), ()) == default_mesh(2)
  for wrong in (devices[:8], local[:4]):
    with pytest.raises(ShardingError, match='input_local_devices are not the devices of one host'):
      get_mesh((2, 1, 1, 2), devices, wrong)
  with pytest.raises(ShardingError, match='two names for the devices'):
    get_mesh((2, 1, 1, 2), devices, devices=devices)
