"""Gradients accumulated over microbatches, exactly: as if the batch had gone through at once.

A batch of B rows is cut into k microbatches of every k-th row, so that where the batch is split over devices each
device cuts its own rows and nothing moves. The loss of the batch is the mean of the microbatches' losses by their
weights w_i:

    loss = sum_i w_i loss_i / sum_i w_i          gradient = sum_i w_i gradient_i / sum_i w_i
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.errors import ConfigError

WeightedScalars = dict[str, tuple[jax.Array, jax.Array]]


class LossOutput(NamedTuple):
  """What a loss function returns beside the loss.

  Attributes:
    weight: weight of the loss in the mean over microbatches, such as the number of tokens.
    metrics: (mean, weight) of each metric.
    per_example: tree of arrays with the batch as dimension 0.
    summaries: tree of arrays; the last microbatch's are kept.
    updates: new values of non-trainable variables, a part of the variable tree.
  """

  weight: jax.Array
  metrics: WeightedScalars
  per_example: Any
  summaries: Any
  updates: Any


# (trained variables, other variables, key, batch) -> (loss, output)
LossFn = Callable[[Any, Any, jax.Array, Any], tuple[jax.Array, LossOutput]]


def value_and_grad(
  loss_fn: LossFn, trained: Any, others: Any, key: jax.Array, batch: Any, num_microbatches: int
) -> tuple[jax.Array, LossOutput, Any]:
  """Returns (loss, output, gradient with respect to `trained`).

  Args:
    loss_fn: see `LossFn`; its updates have the paths of `others`.
    trained: the variables to differentiate by.
    others: the other variables; a microbatch sees those that the one before it has updated.
    key: PRNG key; each microbatch takes it folded with its number.
    batch: tree of arrays [B, ...].
    num_microbatches: k; B must divide by it.

  Raises:
    ConfigError: B does not divide by k.
  """
  grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
  if num_microbatches == 1:
    (loss, output), gradients = grad_fn(trained, others, key, batch)
    return loss, output, gradients

  microbatches = jax.tree.map(lambda x: split_rows(x, num_microbatches), batch)

  def one(carry: Any, xs: Any) -> Any:
    gradients, loss, weight, others = carry
    index, microbatch = xs
    (loss_i, output), gradients_i = grad_fn(trained, others, jax.random.fold_in(key, index), microbatch)
    # A microbatch of padding alone weighs nothing, whatever its loss is.
    counts = output.weight != 0
    gradients = jax.tree.map(
      lambda total, g: total + jnp.where(counts, output.weight * g.astype(jnp.float32), 0), gradients, gradients_i
    )
    loss = loss + jnp.where(counts, output.weight * loss_i, 0)
    updated = _overlay(others, output.updates)
    return (gradients, loss, weight + output.weight, updated), output._replace(updates={})

  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained)
  start = (zeros, jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32), others)
  (gradients, loss, weight, updated), outputs = jax.lax.scan(one, start, (jnp.arange(num_microbatches), microbatches))
  divisor = jnp.where(weight == 0, 1.0, weight)
  gradients = jax.tree.map(lambda g, v: (g / divisor).astype(v.dtype), gradients, trained)
  output = LossOutput(
    weight=weight,
    metrics={name: weighted_mean(*metric) for name, metric in outputs.metrics.items()},
    per_example=jax.tree.map(join_rows, outputs.per_example),
    summaries=jax.tree.map(lambda x: x[-1], outputs.summaries),
    updates=updated,
  )
  return loss / divisor, output, gradients


def weighted_mean(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (mean, weight) over microbatches, float32; a value of weight zero may be anything, not finite too.

  Args:
    values: [k, ...]; layers that stack metrics add dimensions.
    weights: [k], or with leading dimensions of the values.
  """
  values, weights = values.astype(jnp.float32), weights.astype(jnp.float32)
  by_value = weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))
  total = jnp.sum(by_value, axis=0)
  weighted = jnp.sum(jnp.where(by_value == 0, 0, values * by_value), axis=0)
  return weighted / jnp.where(total == 0, 1, total), jnp.sum(weights, axis=0)


def split_rows(x: jax.Array, parts: int) -> jax.Array:
  """[B, ...] -> [k, B / k, ...], part i holding the rows i, i + k, i + 2 k, ..."""
  if x.shape[0] % parts:
    raise ConfigError(f'learner.num_microbatches: a batch of {x.shape[0]} does not divide into {parts} microbatches')
  return jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)


def join_rows(x: jax.Array) -> jax.Array:
  """The inverse of `split_rows`."""
  return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])


def _overlay(base: Any, updates: Any) -> Any:
  return {
    name: _overlay(node, updates[name]) if name in updates and isinstance(node, dict) else updates.get(name, node)
    for name, node in base.items()
  }
