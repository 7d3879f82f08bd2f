"""make_padding_finite: removes NaN and infinities from rows of weight 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from praxis_lite.common.trees import NestedDict


def make_padding_finite(batch: NestedDict) -> NestedDict:
  """Replaces NaN and infinities in rows of weight 0 by 0, because the gradient of 0 times NaN is NaN.

  Args:
    batch: arrays, and `weights`, [B, ...]; a row counts if any of its weights is not 0. If there are no weights, all
      rows count. Arrays whose first dimension is not B are returned unchanged.
  """
  weights = batch.get('weights')
  if weights is None:
    return batch

  def clear(x: jax.Array) -> jax.Array:
    if x is weights or jnp.shape(x)[:1] != weights.shape[:1] or not jnp.issubdtype(x.dtype, jnp.inexact):
      return x
    is_padding_B = jnp.all(weights == 0, axis=range(1, weights.ndim))
    return jnp.where(jnp.expand_dims(is_padding_B, range(1, x.ndim)) & ~jnp.isfinite(x), 0, x)

  return jax.tree.map(clear, batch)
