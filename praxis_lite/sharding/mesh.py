"""The device mesh of an experiment, from its ICI and DCN shapes.

`ici_mesh_shape` is the shape of the mesh within one slice, whose devices are connected by fast links; `dcn_mesh_shape`
is the number of slices along each axis; the data-centre network connects the slices. The size of an axis is the product
of the two, and the devices of a slice are contiguous along each axis.
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

from praxis_lite.common.accelerators import accelerator_of
from praxis_lite.common.devices import start_devices
from praxis_lite.common.errors import ConfigError, ShardingError
from praxis_lite.common.figures import number_of
from praxis_lite.common.jax_internals.devices import abstract_device, mesh_platform

P = ParamSpec('P')
T = TypeVar('T')

# An ICI mesh shape as users may write it. The size 'auto' means -1; the shape 'auto' or -1 means (-1, 1, ...).
GivenMeshShape = tuple[int | str, ...] | str | int


def create_device_mesh(
  ici_mesh_shape: Sequence[int],
  dcn_mesh_shape: Sequence[int] | None = None,
  mesh_axis_names: Sequence[str] = ('replica', 'data', 'mdl'),
  devices: Sequence[jax.Device] | None = None,
) -> Mesh:
  """Returns a mesh with Auto axes.

  Args:
    ici_mesh_shape, mesh_axis_names: size of each axis within a slice, and its name. One size may be -1, which stands
      for the rest of the devices.
    dcn_mesh_shape: number of slices along each axis; None means one slice.
    devices: devices to use; None means all. If the mesh needs fewer, the first ones are used.

  Raises:
    ShardingError: shapes and names differ in length, a size or name is invalid, or there are too few devices.
  """
  names = tuple(mesh_axis_names)
  if devices is None:
    start_devices()
  devices = list(jax.devices() if devices is None else devices)
  ici = fill_mesh_shape(ici_mesh_shape, dcn_mesh_shape, names, len(devices))
  shape, dcn = mesh_sizes(ici, dcn_mesh_shape, names), tuple(dcn_mesh_shape or (1,) * len(names))
  check_mesh_size(shape, dcn_mesh_shape, len(devices))
  devices, slices = devices[: math.prod(shape.values())], math.prod(dcn)
  if slices == 1 and devices[0].platform == 'tpu':
    array = mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
  elif slices > 1 and len({getattr(d, 'slice_index', None) for d in devices} - {None}) == slices:
    array = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=True)
  else:  # Every prod(ici) consecutive devices count as a slice; along each axis, slices vary slowest.
    blocks, rank = np.array(devices).reshape((*dcn, *ici)), len(ici)
    array = blocks.transpose([axis for i in range(rank) for axis in (i, rank + i)]).reshape([*shape.values()])
  return auto_mesh(array, names)


def check_mesh_size(sizes: Mapping[str, int], dcn_mesh_shape: Sequence[int] | None, num_devices: int) -> None:
  """Raises ShardingError, with a mesh that would fit, if one of these sizes needs more devices than there are."""
  needed = math.prod(sizes.values())
  if needed > num_devices:
    largest = max(sizes, key=lambda name: sizes[name])
    fits = ','.join(str(num_devices if name == largest else 1) for name in sizes)
    example = f", as in --set 'task.ici_mesh_shape=({fits}{',' * (len(sizes) == 1)})'" if dcn_mesh_shape is None else ''
    raise ShardingError(
      f'ici_mesh_shape: the mesh {dict(sizes)} needs {number_of(needed, "device")}, and there {_are(num_devices)} '
      f'{num_devices}; make it smaller{example}, or simulate them on the CPU: pass --devices={needed}, or in Python '
      f'call simulate_cpu_devices({needed}) first'
    )


def _are(count: int) -> str:
  return 'is' if count == 1 else 'are'


def auto_mesh(devices: np.ndarray, mesh_axis_names: Sequence[str]) -> Mesh:
  """Returns the mesh for an array of devices, with Auto axes."""
  return Mesh(devices, tuple(mesh_axis_names), axis_types=(AxisType.Auto,) * len(mesh_axis_names))


def read_mesh_shape(given: GivenMeshShape | None, mesh_axis_names: Sequence[str] | None) -> tuple[int, ...] | None:
  """Converts an ICI mesh shape, as users may write it, to a tuple of integers; None stays None.

  Raises:
    ConfigError: it is neither a tuple of integers and 'auto', nor 'auto', nor -1; the message says what to write.
  """
  if given is None:
    return None
  names = mesh_axis_names if isinstance(mesh_axis_names, tuple | list) else ()
  whole = (-1, *(1,) * (len(names) - 1))
  if isinstance(given, str | int) and given in ('auto', -1):
    return whole
  if isinstance(given, tuple | list):
    sizes = [-1 if size == 'auto' else size for size in given]
    shape = tuple(int(size) for size in sizes if isinstance(size, int | np.integer) and not isinstance(size, bool))
    if len(shape) == len(sizes):
      return shape
  raise ConfigError(
    "task.ici_mesh_shape: expected a tuple of integers, in which one 'auto' or -1 is the rest of the devices, as in "
    f'{whole}; got {given!r}'
  )


def fill_mesh_shape(
  ici_mesh_shape: Sequence[int],
  dcn_mesh_shape: Sequence[int] | None,
  mesh_axis_names: Sequence[str],
  num_devices: int | None = None,
) -> tuple[int, ...]:
  """Returns an ICI mesh shape; a size of -1 is replaced by the number of devices that the other sizes leave.

  `num_devices` of None means all devices, for which JAX is started if there is a -1. Raises ShardingError if there are
  several -1, the number of devices is not a multiple of the product of the other sizes, or a size or name is invalid.
  """
  shape = tuple(ici_mesh_shape)
  if -1 not in shape:
    return shape
  given = f'ici_mesh_shape = {shape!r}'
  if shape.count(-1) > 1:
    raise ShardingError(f'{given}: only one size may be -1, for the rest of the devices')
  # The sizes other than -1 are checked here, because the size in place of -1 follows from them.
  others = mesh_sizes([1 if size == -1 else size for size in shape], dcn_mesh_shape, mesh_axis_names)
  if num_devices is None:
    start_devices()
    num_devices = jax.device_count()
  product = math.prod(others.values())
  rest, left = divmod(num_devices, product)
  if left or not rest:
    there = f'there {_are(num_devices)} {number_of(num_devices, "device")}'
    raise ShardingError(f'{given}: {there}, not a multiple of {product}, the product of the other sizes')
  return tuple(rest if size == -1 else size for size in shape)


def mesh_sizes(
  ici_mesh_shape: Sequence[int], dcn_mesh_shape: Sequence[int] | None, mesh_axis_names: Sequence[str]
) -> dict[str, int]:
  """Returns the size of each axis of the mesh that `create_device_mesh` would make; needs no devices.

  Raises ShardingError if shapes and names differ in length, or a size or name is invalid.
  """
  names = tuple(mesh_axis_names)
  ici = _checked_shape('ici_mesh_shape', ici_mesh_shape, names)
  dcn = _checked_shape('dcn_mesh_shape', dcn_mesh_shape, names) if dcn_mesh_shape is not None else (1,) * len(names)
  if len(set(names)) != len(names):
    raise ShardingError(f'mesh_axis_names = {names!r} contains a name twice')
  return {name: i * d for name, i, d in zip(names, ici, dcn)}


def abstract_mesh(
  sizes: Mapping[str, int], platform: str | None = None, device_kind: str | None = None
) -> AbstractMesh:
  """Returns a mesh with Auto axes of these sizes but without devices.

  The platform, 'gpu' or 'tpu', and the kind of the devices, such as 'NVIDIA H100', are None if they are not known.
  """
  device = None if platform is None else abstract_device(device_kind or platform, platform)
  return AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), abstract_device=device)


def platform(mesh: Mesh | AbstractMesh | None = None) -> str:
  """Returns 'cpu', 'gpu' or 'tpu' for a mesh, by default the ambient one, even if its devices are on other machines."""
  return mesh_platform(jax.sharding.get_abstract_mesh() if mesh is None else mesh) or jax.default_backend()


def device_kind() -> str:
  """Returns the kind of the ambient mesh's devices, such as 'TPU v3'; of this process's devices if there is no mesh."""
  return ask_device(str)


def ask_device(question: Callable[[str], T]) -> T:
  """Returns `question(kind)` for the kind of the ambient mesh's devices; see `device_kind`.

  `question` is remembered, and `have_same_answers` calls it later for other kinds. So it must be a function at the top
  level of a module, whose answer depends only on the kind.
  """
  _QUESTIONS.setdefault(question)
  device = getattr(jax.sharding.get_abstract_mesh(), 'abstract_device', None) or jax.devices()[0]
  return question(str(device.device_kind))


_STEPS_OF_MEMORY = 8 << 30


def memory_of_single_gpu() -> float:
  """Returns the memory, in bytes, of the only GPU of the ambient mesh; 0 for other meshes and for unknown GPUs.

  It is rounded to 8 GiB, so that a program that was traced for one GPU serves others with about the same memory.
  """
  if platform() != 'gpu' or jax.sharding.get_abstract_mesh().size > 1:
    return 0.0
  return ask_device(_memory_of)


def _memory_of(kind: str) -> float:
  known = accelerator_of(kind)
  return 0.0 if known is None else round(known.memory / _STEPS_OF_MEMORY) * _STEPS_OF_MEMORY


def have_same_answers(kind: str, other: str) -> bool:
  """Whether all questions asked by `ask_device` so far have the same answers for two kinds of devices of a platform.

  If so, a program that was traced for one kind is also right for the other.
  """
  return kind == other or all(question(kind) == question(other) for question in _QUESTIONS)


_QUESTIONS: dict[Callable[[str], object], None] = {}  # The questions of `ask_device`.


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
      f'{field} = {tuple(shape)!r} has {number_of(len(shape), "size")}, but mesh_axis_names = {names!r} has '
      f'{number_of(len(names), "name")}'
    )
  for name, size in zip(names, shape):
    if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
      raise ShardingError(f'{field} = {tuple(shape)!r}: the size of {name!r} must be a positive integer')
  return tuple(int(size) for size in shape)
