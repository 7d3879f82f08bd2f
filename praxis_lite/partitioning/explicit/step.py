"""The train step of `partitioning='shard_map'`: every collective is written down here, and none is left to XLA.

The state has the layout that the task's mappings, rules and strategy give it, the same as under compiler placement, so
that checkpoints, evaluation and decoding know no difference. What the step makes of it:

    batch axes      all mesh axes, but for those of tensor parallel layers; each device takes its own rows
    split weights   gathered by the layer that uses them, in the dtype it computes in, and gathered again in the
                    backward pass; inside a scan over layers, layer by layer; their gradients are mean-reduce-scattered
    whole weights   their gradients are averaged, once a step, after all microbatches
    KEEP_SPLIT      weights that a layer takes as its part of; they are neither gathered nor averaged over that axis
    optimizer       updates each device's part; norms are sums over all parts
    metrics         sums of mean * weight and of weight

Replicated weights alone make it data parallel; weights split over the batch axes, fully sharded.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from praxis_lite.call import Summary, merge_updates, path_name
from praxis_lite.errors import ConfigError
from praxis_lite.partitioning import steps
from praxis_lite.partitioning.accumulate import LossOutput, value_and_grad
from praxis_lite.partitioning.explicit.gradients import scaled_loss, sync_gradients, sync_metrics
from praxis_lite.partitioning.explicit.rng import fold_rng_over_axis
from praxis_lite.partitioning.explicit.sharded_params import (
  ShardedParam,
  as_sharded,
  gather_params,
  own_part,
)
from praxis_lite.partitioning.layout import StateLayout
from praxis_lite.partitioning.paths import path_names
from praxis_lite.partitioning.specs import infer_partition_spec_based_on_rank_fn, spec_axes
from praxis_lite.partitioning.train_state import TrainState
from praxis_lite.weights import WeightHParamsCollection

PARTITIONINGS = ('auto', 'shard_map')
_KEEP_SPLIT = WeightHParamsCollection.KEEP_SPLIT

_batch_axes: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar('praxis_lite_batch_axes', default=())


def sum_over_batch(x: jax.Array) -> jax.Array:
  """Returns the sum of `x` over the devices that share a batch in an explicit step; elsewhere `x` itself.

  For layers whose statistics are of the whole batch. `x` is a sum over the rows at hand.
  """
  axes = _batch_axes.get()
  return jax.lax.psum(x, axes) if axes else x


class ExplicitTrainStep:
  """`(padded state, key, padded inputs) -> TrainStepOutput` through `shard_map`, for a jit around it.

  Args:
    jax_task: an instantiated task.
    layout: of its state on `mesh`.
    mesh: the mesh.

  Raises:
    ConfigError: the optimizer needs whole tensors, and the layout splits them.
    ShardingError: a KEEP_SPLIT weight does not divide.
  """

  def __init__(self, jax_task: steps.Task, layout: StateLayout, mesh: Mesh):
    self.jax_task, self.layout, self.mesh = jax_task, layout, mesh
    self.weights = jax_task.model.abstract_init()
    kept = self._kept_axes()
    self.batch_axes = tuple(a for a in mesh.axis_names if a not in kept and mesh.shape[a] > 1)
    self._check_optimizer()

  def __call__(self, state: TrainState, prng_key: jax.Array, inputs: Any) -> steps.TrainStepOutput:
    mapping = self.jax_task.train.inputs_split_mapping
    for x in jax.tree.leaves(inputs):
      # Rows are split over the batch axes whatever the mapping says, but it must be one.
      infer_partition_spec_based_on_rank_fn(mapping, self.mesh.axis_names, x)
    rows, whole = PartitionSpec(self.batch_axes or None), PartitionSpec()
    # Specs stand where the step's arrays will.
    out_specs: Any = steps.TrainStepOutput(*(self.layout.specs, whole, whole, rows, whole))  # type: ignore[arg-type]
    step = jax.shard_map(
      self._local_step,
      mesh=self.mesh,
      in_specs=(self.layout.specs, PartitionSpec(), rows),
      out_specs=out_specs,
      # What is replicated is so by construction: layers need not say what varies over which axis.
      check_vma=False,
    )
    return step(state, prng_key, inputs)

  # ---------------------------------------------------------------- on one device

  def _local_step(self, state: TrainState, prng_key: jax.Array, inputs: Any) -> steps.TrainStepOutput:
    learner, weights = self.jax_task.learner, self.weights
    specs = self.layout.specs.mdl_vars
    key = fold_rng_over_axis(jax.random.fold_in(prng_key, state.step), self.batch_axes)
    trained, others = learner.split(state.mdl_vars, weights)
    others = self._others(others)
    with self._entered():
      loss, out, gradients = value_and_grad(self._loss, trained, others, key, inputs, learner.num_microbatches)
    loss = jax.lax.pmean(loss, self.batch_axes) if self.batch_axes else loss
    gradients = sync_gradients(gradients, self.batch_axes, learner.trained(specs, weights))
    update = learner.update(
      gradients,
      loss,
      state.mdl_vars,
      state.opt_states,
      state.ema_vars,
      state.step,
      weights,
      sum_parts=self._sum_parts,
    )
    mdl_vars = merge_updates(update.mdl_vars, self._new_others(update.finite, out, state.mdl_vars))
    one = jnp.ones((), jnp.float32)
    metrics = sync_metrics(out.metrics, self.batch_axes)
    metrics = {**metrics, **{name: (value, one) for name, value in update.stats.items()}}
    new_state = TrainState(state.step + 1, mdl_vars, update.opt_states, update.ema_vars)
    return steps.TrainStepOutput(new_state, loss, metrics, out.per_example, self._one_summary(out.summaries))

  def _loss(self, trained: Any, others: Any, key: jax.Array, batch: Any) -> tuple[jax.Array, LossOutput]:
    variables = merge_updates(others, self._gathered_on_use(trained))
    (metrics, per_example), side = self.jax_task.model.apply(variables, batch, key=key, do_eval=False)
    loss, metrics = steps.with_aux_losses(metrics, side)
    loss, total = scaled_loss(loss, metrics['loss'][1], self.batch_axes)
    return loss, LossOutput(total, metrics, per_example, side.summaries, side.updates)

  def _gathered_on_use(self, tree: Any) -> Any:
    """Describes the part of each split weight, which its layer gathers where it reads it."""
    return self._map_weights(
      lambda x, weight, spec, shape: (
        x if _KEEP_SPLIT in weight.collections else as_sharded(x, spec, shape, len(weight.repeat_prefix), self.mesh)
      ),
      tree,
    )

  def _others(self, tree: Any) -> Any:
    """As `_gathered_on_use`; but what a call may update is gathered at once, for microbatches to pass on."""
    described = self._gathered_on_use(tree)
    return self._map_weights(lambda x, weight, *_: x if weight.trainable else gather_params(x), described)

  def _new_others(self, finite: jax.Array | None, out: LossOutput, mdl_vars: Any) -> Any:
    """This device's part of the new values of variables that are not trained: means over devices."""

    def new(key_path: Any, value: jax.Array) -> jax.Array:
      path = path_names(key_path)
      if self.batch_axes and jnp.issubdtype(value.dtype, jnp.floating):
        value = jax.lax.pmean(value, self.batch_axes)
      if _KEEP_SPLIT not in _at(self.weights, path).collections:
        value = own_part(value, _at(self.layout.specs.mdl_vars, path))
      return value if finite is None else jnp.where(finite, value, _at(mdl_vars, path))

    return jax.tree_util.tree_map_with_path(new, out.updates)

  def _one_summary(self, summaries: dict[str, Summary]) -> dict[str, Summary]:
    """Scalars are averaged over the devices that share the batch; of all else, the first device's is kept."""
    if not self.batch_axes:
      return summaries

    def one(summary: Summary) -> Summary:
      x = summary.value
      if summary.kind == 'scalar' and jnp.issubdtype(x.dtype, jnp.floating):
        return Summary(jax.lax.pmean(x, self.batch_axes), summary.kind)
      first = jnp.where(jax.lax.axis_index(self.batch_axes) == 0, x, jnp.zeros_like(x))
      return Summary(jax.lax.psum(first, self.batch_axes), summary.kind)

    return {name: one(summary) for name, summary in summaries.items()}

  def _sum_parts(self, sums: Any) -> Any:
    """Adds up, for each variable, sums over the parts of it that devices hold.

    Args:
      sums: for trained variables, scalars, or arrays in which all but the repeat prefix is summed over.
    """

    def axes_of(key_path: Any, x: jax.Array) -> tuple[str, ...]:
      path = path_names(key_path)
      spec = _at(self.layout.specs.mdl_vars, path)
      summed = spec[len(_at(self.weights, path).repeat_prefix) if x.ndim else 0 :]
      return tuple(a for a in self.mesh.axis_names if self.mesh.shape[a] > 1 and a in _axes(summed))

    flat, structure = jax.tree_util.tree_flatten_with_path(sums)
    values = [x for _, x in flat]
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, (key_path, x) in enumerate(flat):
      groups.setdefault(axes_of(key_path, x), []).append(i)
    for axes, members in groups.items():
      if axes:
        # One all-reduce for all of a group.
        total = jax.lax.psum(jnp.concatenate([values[i].reshape(-1) for i in members]), axes)
        for i in members:
          values[i], total = total[: values[i].size].reshape(values[i].shape), total[values[i].size :]
    return jax.tree_util.tree_unflatten(structure, values)

  # ---------------------------------------------------------------- what it is built from

  @contextlib.contextmanager
  def _entered(self) -> Iterator[None]:
    token = _batch_axes.set(self.batch_axes)
    try:
      yield
    finally:
      _batch_axes.reset(token)

  def _map_weights(self, fn: Callable[..., Any], tree: Any) -> Any:
    def one(key_path: Any, x: jax.Array) -> Any:
      path = path_names(key_path)
      shape = _at(self.layout.unpadded_shapes.mdl_vars, path).shape
      return fn(x, _at(self.weights, path), _at(self.layout.specs.mdl_vars, path), shape)

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=lambda x: isinstance(x, ShardedParam))

  def _kept_axes(self) -> set[str]:
    kept: set[str] = set()

    def visit(key_path: Any, weight: Any) -> None:
      if _KEEP_SPLIT not in weight.collections:
        return
      path = path_names(key_path)
      padded, true = (_at(t.mdl_vars, path).shape for t in (self.layout.padded_shapes, self.layout.unpadded_shapes))
      if padded != true:
        raise ConfigError(
          f'{path_name(path)}: shape {tuple(true)} does not divide by {_at(self.layout.specs.mdl_vars, path)}; '
          "a tensor parallel layer under partitioning='shard_map' takes equal parts"
        )
      kept.update(_axes(_at(self.layout.specs.mdl_vars, path)))

    jax.tree_util.tree_map_with_path(visit, self.weights)
    return kept

  def _check_optimizer(self) -> None:
    learner = self.jax_task.learner
    split = [
      path_names(key_path)
      for key_path, spec in jax.tree_util.tree_flatten_with_path(
        learner.trained(self.layout.specs.mdl_vars, self.weights)
      )[0]
      if any(self.mesh.shape[a] > 1 for a in _axes(spec))
    ]
    names = learner.not_elementwise()
    if split and names:
      raise ConfigError(
        f"learner.optimizer: {', '.join(names)} needs whole tensors, and under partitioning='shard_map' each device "
        f'updates its part of {path_name(split[0])}; use an elementwise optimizer such as adamw, leave the weights '
        "whole, or set task.partitioning='auto'"
      )


def _axes(spec: Any) -> set[str]:
  return {a for entry in spec for a in spec_axes(entry)}


def _at(tree: Any, path: tuple[str, ...]) -> Any:
  for name in path:
    tree = tree[name]
  return tree
