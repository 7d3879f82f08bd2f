"""Makes meshes for a number of model partitions, placed along the links of the hardware.

These meshes have the axes ('data', 'model'), or ('replica', 'data', 'model') if they join several slices. The devices
are always a parameter; they may be `DescribedDevice`s, which need not exist.

Devices in the same row of the mesh, along 'model', exchange activations in every layer. So on hardware whose devices
form a torus, each row is a compact box of chips, the model-parallel submesh, and the submeshes tile the box of all
devices. Tiles are ordered along 'data', and the devices in a tile along 'model'. Both orders are row-major, except that
the devices of one host must form a contiguous block of the mesh, because each host feeds and stores one block of the
data. So tiles are ordered host by host. Along each side, with g devices in the slice, m in the submesh and l on a host:

    m >= l, whole hosts in a tile:    g = (g / m tiles)              * (m / l hosts) * (l devices)
    m <  l, several tiles on a host:  g = (g / l hosts) * (l / m tiles)              * (m devices)

The mesh orders devices by the first factors of all sides, then by the second factors, and so on.

Tiling host by host is not needed if each host has only one chip along z, and the submesh has all cores of its chips and
spans the whole side x or y, or the whole plane xz or yz. Then devices are ordered with z varying more slowly than y (or
x). This alone makes the devices of each host contiguous, and submeshes remain whole rings, on which collectives are
faster.

The vocabulary and the default submeshes come from T5X (Roberts et al., 2022).
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from praxis_lite.bridges.t5x.chunks import LocalChunker
from praxis_lite.common.errors import ShardingError
from praxis_lite.common.figures import number_of
from praxis_lite.sharding.mesh import auto_mesh, create_device_mesh

_SIDE_NAMES = {4: ('x', 'y', 'z', 'core'), 2: ('hosts', 'devices per host')}
# Default submeshes (x, y, z, core) by number of partitions; the first that fits into the slice is used. TPU v2 and v3
# chips have two cores, closer to each other than to any other core. On later chips, a closed ring comes before a box.
_TWO_CORES = {1: [(1, 1, 1, 1)], 2: [(1, 1, 1, 2)], 4: [(2, 1, 1, 2)], 8: [(2, 2, 1, 2)], 16: [(4, 2, 1, 2)]}
_ONE_CORE = {
  1: [(1, 1, 1, 1)],
  2: [(1, 2, 1, 1)],
  4: [(4, 1, 1, 1), (2, 2, 1, 1)],
  8: [(1, 1, 8, 1), (4, 2, 1, 1)],
  16: [(1, 1, 16, 1), (8, 2, 1, 1), (4, 4, 1, 1), (2, 2, 4, 1)],
}


@dataclasses.dataclass(frozen=True)
class DescribedDevice:
  """A device that need not exist: the facts that a mesh needs."""

  id: int  # Unique number.
  process_index: int = 0  # The host it is attached to.
  coords: tuple[int, int, int] | None = None  # (x, y, z) of its chip in the torus; None without coordinates.
  core_on_chip: int | None = None  # Its core on that chip.
  platform: str = 'cpu'  # 'tpu', 'gpu' or 'cpu'.
  device_kind: str = 'cpu'  # The hardware, such as 'TPU v4'.


Device: TypeAlias = 'jax.Device | DescribedDevice'
Sides = tuple[int, ...]
Submesh: TypeAlias = Sequence[int] | None  # The devices in a row of 'model' form a box with these sides.


def bounds_from_last_device(last_device: Device, devices: Sequence[Device] | None = None) -> Sides:
  """Returns the sides (x, y, z, core) of the box from the origin to `last_device`, if it has coordinates.

  Otherwise, returns (number of hosts, devices per host) of `devices`, by default of all devices.
  """
  coords = _torus_coords(last_device)
  if coords is not None:
    return tuple(c + 1 for c in coords)
  return (jax.process_count(), jax.local_device_count()) if devices is None else _hosts(devices)


def get_coords(device: Device, local_device_count: int | None = None) -> Sides:
  """Returns (x, y, z, core) of a device with coordinates, and otherwise (host, index on the host).

  `local_device_count` is the number of devices on each host; by default, the number on this host.
  """
  coords = _torus_coords(device)
  if coords is not None:
    return coords
  return device.process_index, device.id % (local_device_count or jax.local_device_count())


def default_mesh(
  num_partitions: int | None = None,
  model_parallel_submesh: Submesh = None,
  backend: str | None = None,
  ici_mesh_shape: Sequence[int] | None = None,
  dcn_mesh_shape: Sequence[int] | None = None,
  devices: Sequence[Device] | None = None,
) -> Mesh:
  """Returns the mesh for a degree of model parallelism on any devices.

  Args:
    num_partitions: size of the 'model' axis; the submesh is chosen for the hardware.
    model_parallel_submesh: sides of the submesh instead: (x, y, z, core) on a TPU, (hosts, devices) elsewhere. Both
      arguments may be given if they agree.
    ici_mesh_shape: sizes of ('replica', 'data', 'model') within a slice; replaces the two arguments above. If
      num_partitions is given too, it must equal the size of 'model'.
    dcn_mesh_shape: number of slices along each of these axes; it needs `ici_mesh_shape`.
    devices, backend: the devices; by default all of the JAX backend.

  Raises:
    ShardingError: neither num_partitions nor model_parallel_submesh is given, or they do not agree; or a size does not
      divide; or there is no default submesh for num_partitions.
  """
  devices = _devices_or_default(devices, backend)
  if ici_mesh_shape is not None:
    mesh = create_device_mesh(ici_mesh_shape, dcn_mesh_shape, ('replica', 'data', 'model'), devices)
    if model_parallel_submesh is not None or num_partitions not in (None, mesh.shape['model']):
      raise ShardingError(
        f'ici_mesh_shape and dcn_mesh_shape give {mesh.shape["model"]} model partitions; '
        f'num_partitions={num_partitions}, model_parallel_submesh={model_parallel_submesh} do not agree; leave them out'
      )
    return mesh
  if dcn_mesh_shape is not None:
    raise ShardingError('dcn_mesh_shape needs ici_mesh_shape, the shape within each slice')
  if model_parallel_submesh is not None and num_partitions not in (None, math.prod(model_parallel_submesh)):
    raise ShardingError(
      f'model_parallel_submesh={tuple(model_parallel_submesh)} has '
      f'{number_of(math.prod(model_parallel_submesh), "device")}, and '
      f'num_partitions={num_partitions} does not agree; leave one of them out'
    )
  num = num_model_partitions(None if model_parallel_submesh else num_partitions, model_parallel_submesh)
  if model_parallel_submesh is not None:
    return get_mesh(model_parallel_submesh, devices=devices)
  if _torus_coords(devices[-1]) is None:
    return get_gpu_mesh(num, devices)
  last = max(devices, key=get_coords)
  return get_mesh(default_submesh(num, last.device_kind, bounds_from_last_device(last)), devices=devices)


def get_mesh(
  model_parallel_submesh: Sequence[int],
  input_devices: Sequence[Device] = (),
  input_local_devices: Sequence[Device] = (),
  tile_by_host_if_needed: bool = True,
  backend: str | None = None,
  *,
  devices: Sequence[Device] | None = None,
) -> Mesh:
  """Returns a mesh ('data', 'model') whose rows of 'model' are boxes of the shape of the submesh.

  Args:
    model_parallel_submesh: (x, y, z, core) on a TPU, (hosts, devices per host) elsewhere.
    input_devices, backend: the devices, which must fill a box; or the JAX backend to take them from.
    input_local_devices: the devices of one host; they must be among the devices, which know their hosts.
    devices: another name of `input_devices`.
    tile_by_host_if_needed: arrange the boxes host by host if a host's devices would otherwise not be contiguous.

  Raises:
    ShardingError: the devices do not fill a box; a side of the submesh does not divide the box's side; a host's devices
      are not contiguous without tiling, or cannot be tiled; or the local devices are not all devices of one host.
  """
  if len(input_devices):
    if devices is not None:
      raise ShardingError('get_mesh: input_devices and devices are two names for the devices; give one of them')
    devices = input_devices
  devices = _devices_or_default(devices, backend)
  if len(input_local_devices):
    _check_local(input_local_devices, devices)
  box, host = _device_box(devices)
  names, submesh = _SIDE_NAMES[box.ndim], tuple(model_parallel_submesh)
  if len(submesh) != box.ndim:
    raise ShardingError(
      f'model_parallel_submesh={submesh} has {number_of(len(submesh), "side")}; these devices need {names}'
    )
  for name, whole, part in zip(names, box.shape, submesh):
    if part < 1 or whole % part:
      raise ShardingError(
        f'model_parallel_submesh={submesh}: side {name} = {part} does not divide the {whole} of the devices, '
        f'whose sides are {dict(zip(names, box.shape))}'
      )
  order = _z_major(box.shape, submesh) if box.ndim == 4 and host[2] == 1 else None
  if order is not None:
    box, submesh = box.transpose(order), tuple(submesh[i] for i in order)
  tiled = tile_by_host_if_needed and order is None
  factors = [
    _host_factors(name, *sides) if tiled else (sides[0] // sides[1], 1, 1, sides[1])
    for name, *sides in zip(names, box.shape, submesh, host)
  ]
  split = box.reshape([factor for side in factors for factor in side])
  placed = split.transpose([4 * side + factor for factor in range(4) for side in range(box.ndim)])
  mesh = auto_mesh(placed.reshape(-1, math.prod(submesh)), ('data', 'model'))
  for process in () if tiled else {d.process_index for d in devices}:
    LocalChunker(mesh, process)  # Raises an error if the devices of a host are not a contiguous block.
  return mesh


def get_gpu_mesh(num_partitions: int, devices: Sequence[Device] | None = None) -> Mesh:
  """Returns a mesh ('data', 'model') of devices without coordinates; 'model' fills one host's devices first.

  Raises ShardingError unless num_partitions divides the number of devices of a host, or is a multiple of it that
  divides the number of all devices.
  """
  devices = _devices_or_default(devices)
  num_hosts, per_host = _hosts(devices)
  in_host = max(1, min(num_partitions, per_host))
  model_hosts = num_partitions // in_host
  if num_partitions < 1 or per_host % in_host or num_partitions % in_host or num_hosts % model_hosts:
    raise ShardingError(
      f'num_partitions={num_partitions} must divide the {per_host} devices of each host, or be a multiple of it '
      f'that divides all {num_hosts * per_host} devices'
    )
  return get_mesh((model_hosts, in_host), devices=devices)


def get_cpu_mesh(devices: Sequence[Device] | None = None) -> Mesh:
  """Returns the mesh with 'data' over processes and 'model' over the devices of each process."""
  devices = _devices_or_default(devices)
  return get_gpu_mesh(_hosts(devices)[1], devices)


def default_submesh(num_partitions: int, device_kind: str, bounds: Sequence[int]) -> Sides:
  """Returns the sides (x, y, z, core) of a submesh of `num_partitions` cores in a TPU slice with the sides `bounds`.

  Raises ShardingError if there is no default for these arguments.
  """
  x, _, z, cores = bounds
  known = _TWO_CORES if device_kind in ('TPU v2', 'TPU v3') else _ONE_CORE if cores == 1 else {}
  if num_partitions not in known:
    raise ShardingError(
      f'there is no default submesh for num_partitions={num_partitions} on {device_kind} with sides {tuple(bounds)}; '
      'the defaults are for 1, 2, 4, 8 and 16. Pass model_parallel_submesh=(x, y, z, core)'
    )
  submeshes = known[num_partitions]
  return next((s for s in submeshes if s[0] <= x and s[2] <= z), submeshes[-1])


def num_model_partitions(num_partitions: int | None, model_parallel_submesh: Submesh) -> int:
  """Returns the size of the 'model' axis; raises ShardingError unless exactly one argument is given."""
  if (num_partitions is None) == (model_parallel_submesh is None):
    given = 'neither is' if num_partitions is None else 'both are'
    raise ShardingError(f'pass num_partitions or model_parallel_submesh: exactly one of them; {given} given')
  return math.prod(model_parallel_submesh or ()) if num_partitions is None else num_partitions


def _device_box(devices: Sequence[Device]) -> tuple[np.ndarray, Sides]:
  """Returns an array of the devices, indexed by coordinates or by (host, device), and the sides of one host's box."""
  num_hosts, per_host = _hosts(devices)
  ordered = sorted(devices, key=lambda d: (d.process_index, d.id))
  if _torus_coords(devices[0]) is None:
    return np.array(ordered).reshape(num_hosts, per_host), (1, per_host)
  coords = np.array([get_coords(d) for d in ordered])
  low, sides = coords.min(axis=0), tuple((np.ptp(coords, axis=0) + 1).tolist())
  if len(np.unique(coords, axis=0)) != len(devices) or math.prod(sides) != len(devices):
    raise ShardingError(f'{len(devices)} devices do not fill the box {sides} that their coordinates span')
  box = np.empty(sides, dtype=object)
  box[tuple((coords - low).T)] = ordered
  return box, tuple((np.ptp(coords[:per_host], axis=0) + 1).tolist())


def _check_local(local_devices: Sequence[Device], devices: Sequence[Device]) -> None:
  """Raises ShardingError unless `local_devices` are all devices of one host."""
  ids, hosts = {d.id for d in local_devices}, {d.process_index for d in local_devices}
  if len(hosts) != 1 or ids != {d.id for d in devices if d.process_index in hosts}:
    raise ShardingError(
      f'get_mesh: the {len(local_devices)} input_local_devices are not the devices of one host, by process_index; '
      'leave them out'
    )


def _z_major(whole: Sides, part: Sides) -> Sides | None:
  """Returns an order of the sides x, y, z and core in which z comes before y or x; None if the submesh allows none.

  With this order, z varies more slowly than y or x.
  """
  (gx, gy, gz, gc), (mx, my, mz, mc) = whole, part
  if mc != gc:
    return None
  if (mx == gx > 1 and my == mz == 1) or (mx == 1 and my == gy > 1 and mz == gz > 1):
    return 0, 2, 1, 3
  if (my == gy > 1 and mx == mz == 1) or (my == 1 and mx == gx > 1 and mz == gz > 1):
    return 2, 1, 0, 3
  return None


def _host_factors(name: str, whole: int, part: int, host: int) -> Sides:
  """Returns four factors whose product is one side of the box of devices, which is cut into tiles.

  They are (tiles, 1, hosts in a tile, devices of a host) if a tile is at least as long as a host, and otherwise
  (hosts, tiles on a host, 1, devices of a tile).
  """
  if part >= host and part % host == 0:
    return whole // part, 1, part // host, host
  if part < host and host % part == 0 and whole % host == 0:
    return whole // host, host // part, 1, part
  raise ShardingError(
    f'side {name} is {part} in the submesh and {host} in a host: one must divide the other, so that each host holds a '
    'contiguous part of the mesh'
  )


def _devices_or_default(devices: Sequence[Device] | None, backend: str | None = None) -> list[Device]:
  return list(jax.devices(backend) if devices is None else devices)


def _torus_coords(device: Device) -> Sides | None:
  """Returns (x, y, z, core); None for a device without coordinates."""
  coords = getattr(device, 'coords', None)
  return None if coords is None else (*coords, device.core_on_chip or 0)


def _hosts(devices: Sequence[Device]) -> tuple[int, int]:
  """Returns (hosts, devices per host); raises ShardingError if hosts have different numbers of devices."""
  sizes = collections.Counter(d.process_index for d in devices)
  if len(set(sizes.values())) != 1:
    raise ShardingError(f'hosts must have equally many devices; they have {list(sizes.values())}')
  return len(sizes), len(devices) // len(sizes)
