"""What JAX knows about devices: whether they have been chosen, and the platform of a mesh's devices."""

from __future__ import annotations

import inspect
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

_PLATFORMS = ('cpu', 'gpu', 'tpu')
# On these platforms, the kind of a device is the name of a chip. These are the first words of such names.
_KINDS = {'nvidia': 'gpu', 'tesla': 'gpu', 'geforce': 'gpu', 'quadro': 'gpu', 'amd': 'gpu', 'instinct': 'gpu'}


def abstract_device(kind: str, platform: str) -> AbstractDevice:
  """Returns a device that does not exist. `kind` is its kind, such as 'NVIDIA H100', or if unknown, its platform."""
  make: Any = AbstractDevice
  if 'platform' in inspect.signature(AbstractDevice).parameters:
    return make(kind, None, platform)
  return make(kind, None)  # Up to 0.10.0.


def mesh_platform(mesh: Mesh | AbstractMesh) -> str | None:
  """Returns 'cpu', 'gpu' or 'tpu', the platform of a mesh's devices; None if it is unknown."""
  if isinstance(mesh, Mesh):
    return mesh.devices.flat[0].platform
  return device_platform(getattr(mesh, 'abstract_device', None))


def device_platform(device: Any) -> str | None:
  """Returns the platform of a device, abstract or not; None if unknown. Up to JAX 0.10.0, it follows from the kind."""
  platform = getattr(device, 'platform', None)
  if platform is not None:
    return str(platform)
  kind = str(getattr(device, 'device_kind', '')).lower()
  known = (name for start, name in ({name: name for name in _PLATFORMS} | _KINDS).items() if kind.startswith(start))
  # If the device has the kind of this process's devices, it has their platform.
  return next(known, None) or _platform_here(kind)


def _platform_here(kind: str) -> str | None:
  if not kind or not backends_have_started():
    return None
  return next((device.platform for device in jax.devices() if device.device_kind.lower() == kind), None)


def backends_have_started() -> bool:
  """Whether JAX already uses some devices, so that others cannot be chosen; True if JAX does not say."""
  try:
    from jax._src import xla_bridge  # JAX has no public function for this.

    return bool(xla_bridge.backends_are_initialized())
  except (ImportError, AttributeError):
    return True
