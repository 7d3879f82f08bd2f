"""The memory of the host, as seen from devices: where arrays wait that a step does not need all the time.

Accelerators read and write it directly, in the memory space `pinned_host`. CPU devices have a space of that name, too:
what is offloaded there is computed the same, but saves nothing, as it is the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from praxis_lite.common.errors import ConfigError

HOST_MEMORY = 'pinned_host'


def memory_kinds(device: jax.Device) -> Sequence[str]:
  """The memory spaces that a device can address."""
  return [memory.kind for memory in device.addressable_memories()]


def check_host_memory(mesh: Mesh | AbstractMesh, field: str) -> None:
  """Raises ConfigError, naming the config field that wants it, if the devices of a mesh cannot use the host's memory.

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


def on_host(sharding: NamedSharding) -> NamedSharding:
  """Returns the same sharding in the memory of the host."""
  return sharding.with_memory_kind(HOST_MEMORY)


def on_device(sharding: NamedSharding) -> NamedSharding:
  """Returns the same sharding in the memory of the devices."""
  return sharding.with_memory_kind('device') if is_on_host(sharding) else sharding


def is_on_host(sharding: NamedSharding) -> bool:
  """Whether arrays of a sharding are in the memory of the host."""
  return sharding.memory_kind == HOST_MEMORY
