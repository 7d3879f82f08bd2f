"""The layout of a train state on a mesh: specs, padded and true shapes, all from declarations, without an array.

The invariant: state is padded where it enters and leaves a step, and nowhere else. Inside, every array has its true
shape, so no layer, optimizer or metric ever sees padding; what the padding holds is always zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.partitioning import steps
from praxis_lite.partitioning.padding import MeshLike, pad_to, padded_shape, slice_to
from praxis_lite.partitioning.placement import place_variables, placed_specs
from praxis_lite.partitioning.state_specs import opt_state_specs
from praxis_lite.partitioning.train_state import TrainState


class StateLayout(NamedTuple):
  """Where the arrays of a whole `TrainState`, or of a part of one, lie: four trees of the same structure.

  Attributes:
    specs: PartitionSpecs of full rank.
    shardings: the same on the mesh.
    padded_shapes: shapes and dtypes as stored on the mesh, with shardings.
    unpadded_shapes: true shapes and dtypes.
  """

  specs: Any
  shardings: Any
  padded_shapes: Any
  unpadded_shapes: Any

  @property
  def mdl_vars(self) -> StateLayout:
    """The layout of the model's variables alone."""
    return StateLayout(*(tree.mdl_vars for tree in self))

  def unpad(self, tree: Any) -> Any:
    """Inside a step: slices stored arrays to their true shapes."""
    return self._constrain_padded(slice_to(tree, self.unpadded_shapes))

  def pad(self, tree: Any) -> Any:
    """Inside a step: pads true arrays to their stored shapes."""
    return pad_to(self._constrain_padded(tree), self.padded_shapes)

  def _constrain_padded(self, tree: Any) -> Any:
    """Pins the sharding of the arrays that padding touches, so that slice and pad stay local to each device."""

    def constrain(x: jax.Array, padded: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
      return x if x.shape == padded.shape else jax.lax.with_sharding_constraint(x, sharding)

    return jax.tree.map(constrain, tree, self.padded_shapes, self.shardings)


class PartitionedModelStates(NamedTuple):
  """What `initialize_partitioned_model_states` returns."""

  train_state_partition_specs: TrainState
  padded_shapes: TrainState
  unpadded_shapes: TrainState
  partitioned_train_state: TrainState


def place_task_variables(jax_task: steps.Task, mesh: MeshLike) -> Any:
  """Returns a tree with a `Decision` for each variable of a task's model: its spec, and what decided it."""
  weights = jax_task.model.abstract_init()
  return place_variables(weights, mesh, rules=jax_task.logical_axis_rules, strategy=jax_task.strategy)


def state_layout(jax_task: steps.Task, mesh: Mesh) -> StateLayout:
  """Returns the layout of a task's train state on `mesh`; optimizer slots and averages follow their variables."""
  unpadded = jax.eval_shape(lambda key: steps.initialize_train_state(jax_task, key), jax.random.key(0))
  specs_of_vars = placed_specs(place_task_variables(jax_task, mesh))

  def follow_vars(tree: Any, init_fn: Any = None) -> Any:
    return opt_state_specs(unpadded.mdl_vars, specs_of_vars, tree, init_fn)

  specs = TrainState(
    step=PartitionSpec(),
    mdl_vars=specs_of_vars,
    opt_states=follow_vars(unpadded.opt_states, lambda mdl_vars: steps.initialize_opt_states(jax_task, mdl_vars)),
    ema_vars=follow_vars(unpadded.ema_vars),
  )
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  padded = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(padded_shape(x.shape, s.spec, mesh), x.dtype, sharding=s), unpadded, shardings
  )
  return StateLayout(specs, shardings, padded, unpadded)


def init_partitioned_state(jax_task: steps.Task, layout: StateLayout, mesh: Mesh, init_key: jax.Array) -> TrainState:
  """Returns a new train state, padded, each device holding its own part from the start."""

  def init(key: jax.Array) -> TrainState:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return layout.pad(steps.initialize_train_state(jax_task, key))

  return jax.jit(init, out_shardings=layout.shardings)(init_key)


def initialize_partitioned_model_states(
  jax_task: steps.Task, init_key: jax.Array, *, mesh: Mesh | None = None
) -> PartitionedModelStates:
  """Creates the train state of a task, sharded and padded on its mesh, never whole on one device.

  Args:
    jax_task: an instantiated task.
    init_key: PRNG key of the first values.
    mesh: the mesh; by default the one the task asks for.
  """
  mesh = jax_task.create_mesh() if mesh is None else mesh
  layout = state_layout(jax_task, mesh)
  state = init_partitioned_state(jax_task, layout, mesh, init_key)
  return PartitionedModelStates(layout.specs, layout.padded_shapes, layout.unpadded_shapes, state)
