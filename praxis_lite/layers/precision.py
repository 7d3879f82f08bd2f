"""The dtype of sums: float64 for float64 arrays, otherwise float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def sum_dtype_of(dtype: DTypeLike | None) -> jnp.dtype:
  """Returns the dtype for sums of products of arrays with this dtype; float32 if `dtype` is None."""
  return jnp.promote_types(jnp.float32, jnp.float32 if dtype is None else dtype)


def sum_dtype(*arrays: jax.Array) -> jnp.dtype:
  """Returns the dtype of sums of products of these arrays: float64 if one of them is float64, otherwise float32."""
  return sum_dtype_of(jnp.result_type(*(x.dtype for x in arrays)))


def to_sum_dtype(x: jax.Array) -> jax.Array:
  """Returns an array in the dtype of its sums."""
  return x.astype(sum_dtype(x))
