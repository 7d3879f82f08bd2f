"""Host memory as seen from devices: for arrays that a step does not need all the time.

Accelerators read and write it directly, in the memory space `pinned_host`. CPU devices have a space with that name too:
offloading to it gives the same results, but saves nothing, because it is the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from praxis_lite.common.errors import ConfigError

HOST_MEMORY = 'pinned_host'


def memory_kinds(device: jax.Device) -> Sequence[str]:
  """Returns the memory spaces that a device can address."""
  return [memory.kind for memory in device.addressable_memories()]


def check_host_memory(mesh: Mesh | AbstractMesh, field: str) -> None:
  """Raises ConfigError, which names the config field, if the devices of a mesh cannot use host memory.

  An abstract mesh has no devices, and passes.
  """
  if isinstance(mesh, AbstractMesh):
    return
  device = mesh.devices.flat[0]
  kinds = memory_kinds(device)
  if HOST_MEMORY not in kinds:
    raise ConfigError(
      f'{field}: it offloads to the memory of the host, {HOST_MEMORY!r}, and the devices ({device.platform}) can use '
      f'{", ".join(kinds)} only; leave it unset here'
    )


def to_host_memory(sharding: NamedSharding) -> NamedSharding:
  """Returns the same sharding in host memory."""
  return sharding.with_memory_kind(HOST_MEMORY)


def to_device_memory(sharding: NamedSharding) -> NamedSharding:
  """Returns the same sharding in device memory."""
  return sharding.with_memory_kind('device') if is_on_host(sharding) else sharding


def is_on_host(sharding: NamedSharding) -> bool:
  """Whether arrays with a sharding are in host memory."""
  return sharding.memory_kind == HOST_MEMORY
