"""The state of a training run: its arrays, how they are stored on a mesh, and how they are created there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.jax_internals.flags import quick_options
from praxis_lite.common.trees import NestedDict, Path, leaves_by_path, map_with_path, merge, node_at, select
from praxis_lite.sharding.guards import GuardedJit
from praxis_lite.sharding.host_memory import check_host_memory
from praxis_lite.sharding.layout import StateLayout, layout_of
from praxis_lite.sharding.mesh import bind_mesh, platform
from praxis_lite.sharding.padding import MeshLike, axis_sizes
from praxis_lite.sharding.placement import place_variables, placed_specs
from praxis_lite.sharding.slots import opt_state_specs
from praxis_lite.sharding.specs import spec_axes
from praxis_lite.sharding.weights import FEW_TO_DRAW
from praxis_lite.training.learning.base_learner import BoundLearner
from praxis_lite.training.learning.owners import Splits
from praxis_lite.training.task import SingleTask

T = TypeVar('T')
StateT = TypeVar('StateT', bound='TrainState | NestedDict')


@dataclasses.dataclass(frozen=True)
class TrainState(Generic[T]):
  """The state that a train step takes and returns: arrays, or their shapes, specs or shardings.

  Attributes:
    step: int32 scalar, the number of steps taken, including skipped ones.
    mdl_vars: the model's variables, a nested dict with the paths of the layer tree.
    opt_states: the state of the learner's optimizer, with entries only for trained variables.
    ema_vars: exponential moving averages of the trained variables, or None if the learner keeps none.
  """

  step: T
  mdl_vars: NestedDict
  opt_states: Any  # Any structure that optax makes.
  ema_vars: NestedDict | None = None

  def replace(self, **changes: Any) -> TrainState:
    """Returns a copy with some attributes changed."""
    return dataclasses.replace(self, **changes)


jax.tree_util.register_dataclass(TrainState, data_fields=['step', 'mdl_vars', 'opt_states', 'ema_vars'], meta_fields=[])


class PartitionedModelStates(NamedTuple):
  """The result of `initialize_partitioned_model_states`."""

  train_state_partition_specs: TrainState[PartitionSpec]
  padded_shapes: TrainState[jax.ShapeDtypeStruct]
  unpadded_shapes: TrainState[jax.ShapeDtypeStruct]
  partitioned_train_state: TrainState[jax.Array]


class GivenVariables(NamedTuple):
  """Given initial values of some variables, for example from another run; all other variables are drawn at random."""

  values: NestedDict  # A part of the variable tree; arrays have the shapes of the variables.
  # For each variable, by path, the shape of its given part, which begins at index 0. Other entries get random values.
  known: Mapping[Path, tuple[int, ...]]


def initialize_train_state(
  jax_task: SingleTask, init_key: jax.Array, given: GivenVariables | None = None, *, optimizer: bool = True
) -> TrainState[jax.Array]:
  """Returns the state before the first step, unpadded and unpartitioned; without `optimizer`, no `opt_states`."""
  mdl_vars = jax_task.model.init(init_key)
  if given is not None:
    mdl_vars = merge(mdl_vars, map_with_path(_use_given(mdl_vars, given), given.values))
  learner = jax_task.bind_learner()
  opt_states = learner.init(mdl_vars) if optimizer else None
  return TrainState(jnp.zeros((), jnp.int32), mdl_vars, opt_states, learner.init_ema(mdl_vars))


def train_state_shapes(jax_task: SingleTask, *, optimizer: bool = True) -> TrainState[jax.ShapeDtypeStruct]:
  """Returns the true shapes and dtypes of a task's train state; without `optimizer`, no `opt_states`."""
  return jax.eval_shape(lambda: initialize_train_state(jax_task, jax.random.key(0), optimizer=optimizer))


def place_task_variables(jax_task: SingleTask, mesh: MeshLike) -> Any:
  """Returns a tree with the `Placement` of each variable of a task's model: its spec, and the reasons for it.

  Raises ShardingError if a mapping, rule or strategy does not fit, and ConfigError if a mapping names mesh axes, but
  the task has no names for them.
  """
  if jax_task.mesh_axis_names is None:
    _check_names_no_axes(jax_task, mesh)
  weights = jax_task.model.abstract_init()
  return place_variables(weights, mesh, rules=jax_task.logical_axis_rules, strategy=jax_task.strategy)


def _check_names_no_axes(jax_task: SingleTask, mesh: MeshLike) -> None:
  """Raises ConfigError if a layer of a task without `mesh_axis_names` names an axis that the mesh does not have."""
  known = {*axis_sizes(mesh), *(name for name, _ in jax_task.logical_axis_rules or ())}
  fields_of_axes: dict[str, str] = {}  # By axis: the first field that names it.
  for layer in jax_task.model.descendants():
    for group in ('weight_split_dims_mapping', 'activation_split_dims_mapping'):
      for field, mapping in layer.split_mappings(group).items() if layer.mesh_axis_names is None else ():
        entries = mapping if isinstance(mapping, tuple | list) else ()
        for axis in (a for entry in entries for a in spec_axes(entry) if isinstance(a, str) and a not in known):
          fields_of_axes.setdefault(axis, field)
  for axis, field in fields_of_axes.items():
    raise ConfigError(
      f'{field} names the mesh axis {axis!r}, and task.mesh_axis_names is not set; set it, in the experiment or the '
      f'task, as in mesh_axis_names = {(*axis_sizes(mesh), *fields_of_axes)}, or leave out the mapping'
    )


def state_layout(
  jax_task: SingleTask, mesh: Mesh | AbstractMesh, specs_of_vars: NestedDict | None = None, *, optimizer: bool = True
) -> StateLayout:
  """Returns the layout of a task's train state on `mesh`; optimizer slots and averages follow their variables.

  `specs_of_vars` has the spec of each variable; None uses those of the task. Without `optimizer`, there are no
  `opt_states`, which only training needs, and which take long to trace.
  """
  unpadded = train_state_shapes(jax_task, optimizer=optimizer)
  if specs_of_vars is None:
    specs_of_vars = placed_specs(place_task_variables(jax_task, mesh))
  learner = jax_task.bind_learner()
  specs = TrainState(
    step=PartitionSpec(),
    mdl_vars=specs_of_vars,
    opt_states=_slot_specs(unpadded, specs_of_vars, learner, mesh),
    ema_vars=opt_state_specs(unpadded.mdl_vars, specs_of_vars, unpadded.ema_vars),
  )
  return offload_slots(jax_task, layout_of(unpadded, specs, mesh))


def _slot_specs(
  unpadded: TrainState, specs_of_vars: NestedDict, learner: BoundLearner, mesh: Mesh | AbstractMesh
) -> Any:
  """Returns the specs of slots, which the optimizer or their variables determine; None without optimizer state."""
  if unpadded.opt_states is None:
    return None
  specs = opt_state_specs(unpadded.mdl_vars, specs_of_vars, unpadded.opt_states, learner.init, learner.slot_axes)
  shapes = {path: x.shape for path, x in leaves_by_path(unpadded.mdl_vars).items()}
  splits = Splits(shapes, leaves_by_path(specs_of_vars), dict(mesh.shape))
  own = learner.slot_specs(unpadded.opt_states, splits)
  return map_with_path(own.get, specs) if own else specs


def offload_slots(jax_task: SingleTask, layout: StateLayout) -> StateLayout:
  """Returns the layout, with the optimizer's state in host memory if the task sets `offload_optimizer_state`.

  Raises ConfigError if the devices do not support host memory.
  """
  if not jax_task.train.offload_optimizer_state or layout.specs.opt_states is None:
    return layout
  check_host_memory(layout.mesh, 'task.train.offload_optimizer_state')
  slots = StateLayout(*(tree.opt_states for tree in layout)).on_host
  return StateLayout(*(tree.replace(opt_states=of_slots) for tree, of_slots in zip(layout, slots)))


def unpad(jax_task: Config | SingleTask, state: StateT) -> StateT:
  """Returns a train state on any mesh, or its `mdl_vars`, as NumPy arrays in their true shapes.

  This is `PartitionedTask.unpad` for a state without a `PartitionedTask`, such as the state of a `TrainResult`. The
  arrays are copies: they remain valid when the state is donated. Raises ShardingError if an array does not fit.
  """
  shapes = train_state_shapes(jax_task.instantiate() if isinstance(jax_task, Config) else jax_task)
  true = shapes if isinstance(state, TrainState) else shapes.mdl_vars
  return StateLayout(None, None, padded_shapes=state, unpadded_shapes=true).to_host(state)


def declared_state(jax_task: SingleTask) -> TrainState:
  """Returns a task's train state for partitioners: `WeightHParams` for variables, and shapes for all other arrays."""
  return train_state_shapes(jax_task).replace(mdl_vars=jax_task.model.abstract_init())


def _use_given(drawn: NestedDict, given: GivenVariables) -> Callable[[Path, jax.Array], jax.Array]:
  def values(path: Path, value: jax.Array) -> jax.Array:
    known: jax.Array | bool = True
    for dim, size in enumerate(given.known[path]):
      if size < value.shape[dim]:
        known &= jax.lax.broadcasted_iota(jnp.int32, value.shape, dim) < size
    return value if known is True else jnp.where(known, value, node_at(drawn, path))

  return values


def state_initializer(
  jax_task: SingleTask, layout: StateLayout, known: Mapping[Path, tuple[int, ...]] | None = None
) -> Callable[..., TrainState[jax.Array]]:
  """Returns a jitted function of the init key that creates a padded train state; each device makes its own shards.

  With `known`, see `GivenVariables`, the function also takes the padded values of the given variables.
  """

  def init(key: jax.Array, values: NestedDict | None = None) -> TrainState[jax.Array]:
    given = None
    if values is not None and known is not None:
      stored = StateLayout(*(select(tree, known.__contains__) for tree in layout.mdl_vars))
      given = GivenVariables(stored.unpad(values), known)
    return layout.pad(initialize_train_state(jax_task, key, given))

  options = quick_options(platform(layout.mesh)) if jax_task.model.total_num_params < FEW_TO_DRAW else None
  return GuardedJit(bind_mesh(init, layout.mesh), out_shardings=layout.shardings, compiler_options=options)


def initialize_partitioned_model_states(
  jax_task: SingleTask, init_key: jax.Array, *, mesh: Mesh | None = None
) -> PartitionedModelStates:
  """Creates a task's train state, sharded and padded on `mesh`, by default the task's.

  Each device creates its own shards, so none ever holds the whole state.
  """
  layout = state_layout(jax_task, jax_task.create_mesh() if mesh is None else mesh)
  state = state_initializer(jax_task, layout)(init_key)
  return PartitionedModelStates(layout.specs, layout.padded_shapes, layout.unpadded_shapes, state)
