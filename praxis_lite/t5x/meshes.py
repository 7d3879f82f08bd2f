"""Placing model-parallel boxes on a torus of devices.

The slice is a box of devices, the submesh a smaller box that tiles it. Each tile becomes one row of 'model'; what
remains is the order of the tiles, 'data', and of the devices in a tile. Both are row-major, except that the devices
of one host have to end up contiguous, for each host feeds and stores one block of the data. Tiles are therefore
ordered host by host: along each side, with g devices in the slice, m in the submesh and l on a host,

    m >= l, whole hosts in a tile:  g = (g / m tiles)              * (m / l hosts) * (l devices)
    m <  l, several tiles on one:   g = (g / l hosts) * (l / m tiles)              * (m devices)

and the mesh is all of the first factors, then all of the second, and so on, over the sides. Where the submesh spans a
whole side of the torus, or a whole plane, making z the slower side is enough to keep hosts contiguous; their rings are
then left in one piece, on which collectives are faster.

Meshes for a number of model partitions, placed along the links of the hardware.

A mesh from here has the axes ('data', 'model'), or ('replica', 'data', 'model') where slices are joined. Which devices
share a row of 'model' matters on hardware whose devices form a torus: they exchange activations in every layer, so each
row is a compact box of chips, the model-parallel submesh, and the boxes are laid out such that the devices of one host
form a contiguous block of the mesh. `submesh.py` does the placement; here is what to ask it for.

Devices are a parameter everywhere, and may be described ones:

    chips = [DescribedDevice(id=2 * x + 8 * y + c, process_index=x // 2 + 2 * (y // 2), coords=(x, y, 0),
                             core_on_chip=c, platform='tpu', device_kind='TPU v3')
             for y in range(4) for x in range(4) for c in range(2)]
    default_mesh(4, devices=chips).shape                        # {'data': 8, 'model': 4}

The vocabulary and the default submeshes are those of T5X (Roberts et al., Scaling Up Models and Data with t5x and
seqio, 2022).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from praxis_lite.errors import ShardingError
from praxis_lite.partitioning.mesh import create_device_mesh, place_over_slices

Sides = tuple[int, ...]

_SIDE_NAMES = {4: ('x', 'y', 'z', 'core'), 2: ('hosts', 'devices per host')}


def bounds_from_last_device(last_device: Any, devices: Sequence[Any] | None = None) -> Sides:
  """Returns the sides of the box whose far corner is `last_device`.

  Args:
    last_device: a device; with coordinates, (x, y, z) and a core, the box reaches from the origin to it.
    devices: without coordinates, the box is (number of hosts, devices per host) of these; all devices by default.
  """
  if getattr(last_device, 'coords', None) is not None:
    return (*(c + 1 for c in last_device.coords), last_device.core_on_chip + 1)
  devices = jax.devices() if devices is None else devices
  num_hosts = len({d.process_index for d in devices})
  return num_hosts, len(devices) // num_hosts


def get_coords(device: Any, local_device_count: int | None = None) -> Sides:
  """Returns where a device is: (x, y, z, core) on a TPU, otherwise (host, index on the host).

  Args:
    device: a device.
    local_device_count: number of devices of each host; that of this process by default.
  """
  if getattr(device, 'coords', None) is not None:
    return (*device.coords, device.core_on_chip)
  return device.process_index, device.id % (local_device_count or jax.local_device_count())


def place_submesh(devices: Sequence[Any], submesh: Sides, tile_by_host: bool = True) -> np.ndarray:
  """Returns the devices as an array [data, model] with a tile of the shape `submesh` in each row.

  Raises:
    ShardingError: the devices do not fill a box, or `submesh` does not tile it, or cuts hosts in unequal parts.
  """
  box, host = device_box(devices)
  names = _SIDE_NAMES[box.ndim]
  if len(submesh) != box.ndim:
    raise ShardingError(f'model_parallel_submesh={submesh} has {len(submesh)} sides; these devices need {names}')
  for name, whole, part in zip(names, box.shape, submesh):
    if part < 1 or whole % part:
      raise ShardingError(
        f'model_parallel_submesh={submesh}: side {name} = {part} does not divide the {whole} of the devices, '
        f'whose sides are {dict(zip(names, box.shape))}'
      )
  order = _z_major(box.shape, submesh) if box.ndim == 4 else None
  if order is not None:
    box, submesh, tile_by_host = box.transpose(order), tuple(submesh[i] for i in order), False
  if tile_by_host:
    factors = [_host_factors(name, *sides) for name, *sides in zip(names, box.shape, submesh, host)]
  else:
    factors = [(whole // part, part) for whole, part in zip(box.shape, submesh)]
  split = box.reshape([f for side in factors for f in side])
  per_side = len(factors[0])
  return split.transpose([per_side * s + f for f in range(per_side) for s in range(box.ndim)]).reshape(
    -1, math.prod(submesh)
  )


def device_box(devices: Sequence[Any]) -> tuple[np.ndarray, Sides]:
  """Returns the devices as an array indexed by their coordinates, and the sides of the box of the first host's devices.

  Raises:
    ShardingError: the devices do not fill a box.
  """
  per_host = len(devices) // len({d.process_index for d in devices})
  coords = {get_coords(d, per_host): d for d in devices}
  low = np.min(list(coords), axis=0)
  sides = tuple(int(s) for s in np.max(list(coords), axis=0) - low + 1)
  if len(coords) != len(devices) or math.prod(sides) != len(devices):
    raise ShardingError(f'{len(devices)} devices do not fill the box {sides} that their coordinates span')
  box = np.empty(sides, dtype=object)
  for at, device in coords.items():
    box[tuple(np.subtract(at, low))] = device
  first_host = min(d.process_index for d in devices)
  of_host = [at for at, device in coords.items() if device.process_index == first_host]
  return box, tuple(int(s) for s in np.max(of_host, axis=0) - np.min(of_host, axis=0) + 1)


def _z_major(whole: Sides, part: Sides) -> Sides | None:
  """The order of sides that makes z slower than y or x, where the submesh spans a full side or plane; else None."""
  (gx, gy, gz, gc), (mx, my, mz, mc) = whole, part
  if mc != gc:
    return None
  if (mx == gx > 1 and my == mz == 1) or (mx == 1 and my == gy > 1 and mz == gz > 1):
    return 0, 2, 1, 3
  if (my == gy > 1 and mx == mz == 1) or (my == 1 and mx == gx > 1 and mz == gz > 1):
    return 2, 1, 0, 3
  return None


def _host_factors(name: str, whole: int, part: int, host: int) -> Sides:
  """(hosts of data, devices of data, hosts of model, devices of model) along one side."""
  if part >= host and part % host == 0:
    return whole // part, 1, part // host, host
  if part < host and host % part == 0 and whole % host == 0:
    return whole // host, host // part, 1, part
  raise ShardingError(
    f'side {name} of the submesh is {part}, and that of a host {host}: one must divide the other for each host to hold '
    'a contiguous part of the mesh'
  )


HYBRID_AXES = ('replica', 'data', 'model')


@dataclasses.dataclass(frozen=True)
class DescribedDevice:
  """A device that need not exist: what a mesh needs to know about one.

  Attributes:
    id: unique number.
    process_index: the host it is attached to.
    coords: (x, y, z) of its chip in the torus; None where devices have no places.
    core_on_chip: which core of the chip; None without `coords`.
    platform: 'tpu', 'gpu' or 'cpu'.
    device_kind: the hardware, such as 'TPU v4'.
  """

  id: int
  process_index: int = 0
  coords: tuple[int, int, int] | None = None
  core_on_chip: int | None = None
  platform: str = 'cpu'
  device_kind: str = 'cpu'


def default_mesh(
  num_partitions: int | None = None,
  model_parallel_submesh: Sequence[int] | None = None,
  *,
  ici_mesh_shape: Sequence[int] | None = None,
  dcn_mesh_shape: Sequence[int] | None = None,
  devices: Sequence[Any] | None = None,
  backend: str | None = None,
) -> Mesh:
  """Returns the mesh for a degree of model parallelism on whatever devices there are.

  Args:
    num_partitions: size of the 'model' axis; the submesh is chosen for the hardware.
    model_parallel_submesh: sides of the submesh instead: (x, y, z, core) on a TPU, (hosts, devices) elsewhere.
    ici_mesh_shape: sizes of ('replica', 'data', 'model') within a slice. With it, the two above are not needed, and
      num_partitions may only repeat the size of 'model'.
    dcn_mesh_shape: number of slices along each of them.
    devices: the devices; all of `backend` by default.
    backend: the JAX backend to take the devices of.

  Raises:
    ShardingError: both or neither of num_partitions and model_parallel_submesh, or something that does not divide.
  """
  devices = _all_devices(devices, backend)
  if ici_mesh_shape is not None:
    mesh = create_device_mesh(ici_mesh_shape, dcn_mesh_shape, HYBRID_AXES, devices)
    if model_parallel_submesh is not None or num_partitions not in (None, mesh.shape['model']):
      raise ShardingError(
        f'ici_mesh_shape and dcn_mesh_shape give {mesh.shape["model"]} model partitions; '
        f'num_partitions={num_partitions}, model_parallel_submesh={model_parallel_submesh} do not agree; leave them out'
      )
    return mesh
  if dcn_mesh_shape is not None:
    raise ShardingError('dcn_mesh_shape needs ici_mesh_shape, the shape within each slice')
  check_one_of(num_partitions, model_parallel_submesh)
  if model_parallel_submesh is not None:
    return get_mesh(model_parallel_submesh, devices=devices)
  assert num_partitions is not None
  if not _has_coords(devices[-1]):
    return get_gpu_mesh(num_partitions, devices)
  last = max(devices, key=lambda d: (*d.coords, d.core_on_chip))
  return get_mesh(default_submesh(num_partitions, last.device_kind, bounds_from_last_device(last)), devices=devices)


def get_mesh(
  model_parallel_submesh: Sequence[int],
  *,
  devices: Sequence[Any] | None = None,
  tile_by_host_if_needed: bool = True,
  backend: str | None = None,
) -> Mesh:
  """Returns a mesh ('data', 'model') whose rows of 'model' are boxes of the shape of the submesh.

  Args:
    model_parallel_submesh: (x, y, z, core) on a TPU, (hosts, devices per host) elsewhere.
    devices: the devices; they must fill a box.
    tile_by_host_if_needed: arrange the boxes host by host where a host's devices would otherwise not be contiguous.
    backend: the JAX backend to take the devices of.

  Raises:
    ShardingError: a side of the submesh does not divide that of the slice, or the hosts cannot be tiled.
  """
  placed = place_submesh(_all_devices(devices, backend), tuple(model_parallel_submesh), tile_by_host_if_needed)
  return _auto_mesh(placed, ('data', 'model'))


def get_gpu_mesh(num_partitions: int, devices: Sequence[Any] | None = None) -> Mesh:
  """Returns a mesh ('data', 'model') of devices without coordinates; 'model' fills one host's devices first.

  Raises:
    ShardingError: num_partitions neither divides nor is a multiple of the number of devices of a host.
  """
  by_host = _by_host(_all_devices(devices, None))
  num_hosts, per_host = by_host.shape
  model_in_host = min(num_partitions, per_host)
  model_hosts = num_partitions // model_in_host if num_partitions > 0 else 0
  if num_partitions < 1 or per_host % model_in_host or num_partitions % model_in_host or num_hosts % model_hosts:
    raise ShardingError(
      f'num_partitions={num_partitions} must divide the {per_host} devices of each host, or be a multiple of it '
      f'that divides all {num_hosts * per_host} devices'
    )
  ici, dcn = (per_host // model_in_host, model_in_host), (num_hosts // model_hosts, model_hosts)
  return _auto_mesh(place_over_slices(ici, dcn, list(by_host.reshape(-1))), ('data', 'model'))


def get_cpu_mesh(devices: Sequence[Any] | None = None) -> Mesh:
  """Returns the mesh of 'data' over processes and 'model' over the devices of each."""
  return _auto_mesh(_by_host(_all_devices(devices, None)), ('data', 'model'))


def default_submesh(num_partitions: int, device_kind: str, bounds: Sequence[int]) -> tuple[int, int, int, int]:
  """Returns the sides (x, y, z, core) of a TPU submesh of `num_partitions` cores.

  Args:
    num_partitions: 1, 2, 4, 8 or 16.
    device_kind: the hardware. Chips of the second and third generation have two cores that are closer to each other
      than to any other; on later ones, the longest ring that is closed is preferred to a box.
    bounds: sides of the whole slice.

  Raises:
    ShardingError: there is no default for these; pass model_parallel_submesh.
  """
  x, _, z, cores = bounds
  submesh: tuple[int, int, int, int] | None = None
  if device_kind in ('TPU v2', 'TPU v3'):
    submesh = {1: (1, 1, 1, 1), 2: (1, 1, 1, 2), 4: (2, 1, 1, 2), 8: (2, 2, 1, 2), 16: (4, 2, 1, 2)}.get(num_partitions)
  elif cores == 1:
    match num_partitions:
      case 1:
        submesh = (1, 1, 1, 1)
      case 2:
        submesh = (1, 2, 1, 1)
      case 4:
        submesh = (4, 1, 1, 1) if x >= 4 else (2, 2, 1, 1)
      case 8:
        submesh = (1, 1, 8, 1) if z >= 8 else (4, 2, 1, 1)
      case 16:
        submesh = (1, 1, 16, 1) if z >= 16 else (8, 2, 1, 1) if x >= 8 else (4, 4, 1, 1) if x >= 4 else (2, 2, 4, 1)
  if submesh is None:
    raise ShardingError(
      f'there is no default submesh for num_partitions={num_partitions} on {device_kind} with sides {tuple(bounds)}; '
      'the defaults are for 1, 2, 4, 8 and 16. Pass model_parallel_submesh=(x, y, z, core)'
    )
  return submesh


def check_one_of(num_partitions: int | None, model_parallel_submesh: Sequence[int] | None) -> None:
  """Raises ShardingError unless exactly one of the two is given."""
  if (num_partitions is None) == (model_parallel_submesh is None):
    given = 'neither is' if num_partitions is None else 'both are'
    raise ShardingError(f'pass num_partitions or model_parallel_submesh: exactly one of them; {given} given')


def _all_devices(devices: Sequence[Any] | None, backend: str | None) -> list[Any]:
  return list(jax.devices(backend) if devices is None else devices)


def _has_coords(device: Any) -> bool:
  return getattr(device, 'coords', None) is not None


def _by_host(devices: Sequence[Any]) -> np.ndarray:
  """Devices as an array [hosts, devices per host]."""
  hosts: dict[int, list[Any]] = {}
  for device in sorted(devices, key=lambda d: (d.process_index, d.id)):
    hosts.setdefault(device.process_index, []).append(device)
  sizes = {len(host) for host in hosts.values()}
  if len(sizes) != 1:
    raise ShardingError(f'hosts must have equally many devices; they have {[len(h) for h in hosts.values()]}')
  return place_over_slices((1, sizes.pop()), (len(hosts), 1), [d for host in hosts.values() for d in host])


def _auto_mesh(devices: np.ndarray, names: tuple[str, ...]) -> Mesh:
  return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


__all__ = [
  'DescribedDevice',
  'bounds_from_last_device',
  'check_one_of',
  'default_mesh',
  'default_submesh',
  'get_coords',
  'get_cpu_mesh',
  'get_gpu_mesh',
  'get_mesh',
]
