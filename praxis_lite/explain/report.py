"""explain: why any variable, optimizer slot, activation or input of a task lies where it does.

All from shapes: a model of any size, on a mesh of any size, in a second or so on a laptop.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from praxis_lite.call import Constraint
from praxis_lite.config import Config
from praxis_lite.errors import ConfigError, did_you_mean
from praxis_lite.experiment import BaseExperiment, ExperimentConfig, configure
from praxis_lite.explain.batches import inputs_struct as batch_of
from praxis_lite.explain.explanation import Dimension, Explanation, Kind
from praxis_lite.explain.sources import layers_to, mapping_sources, repeat_fields, weight_field
from praxis_lite.explain.tracing import Trace, abstract_mesh, trace_model
from praxis_lite.partitioning.batch import padded_batch_shape
from praxis_lite.partitioning.layout import StateLayout
from praxis_lite.partitioning.padding import num_parts
from praxis_lite.partitioning.slots import owner_of
from praxis_lite.partitioning.specs import infer_partition_spec_based_on_rank_fn, spec_axes
from praxis_lite.partitioning.strategies import Decision
from praxis_lite.task import SingleTask
from praxis_lite.training.state import place_task_variables, state_layout
from praxis_lite.trees import Path, leaves_by_path
from praxis_lite.weights import WeightHParams, WeightHParamsCollection


@dataclasses.dataclass(frozen=True)
class ShardingReport:
  """An `Explanation` of every array of a task.

  Attributes:
    mesh_sizes: size of each mesh axis.
    variables, slots, activations, inputs: in the order of their trees; activations in that of the forward pass.
      Activations and inputs are empty where the shapes of a batch are not known.
  """

  mesh_sizes: Mapping[str, int]
  variables: list[Explanation]
  slots: list[Explanation]
  activations: list[Explanation]
  inputs: list[Explanation]

  def all(self) -> list[Explanation]:
    """All of them."""
    return [*self.variables, *self.slots, *self.activations, *self.inputs]

  def find(self, path: str) -> Explanation:
    """Returns the one with this path.

    Args:
      path: 'lm.softmax.w' or 'mdl_vars.lm.softmax.w'; 'opt_states...' or 'ema_vars...'; 'inputs.ids'; an activation's
        'lm.softmax.out' or the field that splits it.

    Raises:
      ConfigError: there is none.
    """
    wanted = path.replace('/', '.').removeprefix('mdl_vars.').replace('.activation_split_dims_mapping.', '.')
    known = {e.path: e for e in reversed(self.all())}
    if wanted not in known:
      below = [p for p in known if p.startswith(f'{wanted}.')]
      hint = f' Below it are {", ".join(sorted(below)[:5])}.' if below else did_you_mean(wanted, known)
      raise ConfigError(f'explain: there is no variable, optimizer slot, activation or input {path!r}.{hint}')
    return known[wanted]


def explain(
  task_or_experiment: Any, path: str, inputs_struct: Any = None, mesh_sizes: Mapping[str, int] | None = None
) -> Explanation:
  """Returns where one array lies on the mesh, and what decided it.

  Args:
    task_or_experiment: a task or its config, an experiment class, or what `configure` made of one.
    path: see `ShardingReport.find`.
    inputs_struct: shapes and dtypes of a batch, for activations and inputs; by default those of the experiment's data.
    mesh_sizes: size of each mesh axis; by default those the task asks for.

  Raises:
    ConfigError: there is no such array.
    ShardingError: a mapping, rule or strategy does not fit.
  """
  return explain_task(task_or_experiment, inputs_struct, mesh_sizes).find(path)


def explain_task(
  task_or_experiment: Any, inputs_struct: Any = None, mesh_sizes: Mapping[str, int] | None = None
) -> ShardingReport:
  """Returns explanations of all arrays of a task; arguments and errors as of `explain`."""
  jax_task, inputs_struct = task_and_inputs(task_or_experiment, inputs_struct)
  sizes = dict(jax_task.mesh_sizes() if mesh_sizes is None else mesh_sizes)
  layout = state_layout(jax_task, abstract_mesh(sizes))
  trace = None if inputs_struct is None else trace_model(jax_task, inputs_struct, sizes)
  return ShardingReport(
    sizes,
    explain_variables(jax_task, sizes),
    explain_slots(layout, sizes),
    [] if trace is None else explain_activations(jax_task, trace, sizes),
    [] if inputs_struct is None else explain_inputs(jax_task, inputs_struct, sizes),
  )


def task_and_inputs(task_or_experiment: Any, inputs_struct: Any = None) -> tuple[SingleTask, Any]:
  """Returns the built task and the shapes of a batch, of whatever names them."""
  if isinstance(task_or_experiment, type) and issubclass(task_or_experiment, BaseExperiment):
    task_or_experiment = configure(task_or_experiment)
  if isinstance(task_or_experiment, ExperimentConfig):
    if inputs_struct is None:
      inputs_struct = batch_of(task_or_experiment)
    task_or_experiment = task_or_experiment.task
  if isinstance(task_or_experiment, Config):
    task_or_experiment = task_or_experiment.instantiate()
  if not isinstance(task_or_experiment, SingleTask):
    raise ConfigError(f'explain takes a task, its config or an experiment, not {type(task_or_experiment).__name__}')
  return task_or_experiment, inputs_struct


# ---------------------------------------------------------------- the four kinds


def explain_variables(jax_task: SingleTask, sizes: Mapping[str, int]) -> list[Explanation]:
  """Returns an explanation of each variable of the model."""
  weights = leaves_by_path(jax_task.model.abstract_init())
  decisions = leaves_by_path(place_task_variables(jax_task, sizes))
  found = []
  for path, weight in weights.items():
    decision, struct = decisions[path], weight.as_struct()
    sources = _variable_sources(jax_task, path, weight, decision)
    dims = dimensions(struct.shape, decision.spec, sizes, sources)
    remarks = decision.remarks if weight.trainable else (*decision.remarks, 'not trained by the optimizer')
    found.append(Explanation('.'.join(path), Kind.VARIABLE, dims, np.dtype(struct.dtype), sizes, remarks))
  return found


def _variable_sources(jax_task: SingleTask, path: Path, weight: WeightHParams, decision: Decision) -> tuple[str, ...]:
  layers = layers_to(jax_task.model, path)
  mapping = weight.tensor_split_dims_mapping
  field = weight_field(layers, mapping)
  prefix = len(weight.repeat_prefix)
  if mapping is not None:
    own = mapping_sources(mapping, PartitionSpec(*decision.spec[prefix:]), jax_task.logical_axis_rules, field)
  elif decision.pattern is not None:
    left = f'strategy {decision.pattern!r} leaves it whole'
    own = tuple(source or left for source in decision.sources[prefix:])
  else:
    why = 'no pattern of the strategy matches' if jax_task.strategy is not None else 'is not set'
    own = (f'{field} {why}' if jax_task.strategy is None else why,) * len(weight.shape)
  stacked = tuple(
    source if source.startswith('strategy') else stack
    for source, stack in zip(decision.sources, repeat_fields(layers, weight))
  )
  return (*stacked, *own)


def explain_slots(layout: StateLayout, sizes: Mapping[str, int]) -> list[Explanation]:
  """Returns an explanation of each array of the optimizer's state and of the moving averages."""
  variables = leaves_by_path(layout.unpadded_shapes.mdl_vars)
  variable_specs = leaves_by_path(layout.specs.mdl_vars)
  found = []
  for part in ('opt_states', 'ema_vars'):
    structs = leaves_by_path(getattr(layout.unpadded_shapes, part))
    specs = leaves_by_path(getattr(layout.specs, part))
    for path, struct in structs.items():
      owner = owner_of(path, variables)
      remarks: tuple[str, ...] = ()
      name = '' if owner is None else '.'.join(owner)
      if owner is None:
        source, remarks = 'of no variable, so replicated', ('of no variable, so replicated',)
      elif tuple(struct.shape) == tuple(variables[owner].shape) and specs[path] == variable_specs[owner]:
        source = f'as its variable {name}'
      elif tuple(struct.shape) == tuple(variables[owner].shape):
        source = f'unlike its variable {name}, which is {tuple(variable_specs[owner])}'
      else:
        source = f'the dimensions it has left of its variable {name}'
        remarks = (f'its variable has shape {tuple(variables[owner].shape)}',)
      dims = dimensions(struct.shape, specs[path], sizes, (source,) * len(struct.shape))
      dtype = np.dtype(struct.dtype) if not jax.dtypes.issubdtype(struct.dtype, jax.dtypes.extended) else np.dtype('u4')
      found.append(Explanation('.'.join((part, *path)), Kind.SLOT, dims, dtype, sizes, remarks, owner=name))
  return found


def explain_activations(jax_task: SingleTask, trace: Trace, sizes: Mapping[str, int]) -> list[Explanation]:
  """Returns an explanation of each activation that a layer names.

  Under partitioning='shard_map' each device computes its own rows, and mappings of activations do nothing.
  """
  counts: dict[str, itertools.count[int]] = {}
  found = []
  for constraint in trace.constraints:
    name = constraint.field.replace('.activation_split_dims_mapping.', '.')
    if '.weight_split_dims_mapping.' in name:
      name = name.replace('.weight_split_dims_mapping.', '.') + ' (as used)'
    number = next(counts.setdefault(name, itertools.count(1)))
    found.append(_activation(f'{name}[{number}]' if number > 1 else name, constraint, jax_task, sizes))
  return found


def _activation(name: str, constraint: Constraint, jax_task: SingleTask, sizes: Mapping[str, int]) -> Explanation:
  spec, rank = constraint.spec, len(constraint.shape)
  explicit = jax_task.partitioning == 'shard_map'
  if spec is None or explicit:
    whole = PartitionSpec(*(None,) * rank)
    why = "partitioning='shard_map': of its own rows on each device" if explicit else f'{constraint.field} is not set'
    dims = dimensions(constraint.shape, whole, sizes, (why,) * rank)
    remarks = ('mappings of activations do nothing here',) if explicit else ('left to the compiler',)
    return Explanation(name, Kind.ACTIVATION, dims, np.dtype(constraint.dtype), sizes, remarks, constrained=False)
  sources = mapping_sources(constraint.mapping, spec, jax_task.logical_axis_rules, constraint.field)
  dims = dimensions(constraint.shape, spec, sizes, sources)
  return Explanation(name, Kind.ACTIVATION, dims, np.dtype(constraint.dtype), sizes)


def explain_inputs(jax_task: SingleTask, inputs_struct: Any, sizes: Mapping[str, int]) -> list[Explanation]:
  """Returns an explanation of each array of a batch, as it lies inside a step."""
  mapping = jax_task.train.inputs_split_mapping
  everywhere = tuple(sizes)
  multiple = int(np.prod(list(sizes.values()))) * jax_task.learner.num_microbatches
  padded = leaves_by_path(padded_batch_shape(inputs_struct, multiple))
  found = []
  for path, struct in leaves_by_path(inputs_struct).items():
    rank, field = len(struct.shape), f'train.inputs_split_mapping.map_{len(struct.shape)}d'
    spec = infer_partition_spec_based_on_rank_fn(mapping, everywhere, struct)
    if jax_task.partitioning == 'shard_map':
      spec = PartitionSpec(explicit_batch_axes(jax_task, sizes), *(None,) * (rank - 1))
      field = "partitioning='shard_map': each device takes its own rows"
    elif spec is None:
      spec = PartitionSpec(everywhere, *(None,) * (rank - 1))
      field = f'{field} is not set: dimension 0 over all mesh axes'
    dims = list(dimensions(padded[path].shape, spec, sizes, (field,) * rank))
    dims[0] = dataclasses.replace(dims[0], size=int(struct.shape[0]))
    remarks = (f'enters a step with dimension 0 over all mesh axes, as {padded[path].shape[0]} rows',)
    found.append(
      Explanation('.'.join(('inputs', *path)), Kind.INPUT, tuple(dims), np.dtype(struct.dtype), sizes, remarks)
    )
  return found


def explicit_batch_axes(jax_task: SingleTask, sizes: Mapping[str, int]) -> tuple[str, ...]:
  """The mesh axes that rows are split over under partitioning='shard_map': all but those of tensor parallel layers."""
  weights = leaves_by_path(jax_task.model.abstract_init())
  decisions = leaves_by_path(place_task_variables(jax_task, sizes))
  kept = {
    axis
    for path, weight in weights.items()
    if WeightHParamsCollection.KEEP_SPLIT in weight.collections
    for entry in decisions[path].spec
    for axis in spec_axes(entry)
  }
  return tuple(axis for axis in sizes if axis not in kept)


def dimensions(
  shape: Sequence[int], spec: PartitionSpec, sizes: Mapping[str, int], sources: Sequence[str]
) -> tuple[Dimension, ...]:
  """Returns the dimensions of an array of `shape` under a spec of full rank."""
  parts = [num_parts(entry, sizes) for entry in spec]
  return tuple(
    Dimension(int(size), spec_axes(entry), n, -(-int(size) // n), source)
    for size, entry, n, source in zip(shape, spec, parts, sources)
  )
