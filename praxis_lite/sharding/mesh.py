"""The device mesh of an experiment, from its ICI and DCN shapes.

`ici_mesh_shape` is the shape of the mesh within one slice, whose devices are connected by fast links; `dcn_mesh_shape`
is the number of slices along each axis, connected by the data-centre network. The size of an axis is the product of the
two, and the devices of a slice are contiguous along each axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from praxis_lite.common.errors import ShardingError
from praxis_lite.common.jax_internals.devices import abstract_device, mesh_platform

P = ParamSpec('P')
T = TypeVar('T')


def create_device_mesh(
  ici_mesh_shape: Sequence[int],
  dcn_mesh_shape: Sequence[int] | None = None,
  mesh_axis_names: Sequence[str] = ('replica', 'data', 'mdl'),
  devices: Sequence[jax.Device] | None = None,
) -> Mesh:
  """Returns a mesh with Auto axes.

  Args:
    ici_mesh_shape, mesh_axis_names: size of each axis within a slice, and its name.
    dcn_mesh_shape: number of slices along each axis; None means one slice.
    devices: devices to use; None means all. If the mesh needs fewer, the first ones are used.

  Raises:
    ShardingError: shapes and names differ in length, a size or name is invalid, or there are too few devices.
  """
  names = tuple(mesh_axis_names)
  shape = mesh_sizes(ici_mesh_shape, dcn_mesh_shape, names)
  ici, dcn = tuple(ici_mesh_shape), tuple(dcn_mesh_shape or (1,) * len(names))
  devices = list(jax.devices() if devices is None else devices)
  needed = math.prod(shape.values())
  if needed > len(devices):
    raise ShardingError(
      f'ici_mesh_shape: the mesh {shape} needs {needed} devices, and there are {len(devices)}; make it smaller, or '
      f'pass --devices={needed} to simulate them on the CPU'
    )
  devices, slices = devices[:needed], math.prod(dcn)
  if slices == 1 and devices[0].platform == 'tpu':
    array = mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
  elif slices > 1 and len({getattr(d, 'slice_index', None) for d in devices} - {None}) == slices:
    array = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=True)
  else:  # Treats each prod(ici) consecutive devices as a slice; along each axis, slices are outermost.
    blocks, rank = np.array(devices).reshape((*dcn, *ici)), len(ici)
    array = blocks.transpose([axis for i in range(rank) for axis in (i, rank + i)]).reshape([*shape.values()])
  return auto_mesh(array, names)


def auto_mesh(devices: np.ndarray, mesh_axis_names: Sequence[str]) -> Mesh:
  """Returns the mesh for an array of devices, with Auto axes."""
  return Mesh(devices, tuple(mesh_axis_names), axis_types=(AxisType.Auto,) * len(mesh_axis_names))


def mesh_sizes(
  ici_mesh_shape: Sequence[int], dcn_mesh_shape: Sequence[int] | None, mesh_axis_names: Sequence[str]
) -> dict[str, int]:
  """Returns the size of each axis of the mesh that `create_device_mesh` would make; needs no devices.

  Raises:
    ShardingError: shapes and names differ in length, or a size or name is invalid.
  """
  names = tuple(mesh_axis_names)
  ici = _checked_shape('ici_mesh_shape', ici_mesh_shape, names)
  dcn = _checked_shape('dcn_mesh_shape', dcn_mesh_shape, names) if dcn_mesh_shape is not None else (1,) * len(names)
  if len(set(names)) != len(names):
    raise ShardingError(f'mesh_axis_names = {names!r} contains a name twice')
  return {name: i * d for name, i, d in zip(names, ici, dcn)}


def abstract_mesh(sizes: Mapping[str, int], platform: str | None = None) -> AbstractMesh:
  """Returns a mesh with Auto axes of these sizes but without devices; `platform` may be 'gpu' or 'tpu'."""
  device = None if platform is None else abstract_device(platform, platform)
  return AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), abstract_device=device)


def platform(mesh: Mesh | AbstractMesh | None = None) -> str:
  """Returns 'cpu', 'gpu' or 'tpu' for a mesh, by default the ambient one; its devices may be of another machine."""
  return mesh_platform(jax.sharding.get_abstract_mesh() if mesh is None else mesh) or jax.default_backend()


def bind_mesh(fn: Callable[P, T], mesh: Mesh | AbstractMesh) -> Callable[P, T]:
  """Returns `fn`, traced with `mesh` as the ambient mesh, so that sharding constraints inside it apply."""

  @functools.wraps(fn)
  def call_on_mesh(*args: P.args, **kwargs: P.kwargs) -> T:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return fn(*args, **kwargs)

  return call_on_mesh


def _checked_shape(field: str, shape: Sequence[int], names: tuple[str, ...]) -> tuple[int, ...]:
  if len(shape) != len(names):
    raise ShardingError(
      f'{field} = {tuple(shape)!r} has {len(shape)} sizes, but mesh_axis_names = {names!r} has {len(names)} names'
    )
  for name, size in zip(names, shape):
    if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
      raise ShardingError(f'{field} = {tuple(shape)!r}: the size of {name!r} must be a positive integer')
  return tuple(int(size) for size in shape)
