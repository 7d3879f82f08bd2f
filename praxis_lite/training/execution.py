"""How a step is executed: the differences between one device, XLA-placed communication, and `shard_map`.

    Execution        one device: all rows, whole weights; every method is the identity
    CompilerPlaced   the step sees global arrays in their true shapes; XLA inserts the communication
    ShardMapped      each device runs the step on its own rows and its own shards; every collective is written here

Under `shard_map` the state has the same layout, so checkpoints, evaluation and decoding are not affected:

    batch axes      all mesh axes except those of tensor-parallel layers; each device takes its own rows
    split weights   gathered by the layer that uses them, in the dtype in which the layer computes, and again in the
                    backward pass; a scan over layers gathers one layer at a time; their gradients are
                    mean-reduce-scattered
    whole weights   their gradients are averaged once per step, after all microbatches
    KEEP_SPLIT      the layer uses this device's shard; the weight is neither gathered nor averaged over that axis
    optimizer       updates each device's shard; norms are sums over all shards
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from praxis_lite.common.errors import ConfigError, prefix_errors
from praxis_lite.common.trees import NestedDict, Path, leaves, leaves_by_path, map_with_path, path_name
from praxis_lite.common.weighted import mean_over_devices
from praxis_lite.layers.base.call import Surroundings, summary_over_devices
from praxis_lite.sharding.constraints import reshard_input_based_on_rank_fn
from praxis_lite.sharding.explicit import ShardedParam, fold_rng_over_axis, take_own_part
from praxis_lite.sharding.layout import StateLayout
from praxis_lite.sharding.padding import num_parts
from praxis_lite.sharding.specs import (
  HasShape,
  Placement,
  all_axes,
  infer_partition_spec_based_on_rank_fn,
  shard_on_batch_dim_partition_spec,
  spec_axes,
)
from praxis_lite.sharding.weights import WeightHParams, WeightHParamsCollection
from praxis_lite.training.learning.owners import Splits
from praxis_lite.training.microbatches import Losses, LossOutput, scaled_loss, sync_gradients
from praxis_lite.training.state import TrainState
from praxis_lite.training.taps import StepTaps
from praxis_lite.training.task import SingleTask

T = TypeVar('T')
# (state, key, inputs) -> the fields of a `TrainStepOutput`, the new state first
TrainStep = Callable[[TrainState, jax.Array, NestedDict], tuple[Any, ...]]


class Execution:
  """A step on one device, without a mesh. Calls of the model get `surroundings`; `taps` observe values of a step."""

  surroundings = Surroundings()
  taps: StepTaps | None = None
  num_losses = 1  # The number of devices whose losses are averaged.

  @property
  def splits(self) -> Splits | None:
    """How the mesh splits the variables; None without a mesh."""
    return None

  def device_key(self, key: jax.Array) -> jax.Array:
    """Returns the PRNG key for this device."""
    return key

  def readable(self, variables: NestedDict) -> NestedDict:
    """Returns variables in a form that layers can read: stacks can be indexed, and `read_weight` does the rest."""
    return variables

  def updatable(self, others: NestedDict) -> NestedDict:
    """Returns non-trained variables in a form that the model can update in each microbatch."""
    return others

  def share_of_loss(self, loss: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (loss to differentiate, weight of the whole batch), given the mean loss over the local rows."""
    return loss, weight

  def combine(self, loss: Losses, out: LossOutput, gradients: NestedDict) -> tuple[Losses, LossOutput, NestedDict]:
    """Returns loss, output and gradients of the whole batch; gradients and `out.updates` are this device's shards."""
    return loss, out, gradients

  def sum_parts(self, sums: NestedDict) -> NestedDict:
    """Returns sums over whole variables, given sums over this device's shards.

    Each sum is a scalar, or [layers, 1, ...] for a stack of layers.
    """
    return sums

  def whole(self, path: Path, part: jax.Array) -> jax.Array:
    """Returns a whole array in its true shape; `part` is this device's shard of it.

    The array is split like the variable `path`.
    """
    return part


class CompilerPlaced(Execution):
  """A step on a mesh as a program on global arrays; XLA inserts the communication."""

  def __init__(self, jax_task: SingleTask, layout: StateLayout):
    self._task, self._layout = jax_task, layout
    self._names = layout.mesh.axis_names

  @property
  def splits(self) -> Splits:
    return splits_of(self._layout)

  def wrap(self, step: TrainStep) -> TrainStep:
    """Converts a step on unpadded arrays to a step on the padded state and padded global inputs."""

    def train_step(state: TrainState, prng_key: jax.Array, inputs: NestedDict) -> tuple[Any, ...]:
      state, *others = step(self._layout.unpad(state), prng_key, self.split_inputs(inputs))
      return (self._layout.pad(state), *others)

    return train_step

  def place_input(self, x: HasShape) -> Placement:
    """Returns how an array of a global batch is split in a step, and why."""
    with prefix_errors('task.train'):
      spec = infer_partition_spec_based_on_rank_fn(self._task.train.inputs_split_mapping, self._names, x)
    why = f'train.inputs_split_mapping.map_{len(x.shape)}d'
    if spec is None:
      spec = shard_on_batch_dim_partition_spec(self._names, x)
      why = f'{why} is not set: dimension 0 over all mesh axes'
    return Placement(spec, (why,) * len(x.shape))

  def split_inputs(self, inputs: T) -> T:
    """Constrains a batch by the task's `inputs_split_mapping`, inside a step."""
    with prefix_errors('task.train'):
      return reshard_input_based_on_rank_fn(self._task.train.inputs_split_mapping, self._names, inputs)


class ShardMapped(Execution):
  """A step on a mesh as a per-device program, run by `shard_map`.

  Raises ConfigError if the optimizer needs whole variables that the layout splits, or the mesh does not divide a
  KEEP_SPLIT weight evenly.
  """

  def __init__(self, jax_task: SingleTask, layout: StateLayout):
    self._task, self._layout, self._mesh = jax_task, layout, layout.mesh
    self._sizes = dict(layout.mesh.shape)
    self._weights: dict[Path, WeightHParams] = leaves_by_path(jax_task.model.abstract_init())
    self._specs: dict[Path, PartitionSpec] = leaves_by_path(layout.specs.mdl_vars)
    self.kept_axes = kept = self._kept_axes()
    self.batch_axes = tuple(a for a, size in self._sizes.items() if a not in kept and size > 1)
    self.num_losses = math.prod(self._sizes[a] for a in self.batch_axes)
    self._check_optimizer()
    if jax_task.learner.report_noise_scale and layout.mesh.size > 1:
      raise ConfigError(
        "task.train.learner.report_noise_scale: under partitioning='shard_map', each device has only the gradients of "
        "its own rows until the end of a step; set task.partitioning='auto'"
      )
    # The mesh axes over which each dimension of a variable may be gathered.
    self._split = {
      path: ((),) * len(self._specs[path]) if _keeps_split(weight) else self._axes_of(path)
      for path, weight in self._weights.items()
    }
    self._gathered = {
      (*jax_task.model.path, *path): path
      for path, weight in self._weights.items()
      if not weight.is_updated_by_layer and any(self._split[path][len(weight.repeat_prefix) :])
    }
    self.surroundings = Surroundings(
      read_weight=self._read,
      reading_gathers=bool(self._gathered),
      sum_over_rows=lambda x: jax.lax.psum(x, self.batch_axes),
      manual_axes=frozenset(layout.mesh.axis_names),
    )

  @property
  def splits(self) -> Splits:
    return splits_of(self._layout, inside=True)

  def wrap(self, step: TrainStep) -> TrainStep:
    mapping = self._task.train.inputs_split_mapping
    rows, whole = PartitionSpec(self.batch_axes or None), PartitionSpec()
    mapped = jax.shard_map(
      lambda *arguments: tuple(step(*arguments)),
      mesh=self._mesh,
      in_specs=(self._layout.specs, whole, rows),
      out_specs=(self._layout.specs, whole, whole, rows, whole),
      # Off, so that layers need not declare which values vary over which axes; outputs are replicated by construction.
      check_vma=False,
    )

    def train_step(state: TrainState, prng_key: jax.Array, inputs: NestedDict) -> tuple[Any, ...]:
      with prefix_errors('task.train'):
        for x in jax.tree.leaves(inputs):
          # The mapping has no effect, since rows are split over the batch axes, but it must be valid.
          infer_partition_spec_based_on_rank_fn(mapping, self._mesh.axis_names, x)
      state, *others = mapped(self._layout.fetch(state), prng_key, inputs)
      return (self._layout.send_to_host(state), *others)

    return train_step

  def place_input(self, x: HasShape) -> Placement:
    why = "partitioning='shard_map': each device takes its own rows"
    return Placement(shard_on_batch_dim_partition_spec(self.batch_axes, x), (why,) * len(x.shape))

  def device_key(self, key: jax.Array) -> jax.Array:
    return fold_rng_over_axis(key, self.batch_axes)

  def readable(self, variables: NestedDict) -> NestedDict:
    """Returns variables that are whole along the dimensions that repeating layers add, which those layers index."""

    def readable(path: Path, x: jax.Array) -> jax.Array:
      weight = self._weights[path]
      return x if weight.is_updated_by_layer else self._gather(path, x, range(len(weight.repeat_prefix)))

    return map_with_path(readable, variables)

  def updatable(self, others: NestedDict) -> NestedDict:
    def whole(path: Path, x: jax.Array) -> jax.Array:
      return self._gather(path, x, range(x.ndim)) if self._weights[path].is_updated_by_layer else x

    return map_with_path(whole, others)

  def share_of_loss(self, loss: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    return scaled_loss(loss, weight, self.batch_axes)

  def combine(self, loss: Losses, out: LossOutput, gradients: NestedDict) -> tuple[Losses, LossOutput, NestedDict]:
    specs = map_with_path(lambda path, _: self._specs[path], gradients)
    out = out._replace(
      metrics=mean_over_devices(out.metrics, self.batch_axes),
      summaries={name: summary_over_devices(s, self.batch_axes) for name, s in out.summaries.items()},
      updates=map_with_path(self._take_own_update, out.updates),
    )
    return jax.lax.pmean(loss, self.batch_axes), out, sync_gradients(gradients, self.batch_axes, specs)

  def sum_parts(self, sums: NestedDict) -> NestedDict:
    groups: dict[tuple[str, ...], dict[Path, jax.Array]] = {}
    for path, x in leaves_by_path(sums).items():
      summed = tuple(self._specs[path])[len(self._weights[path].repeat_prefix) if x.ndim else 0 :]
      axes = tuple(a for a, size in self._sizes.items() if size > 1 and a in all_axes(summed))
      groups.setdefault(axes, {})[path] = x
    complete: dict[Path, jax.Array] = groups.pop((), {})
    for axes, parts in groups.items():  # One all-reduce for all parts of a group.
      flat, unflatten = ravel_pytree(parts)
      complete |= unflatten(jax.lax.psum(flat, axes))
    return map_with_path(lambda path, _: complete[path], sums)

  def whole(self, path: Path, part: jax.Array) -> jax.Array:
    return ShardedParam(part, self._axes_of(path), self._weights[path].full_shape).gather()

  # ---------------------------------------------------------------- shards

  def _axes_of(self, path: Path) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes that split each dimension of a variable."""
    return tuple(spec_axes(entry) if num_parts(entry, self._sizes) > 1 else () for entry in self._specs[path])

  def _read(self, path: Path, stored: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    if path not in self._gathered:
      return stored if dtype is None else stored.astype(dtype)
    own = self._gathered[path]
    weight = self._weights[own]
    return self._gather(own, stored, range(len(weight.repeat_prefix), len(weight.full_shape)), dtype)

  def _gather(self, path: Path, part: jax.Array, dims: range, dtype: DTypeLike | None = None) -> jax.Array:
    """Gathers some dimensions of a variable. A scan may have removed the first dimensions of `part`."""
    shape = self._weights[path].full_shape
    axes = tuple(a if dim in dims else () for dim, a in enumerate(self._split[path]))
    cut = len(shape) - part.ndim
    return ShardedParam(part, axes[cut:], shape[cut:]).gather(dtype)

  def _take_own_update(self, path: Path, value: jax.Array) -> jax.Array:
    """Averages the new value of a non-trained variable over devices, and returns this device's shard of the average."""
    value = jax.lax.pmean(value, self.batch_axes) if jnp.issubdtype(value.dtype, jnp.floating) else value
    return value if _keeps_split(self._weights[path]) else take_own_part(value, self._specs[path])

  # ---------------------------------------------------------------- checks

  def _kept_axes(self) -> set[str]:
    kept = {path: weight for path, weight in self._weights.items() if _keeps_split(weight)}
    padded = leaves_by_path(self._layout.padded_shapes.mdl_vars)
    for path, weight in kept.items():
      if padded[path].shape != weight.full_shape:
        raise ConfigError(
          f'{path_name(path)}: shape {weight.full_shape} does not divide by {self._specs[path]}; '
          "a tensor-parallel layer under partitioning='shard_map' takes equal parts"
        )
    return {axis for path in kept for axis in all_axes(self._specs[path])}

  def _check_optimizer(self) -> None:
    learner = self._task.bind_learner()
    split: dict[Path, tuple[int, ...]] = {}
    for path in leaves(self._task.model.abstract_init()):
      dims = tuple(dim for dim, axes in enumerate(self._axes_of(path)) if axes)
      if dims and learner.is_trained(path):
        split[path] = dims
    where, names = learner.needs_whole(split)
    if names:
      other = 'use an elementwise optimizer such as adamw'
      if any('learner.moments' in name for name in names):
        other = "set it to 'bfloat16'"
      if where.endswith('layer_decay'):
        other = 'remove layer_decay'
      if where.endswith('clip_gradient_unit_ratio'):
        other = 'use clip_gradient_single_norm_to_value'
      raise ConfigError(
        f"task.train.{where}: {', '.join(names)} needs whole tensors, and under partitioning='shard_map' each device "
        f'updates its part of {path_name(next(iter(split)))}; {other}, leave the weights whole, or set '
        "task.partitioning='auto'"
      )


MeshExecution = CompilerPlaced | ShardMapped
EXECUTIONS: dict[str, Callable[[SingleTask, StateLayout], MeshExecution]] = {
  'auto': CompilerPlaced,
  'shard_map': ShardMapped,
}


def splits_of(layout: StateLayout, inside: bool = False) -> Splits:
  """Returns how a mesh splits the variables; `inside` is whether steps run inside `shard_map`."""
  shapes = {path: x.shape for path, x in leaves_by_path(layout.unpadded_shapes.mdl_vars).items()}
  return Splits(shapes, leaves_by_path(layout.specs.mdl_vars), dict(layout.mesh.shape), inside)


def _keeps_split(weight: WeightHParams) -> bool:
  return WeightHParamsCollection.KEEP_SPLIT in weight.collections
