"""What JAX says of devices: whether they have been chosen, and of which kind those of a mesh are."""

from __future__ import annotations

import inspect
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

_PLATFORMS = ('cpu', 'gpu', 'tpu')
# How the kind of a device begins, of the platforms that name it by the chip.
_KINDS = {'nvidia': 'gpu', 'tesla': 'gpu', 'geforce': 'gpu', 'quadro': 'gpu', 'amd': 'gpu', 'instinct': 'gpu'}


def abstract_device(kind: str, platform: str) -> AbstractDevice:
  """Returns a device that is not there, of a kind such as 'NVIDIA H100', or the platform itself where it is unknown."""
  make: Any = AbstractDevice
  if 'platform' in inspect.signature(AbstractDevice).parameters:
    return make(kind, None, platform)
  return make(kind, None)  # Up to 0.10.0.


def mesh_platform(mesh: Mesh | AbstractMesh) -> str | None:
  """Returns 'cpu', 'gpu' or 'tpu', the platform of the devices of a mesh; None if it does not say."""
  if isinstance(mesh, Mesh):
    return mesh.devices.flat[0].platform
  return device_platform(getattr(mesh, 'abstract_device', None))


def device_platform(device: Any) -> str | None:
  """Returns the platform of a device, abstract or not, which up to JAX 0.10.0 says only its kind; None: not known."""
  platform = getattr(device, 'platform', None)
  if platform is not None:
    return str(platform)
  kind = str(getattr(device, 'device_kind', '')).lower()
  known = (name for start, name in ({name: name for name in _PLATFORMS} | _KINDS).items() if kind.startswith(start))
  # The ambient mesh of a program for the devices of this process has their kind.
  return next(known, None) or _platform_here(kind)


def _platform_here(kind: str) -> str | None:
  if not kind or not backends_have_started():
    return None
  return next((device.platform for device in jax.devices() if device.device_kind.lower() == kind), None)


def backends_have_started() -> bool:
  """Whether JAX runs on some devices already, so that others cannot be chosen; True where JAX does not say."""
  try:
    from jax._src import xla_bridge  # JAX has no public way to ask.

    return bool(xla_bridge.backends_are_initialized())
  except (ImportError, AttributeError):
    return True
