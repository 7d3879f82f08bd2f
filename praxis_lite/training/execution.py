"""How a step runs: what differs between one device, a mesh whose communication XLA places, and `shard_map`.

    Execution        one device: all rows, whole weights; every method is the identity
    CompilerPlaced   the step sees global arrays in their true shapes; XLA places the communication
    ShardMapped      each device runs the step on its own rows and its own parts; every collective is written here

Under `shard_map` the state has the layout that the task's mappings, rules and strategy give it, so that checkpoints,
evaluation and decoding know no difference:

    batch axes      all mesh axes but those of tensor-parallel layers; each device takes its own rows
    split weights   gathered by the layer that uses them, in the dtype it computes in, and gathered again in the
                    backward pass; inside a scan over layers, layer by layer; their gradients are mean-reduce-scattered
    whole weights   their gradients are averaged, once a step, after all microbatches
    KEEP_SPLIT      weights that a layer takes as its part of; they are neither gathered nor averaged over that axis
    optimizer       updates each device's part; norms are sums over all parts
    metrics         sums of mean * weight and of weight

Replicated weights alone make it data parallel; weights split over the batch axes, fully sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from praxis_lite.call import Summary, Surroundings
from praxis_lite.errors import ConfigError, located
from praxis_lite.partitioning import guards
from praxis_lite.partitioning.constraints import reshard_input_based_on_rank_fn, with_sharding_constraint
from praxis_lite.partitioning.explicit import ShardedParam, fold_rng_over_axis, own_part
from praxis_lite.partitioning.layout import StateLayout
from praxis_lite.partitioning.padding import num_parts
from praxis_lite.partitioning.specs import (
  HasShape,
  Placement,
  infer_partition_spec_based_on_rank_fn,
  place_by_rank,
  shard_on_batch_dim_partition_spec,
  spec_axes,
  to_partition_spec,
)
from praxis_lite.task import SingleTask
from praxis_lite.training.microbatches import LossOutput, scaled_loss, sync_gradients
from praxis_lite.training.state import TrainState
from praxis_lite.trees import NestedDict, Path, leaves, leaves_by_path, map_with_path, path_name
from praxis_lite.weighted import mean_over_devices
from praxis_lite.weights import WeightHParams, WeightHParamsCollection

T = TypeVar('T')
# (state, key, inputs) -> the fields of a `TrainStepOutput`, the new state first
TrainStep = Callable[[TrainState, jax.Array, NestedDict], tuple[Any, ...]]


class Execution:
  """A step on one device, without a mesh.

  Attributes:
    surroundings: of the model's calls.
  """

  surroundings = Surroundings()

  def wrapped(self, step: TrainStep) -> TrainStep:
    """Returns a step of padded state and padded global inputs from one of what `step` sees of them."""
    return step

  def place_input(self, x: HasShape) -> Placement:
    """How an array of a global batch is split in a step, and why."""
    rank = len(x.shape)
    return Placement(PartitionSpec(*(None,) * rank), ('without a mesh',) * rank)

  def device_key(self, key: jax.Array) -> jax.Array:
    """The key that this device draws with."""
    return key

  def readable(self, variables: NestedDict) -> NestedDict:
    """Variables as the model's layers may slice and read them."""
    return variables

  def updatable(self, others: NestedDict) -> NestedDict:
    """Variables that are not trained, as the model may update them, microbatch after microbatch."""
    return others

  def share_of_loss(self, loss: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (loss to differentiate, weight of the whole batch) of a mean loss over the rows at hand."""
    return loss, weight

  def combined(
    self, loss: jax.Array, out: LossOutput, gradients: NestedDict
  ) -> tuple[jax.Array, LossOutput, NestedDict]:
    """Returns the loss, outputs and gradients of the whole batch; updates and gradients of this device's parts."""
    return loss, out, gradients

  def sum_parts(self, sums: NestedDict) -> NestedDict:
    """Completes, for each trained variable, a sum over the part at hand to the sum over the variable.

    Args:
      sums: scalars, or arrays in which all but the repeat prefix is summed over.
    """
    return sums


class CompilerPlaced(Execution):
  """A step on a mesh as a program of global arrays, for which XLA places the communication.

  Args:
    jax_task: an instantiated task.
    layout: of its state.
  """

  def __init__(self, jax_task: SingleTask, layout: StateLayout):
    self._task, self._layout = jax_task, layout
    self._names = layout.mesh.axis_names
    used = guards.gathered_specs(leaves_by_path(layout.specs.mdl_vars), self._row_specs(), dict(layout.mesh.shape))
    self._used = {(*jax_task.model.path, *path): spec for path, spec in used.items()}
    self.surroundings = Surroundings(read_weight=self._read)

  def wrapped(self, step: TrainStep) -> TrainStep:
    def train_step(state: TrainState, prng_key: jax.Array, inputs: NestedDict) -> tuple[Any, ...]:
      state, *others = step(self._layout.unpad(state), prng_key, self.split_inputs(inputs))
      return (self._layout.pad(state), *others)

    return train_step

  def place_input(self, x: HasShape) -> Placement:
    with located('task.train'):
      placement = place_by_rank(self._task.train.inputs_split_mapping, self._names, x)
    rank = len(x.shape)
    field = f'train.inputs_split_mapping.map_{rank}d'
    if placement is not None:
      return Placement(placement.spec, (field,) * rank)
    why = f'{field} is not set: dimension 0 over all mesh axes'
    return Placement(shard_on_batch_dim_partition_spec(self._names, x), (why,) * rank)

  def split_inputs(self, inputs: T) -> T:
    """Inside a step: constrains a batch by the task's `inputs_split_mapping`."""
    with located('task.train'):
      return reshard_input_based_on_rank_fn(self._task.train.inputs_split_mapping, self._names, inputs)

  def _row_specs(self) -> list[PartitionSpec]:
    with located('task.train'):
      inputs = [
        to_partition_spec(mapping, self._names, path=f'inputs_split_mapping.{key}')
        for key, mapping in (self._task.train.inputs_split_mapping or {}).items()
        if mapping
      ]
    return [*inputs, *self._task.model.activation_specs()]

  def _read(self, path: Path, stored: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    weight = stored if dtype is None else stored.astype(dtype)
    spec = self._used.get(path)
    return (
      weight
      if spec is None
      else with_sharding_constraint(weight, PartitionSpec(*tuple(spec)[len(spec) - weight.ndim :]))
    )


class ShardMapped(Execution):
  """A step on a mesh as a program of one device, through `shard_map`.

  Args:
    jax_task: an instantiated task.
    layout: of its state.

  Raises:
    ConfigError: the optimizer needs whole tensors and the layout splits them, or a KEEP_SPLIT weight does not divide.
  """

  def __init__(self, jax_task: SingleTask, layout: StateLayout):
    self._task, self._layout, self._mesh = jax_task, layout, layout.mesh
    self._sizes = dict(layout.mesh.shape)
    self._weights: dict[Path, WeightHParams] = leaves_by_path(jax_task.model.abstract_init())
    self._specs: dict[Path, PartitionSpec] = leaves_by_path(layout.specs.mdl_vars)
    kept = self._kept_axes()
    self.batch_axes = tuple(a for a, size in self._sizes.items() if a not in kept and size > 1)
    self._check_optimizer()
    self._gathered = {
      (*jax_task.model.path, *path): parameter
      for path, weight in self._weights.items()
      if weight.trainable and (parameter := self._sharded(path, skip=len(weight.repeat_prefix))) is not None
    }
    self.surroundings = Surroundings(
      read_weight=self._read,
      reading_gathers=bool(self._gathered),
      sum_over_rows=self._sum_over_rows,
      manual_axes=frozenset(layout.mesh.axis_names),
    )

  def wrapped(self, step: TrainStep) -> TrainStep:
    mapping = self._task.train.inputs_split_mapping
    rows, whole = PartitionSpec(self.batch_axes or None), PartitionSpec()
    mapped = jax.shard_map(
      lambda *arguments: tuple(step(*arguments)),
      mesh=self._mesh,
      in_specs=(self._layout.specs, whole, rows),
      out_specs=(self._layout.specs, whole, whole, rows, whole),
      # What is replicated is so by construction: layers need not say what varies over which axis.
      check_vma=False,
    )

    def train_step(state: TrainState, prng_key: jax.Array, inputs: NestedDict) -> tuple[Any, ...]:
      with located('task.train'):
        for x in jax.tree.leaves(inputs):
          # Rows are split over the batch axes whatever the mapping says, but it must be a valid one.
          infer_partition_spec_based_on_rank_fn(mapping, self._mesh.axis_names, x)
      return mapped(state, prng_key, inputs)

    return train_step

  def place_input(self, x: HasShape) -> Placement:
    why = "partitioning='shard_map': each device takes its own rows"
    return Placement(shard_on_batch_dim_partition_spec(self.batch_axes, x), (why,) * len(x.shape))

  def device_key(self, key: jax.Array) -> jax.Array:
    return fold_rng_over_axis(key, self.batch_axes)

  def readable(self, variables: NestedDict) -> NestedDict:
    """Gathers the leading dimensions that repeating layers cut away, where these are split."""

    def readable(path: Path, x: jax.Array) -> jax.Array:
      weight = self._weights[path]
      stack = self._sharded(path, keep=len(weight.repeat_prefix)) if weight.trainable else None
      return x if stack is None else stack(x).gather()

    return map_with_path(readable, variables)

  def updatable(self, others: NestedDict) -> NestedDict:
    def whole(path: Path, x: jax.Array) -> jax.Array:
      parameter = None if self._weights[path].trainable else self._sharded(path)
      return x if parameter is None else parameter(x).gather()

    return map_with_path(whole, others)

  def share_of_loss(self, loss: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    return scaled_loss(loss, weight, self.batch_axes)

  def combined(
    self, loss: jax.Array, out: LossOutput, gradients: NestedDict
  ) -> tuple[jax.Array, LossOutput, NestedDict]:
    specs = map_with_path(lambda path, _: self._specs[path], gradients)
    out = out._replace(
      metrics=mean_over_devices(out.metrics, self.batch_axes),
      summaries={name: self._one_summary(summary) for name, summary in out.summaries.items()},
      updates=map_with_path(self._own_update, out.updates),
    )
    return self._mean(loss), out, sync_gradients(gradients, self.batch_axes, specs)

  def sum_parts(self, sums: NestedDict) -> NestedDict:
    flat, structure = jax.tree_util.tree_flatten_with_path(sums)
    by_path = leaves_by_path(sums)
    values = [x for _, x in flat]
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, (path, x) in enumerate(by_path.items()):
      summed = tuple(self._specs[path])[len(self._weights[path].repeat_prefix) if x.ndim else 0 :]
      axes = tuple(a for a, size in self._sizes.items() if size > 1 and a in _axes(summed))
      groups.setdefault(axes, []).append(i)
    for axes, members in groups.items():
      if axes:
        # One all-reduce for all of a group.
        total = jax.lax.psum(jnp.concatenate([values[i].reshape(-1) for i in members]), axes)
        for i in members:
          values[i], total = total[: values[i].size].reshape(values[i].shape), total[values[i].size :]
    return jax.tree_util.tree_unflatten(structure, values)

  # ---------------------------------------------------------------- parts

  def _read(self, path: Path, stored: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    parameter = self._gathered.get(path)
    if parameter is not None:
      return parameter(stored).gather(dtype)
    return stored if dtype is None else stored.astype(dtype)

  def _sharded(
    self, path: Path, *, skip: int = 0, keep: int | None = None
  ) -> Callable[[jax.Array], ShardedParam] | None:
    """What makes a `ShardedParam` of the stored part of a variable; None where nothing is to be gathered.

    Args:
      path: of the variable.
      skip: leading dimensions that are not there any more.
      keep: only so many leading dimensions are gathered; None gathers all.
    """
    if WeightHParamsCollection.KEEP_SPLIT in self._weights[path].collections:
      return None
    shape = self._weights[path].full_shape
    axes = tuple(spec_axes(e) if num_parts(e, self._sizes) > 1 else () for e in self._specs[path])
    axes = tuple(a if keep is None or i < keep else () for i, a in enumerate(axes))
    if not any(axes[skip:]):
      return None
    return lambda part: ShardedParam(part, axes[skip:], shape[skip:])

  def _sum_over_rows(self, x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, self.batch_axes) if self.batch_axes else x

  def _mean(self, x: jax.Array) -> jax.Array:
    return jax.lax.pmean(x, self.batch_axes) if self.batch_axes else x

  def _own_update(self, path: Path, value: jax.Array) -> jax.Array:
    """This device's part of the new value of a variable that is not trained: the mean over devices."""
    value = self._mean(value) if jnp.issubdtype(value.dtype, jnp.floating) else value
    kept = WeightHParamsCollection.KEEP_SPLIT in self._weights[path].collections
    return value if kept else own_part(value, self._specs[path])

  def _one_summary(self, summary: Summary) -> Summary:
    """Scalars are averaged over the devices that share the batch; of all else, the first device's is kept."""
    x = summary.value
    if not self.batch_axes:
      return summary
    if summary.kind == 'scalar' and jnp.issubdtype(x.dtype, jnp.floating):
      return Summary(self._mean(x), summary.kind)
    first = jnp.where(jax.lax.axis_index(self.batch_axes) == 0, x, jnp.zeros_like(x))
    return Summary(jax.lax.psum(first, self.batch_axes), summary.kind)

  # ---------------------------------------------------------------- checks

  def _kept_axes(self) -> set[str]:
    kept: set[str] = set()
    padded = leaves_by_path(self._layout.padded_shapes.mdl_vars)
    for path, weight in self._weights.items():
      if WeightHParamsCollection.KEEP_SPLIT not in weight.collections:
        continue
      if padded[path].shape != weight.full_shape:
        raise ConfigError(
          f'{path_name(path)}: shape {weight.full_shape} does not divide by {self._specs[path]}; '
          "a tensor-parallel layer under partitioning='shard_map' takes equal parts"
        )
      kept |= _axes(self._specs[path])
    return kept

  def _check_optimizer(self) -> None:
    weights = self._task.model.abstract_init()
    learner = self._task.learner.bind(weights)
    trained = leaves(learner.trained(weights))
    split = [path for path in trained if any(self._sizes[a] > 1 for a in _axes(self._specs[path]))]
    names = learner.not_elementwise() if split else []
    if names:
      raise ConfigError(
        f"learner.optimizer: {', '.join(names)} needs whole tensors, and under partitioning='shard_map' each device "
        f'updates its part of {path_name(split[0])}; use an elementwise optimizer such as adamw, leave the weights '
        "whole, or set task.partitioning='auto'"
      )


EXECUTIONS: dict[str, Callable[[SingleTask, StateLayout], Execution]] = {
  'auto': CompilerPlaced,
  'shard_map': ShardMapped,
}


def _axes(spec: Iterable[object]) -> set[str]:
  return {a for entry in spec for a in spec_axes(entry)}
