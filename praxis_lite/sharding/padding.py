"""Padding: how a dimension is split if it does not divide evenly.

When arrays enter or leave a jitted function, JAX rejects those whose split dimensions do not divide evenly by their
mesh axes. So outside of a step, such arrays are padded with zeros at the end of each uneven dimension.

    d = 10 over 4 devices: 2 zeros;  6 over ('data', 'mdl') = 8 devices: 2 zeros;  10 over 8: 6 zeros
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax import lax, numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from praxis_lite.common.errors import ShardingError, ShardingFault, did_you_mean
from praxis_lite.sharding.specs import HasShape, complete_spec, spec_axes

T = TypeVar('T')
AnyArray = jax.Array | np.ndarray
MeshLike = Mesh | AbstractMesh | Mapping[str, int]


def axis_sizes(mesh: MeshLike) -> Mapping[str, int]:
  """Returns the size of each axis by name, for a mesh or for a mapping that already has the sizes."""
  return mesh if isinstance(mesh, Mapping) else mesh.shape


def num_parts(entry: object, mesh: MeshLike) -> int:
  """Returns the number of parts into which one entry of a spec splits its dimension.

  Raises:
    ShardingError: the entry names an axis that the mesh does not have.
  """
  sizes = axis_sizes(mesh)
  for axis in spec_axes(entry):
    if axis not in sizes:
      message = f'axis {axis!r} is not an axis of the mesh {dict(sizes)}.{did_you_mean(axis, sizes)}'
      raise ShardingError(message, ShardingFault.UNKNOWN_AXIS)
  return math.prod(sizes[axis] for axis in spec_axes(entry))


def padded_shape(shape: Sequence[int], spec: PartitionSpec | None, mesh: MeshLike) -> tuple[int, ...]:
  """Returns `shape` with each split dimension rounded up to a multiple of the number of its parts."""
  parts = [num_parts(entry, mesh) for entry in complete_spec(spec, len(shape))]
  return tuple(-(-d // n) * n for d, n in zip(shape, parts))


def pad_amounts(shape: Sequence[int], spec: PartitionSpec | None, mesh: MeshLike) -> tuple[int, ...]:
  """Returns the number of zeros to append to each dimension."""
  return tuple(p - d for d, p in zip(shape, padded_shape(shape, spec, mesh)))


def local_shape(shape: Sequence[int], spec: PartitionSpec | None, mesh: MeshLike) -> tuple[int, ...]:
  """Returns the shape of the padded array's slice on each device."""
  parts = [num_parts(entry, mesh) for entry in complete_spec(spec, len(shape))]
  return tuple(-(-d // n) for d, n in zip(shape, parts))


def pad_to(x: T, shape: object) -> T:
  """Appends zeros to each array until it has `shape`; works inside and outside of jit, and on NumPy arrays.

  Args:
    x: an array or a tree of arrays.
    shape: the shape, or a tree like `x` of shapes or of objects with a shape.

  Raises:
    ShardingError: an array is larger than its shape, or has another rank.
  """
  return jax.tree.map(_pad_one, x, shape)


def slice_to(x: T, shape: object) -> T:
  """The inverse of `pad_to`: cuts each dimension at its end to `shape`."""
  return jax.tree.map(_slice_one, x, shape)


def _pad_one(x: AnyArray, shape: HasShape | Sequence[int]) -> AnyArray:
  target = _to_shape(shape)
  if tuple(x.shape) == target:
    return x
  if len(x.shape) != len(target) or any(d > t for d, t in zip(x.shape, target)):
    raise ShardingError(f'an array of shape {tuple(x.shape)} cannot be padded to {target}')
  if isinstance(x, np.ndarray):  # It stays on the host: it may not fit into the memory of one device.
    return np.pad(x, [(0, t - d) for d, t in zip(x.shape, target)])
  return lax.pad(x, jnp.zeros((), x.dtype), [(0, t - d, 0) for d, t in zip(x.shape, target)])


def _slice_one(x: AnyArray, shape: HasShape | Sequence[int]) -> AnyArray:
  target = _to_shape(shape)
  if tuple(x.shape) == target:
    return x
  if len(x.shape) != len(target) or any(d < t for d, t in zip(x.shape, target)):
    raise ShardingError(f'an array of shape {tuple(x.shape)} cannot be sliced to {target}')
  if isinstance(x, np.ndarray):
    return x[tuple(slice(t) for t in target)]
  return lax.slice(x, (0,) * len(target), target)


def _to_shape(shape: HasShape | Sequence[int]) -> tuple[int, ...]:
  return tuple(shape if isinstance(shape, Sequence) else shape.shape)
