"""How the arrays of a tree are stored on a mesh: specs, padded and true shapes.

The invariant: state is padded where it enters and leaves a step, and nowhere else. Inside, every array has its true
shape, so no layer, optimizer or metric ever sees padding; padding is always zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from praxis_lite.partitioning.padding import pad_to, padded_shape, slice_to
from praxis_lite.partitioning.specs import complete_spec, stored_spec

T = TypeVar('T')


class StateLayout(NamedTuple):
  """How the arrays of a whole `TrainState`, or of a part of one, are stored: four trees of the same structure.

  Attributes:
    specs, shardings: PartitionSpecs of full rank, and the same on the mesh.
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
    """The layout of the model's variables alone."""
    return StateLayout(*(tree.mdl_vars for tree in self))

  def unpad(self, tree: T) -> T:
    """Inside a step: slices stored arrays to their true shapes."""
    return self._constrain_padded(slice_to(tree, self.unpadded_shapes))

  def pad(self, tree: T) -> T:
    """Inside a step: pads true arrays to their stored shapes."""
    return pad_to(self._constrain_padded(tree), self.padded_shapes)

  def _constrain_padded(self, tree: T) -> T:
    """Pins the sharding of the arrays that padding touches, so that slice and pad stay local to each device."""

    def constrain(x: jax.Array, padded: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
      return x if x.shape == padded.shape else jax.lax.with_sharding_constraint(x, sharding)

    return jax.tree.map(constrain, tree, self.padded_shapes, self.shardings)


def layout_of(shapes: object, specs: object, mesh: Mesh | AbstractMesh) -> StateLayout:
  """Returns the layout on `mesh` of any tree.

  Args:
    shapes: tree of things with a shape and dtype: the true ones.
    specs: tree of PartitionSpecs, or a prefix of that; None is replicated.
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
  """Whether `x` is a leaf of a tree of specs; None is one."""
  return x is None or isinstance(x, PartitionSpec)
