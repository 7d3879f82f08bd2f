"""Weighted means: pairs (mean, weight), and how they combine exactly over tokens, microbatches, devices and batches.

    (m1, w1) and (m2, w2)  ->  ((m1 w1 + m2 w2) / (w1 + w2), w1 + w2)

A mean of weight zero does not count, even if its value is NaN. Means of total weight zero are 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from praxis_lite.common.errors import DataError

WeightedScalar = tuple[jax.Array, jax.Array]
"""A mean and its weight."""
WeightedScalars = dict[str, WeightedScalar]
"""Metrics: means and their weights by name."""


def weighted_mean(values: jax.Array, weights: jax.Array, axis: int | None = None) -> WeightedScalar:
  """Returns (sum(values * weights) / sum(weights), sum(weights)) in float32, and (0, 0) if all weights are zero.

  Values of zero weight are arbitrary, even NaN. A weight that is NaN makes the mean NaN, so that it is noticed.

  Args:
    values: any shape.
    weights: the same shape, at least 0.
    axis: the dimension to average over; None means all.

  Raises:
    DataError: the shapes differ.
  """
  if values.shape != weights.shape:
    raise DataError(
      f'weighted_mean: values {values.shape} have weights {weights.shape}; each value needs one of its own'
    )
  product, weights = _product(values, weights)
  return _mean(jnp.sum(product, axis), jnp.sum(weights, axis))


def mean_of_means(means: jax.Array, weights: jax.Array) -> WeightedScalar:
  """Returns (mean, weight) over dimension 0 of stacked pairs, in float32.

  Args:
    means: [k, ...].
    weights: [k], or [k, ...] with some of the next dimensions of the means.
  """
  product, weights = _product(means, weights)
  return _mean(jnp.sum(product, axis=0), jnp.sum(weights, axis=0))


def mean_over_devices(metrics: Mapping[str, WeightedScalar], axes: Sequence[str]) -> WeightedScalars:
  """Inside `shard_map`: returns each pair combined over the devices along `axes`, by one all-reduce.

  A mean may be an array. Its weight then has the same shape, or that of the mean's first dimensions.
  """
  if not axes:
    return dict(metrics)
  sums = {name: _product(jnp.asarray(mean), jnp.asarray(weight)) for name, (mean, weight) in metrics.items()}
  flat, unflatten = ravel_pytree(sums)
  return {name: _mean(*pair) for name, pair in unflatten(jax.lax.psum(flat, tuple(axes))).items()}


def _product(means: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
  means, weights = means.astype(jnp.float32), weights.astype(jnp.float32)
  by_mean = _expand(weights, means.ndim)
  return zero_where(by_mean == 0, means * by_mean), weights


def _mean(total: jax.Array, weight: jax.Array) -> WeightedScalar:
  divisor = weight + (weight == 0)  # Never zero. `jnp.where` would take twice as long to trace, for every metric.
  return total / _expand(divisor, total.ndim), weight


def zero_where(condition: jax.Array, x: jax.Array) -> jax.Array:
  """Returns `x` with zeros where `condition` is True. The condition is a boolean array that broadcasts to x's shape.

  This is `jnp.where(condition, 0, x)`, but it traces, and is differentiated, in a third of the time.
  """
  return jax.lax.select(jnp.broadcast_to(condition, x.shape), jnp.zeros_like(x), x)


def _expand(weights: jax.Array, rank: int) -> jax.Array:
  return weights.reshape(weights.shape + (1,) * (rank - weights.ndim))
