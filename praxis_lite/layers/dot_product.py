"""Dot-product attention: which of its implementations computes it, and the dense one.

    dense       all logits at once, [B, N, T, S]: JAX's own, or a plain form for what that does not take
    blockwise   memory linear in the length; see `blockwise.py`
    cudnn       a fused kernel for NVIDIA GPUs, in bfloat16 or float16
    auto        one of these, by platform, length and masks; `choose_attention` says which and why

B batch, T length of the queries, S length of the keys, N heads, K kv heads, G = N / K query heads for each kv head,
H dims per head.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.errors import ConfigError, check_choice
from praxis_lite.layers.blocks import dropout_factors
from praxis_lite.layers.blockwise import LogitBias, ProbabilityDropout, blockwise_attention
from praxis_lite.layers.masks import Visibility, combine_masks, segment_mask
from praxis_lite.layers.precision import sum_dtype
from praxis_lite.partitioning.constraints import is_partly_mapped
from praxis_lite.partitioning.mesh import platform

Chosen = Literal['dense', 'blockwise', 'cudnn']
AttentionImplementation = Literal['auto', 'xla'] | Chosen
IMPLEMENTATIONS = ('auto', 'dense', 'blockwise', 'cudnn', 'xla')  # 'xla' is an older name of 'dense'.
# From so many logits a head on, 'auto' does not compute them all at once.
_MANY_LOGITS = 2048 * 2048
# From so many queries and keys on, it takes the fused kernel; with a mask as an array, for up to so many logits.
_FUSED_FROM = 256
_MOST_MASKED = 8192 * 8192


class AttentionCase(NamedTuple):
  """What decides how attention is computed.

  Attributes:
    platform: 'cpu', 'gpu' or 'tpu'.
    dtype: of the queries.
    query_len, key_len, dims_per_head: T, S and H.
    causal, window: whether the mask is causal, and whether it has a window.
    by_rows: whether the mask differs from row to row, by segments or prefixes.
    arrays: whether a mask or a bias is given as an array of queries and keys.
    split: whether the sequence is split over a mesh axis, as `context_axis` says.
    partly_mapped: whether it is in a `shard_map` over some of the mesh's axes, others of which split its arrays.
    logit_bias, soft_cap, dropout: whether logits have a bias by position or a soft cap, and probabilities a dropout.
  """

  platform: str
  dtype: jnp.dtype
  query_len: int
  key_len: int
  dims_per_head: int
  causal: bool = False
  window: bool = False
  by_rows: bool = False
  arrays: bool = False
  split: bool = False
  partly_mapped: bool = False
  logit_bias: bool = False
  soft_cap: bool = False
  dropout: bool = False


class AttentionChoice(NamedTuple):
  """An implementation, and why."""

  name: Chosen
  reason: str


def choose_attention(implementation: str, case: AttentionCase, path: str = 'implementation') -> AttentionChoice:
  """Returns 'dense', 'blockwise' or 'cudnn', and why.

  Args:
    implementation: one of `IMPLEMENTATIONS`.
    case: what is to be computed, and on what.
    path: config path of the implementation, for messages.

  Raises:
    ConfigError: there is no such implementation, or it cannot compute this case.
  """
  check_choice(path, implementation, IMPLEMENTATIONS)
  if implementation in ('dense', 'xla'):
    return AttentionChoice('dense', f'{path} is {implementation!r}')
  if implementation == 'blockwise':
    if case.arrays:
      raise ConfigError(
        f"{path}: 'blockwise' makes the mask of a block from rules (causal, sliding_window, segment_ids, "
        "prefix_lengths), and this call gives a mask or a bias as an array; 'dense' and 'auto' take one"
      )
    return AttentionChoice('blockwise', f"{path} is 'blockwise'")
  obstacle = _cudnn_obstacle(case)
  if implementation == 'cudnn':
    if obstacle:
      raise ConfigError(f"{path}: 'cudnn' {obstacle}; 'auto' chooses what is possible")
    return AttentionChoice('cudnn', f"{path} is 'cudnn'")
  logits = f'{case.query_len:,} queries x {case.key_len:,} keys'
  if case.arrays:
    gathered = ', for which the split sequence is gathered' if case.split else ''
    return AttentionChoice('dense', f'a mask or a bias is given as an array{gathered}')
  if case.split:
    return AttentionChoice('blockwise', 'the sequence is split over a mesh axis')
  count = case.query_len * case.key_len
  takes_mask = not case.logit_bias and (not case.by_rows or count <= _MOST_MASKED)
  if not obstacle and takes_mask and min(case.query_len, case.key_len) >= _FUSED_FROM:
    return AttentionChoice('cudnn', f'{logits}, and the fused kernel takes this case')
  if count < _MANY_LOGITS:
    return AttentionChoice('dense', f'{logits} are few')
  without = ''
  if case.platform == 'gpu':
    without = '; the fused kernel ' + (obstacle or 'would need the mask or the bias as an array of this size')
  return AttentionChoice('blockwise', f'{logits} are too many to hold{without}')


def _cudnn_obstacle(case: AttentionCase) -> str:
  """Why the fused kernel cannot compute a case, as the end of a sentence; '' if it can."""
  if case.platform != 'gpu':
    return f'needs an NVIDIA GPU, and the platform is {case.platform!r}'
  if case.dtype not in (jnp.bfloat16, jnp.float16):
    return f'computes in bfloat16 or float16, not in {jnp.dtype(case.dtype).name}'
  if case.dims_per_head % 8 or case.dims_per_head > 128:
    return f'needs dims_per_head to be a multiple of 8 of at most 128, not {case.dims_per_head}'
  if case.partly_mapped:
    return "cannot be split by the compiler inside of a shard_map over other axes, such as a pipeline's batch_axes"
  if case.soft_cap:
    return 'has no logit_soft_cap'
  if case.dropout:
    return 'has no dropout here'
  if case.window and not case.causal:
    return 'has a sliding_window with causal attention alone'
  if (case.by_rows or case.logit_bias or case.arrays) and (case.query_len % 2 or case.key_len % 2):
    return 'takes a mask or a bias of even lengths alone'
  return ''


def dot_product_attention(
  query_BTNH: jax.Array,
  key_BSKH: jax.Array,
  value_BSKH: jax.Array,
  *,
  bias: jax.Array | LogitBias | None = None,
  mask: jax.Array | None = None,
  causal: bool = False,
  window: int | None = None,
  prefix_lengths: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
  kv_segment_ids: jax.Array | None = None,
  dropout: ProbabilityDropout | None = None,
  scale: float | None = None,
  logit_soft_cap: float | None = None,
  implementation: AttentionImplementation = 'auto',
  block_size: int | None = None,
) -> jax.Array:
  """Returns softmax(scale * query . key) . value per head, [B, T, N, H]; the softmax is in float32.

  Args:
    query_BTNH: queries.
    key_BSKH, value_BSKH: query head n uses kv head n // (N / K).
    bias: added to the logits: an array that broadcasts to [B, N, T, S], or a function of positions.
    mask: bool, broadcasts to [B, N, T, S], True where a query attends; combined with the rules below. What a query with
      every key masked gets is finite.
    causal: query t attends to keys up to t.
    window: a query attends to keys less than `window` away.
    prefix_lengths: [B] int32, how many of the first keys all queries of a row attend to, also if `causal`.
    segment_ids, kv_segment_ids: [B, T] and [B, S] int32; a query attends to the keys of its own segment. Both or
      neither.
    dropout: on the probabilities; None disables it. The same ones are dropped by all implementations.
    scale: factor of the logits; None: 1 / sqrt(H).
    logit_soft_cap: bounds logits smoothly: cap * tanh(logits / cap) (Gemma 2). None disables it.
    implementation: how it is computed; see `choose_attention`.
    block_size: see `blockwise_attention`.

  Raises:
    ConfigError: the implementation cannot compute this.
  """
  visible = Visibility(causal, window, prefix_lengths, segment_ids, kv_segment_ids)
  T, S = query_BTNH.shape[1], key_BSKH.shape[1]
  case = AttentionCase(
    platform(),
    jnp.dtype(query_BTNH.dtype),
    T,
    S,
    query_BTNH.shape[3],
    causal=causal,
    window=window is not None,
    by_rows=segment_ids is not None or prefix_lengths is not None,
    arrays=mask is not None or not isinstance(bias, LogitBias | None),
    partly_mapped=is_partly_mapped(),
    logit_bias=isinstance(bias, LogitBias),
    soft_cap=logit_soft_cap is not None,
    dropout=dropout is not None,
  )
  name, _ = choose_attention(implementation, case)
  if name == 'blockwise':
    assert isinstance(bias, LogitBias | None)  # Of an array it is not chosen.
    return blockwise_attention(
      query_BTNH,
      key_BSKH,
      value_BSKH,
      visible=visible,
      bias=bias,
      dropout=dropout,
      scale=scale,
      logit_soft_cap=logit_soft_cap,
      block_size=block_size,
    )
  bias_BNTS = bias.whole(T, S) if isinstance(bias, LogitBias) else bias
  if logit_soft_cap is not None or dropout is not None:
    mask = combine_masks(visible.mask(T, S), mask)
    return _plain(query_BTNH, key_BSKH, value_BSKH, bias_BNTS, mask, dropout, scale, logit_soft_cap)
  if prefix_lengths is not None or (window is not None and name == 'dense'):  # Windows of JAX 0.8 are wrong.
    mask, causal, window = combine_masks(visible.mask(T, S), mask), False, None
  elif segment_ids is not None and kv_segment_ids is not None:
    mask = combine_masks(segment_mask(segment_ids, kv_segment_ids), mask)
  window_sizes = None if window is None else (window - 1, 0 if causal else window - 1)
  return jax.nn.dot_product_attention(
    query_BTNH,
    key_BSKH,
    value_BSKH,
    bias=bias_BNTS,
    mask=mask,
    is_causal=causal,
    local_window_size=window_sizes,
    scale=scale,
    implementation='cudnn' if name == 'cudnn' else 'xla',
  )


def _plain(
  query_BTNH: jax.Array,
  key_BSKH: jax.Array,
  value_BSKH: jax.Array,
  bias: jax.Array | None,
  mask: jax.Array | None,
  dropout: ProbabilityDropout | None,
  scale: float | None,
  logit_soft_cap: float | None,
) -> jax.Array:
  """Dense attention with soft cap and dropout, which JAX's own has not."""
  (B, T, N, H), (_, S, K, _) = query_BTNH.shape, key_BSKH.shape

  query_BTKGH = query_BTNH.reshape(B, T, K, N // K, H)
  logits_BKGTS = jnp.einsum(
    'BTKGH,BSKH->BKGTS', query_BTKGH, key_BSKH, preferred_element_type=sum_dtype(query_BTKGH, key_BSKH)
  )
  logits_BKGTS *= H**-0.5 if scale is None else scale
  if logit_soft_cap is not None:
    logits_BKGTS = logit_soft_cap * jnp.tanh(logits_BKGTS / logit_soft_cap)
  if bias is not None:
    logits_BKGTS += by_kv_head(bias, K)
  if mask is not None:
    logits_BKGTS = jnp.where(by_kv_head(mask, K), logits_BKGTS, 0.7 * jnp.finfo(jnp.float32).min)
  probs_BKGTS = jax.nn.softmax(logits_BKGTS, axis=-1)
  if dropout is not None:
    seeds_BNT = jnp.moveaxis(dropout.seeds_BTN, 2, 1)
    probs_BKGTS *= by_kv_head(dropout_factors(seeds_BNT, jnp.arange(S), dropout.rate), K)
  return jnp.einsum('BKGTS,BSKH->BTKGH', probs_BKGTS.astype(value_BSKH.dtype), value_BSKH).reshape(B, T, N, H)


def by_kv_head(x_BNTS: jax.Array, num_kv_heads: int) -> jax.Array:
  """Returns what belongs to query heads by kv head, [B, K, G, T, S]; of one head, which broadcasts, [B, 1, 1, T, S]."""
  B, N, T, S = x_BNTS.shape
  return x_BNTS.reshape(B, *((num_kv_heads, N // num_kv_heads) if N > 1 else (1, 1)), T, S)
