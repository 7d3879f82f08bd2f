"""make_padding_finite: removes NaN and infinities from rows of weight 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def make_padding_finite(x: jax.Array, weights_B: jax.Array) -> jax.Array:
  """Replaces NaN and infinities in rows of weight 0 by 0: a gradient of 0 * NaN would be NaN; returns [B, ...]."""
  is_padding = jnp.expand_dims(weights_B == 0, range(1, x.ndim))
  return jnp.where(is_padding & ~jnp.isfinite(x), 0, x)
