"""explain: says how each variable, optimizer slot, activation and input of a task is split, and why.

It needs only shapes, so the model and the mesh may have any size. It traces the train step on a mesh without devices,
and reports the activations that this step constrains.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from praxis_lite.common.config import Config, fill_required
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.common.figures import number_of
from praxis_lite.common.trees import leaves_by_path, path_name
from praxis_lite.instruments.explain.explanation import ArrayKind, Explanation, ShardingReport, dimensions
from praxis_lite.layers.base import Layer
from praxis_lite.layers.base.call import SplitConstraint
from praxis_lite.layers.base.facts import Exchange
from praxis_lite.sharding.batch import padded_batch_shape
from praxis_lite.sharding.layout import StateLayout
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.sharding.slots import owner_of
from praxis_lite.sharding.specs import UNCONSTRAINED, Placement
from praxis_lite.training.experiment import BaseExperiment, ExperimentConfig, configure
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.state import place_task_variables, state_layout
from praxis_lite.training.task import SingleTask

Explained = SingleTask | Config | type[BaseExperiment] | ExperimentConfig  # The types whose shardings can be explained.


class TracedStep(NamedTuple):
  """A train step, traced by `PartitionedTask.trace_train_step` on a mesh without devices."""

  task: PartitionedTask
  constraints: list[SplitConstraint]  # One for each field, shape and dtype, in the order of the step.
  jaxpr: ClosedJaxpr


def explain(
  task_or_experiment: Explained,
  path: str,
  inputs_struct: Mapping[str, object] | None = None,
  mesh_sizes: Mapping[str, int] | None = None,
) -> Explanation:
  """Returns how one array is split over the mesh, and what decided the split.

  Args:
    task_or_experiment: a task or its config, an experiment class, or the result of `configure` for one.
    path: see `ShardingReport.find`.
    inputs_struct: shapes and dtypes of a batch, for activations and inputs; by default those of the experiment's data.
    mesh_sizes: size of each mesh axis; by default the sizes that the task declares.

  Raises:
    ConfigError: the task has no such array.
    ShardingError: a mapping, rule or strategy does not fit.
  """
  return explain_task(task_or_experiment, inputs_struct, mesh_sizes).find(path)


def explain_task(
  task_or_experiment: Explained,
  inputs_struct: Mapping[str, object] | None = None,
  mesh_sizes: Mapping[str, int] | None = None,
) -> ShardingReport:
  """Returns explanations of all arrays of a task; see `explain` for arguments and errors."""
  jax_task, inputs_struct = task_and_inputs(task_or_experiment, inputs_struct)
  sizes = dict(jax_task.mesh_sizes() if mesh_sizes is None else mesh_sizes)
  layout = state_layout(jax_task, abstract_mesh(sizes))
  return report_of(jax_task, layout, None if inputs_struct is None else trace_task(jax_task, layout, inputs_struct))


def parameter_table(jax_task: SingleTask, mesh_sizes: Mapping[str, int]) -> list[Explanation]:
  """Returns an explanation of each variable of a task's model, for `format_parameter_table`.

  Raises:
    ShardingError: a mapping does not fit its variable or the mesh.
  """
  placements, learner = leaves_by_path(place_task_variables(jax_task, mesh_sizes)), jax_task.bind_learner()
  found = []
  for path, weight in leaves_by_path(jax_task.model.abstract_init()).items():
    struct, placement = weight.as_struct(), placements[path]
    dims, remarks = dimensions(struct.shape, placement, mesh_sizes), placement.remarks
    frozen = weight.trainable and not learner.is_trained(path)
    if learner.is_trained(path):
      grown = learner.growth_remark(path)
      remarks = (*remarks, *filter(None, (learner.remark(path), grown and f'mup: {grown}')))
    if frozen or not weight.trainable:
      remarks = (*remarks, 'frozen by task.train.learner' if frozen else 'not trained by the optimizer')
    name, dtype, trainable = path_name(path), np.dtype(struct.dtype), weight.trainable
    row = Explanation(name, ArrayKind.VARIABLE, dims, dtype, mesh_sizes, remarks, trainable=trainable, frozen=frozen)
    if weight.stands_for is not None:
      row = dataclasses.replace(row, num_params=weight.num_params)
    if weight.active_share < 1:
      used = f'one token uses {weight.active_share:.3g} of it'
      row = dataclasses.replace(row, remarks=(*remarks, used), num_active=weight.num_active)
    found.append(row)
  return found


# ---------------------------------------------------------------- what is explained


class Subject(NamedTuple):
  """A task (or its config) to explain or verify, with the shapes of its batches."""

  task: object
  inputs: Mapping[str, object] | None
  prompts: Mapping[str, object] | None = None


def subject_of(named: object, inputs_struct: Mapping[str, object] | None = None) -> Subject:
  """Returns the `Subject` of a task or experiment. `inputs_struct` replaces the shapes of the training batch."""
  if isinstance(named, type) and issubclass(named, BaseExperiment):
    named = configure(named)
  if not isinstance(named, ExperimentConfig):
    return Subject(named, inputs_struct)
  inputs = batch_of(named.datasets) if inputs_struct is None else inputs_struct
  return Subject(named.task, inputs, batch_of(named.decode_datasets))


def task_and_inputs(
  task_or_experiment: Explained, inputs_struct: Mapping[str, object] | None = None
) -> tuple[SingleTask, Mapping[str, object] | None]:
  """Returns the instantiated task, and the shapes of a batch if they are known."""
  named, inputs, _ = subject_of(task_or_experiment, inputs_struct)
  task = named.instantiate() if isinstance(named, Config) else named
  if not isinstance(task, SingleTask):
    raise ConfigError(f'explain takes a task, its config or an experiment, not {type(task).__name__}')
  return task, inputs


def batch_of(datasets: Sequence[Config]) -> Mapping[str, object] | None:
  """Returns the shapes and dtypes of a global batch, preferably a training batch; None if they depend on the data."""
  training = [c for c in datasets if getattr(c, 'is_training', False)] or datasets
  for config in training:
    try:
      return fill_required(config).instantiate().batch_struct()
    except (UserError, OSError):
      continue
  return None


def trace_task(jax_task: SingleTask, layout: StateLayout, inputs_struct: Mapping[str, object]) -> TracedStep:
  """Traces the train step of a task whose state has this layout, on a mesh that needs no devices.

  Raises:
    UserError: a mapping does not fit its activation, its input or the mesh, or the step cannot run on it.
  """
  task = PartitionedTask(jax_task, dict(inputs_struct), layout=layout)
  found: dict[tuple[object, ...], SplitConstraint] = {}

  def listener(constraint: SplitConstraint) -> None:
    key = (constraint.field, constraint.shape, str(constraint.dtype))
    if constraint.remark or key not in found:  # If one field splits several arrays, the one with a remark is kept.
      found[key] = constraint

  jaxpr = task.trace_train_step(listener)
  return TracedStep(task, list(found.values()), jaxpr)


def report_of(jax_task: SingleTask, layout: StateLayout, step: TracedStep | None) -> ShardingReport:
  """Returns explanations of all arrays of a task whose state has this layout; only of its state if `step` is None."""
  sizes, exchanges = dict(layout.mesh.shape), declared_exchanges(jax_task.model)
  state = parameter_table(jax_task, sizes), _slots(layout, sizes)
  if step is None:
    return ShardingReport(sizes, *state, [], [], exchanges)
  for constraint in step.constraints:
    if constraint.exchange is not None:  # The layer declared it while the step was traced.
      layer = constraint.field.partition('.activation_split_dims_mapping.')[0]
      exchanges[f'{layer}.{constraint.exchange.field}'] = constraint.exchange
  return ShardingReport(sizes, *state, _activations(step.constraints, sizes), _inputs(step.task, sizes), exchanges)


def declared_exchanges(model: Layer) -> dict[str, Exchange]:
  """Returns the communication that layers of a model declare, by the path of the config field that causes it."""
  return {f'{layer.path_name}.{e.field}': e for layer in model.descendants() for e in layer.exchanges()}


def _slots(layout: StateLayout, sizes: Mapping[str, int]) -> list[Explanation]:
  """Explains each array of the optimizer's state and of the moving averages."""
  variables, variable_specs = leaves_by_path(layout.unpadded_shapes.mdl_vars), leaves_by_path(layout.specs.mdl_vars)
  found = []
  for part in ('opt_states', 'ema_vars'):
    specs = leaves_by_path(getattr(layout.specs, part))
    for path, struct in leaves_by_path(getattr(layout.unpadded_shapes, part)).items():
      owner = owner_of(path, variables)
      name = path_name(owner or ())
      remarks: tuple[str, ...] = ()
      if owner is None:
        why = 'of no variable, so replicated'
        remarks = (why,)
      elif tuple(struct.shape) != tuple(variables[owner].shape):
        why = f'as the dimensions that it keeps of its variable {name}'
        remarks = (f'its variable has shape {tuple(variables[owner].shape)}',)
      elif specs[path] == variable_specs[owner]:
        why = f'as its variable {name}'
      else:
        why = f'unlike its variable {name}, which is {tuple(variable_specs[owner])}'
      dims = dimensions(struct.shape, Placement(specs[path], (why,) * len(struct.shape)), sizes)
      dtype = np.dtype(struct.dtype) if not jax.numpy.issubdtype(struct.dtype, jax.dtypes.extended) else np.dtype('u4')
      found.append(Explanation(path_name((part, *path)), ArrayKind.SLOT, dims, dtype, sizes, remarks, owner=name))
  return found


def _activations(constraints: Iterable[SplitConstraint], sizes: Mapping[str, int]) -> list[Explanation]:
  """Explains each activation that a layer constrains."""
  counts: collections.Counter[str] = collections.Counter()
  found = []
  for constraint in constraints:
    name, of_weight = constraint.field, '.weight_split_dims_mapping.' in constraint.field
    name = re.sub(r'\.(activation|weight)_split_dims_mapping\.', '.', name) + (' (as used)' if of_weight else '')
    counts[name] += 1
    name += f'[{counts[name]}]' if counts[name] > 1 else ''
    rank, placement, per_device = len(constraint.shape), constraint.placement, bool(constraint.manual_axes)
    remarks: tuple[str, ...] = ()
    if per_device:
      why = 'inside shard_map: each device computes its own part'
      placement = Placement(PartitionSpec(*(None,) * rank), (why,) * rank)
      remarks = ('mappings of activations do nothing inside shard_map',)
    elif placement is None:
      placement = Placement(PartitionSpec(*(UNCONSTRAINED,) * rank), (f'{constraint.field} is not set',) * rank)
      remarks = ('left to the compiler',)
    elif UNCONSTRAINED in placement.spec:
      free = ', '.join(str(dim) for dim, entry in enumerate(placement.spec) if entry is UNCONSTRAINED)
      remarks = (f'left to the compiler: dimension {free}',)
    remarks = (*remarks, *filter(None, [constraint.remark]))
    array = name, ArrayKind.ACTIVATION, dimensions(constraint.shape, placement, sizes), np.dtype(constraint.dtype)
    found.append(Explanation(*array, sizes, remarks, per_device=per_device, of_weight=of_weight))
  return found


def _inputs(task: PartitionedTask, sizes: Mapping[str, int]) -> list[Explanation]:
  """Explains how a step splits each array of a batch. Rows that fill up the batch count as padding."""
  rows = task.train_rows
  over = 'all mesh axes' if rows.apart or task.row_parts == task.mesh.size else number_of(task.row_parts, 'part')
  taken = f'; the step takes {task.batch_size} of them, and computes {rows.computed}' if rows.apart else ''
  found = []
  for path, struct in leaves_by_path(padded_batch_shape(task.batch_shape, rows.computed)).items():
    dims = dimensions(struct.shape, task.execution.place_input(struct), sizes)
    dims = (dataclasses.replace(dims[0], size=task.batch_size), *dims[1:])
    remarks = (f'enters a step with dimension 0 over {over}, as {number_of(rows.entering, "row")}{taken}',)
    name = path_name(('inputs', *path))
    found.append(Explanation(name, ArrayKind.INPUT, dims, np.dtype(struct.dtype), sizes, remarks))
  return found
