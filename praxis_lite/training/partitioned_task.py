"""Partitioned train, eval and decode functions of a task, on any mesh; the mesh need not divide any dimension."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.extend
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, ShardingError
from praxis_lite.common.trees import NestedDict
from praxis_lite.layers.base.call import SplitConstraint
from praxis_lite.sharding.batch import batch_size, padded_batch_shape
from praxis_lite.sharding.batch_rows import BatchRows, batch_rows, row_axes
from praxis_lite.sharding.constraints import axis_rules
from praxis_lite.sharding.host_memory import check_host_memory
from praxis_lite.sharding.layout import StateLayout, layout_of
from praxis_lite.sharding.mesh import bind_mesh, platform
from praxis_lite.sharding.rules import LogicalAxisRules
from praxis_lite.sharding.specs import get_input_partition_specs, infer_partition_spec_based_on_rank_fn
from praxis_lite.sharding.xla_flags import XlaFlags, xla_flags
from praxis_lite.training import steps
from praxis_lite.training.edits import Edits
from praxis_lite.training.execution import EXECUTIONS, CompilerPlaced, MeshExecution, ShardMapped
from praxis_lite.training.partitioned_step import PartitionedStep
from praxis_lite.training.state import (
  GivenVariables,
  StateT,
  TrainState,
  declared_state,
  offload_slots,
  state_initializer,
  state_layout,
  train_state_shapes,
)
from praxis_lite.training.taps import StepTaps
from praxis_lite.training.task import SingleTask

T = TypeVar('T')
_OutT = TypeVar('_OutT', steps.EvalStepOutput, steps.PredictStepOutput, steps.DecodeStepOutput, steps.TapStepOutput)


class Partitioner(Protocol):
  """An object that decides the mesh and the specs instead of the task, for example a T5X partitioner."""

  @property
  def mesh(self) -> Mesh: ...
  @property
  def logical_axis_rules(self) -> LogicalAxisRules: ...
  def get_layout(self, train_state: TrainState) -> StateLayout: ...
  def place_params(self, train_state: TrainState, layout: StateLayout) -> TrainState: ...


class _PartitionedModel(NamedTuple):
  partitioned_train_state: TrainState
  train_state_partition_specs: TrainState
  inputs_partition_spec: NestedDict
  train_step: PartitionedStep[steps.TrainStepOutput]
  eval_step: PartitionedStep[steps.EvalStepOutput]
  total_num_params: int


class PartitionedModel(_PartitionedModel):
  """The result of `partition_spmd_model`: a tuple, with an attribute for the `PartitionedTask`."""

  partitioned_task: PartitionedTask


class PartitionedTask:
  """A task on a mesh: the layout of its state and inputs, and its compiled steps.

  Args:
    jax_task: an instantiated `SingleTask`.
    inputs_shape: tree of `jax.ShapeDtypeStruct` (or arrays) of one global batch, whose dimension 0 is the batch.
    mesh: the mesh; by default the mesh of the task's config.
    partitioner: decides mesh and specs instead of the task, by the partitioner's logical axis rules.
    layout: the layout of an existing train state, including its mesh, instead of `mesh` and `partitioner`.
    taps: statistics of values that the steps report; see `taps.py`. None reports no statistics.
    edits: changes of values between layers in inference steps; None changes nothing.

  Attributes:
    state_specs, state_shapes, unpadded_state_shapes: the layout of the train state.
    inputs_partition_spec: specs of the inputs when a batch enters a step.
    batch_shape: shapes and dtypes of a global batch, with its weights.
    inputs_shape: shapes and dtypes of a global batch, including rows of padding for the mesh.
    train_step, eval_step, predict_step, score_step, decode_step: the partitioned steps; like the other steps below,
      they are compiled when first used.
    batch_size: rows of a global batch, without padding for the mesh.
    untapped: the same task without taps, for steps whose statistics are not needed.
    row_parts: steps compute a multiple of this number of rows.
    total_num_params: number of model parameters, without padding, including moving statistics.
  """

  def __init__(
    self,
    jax_task: SingleTask,
    inputs_shape: NestedDict,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    partitioner: Partitioner | None = None,
    layout: StateLayout | None = None,
    taps: StepTaps | None = None,
    edits: Edits | None = None,
  ):
    _check_one_mesh(mesh, partitioner, layout)
    self.jax_task = jax_task
    self.taps = taps
    self.edits = edits
    if layout is not None:
      self.layout = layout
    elif partitioner is not None:
      self.layout = offload_slots(jax_task, partitioner.get_layout(declared_state(jax_task)))
    else:
      self.layout = state_layout(jax_task, jax_task.create_mesh() if mesh is None else mesh)
    self.mesh = self.layout.mesh
    for layer in jax_task.model.descendants():
      for field in ('remat_offload_names', 'stage_remat_offload_names'):
        if getattr(layer, field, ()):
          check_host_memory(self.mesh, f'{layer.path_name}.{field}')
    self.state_specs: TrainState[PartitionSpec] = self.layout.specs
    self.state_shapes: TrainState[jax.ShapeDtypeStruct] = self.layout.padded_shapes
    self.unpadded_state_shapes: TrainState[jax.ShapeDtypeStruct] = self.layout.unpadded_shapes
    self._input_specs = self._specs_inside(inputs_shape)
    self.row_parts = math.prod(self.mesh.shape[axis] for axis in row_axes(self.mesh, self._input_specs))
    self.batch_shape = padded_batch_shape(inputs_shape, 1)
    self.inputs_shape = padded_batch_shape(inputs_shape, self.row_parts)
    self.inputs_partition_spec = get_input_partition_specs(self.inference_rows.axes, self.inputs_shape)
    self.batch_size = batch_size(inputs_shape)
    self.untapped = self
    if taps is not None:
      self.untapped = PartitionedTask(jax_task, self.batch_shape, layout=self.layout, edits=edits)

  def _specs_inside(self, inputs_shape: NestedDict) -> list[PartitionSpec | None]:
    """Returns the specs of the arrays of a batch inside a step; [] if each device takes whole rows.

    An invalid mapping also gives [], because it raises an error when the step is traced.
    """
    mapping, names = self.jax_task.train.inputs_split_mapping, self.mesh.axis_names
    if self.jax_task.partitioning != 'auto':
      return []
    try:
      return [infer_partition_spec_based_on_rank_fn(mapping, names, x) for x in jax.tree.leaves(inputs_shape)]
    except ShardingError:  # Raised again, with its path, when the step is traced.
      return []

  @functools.cached_property
  def train_rows(self) -> BatchRows:
    """How the train step pads and splits the rows of a batch."""
    return batch_rows(self.mesh, self._input_specs, self.batch_shape, self.jax_task.learner.num_microbatches)

  @functools.cached_property
  def inference_rows(self) -> BatchRows:
    """How the eval, predict and decode steps pad and split the rows of a batch."""
    return batch_rows(self.mesh, self._input_specs, self.batch_shape)

  @property
  def total_num_params(self) -> int:
    return self.jax_task.model.total_num_params

  @property
  def rows_of_microbatch(self) -> int:
    """The number of rows, including padding for the mesh, that the model processes at once in training."""
    return self.train_rows.computed // self.jax_task.learner.num_microbatches

  @property
  def _train_outputs(self) -> Any:
    """Shardings for a `TrainStepOutput`: one for each array of the state, and one for each other field as a whole."""
    return steps.TrainStepOutput(self.layout.shardings, *[self._replicated] * 4)  # type: ignore[arg-type]

  @functools.cached_property
  def train_step(self) -> PartitionedStep[steps.TrainStepOutput]:
    """`(state, prng_key, inputs) -> TrainStepOutput`; the state passed in is donated."""
    fn, arguments = self._train_fn(self.execution)
    return PartitionedStep(fn, arguments, self._train_outputs, mesh=self.mesh, donate_argnums=(0,), flags=self._flags)

  @functools.cached_property
  def eval_step(self) -> PartitionedStep[steps.EvalStepOutput]:
    """`(mdl_vars, prng_key, global_step, inputs) -> EvalStepOutput`."""
    return self._inference_step(steps.eval_step_single_learner, 'per_example_out')

  @functools.cached_property
  def predict_step(self) -> PartitionedStep[steps.PredictStepOutput]:
    """`(mdl_vars, prng_key, global_step, inputs) -> PredictStepOutput`."""
    return self._inference_step(steps.predict_step, 'predictions')

  @functools.cached_property
  def score_step(self) -> PartitionedStep[steps.PredictStepOutput]:
    """`(mdl_vars, prng_key, global_step, inputs) -> PredictStepOutput`, of a language model."""
    return self._inference_step(functools.partial(steps.predict_step, method='score'), 'predictions', 'score_step')

  @functools.cached_property
  def score_training_step(self) -> PartitionedStep[steps.PredictStepOutput]:
    """`(mdl_vars, prng_key, global_step, inputs) -> PredictStepOutput`; see `steps.score_training_step`."""
    return self._inference_step(steps.score_training_step, 'predictions')

  @functools.cached_property
  def tap_step(self) -> PartitionedStep[steps.TapStepOutput]:
    """`(mdl_vars, prng_key, global_step, inputs) -> TapStepOutput`, with the taps of this task."""
    of_loss = self.taps is not None and self.taps.wants_gradients
    return self._inference_step(steps.tap_loss_step if of_loss else steps.tap_step, 'arrays')

  @functools.cached_property
  def decode_step(self) -> PartitionedStep[steps.DecodeStepOutput]:
    """`(mdl_vars, prng_key, global_step, inputs) -> DecodeStepOutput`."""
    return self._inference_step(steps.decode_step, 'decoded')

  @functools.cached_property
  def sample_step(self) -> PartitionedStep[steps.DecodeStepOutput]:
    """Like `decode_step`, for a `PolicyModel`, which samples answers from its own distribution."""
    return self._inference_step(functools.partial(steps.decode_step, method='sample'), 'decoded', 'sample_step')

  def gradient_norms(self, execution: MeshExecution | None = None) -> PartitionedStep[steps.TrainStepOutput]:
    """Returns `steps.gradient_norms` on the mesh; it takes the arguments of `train_step`.

    It is executed like `train_step`, unless `execution` is given.
    """
    fn, arguments = self._train_fn(execution or self.execution, steps.gradient_norms)
    return PartitionedStep(fn, arguments, self._train_outputs, mesh=self.mesh, flags=self._flags)

  def init_state(self, init_key: jax.Array) -> TrainState[jax.Array]:
    """Returns a new train state, padded; each device creates only its own part."""
    return self._init_state(init_key)

  def init_state_from(self, init_key: jax.Array, given: GivenVariables) -> TrainState[jax.Array]:
    """Returns a new train state in which some variables have given values, which are padded and on the mesh."""
    return state_initializer(self.jax_task, self.layout, given.known)(init_key, given.values)

  @functools.cached_property
  def _init_state(self) -> Callable[[jax.Array], TrainState[jax.Array]]:
    return state_initializer(self.jax_task, self.layout)  # Cached, so that it is compiled once.

  def unpad(self, state: StateT) -> StateT:
    """Returns a train state, or its `mdl_vars`, or a part of either, as NumPy arrays in their true shapes.

    Use this for results: `np.asarray` of an array of the state includes the padding that its mesh needs. The returned
    arrays are copies on the host, so they remain valid when the state is donated, and a layer's `apply` computes with
    them on one device.

    Raises:
      ShardingError: an array does not have the shape that it has in the state of this task.
    """
    return self._layout_of(state).to_host(state)

  def pad(self, state: StateT) -> StateT:
    """Pads arrays of true shapes, from any device or host, and puts them on the mesh; the inverse of `unpad`."""
    return self._layout_of(state).to_mesh(state)

  def _layout_of(self, state: object) -> StateLayout:
    return self.layout if isinstance(state, TrainState) else self.layout.mdl_vars

  def trace_train_step(self, listener: Callable[[SplitConstraint], object]) -> jax.extend.core.ClosedJaxpr:
    """Traces the train step without compiling it; also works on an abstract mesh.

    The program's arguments are the leaves of the padded state, the key, and the leaves of the padded inputs. `listener`
    is called with each sharding constraint of the model's layers.
    """
    execution = EXECUTIONS[self.jax_task.partitioning](self.jax_task, self.layout)
    execution.surroundings = dataclasses.replace(execution.surroundings, listener=listener)
    fn, arguments = self._train_fn(execution)
    return jax.make_jaxpr(bind_mesh(fn, self.mesh))(*arguments)

  @functools.cached_property
  def execution(self) -> MeshExecution:
    """How the train step is executed."""
    execution = EXECUTIONS[self.jax_task.partitioning](self.jax_task, self.layout)
    if self.taps is not None and isinstance(execution, ShardMapped):
      self.taps.check_parts(execution.kept_axes)
    execution.taps = self.taps
    return execution

  @functools.cached_property
  def _placed(self) -> CompilerPlaced:
    """How evaluation and decoding are executed, for any partitioning of the train step."""
    return CompilerPlaced(self.jax_task, self.layout)

  def _train_fn(
    self,
    execution: MeshExecution,
    single_learner_step: Callable[..., steps.TrainStepOutput] = steps.train_step_single_learner,
  ) -> tuple[Callable[..., steps.TrainStepOutput], tuple[object, ...]]:
    step = execution.wrap(functools.partial(single_learner_step, self.jax_task, execution=execution))
    rows = self.train_rows

    def train_step(state: TrainState[jax.Array], prng_key: jax.Array, inputs: NestedDict) -> steps.TrainStepOutput:
      with self.jax_task.name_fields(), axis_rules(self.jax_task.logical_axis_rules or ()):
        out = steps.TrainStepOutput(*step(state, prng_key, rows.take_rows(inputs)))
      if execution.taps is not None:
        execution.taps.check_seen()
        before, after = (self.layout.mdl_vars.unpad(variables) for variables in (state.mdl_vars, out.state.mdl_vars))
        out = out._replace(summaries={**out.summaries, **execution.taps.summarize_step(before, after)})
      return out._replace(per_example_out=jax.tree.map(rows.return_rows, out.per_example_out))

    return train_step, (self.state_shapes, *self._placed_shapes(rows))

  def _inference_step(self, step: Callable[..., _OutT], by_row: str, name: str = '') -> PartitionedStep[_OutT]:
    """Returns a step that takes the model's variables instead of a train state.

    Args:
      step: the function of `steps` that computes the step.
      by_row: the field of the step's result whose arrays have the batch as dimension 0.
      name: the program's name in profiles; '' takes the name of `step`.
    """
    rows = self.inference_rows
    shapes: tuple[object, ...] = self._placed_shapes(rows, jax.ShapeDtypeStruct((), jnp.int32))
    placed = self._placed

    def inference_step(mdl_vars: NestedDict, key: jax.Array, global_step: jax.Array, inputs: NestedDict) -> _OutT:
      mdl_vars, inputs = self.layout.mdl_vars.unpad(mdl_vars), placed.split_inputs(rows.take_rows(inputs))
      surroundings = placed.surroundings if self.taps is None else self.taps.surround(placed.surroundings, inputs)
      if self.edits is not None:
        mdl_vars, surroundings = self.edits.add_to(mdl_vars, surroundings)
      with self.jax_task.name_fields(), axis_rules(self.jax_task.logical_axis_rules or ()):
        out = step(self.jax_task, mdl_vars, key, global_step, inputs, surroundings)
      if self.taps is not None and not self.taps.trains:
        self.taps.check_seen()
      if self.edits is not None and surroundings.edited is not None:
        self.edits.check_met(surroundings.edited)
      return out._replace(**{by_row: jax.tree.map(rows.return_rows, getattr(out, by_row))})

    inference_step.__name__ = name or step.__name__
    arguments = (self.state_shapes.mdl_vars, *shapes)
    return PartitionedStep(inference_step, arguments, self._replicated, mesh=self.mesh, flags=self._flags)

  @property
  def _flags(self) -> XlaFlags:
    task = self.jax_task
    return xla_flags(platform(self.mesh), self.mesh.size, task.xla_flags, use_defaults=task.default_xla_flags)

  @property
  def _replicated(self) -> NamedSharding:
    return NamedSharding(self.mesh, PartitionSpec())

  def _placed_shapes(self, rows: BatchRows, *replicated: object) -> tuple[object, ...]:
    """Returns the shapes, with shardings, of a step's PRNG key, its replicated arguments and its inputs."""
    inputs = padded_batch_shape(self.batch_shape, rows.entering)
    shapes = (jax.eval_shape(lambda: jax.random.key(0)), *replicated, inputs)
    specs = (*[None] * (1 + len(replicated)), self.inputs_partition_spec)
    return layout_of(shapes, specs, self.mesh).padded_shapes


def partition_spmd_model(
  task_p: Config | SingleTask,
  init_key: jax.Array,
  inputs_shape: NestedDict,
  *,
  mesh: Mesh | None = None,
  partitioner: Partitioner | None = None,
) -> PartitionedModel:
  """Partitions a task over its mesh.

  Args:
    task_p: config of the task, or the instantiated task.
    init_key: PRNG key for the initial values of the variables.
    inputs_shape: tree of shapes and dtypes of one global batch; its batch size may be any number.
    mesh: the mesh; by default the mesh of the task's config.
    partitioner: decides mesh and specs instead of the task; if `task_p` is a config, also sets its mesh axes and rules.

  Returns:
    The state on the mesh, its specs, the specs of the inputs, the train and the eval step, and the number of
    parameters. The steps take host batches (numpy, of the shape of `inputs_shape`), which they pad and place, or
    batches already placed by `step.put_inputs`. If the partitioner has params_on_devices=False, the variables are in
    host memory; call its `move_params_to_devices` before a step. The result's `partitioned_task` converts states with
    `unpad(state)` and `pad(state)`.

  Raises:
    ShardingError: a mapping does not fit its array or the mesh, or the mesh does not fit the devices.
    ConfigError: both mesh and partitioner are given.
  """
  _check_one_mesh(mesh, partitioner)
  if isinstance(task_p, Config) and partitioner is not None:
    task_p = task_p.clone(
      mesh_axis_names=partitioner.mesh.axis_names,
      ici_mesh_shape=None,
      logical_axis_rules=partitioner.logical_axis_rules,
    )
  jax_task = task_p.instantiate() if isinstance(task_p, Config) else task_p
  partitioned = PartitionedTask(jax_task, inputs_shape, mesh=mesh, partitioner=partitioner)
  state = partitioned.init_state(init_key)
  model = PartitionedModel(
    state if partitioner is None else partitioner.place_params(state, partitioned.layout),
    partitioned.state_specs,
    partitioned.inputs_partition_spec,
    partitioned.train_step,
    partitioned.eval_step,
    partitioned.total_num_params,
  )
  model.partitioned_task = partitioned
  return model


def _check_one_mesh(*given: object) -> None:
  if sum(x is not None for x in given) > 1:
    raise ConfigError('PartitionedTask: mesh, partitioner and layout each decide the mesh; pass one of them')


def get_partitioned_spmd_model_decode_fn(
  jax_task: SingleTask,
  init_key: jax.Array,
  partitioned_train_state: TrainState,
  train_state_partition_specs: TrainState,
  inputs_shape: NestedDict,
) -> tuple[PartitionedStep[steps.DecodeStepOutput], NestedDict]:
  """Returns the partitioned decode function of a task, on the mesh of a train state, and the specs of its inputs.

  `inputs_shape` has the shapes and dtypes of one global batch of prompts. `init_key`, an argument in Pax, is not used,
  because decoding takes its key in each call.
  """
  del init_key
  mesh = jax.tree.leaves(partitioned_train_state)[0].sharding.mesh
  layout = layout_of(train_state_shapes(jax_task), train_state_partition_specs, mesh)
  partitioned = PartitionedTask(jax_task, inputs_shape, layout=layout)
  return partitioned.decode_step, partitioned.inputs_partition_spec
