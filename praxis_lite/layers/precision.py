"""The precision of sums: float32 for narrower arrays, that of the arrays for float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sum_dtype(*arrays: jax.Array) -> jnp.dtype:
  """The dtype that sums of products of these arrays have: float32, or float64 if one of them is."""
  return jnp.promote_types(jnp.float32, jnp.result_type(*(x.dtype for x in arrays)))


def widen(x: jax.Array) -> jax.Array:
  """An array in the dtype of its sums."""
  return x.astype(sum_dtype(x))
