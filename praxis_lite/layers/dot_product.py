"""Dot-product attention and its masks.

Attention is JAX's own, which has fused kernels, or a plain form for what no fused kernel computes: soft-capped logits.
A mask is boolean, True where a query may attend to a key. Masks broadcast to [B, N, T, S] and combine with `&`.

B batch, T length of the queries, S length of the keys, N heads, K kv heads, G = N / K query heads for each kv head,
H dims per head.
"""

from __future__ import annotations

import functools
import operator
from typing import Literal

import jax
import jax.numpy as jnp

AttentionImplementation = Literal['xla', 'cudnn']


def segment_mask(query_segment_ids_BT: jax.Array, key_segment_ids_BS: jax.Array) -> jax.Array:
  """Returns [B, 1, T, S]: a query sees the keys of its own segment; padding, segment 0, sees padding."""
  return (query_segment_ids_BT[:, :, None] == key_segment_ids_BS[:, None, :])[:, None]


def cache_mask(query_pos_BT: jax.Array, key_pos_BS: jax.Array, window: int | None = None) -> jax.Array:
  """Returns [B, 1, T, S]: a query sees the cached keys at positions up to its own.

  Args:
    query_pos_BT: position of each query in its sequence; -1 is padding.
    key_pos_BS: position of the key in each slot of the cache; -1 is an empty slot.
    window: number of positions up to its own that a query sees; None: all.
  """
  query_BT1, key_B1S = query_pos_BT[:, :, None], key_pos_BS[:, None, :]
  mask_BTS = (key_B1S >= 0) & (key_B1S <= query_BT1)
  if window is not None:
    mask_BTS &= query_BT1 - key_B1S < window
  return mask_BTS[:, None]


def combine_masks(*masks: jax.Array | None) -> jax.Array | None:
  """Returns the conjunction of the masks that are not None, or None if all of them are."""
  given = [m for m in masks if m is not None]
  return functools.reduce(operator.and_, given) if given else None


def dot_product_attention(
  query_BTNH: jax.Array,
  key_BSKH: jax.Array,
  value_BSKH: jax.Array,
  *,
  bias: jax.Array | None = None,
  mask: jax.Array | None = None,
  causal: bool = False,
  window: int | None = None,
  scale: float | None = None,
  logit_soft_cap: float | None = None,
  implementation: AttentionImplementation | None = None,
) -> jax.Array:
  """Returns softmax(scale * query . key) . value per head, [B, T, N, H]; the softmax is in float32.

  Args:
    query_BTNH: queries.
    key_BSKH, value_BSKH: query head n uses kv head n // (N / K).
    bias: broadcasts to [B, N, T, S], added to the logits.
    mask: bool, broadcasts to [B, N, T, S], True where a query attends; combined with `causal` and `window`. A query
      with every key masked gets the mean of all values.
    causal: query t attends to keys up to t.
    window: a query attends to keys less than `window` away.
    scale: factor of the logits; None: 1 / sqrt(H).
    logit_soft_cap: bounds logits smoothly: cap * tanh(logits / cap) (Gemma 2). No fused kernel supports it. None
      disables it.
    implementation: 'xla', or 'cudnn' for fused attention on NVIDIA GPUs in bfloat16 or float16; None: JAX chooses.
  """
  if logit_soft_cap is None:
    window_sizes = None if window is None else (window - 1, 0 if causal else window - 1)
    return jax.nn.dot_product_attention(
      query_BTNH,
      key_BSKH,
      value_BSKH,
      bias=bias,
      mask=mask,
      is_causal=causal,
      local_window_size=window_sizes,
      scale=scale,
      implementation=implementation,
    )
  (B, T, N, H), (_, S, K, _) = query_BTNH.shape, key_BSKH.shape
  offset_11TS = (jnp.arange(T)[:, None] - jnp.arange(S))[None, None]
  if causal:
    mask = combine_masks(mask, offset_11TS >= 0)
  if window is not None:
    mask = combine_masks(mask, jnp.abs(offset_11TS) < window)

  def grouped(x_BNTS: jax.Array) -> jax.Array:
    """[B, N, T, S] to [B, K, G, T, S]; a single head, which broadcasts, to [B, 1, 1, T, S]."""
    heads = (K, N // K) if x_BNTS.shape[1] > 1 else (1, 1)
    return x_BNTS.reshape(x_BNTS.shape[0], *heads, *x_BNTS.shape[2:])

  query_BTKGH = query_BTNH.reshape(B, T, K, N // K, H)
  logits_BKGTS = jnp.einsum('BTKGH,BSKH->BKGTS', query_BTKGH, key_BSKH, preferred_element_type=jnp.float32)
  logits_BKGTS *= H**-0.5 if scale is None else scale
  logits_BKGTS = logit_soft_cap * jnp.tanh(logits_BKGTS / logit_soft_cap)
  if bias is not None:
    logits_BKGTS += grouped(bias)
  if mask is not None:
    logits_BKGTS = jnp.where(grouped(mask), logits_BKGTS, 0.7 * jnp.finfo(jnp.float32).min)
  probs_BKGTS = jax.nn.softmax(logits_BKGTS, axis=-1).astype(value_BSKH.dtype)
  return jnp.einsum('BKGTS,BSKH->BTKGH', probs_BKGTS, value_BSKH).reshape(B, T, N, H)
