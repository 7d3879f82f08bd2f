"""make_padding_finite: rows that do not count, and may hold anything, become numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def make_padding_finite(x: jax.Array, weights_B: jax.Array) -> jax.Array:
  """Returns [B, ...] with zeros for what is not finite in rows of weight 0: 0 times NaN is not a zero gradient."""
  is_padding = jnp.expand_dims(weights_B == 0, range(1, x.ndim))
  return jnp.where(is_padding & ~jnp.isfinite(x), 0, x)
