"""Gradients and metrics inside `shard_map`: accumulated over microbatches, and brought together over devices.

Each of the n devices along the batch axes has rows of its own, of weight w_d. With the loss of device d scaled by
n w_d / W, W the sum of all w_d, the mean over devices of losses and gradients is exactly that of the whole batch, also
where devices have rows of unequal weight or, at the end of a batch, of none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.partitioning.accumulate import LossOutput, WeightedScalars, value_and_grad
from praxis_lite.partitioning.explicit.sharded_params import ShardedParam
from praxis_lite.partitioning.specs import spec_axes


def sync_gradients(gradients: Any, axes: str | Sequence[str], specs: Any = None) -> Any:
  """Inside `shard_map`: averages each gradient over those of `axes` that its parameter is replicated on.

  Over the axes that split a parameter, its gradient is averaged already: by `gather_array_with_mean_grads`.

  Args:
    gradients: tree of arrays or `ShardedParam`s.
    axes: the mesh axis, or axes, that the batch is split over.
    specs: tree with the PartitionSpec of each parameter; None takes it from the `ShardedParam`s, and all else for
      replicated.
  """
  batch_axes = (axes,) if isinstance(axes, str) else tuple(axes)

  def sync(gradient: Any, spec: Any = None) -> Any:
    split = gradient.spec if isinstance(gradient, ShardedParam) else spec
    taken = {a for entry in split or () for a in spec_axes(entry)}
    over = tuple(a for a in batch_axes if a not in taken)
    return jax.tree.map(lambda g: jax.lax.pmean(g, over), gradient) if over else gradient

  trees = (gradients,) if specs is None else (gradients, specs)
  return jax.tree.map(sync, *trees, is_leaf=lambda x: isinstance(x, ShardedParam))


def sync_metrics(metrics: WeightedScalars, axes: str | Sequence[str]) -> WeightedScalars:
  """Inside `shard_map`: returns (mean, weight) over the devices along `axes`, by the exact sums of both.

  A device whose weight is zero adds nothing, whatever its mean is.
  """
  if not axes:
    return metrics
  axes = (axes,) if isinstance(axes, str) else tuple(axes)
  pairs = {name: (jnp.float32(mean), jnp.float32(weight)) for name, (mean, weight) in metrics.items()}
  sums = {name: (jnp.where(w == 0, 0.0, m * w), w) for name, (m, w) in pairs.items()}
  stacked = jax.lax.psum(jnp.stack([jnp.stack(pair) for pair in sums.values()]), axes)
  return {name: (s / jnp.where(w == 0, 1.0, w), w) for name, (s, w) in zip(sums, stacked)}


def scaled_loss(loss: jax.Array, weight: jax.Array, axes: Sequence[str]) -> tuple[jax.Array, jax.Array]:
  """Inside `shard_map`: returns (loss * n w / W, W), so that the mean over devices is the mean by weight.

  Args:
    loss: mean loss of this device's rows.
    weight: w, their weight. No gradient flows through it. Where it is zero, so is the scaled loss.
    axes: the axes that the batch is split over.
  """
  weight = jax.lax.stop_gradient(weight.astype(jnp.float32))
  if not axes:
    return loss, weight
  total = jax.lax.psum(weight, tuple(axes))
  scale = jax.lax.axis_size(tuple(axes)) * weight / jnp.where(total == 0, 1.0, total)
  return jnp.where(weight == 0, 0.0, loss * scale), total


def accumulate_gradients(
  loss_fn: Callable[[Any, jax.Array, Any], tuple[jax.Array, WeightedScalars]],
  params: Any,
  key: jax.Array,
  batch: Any,
  num_microbatches: int,
  axes: str | Sequence[str] = (),
) -> tuple[jax.Array, WeightedScalars, Any]:
  """Returns (loss, metrics, gradients) of a batch that goes through in parts, exactly as if at once.

  Args:
    loss_fn: (params, key, batch) -> (mean loss, metrics), with the loss and its weight among the metrics, as 'loss'.
    params: tree of arrays, or of `ShardedParam`s which `loss_fn` gathers.
    key: PRNG key; each microbatch takes it folded with its number.
    batch: this device's rows, a tree of arrays [B, ...].
    num_microbatches: into how many parts the rows are cut; B must divide by it.
    axes: inside `shard_map`, the axes that the batch is split over: all that is returned is of the whole batch, but for
      the gradients of replicated parameters, which `sync_gradients` has to average.

  Raises:
    ConfigError: B does not divide.
  """
  names = (axes,) if isinstance(axes, str) else tuple(axes)

  def scaled(params: Any, others: Any, key: jax.Array, batch: Any) -> tuple[jax.Array, LossOutput]:
    loss, metrics = loss_fn(params, key, batch)
    loss, total = scaled_loss(loss, metrics['loss'][1], names)
    return loss, LossOutput(total, metrics, {}, {}, {})

  loss, output, gradients = value_and_grad(scaled, params, {}, key, batch, num_microbatches)
  loss = jax.lax.pmean(loss, names) if names else loss
  return loss, sync_metrics(output.metrics, names), gradients
