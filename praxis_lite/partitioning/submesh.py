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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from praxis_lite.errors import ShardingError

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
