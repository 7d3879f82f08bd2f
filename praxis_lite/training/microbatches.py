"""Accumulates gradients over microbatches, with exactly the result of one pass over the whole batch.

A batch of B rows is divided into k microbatches; microbatch i has the rows i, i + k, i + 2 k, ... So if the batch is
split over devices, each device divides its own rows, and no data moves. The loss of the batch is the mean of the losses
of the microbatches, weighted by w_i:

    loss = sum_i w_i loss_i / sum_i w_i          gradient = sum_i w_i gradient_i / sum_i w_i

If there are several losses, each has its own weights.

The gradients g_i of k microbatches also measure the gradient noise (McCandlish et al., 2018). Let s be the variance of
the gradient of one row or, more exactly, of as many rows or tokens as have a weight of 1. Let G be the gradient of
infinitely many rows. Then, in expectation,

    P = weighted mean of |g_i|^2 = |G|^2 + k s / W         Q = |gradient|^2 = |G|^2 + s / W        W = sum_i w_i

so s = W (P - Q) / (k - 1) and |G|^2 = (k Q - P) / (k - 1), with means of P and Q over steps. The noise scale
is s / |G|^2: the batch size at which noise and signal are equal.

Inside `shard_map`, each of the n devices along the batch axes has its own rows, of weight w_d. The loss of device d is
scaled by n w_d / W, where W is the sum of all w_d. Then the mean of the scaled losses over devices is exactly the loss
of the whole batch, and so for gradients. This holds even if devices have rows of unequal weight or only padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict, Path, leaves, map_with_path, merge, select
from praxis_lite.common.weighted import WeightedScalars, mean_of_means, mean_over_devices
from praxis_lite.layers.base.call import Summary, part_kind
from praxis_lite.sharding.explicit import ShardedParam, also_named, to_axes
from praxis_lite.sharding.specs import all_axes

_TreeT = TypeVar('_TreeT')
_BatchT = TypeVar('_BatchT')
# A loss, a scalar; or several losses by name.
Losses: TypeAlias = jax.Array | dict[str, jax.Array]
_SQUARES = '~squares of gradients'


class LossOutput(NamedTuple):
  """The outputs of a loss function besides the loss.

  Attributes:
    weight: weight of the loss in the mean over microbatches, such as the number of tokens; if there are several losses,
      a dict with the weight of each.
    metrics: (mean, weight) of each metric.
    per_example: tree of arrays with the batch as dimension 0.
    summaries: summaries by name, from the last microbatch with a nonzero weight; parts of statistics are combined over
      all microbatches.
    updates: new values of non-trainable variables, a part of the variable tree.
  """

  weight: Losses
  metrics: WeightedScalars
  per_example: NestedDict
  summaries: dict[str, Summary]
  updates: NestedDict


# (trained variables, other variables, key, batch) -> (loss, output)
LossFn = Callable[[_TreeT, NestedDict, jax.Array, _BatchT], tuple[jax.Array, LossOutput]]
# The same arguments -> ((loss, output), gradient with respect to the trained variables)
GradientFn = Callable[[Any, NestedDict, jax.Array, Any], Any]


def value_and_grad(
  loss_fn: LossFn[_TreeT, _BatchT],
  trained: _TreeT,
  others: NestedDict,
  key: jax.Array,
  batch: _BatchT,
  num_microbatches: int,
  paths_by_loss: Mapping[str, set[Path]] | None = None,
  *,
  reports_noise: bool = False,
  watch: Callable[[jax.Array], GradientFn] | None = None,
) -> tuple[Losses, LossOutput, _TreeT]:
  """Returns (loss, output, gradient with respect to `trained`).

  Args:
    loss_fn: see `LossFn`; the variables that it updates are among `others`.
    trained: the variables to differentiate by.
    others: all other variables; each microbatch gets the updates of the previous one.
    key: PRNG key; each microbatch folds in its index.
    batch, num_microbatches: tree of arrays [B, ...], and k, which must divide B.
    paths_by_loss: for several losses, the paths of the variables that each one trains. `loss_fn` then also takes the
      name of the loss, and all losses are returned by name.
    reports_noise: adds the metrics `grad_noise/variance`, s above, and `grad_noise/signal`, |G|^2; needs a single loss
      and at least two microbatches.
    watch: (w_i / sum_i w_i) -> the function that computes the gradients of a single loss in microbatch i; None means
      `jax.value_and_grad`.

  Raises:
    ConfigError: k does not divide B.
  """
  grad_fn: GradientFn = jax.value_and_grad(loss_fn, has_aux=True)
  if paths_by_loss is not None:
    grad_fn = _gradients_of_several(loss_fn, paths_by_loss)
  if num_microbatches == 1:
    grad_fn = grad_fn if watch is None else watch(jnp.ones((), jnp.float32))
    (loss, output), gradients = grad_fn(trained, others, key, batch)
    return loss, output, gradients

  microbatches = jax.tree.map(lambda x: split_rows(x, num_microbatches), batch)
  changed: set[Path] = set()

  def add(total: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
    # A microbatch of padding has weight zero; its loss may be NaN, and must be ignored.
    return total + jnp.where(weight != 0, weight * x.astype(jnp.float32), 0)

  def weights_of_losses(weight: Losses) -> Any:
    """Returns, for each trained variable, the weight of its loss."""
    if paths_by_loss is None or not isinstance(weight, dict):
      return jax.tree.map(lambda _: weight, trained)
    names = {path: name for name, paths in paths_by_loss.items() for path in paths}
    return map_with_path(lambda path, _: weight[names[path]], trained)

  def one(
    carry: tuple[_TreeT, Losses, Losses, NestedDict], xs: tuple[jax.Array, _BatchT, jax.Array | None]
  ) -> tuple[tuple[_TreeT, Losses, Losses, NestedDict], LossOutput]:
    # On GPUs, XLA merges two iterations of a loop. Without the barrier, it begins a microbatch before the previous one
    # has ended, and stores the activations of both.
    carry, xs = jax.lax.optimization_barrier((carry, xs))
    gradients, losses, weights, others = carry
    index, microbatch, share = xs
    of_one = grad_fn if watch is None or share is None else watch(share)
    (losses_i, output), gradients_i = of_one(trained, others, jax.random.fold_in(key, index), microbatch)
    gradients = jax.tree.map(add, gradients, gradients_i, weights_of_losses(output.weight))
    losses = jax.tree.map(add, losses, losses_i, output.weight)
    weights = jax.tree.map(jnp.add, weights, output.weight)
    changed.update(leaves(output.updates))
    updated = merge(others, output.updates)
    if reports_noise:
      output = output._replace(metrics={**output.metrics, _SQUARES: (_squares(gradients_i), output.weight)})
    return (gradients, losses, weights, updated), output._replace(updates={})

  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained)
  zero = jnp.zeros((), jnp.float32)
  no_loss: Losses = zero if paths_by_loss is None else dict.fromkeys(paths_by_loss, zero)
  start = (zeros, no_loss, no_loss, others)
  indices, shares = jnp.arange(num_microbatches), None
  if watch is not None:  # This only computes weights; XLA removes the unused losses.
    one_weight = lambda xs: loss_fn(trained, others, jax.random.fold_in(key, xs[0]), xs[1])[1].weight  # noqa: E731
    weights_i: Any = jax.lax.map(one_weight, (indices, microbatches))
    shares = weights_i / jnp.where(jnp.sum(weights_i) == 0, 1, jnp.sum(weights_i))
  (gradients, losses, weight, updated), outputs = jax.lax.scan(one, start, (indices, microbatches, shares))
  divisor = jax.tree.map(lambda w: jnp.where(w == 0, 1.0, w), weight)
  counts = functools.reduce(jnp.logical_or, (w != 0 for w in jax.tree.leaves(outputs.weight)))
  last = num_microbatches - 1 - jnp.argmax(counts[::-1])
  gradients = jax.tree.map(lambda g, v, d: (g / d).astype(v.dtype), gradients, trained, weights_of_losses(divisor))
  metrics = {name: mean_of_means(*metric) for name, metric in outputs.metrics.items()}
  if reports_noise:
    metrics |= _noise(metrics.pop(_SQUARES)[0], _squares(gradients), jnp.asarray(outputs.weight))
  output = LossOutput(
    weight=weight,
    metrics=metrics,
    per_example=jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), outputs.per_example),
    summaries={name: _reduce_microbatches(summary, last) for name, summary in outputs.summaries.items()},
    updates=select(updated, changed.__contains__),
  )
  return jax.tree.map(jnp.divide, losses, divisor), output, gradients


def _squares(gradients: object) -> jax.Array:
  return sum((jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradients)), jnp.zeros(()))


def _noise(of_parts: jax.Array, of_whole: jax.Array, weights: jax.Array) -> WeightedScalars:
  """Returns the metrics of gradient noise, given P, Q and the weights w_i; see the top of this file."""
  k = jnp.sum(weights != 0)
  others = jnp.maximum(k - 1, 1)
  is_known = (k > 1).astype(jnp.float32)
  return {
    'grad_noise/variance': (jnp.sum(weights) * (of_parts - of_whole) / others, is_known),
    'grad_noise/signal': ((k * of_whole - of_parts) / others, is_known),
  }


def _reduce_microbatches(stacked: Summary, last: jax.Array) -> Summary:
  """Returns the summary of a whole batch: combines parts of a statistic; takes other values from microbatch `last`."""
  if (kind := part_kind(stacked)) is not None:
    return Summary(kind.combine(stacked.value), stacked.kind)
  return Summary(jax.lax.dynamic_index_in_dim(stacked.value, last, keepdims=False), stacked.kind)


def _gradients_of_several(loss_fn: Callable[..., Any], paths_by_loss: Mapping[str, set[Path]]) -> Callable[..., Any]:
  def gradients(trained: Any, others: NestedDict, key: jax.Array, batch: Any) -> Any:
    losses, found, outputs = {}, [], {}
    for name, paths in paths_by_loss.items():
      frozen = merge(others, select(trained, (leaves(trained).keys() - paths).__contains__))
      of_loss = jax.value_and_grad(functools.partial(loss_fn, name=name), has_aux=True)
      (losses[name], outputs[name]), part = of_loss(select(trained, paths.__contains__), frozen, key, batch)
      found.append(part)
    weights = {name: output.weight for name, output in outputs.items()}
    return (losses, outputs[name]._replace(weight=weights)), merge(*found)

  return gradients


def split_rows(x: jax.Array, parts: int) -> jax.Array:
  """Reshapes [B, ...] to [k, B / k, ...]; part i has the rows i, i + k, i + 2 k, ...

  Raises ConfigError if k does not divide B.
  """
  if x.shape[0] % parts:
    raise ConfigError(
      f'task.train.learner.num_microbatches: a batch of {x.shape[0]} does not divide into {parts} microbatches'
    )
  return jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)


@also_named(grads='gradients', axis_name='axes', axis_names='axes')
def sync_gradients(gradients: _TreeT, axes: str | Sequence[str], specs: object = None) -> _TreeT:
  """Averages gradients, inside `shard_map`, over the axes in `axes` that do not split their parameters.

  Over the axes that split a parameter, `gather_array_with_mean_grads` has already averaged its gradient.

  Args:
    gradients: tree of arrays or `ShardedParam`s.
    axes: the mesh axis, or axes, over which the batch is split.
    specs: tree with the PartitionSpec of each parameter; None uses those of the `ShardedParam`s, and assumes that all
      other parameters are replicated.
  """
  batch_axes = to_axes(axes)

  def sync(gradient: jax.Array | ShardedParam, spec: PartitionSpec | None = None) -> jax.Array | ShardedParam:
    split = gradient.spec if isinstance(gradient, ShardedParam) else spec
    taken = all_axes(split or ())
    over = tuple(a for a in batch_axes if a not in taken)
    return jax.tree.map(lambda g: jax.lax.pmean(g, over), gradient) if over else gradient

  trees = (gradients,) if specs is None else (gradients, specs)
  with jax.named_scope('sync_gradients'):
    return jax.tree.map(sync, *trees, is_leaf=lambda x: isinstance(x, ShardedParam))


def scaled_loss(loss: jax.Array, weight: jax.Array, axes: Sequence[str]) -> tuple[jax.Array, jax.Array]:
  """Returns (loss * n w / W, W), inside `shard_map`, so that the mean over devices is the mean weighted by w.

  No gradient flows through the weight w. If it is zero, so is the scaled loss.
  """
  weight = jax.lax.stop_gradient(weight.astype(jnp.float32))
  if not axes:
    return loss, weight
  total = jax.lax.psum(weight, tuple(axes))
  scale = jax.lax.axis_size(tuple(axes)) * weight / jnp.where(total == 0, 1.0, total)
  return jnp.where(weight == 0, 0.0, loss * scale), total


@also_named(axis_name='axes', axis_names='axes', rng='key')
def accumulate_gradients(
  loss_fn: Callable[[_TreeT, jax.Array, _BatchT], tuple[jax.Array, WeightedScalars]],
  params: _TreeT,
  key: jax.Array,
  batch: _BatchT,
  num_microbatches: int,
  axes: str | Sequence[str] = (),
) -> tuple[jax.Array, WeightedScalars, _TreeT]:
  """Returns (loss, metrics, gradients) of a batch that is computed in parts, exactly as if it were computed at once.

  Args:
    loss_fn: (params, key, batch) -> (mean loss, metrics); the metrics include the loss and its weight as 'loss'.
    params: tree of arrays, or of `ShardedParam`s which `loss_fn` gathers.
    key: PRNG key; each microbatch folds in its index.
    batch: this device's rows, a tree of arrays [B, ...].
    num_microbatches: the number of parts; it must divide B.
    axes: inside `shard_map`, the axes over which the batch is split. The results are then those of the whole batch,
      except the gradients of replicated parameters, which must still be averaged by `sync_gradients`.

  Raises:
    ConfigError: the number of parts does not divide B.
  """
  names = to_axes(axes)

  def loss_of_part(params: _TreeT, others: NestedDict, key: jax.Array, batch: _BatchT) -> tuple[jax.Array, LossOutput]:
    loss, metrics = loss_fn(params, key, batch)
    loss, total = scaled_loss(loss, metrics['loss'][1], names)
    return loss, LossOutput(total, metrics, {}, {}, {})

  with jax.named_scope('accumulate_gradients'):
    loss, output, gradients = value_and_grad(loss_of_part, params, {}, key, batch, num_microbatches)
  return jax.lax.pmean(loss, names), mean_over_devices(output.metrics, names), gradients
