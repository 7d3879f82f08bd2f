"""How the arrays of a tree are stored on a mesh: specs, padded and true shapes.

The invariant: state is padded only when it enters or leaves a step. Inside, every array has its true shape, so no
layer, optimizer or metric ever sees padding. Padding is always zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from praxis_lite.common.errors import ShardingError, did_you_mean
from praxis_lite.common.trees import Path, leaves_by_path, map_with_path, path_name
from praxis_lite.sharding.host_memory import is_on_host, to_device_memory, to_host_memory
from praxis_lite.sharding.padding import AnyArray, pad_to, padded_shape, slice_to
from praxis_lite.sharding.specs import complete_spec, stored_spec

T = TypeVar('T')


class StateLayout(NamedTuple):
  """How the arrays of a whole `TrainState`, or of a part of one, are stored: four trees of the same structure.

  Attributes:
    specs, shardings: PartitionSpecs of full rank, and the corresponding shardings on the mesh.
    padded_shapes, unpadded_shapes: shapes and dtypes as stored on the mesh, with shardings; and the true ones.
  """

  specs: Any
  shardings: Any
  padded_shapes: Any
  unpadded_shapes: Any

  @property
  def mesh(self) -> Mesh:
    return jax.tree.leaves(self.shardings)[0].mesh

  @property
  def mdl_vars(self) -> StateLayout:
    """The layout of only the model's variables."""
    return StateLayout(*(tree.mdl_vars for tree in self))

  @property
  def on_host(self) -> StateLayout:
    """The same layout in host memory."""
    shardings = jax.tree.map(to_host_memory, self.shardings)
    padded = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self.padded_shapes, shardings
    )
    return self._replace(shardings=shardings, padded_shapes=padded)

  def unpad(self, tree: T) -> T:
    """Inside a step: slices stored arrays to their true shapes."""
    return self._constrain_padded(slice_to(self.fetch(tree), self.unpadded_shapes))

  def pad(self, tree: T) -> T:
    """Inside a step: pads true arrays to their stored shapes."""
    return self.send_to_host(pad_to(self._constrain_padded(tree), self.padded_shapes))

  def fetch(self, tree: T) -> T:
    """Inside a step: moves arrays that are stored in host memory to the devices."""
    return jax.tree.map(
      lambda x, s: jax.device_put(x, to_device_memory(s)) if is_on_host(s) else x, tree, self.shardings
    )

  def send_to_host(self, tree: T) -> T:
    """Inside a step: the inverse of `fetch`."""
    return jax.tree.map(lambda x, s: jax.device_put(x, s) if is_on_host(s) else x, tree, self.shardings)

  def to_host(self, tree: T) -> T:
    """Outside a step: returns some or all arrays of this layout as NumPy arrays in their true shapes.

    They are copies. PRNG keys are returned unchanged. Raises ShardingError if an array is not in this layout, or has
    neither its stored nor its true shape.
    """

    def read(x: AnyArray, padded: jax.ShapeDtypeStruct, true: jax.ShapeDtypeStruct) -> AnyArray:
      if is_prng_key(x):
        return x
      if isinstance(x, jax.Array) and not x.is_fully_addressable:  # Parts are on other hosts.
        x = multihost_utils.process_allgather(x, tiled=True)
      # A copy: NumPy would share the memory of a CPU device, and a step may write its result there.
      return np.array(slice_to(np.asarray(x), true))

    return self._map_stored(read, tree)

  def to_mesh(self, tree: T) -> T:
    """The inverse of `to_host`: puts some or all arrays of this layout, from the host or any device, on the mesh."""

    def put(x: AnyArray, padded: jax.ShapeDtypeStruct, true: jax.ShapeDtypeStruct) -> jax.Array:
      if is_prng_key(x):
        return jax.device_put(x, padded.sharding)
      if isinstance(x, jax.Array) and x.shape == padded.shape and x.sharding == padded.sharding:
        return x
      stored = pad_to(np.asarray(x).astype(padded.dtype), padded)
      return jax.make_array_from_callback(padded.shape, padded.sharding, lambda index: np.array(stored[index]))

    return self._map_stored(put, tree)

  def _map_stored(self, fn: Callable[..., AnyArray], tree: T) -> T:
    """Returns `fn(array, stored shape, true shape)` for some or all arrays of this layout."""
    padded, true = (leaves_by_path(shapes) for shapes in (self.padded_shapes, self.unpadded_shapes))

    def check_and_map(path: Path, x: AnyArray) -> AnyArray:
      if path not in true:
        close = did_you_mean(path_name(path), map(path_name, true))
        raise ShardingError(f'{path_name(path)}: the layout has no such array.{close}')
      if x.shape not in (true[path].shape, padded[path].shape):
        stored = '' if padded[path].shape == true[path].shape else f', and {padded[path].shape} with padding'
        raise ShardingError(f'{path_name(path)} has shape {x.shape}; in the layout it has {true[path].shape}{stored}')
      return fn(x, padded[path], true[path])

    return map_with_path(check_and_map, tree)

  def _constrain_padded(self, tree: T) -> T:
    """Constrains padded arrays to their stored sharding, so that slices and pads need no communication."""

    def constrain(x: jax.Array, padded: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
      return x if x.shape == padded.shape else jax.lax.with_sharding_constraint(x, to_device_memory(sharding))

    return jax.tree.map(constrain, tree, self.padded_shapes, self.shardings)


def is_prng_key(x: Any) -> bool:
  """Whether x is an array of PRNG keys, or the shape of one."""
  return hasattr(x, 'dtype') and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def layout_of(shapes: object, specs: object, mesh: Mesh | AbstractMesh) -> StateLayout:
  """Returns the layout on `mesh` of a tree of objects with the true shape and dtype.

  `specs` is a tree of PartitionSpecs, or a prefix of one; None means replicated.
  """
  full = jax.tree.map(
    lambda x, spec: stored_spec(complete_spec(spec, len(x.shape))),
    shapes,
    jax.tree.broadcast(specs, shapes, is_leaf=is_spec),
  )
  unpadded = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), full)
  padded = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(padded_shape(x.shape, s.spec, mesh), x.dtype, sharding=s), unpadded, shardings
  )
  return StateLayout(full, shardings, padded, unpadded)


def is_spec(x: object) -> TypeGuard[PartitionSpec | None]:
  """Whether `x` is a leaf of a tree of specs, which may be None."""
  return x is None or isinstance(x, PartitionSpec)
