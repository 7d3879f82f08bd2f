"""Attention masks: boolean, True where a query may attend to a key.

B batch, T length of the queries, S length of the keys. Masks broadcast to [B, heads, T, S], so they combine with `&`.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp


def causal_mask(num_queries: int, num_keys: int) -> jax.Array:
  """Returns [1, 1, T, S]: query t sees the keys up to t."""
  return (jnp.arange(num_queries)[:, None] >= jnp.arange(num_keys))[None, None]


def sliding_window_mask(num_queries: int, num_keys: int, window: int) -> jax.Array:
  """Returns [1, 1, T, S]: query t sees the keys less than `window` away, to the left and to the right."""
  return (jnp.abs(jnp.arange(num_queries)[:, None] - jnp.arange(num_keys)) < window)[None, None]


def segment_mask(query_segment_ids_BT: jax.Array, key_segment_ids_BS: jax.Array) -> jax.Array:
  """Returns [B, 1, T, S]: a query sees the keys of its own segment; what padding (segment 0) sees is of no account."""
  return (query_segment_ids_BT[:, :, None] == key_segment_ids_BS[:, None, :])[:, None]


def cache_mask(query_pos_BT: jax.Array, key_pos_BS: jax.Array, window: int | None = None) -> jax.Array:
  """Returns [B, 1, T, S]: a query sees the cached keys at positions up to its own.

  Args:
    query_pos_BT: position of each query in its sequence; -1 is padding.
    key_pos_BS: position of the key in each slot of the cache; -1 is an empty slot.
    window: how many positions up to its own a query sees; None is all.
  """
  query_BT1, key_B1S = query_pos_BT[:, :, None], key_pos_BS[:, None, :]
  mask_BTS = (key_B1S >= 0) & (key_B1S <= query_BT1)
  if window is not None:
    mask_BTS &= query_BT1 - key_B1S < window
  return mask_BTS[:, None]


def combine_masks(*masks: jax.Array | None) -> jax.Array | None:
  """Returns the conjunction of those masks that are not None; None where all are."""
  given = [m for m in masks if m is not None]
  return functools.reduce(operator.and_, given) if given else None
