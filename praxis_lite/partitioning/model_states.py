"""The layout of a train state on a mesh, from declarations, and making the state there."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec

from praxis_lite.partitioning import steps
from praxis_lite.partitioning.layout import StateLayout, layout_of
from praxis_lite.partitioning.padding import MeshLike
from praxis_lite.partitioning.placement import place_variables, placed_specs
from praxis_lite.partitioning.state_specs import opt_state_specs
from praxis_lite.partitioning.train_state import TrainState


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


def train_state_shapes(jax_task: steps.Task) -> TrainState:
  """Returns the true shapes and dtypes of a task's train state."""
  return jax.eval_shape(lambda key: steps.initialize_train_state(jax_task, key), jax.random.key(0))


def state_layout(jax_task: steps.Task, mesh: Mesh) -> StateLayout:
  """Returns the layout of a task's train state on `mesh`; optimizer slots and averages follow their variables."""
  unpadded = train_state_shapes(jax_task)
  specs_of_vars = placed_specs(place_task_variables(jax_task, mesh))

  def follow_vars(tree: Any, init_fn: Any = None) -> Any:
    return opt_state_specs(unpadded.mdl_vars, specs_of_vars, tree, init_fn)

  specs = TrainState(
    step=PartitionSpec(),
    mdl_vars=specs_of_vars,
    opt_states=follow_vars(unpadded.opt_states, lambda mdl_vars: steps.initialize_opt_states(jax_task, mdl_vars)),
    ema_vars=follow_vars(unpadded.ema_vars),
  )
  return layout_of(unpadded, specs, mesh)


def declared_state(jax_task: steps.Task) -> TrainState:
  """Returns a task's train state with `WeightHParams` as variables and shapes elsewhere, as partitioners take it."""
  return train_state_shapes(jax_task).replace(mdl_vars=jax_task.model.abstract_init())


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
