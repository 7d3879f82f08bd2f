"""Attention of one token of each row to the slots of a cache, by a kernel in Pallas for one NVIDIA GPU.

A token reads little but its cache, so reading the cache takes most of the time. The slots are divided into parts, so
that all multiprocessors read at the same time, also for a single row; each part has its own softmax, and XLA joins them
(flash decoding; Dao et al., 2023). Slots after the last one that a row sees are not read.

B batch, K kv heads, G query heads for each, S slots, P parts, H dims per head.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from praxis_lite.layers.blocks import MASKED, Formula, add_keys, finish_sums, zero_sums
from praxis_lite.layers.grouped_kernels import dot
from praxis_lite.sharding.mesh import platform

_SLOTS = 64  # Slots that a program reads at a time.
_PROGRAMS = 512  # The number of programs that keep a large GPU busy.
_FEWEST_ROWS = 16  # Rows of the smallest product of a matrix unit.


class _Arrays(NamedTuple):
  query: jax.Array  # [B, K, G, H]
  key: jax.Array  # [B, K, S, H]
  value: jax.Array  # [B, K, S, H]
  seen: jax.Array  # [B, S] bool
  sinks: jax.Array | None  # [K, G] float32


def attend_one_token(
  query_BNH: jax.Array,
  key_BKSH: jax.Array,
  value_BKSH: jax.Array,
  seen_BS: jax.Array,
  formula: Formula,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Returns softmax(scale * query . key) . value, [B, N, H], in the dtype of the queries.

  Keys and values are the cache, in the dtype of the queries; head n uses kv head n // (N / K). H is a power of 2 and at
  least 16. `seen_BS` is bool, the slots that the token of each row attends to; a row that attends to no slot gets 0.
  For `sinks`, [N], see `dot_product_attention`. The gradient is computed by plain attention. On CPUs, the kernel is
  interpreted.
  """
  (B, N, H), K = query_BNH.shape, key_BKSH.shape[1]
  of_heads = None if sinks is None else sinks.astype(jnp.float32).reshape(K, -1)
  arrays = _Arrays(query_BNH.reshape(B, K, N // K, H), key_BKSH, value_BKSH, seen_BS, of_heads)
  return _attend(formula, arrays).reshape(B, N, H)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(formula: Formula, arrays: _Arrays) -> jax.Array:
  """Returns the results of attention, [B, K, G, H]."""
  (B, K, G, H), S = arrays.query.shape, arrays.key.shape[2]
  steps = pl.cdiv(S, _SLOTS)
  parts = min(steps, pl.cdiv(_PROGRAMS, B * K))
  steps = pl.cdiv(steps, parts)
  ends_B = jnp.max(jnp.where(arrays.seen, jnp.arange(1, S + 1, dtype=jnp.int32), 0), axis=1, initial=0)
  of_parts = jax.ShapeDtypeStruct((parts, B, K, G), jnp.float32)
  most, total, sums = pl.pallas_call(
    functools.partial(_kernel, formula=formula, steps=steps),
    (of_parts, of_parts, jax.ShapeDtypeStruct((parts, B, K, G, H), jnp.float32)),
    grid=(B, K, parts),
    interpret=platform() == 'cpu',
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
  )(arrays.query, arrays.key, arrays.value, arrays.seen.astype(jnp.int32), ends_B)
  top = jnp.max(most, axis=0)
  if arrays.sinks is not None:
    top = jnp.maximum(top, arrays.sinks)
  share = jnp.exp(most - top)
  whole = jnp.sum(share * total, axis=0)
  if arrays.sinks is not None:
    whole += jnp.exp(arrays.sinks - top)
  out = jnp.sum(share[..., None] * sums, axis=0) / jnp.where(whole == 0, 1.0, whole)[..., None]
  return out.astype(arrays.query.dtype)


@_attend.defjvp
def _attend_jvp(formula: Formula, primals: tuple[_Arrays], tangents: tuple[_Arrays]) -> tuple[jax.Array, jax.Array]:
  return _attend(formula, *primals), jax.jvp(functools.partial(_attend_plainly, formula), primals, tangents)[1]


def _attend_plainly(formula: Formula, arrays: _Arrays) -> jax.Array:
  """Returns the result of `_attend`, computed in plain JAX from all logits at once."""
  query, key, value = (x.astype(jnp.float32) for x in arrays[:3])
  logits_BKGS = formula.to_logits(jnp.einsum('BKGH,BKSH->BKGS', query, key))
  logits_BKGS = jnp.where(arrays.seen[:, None, None], logits_BKGS, MASKED)
  sums = zero_sums((*logits_BKGS.shape[:3], 1, query.shape[3]), jnp.dtype(jnp.float32))
  sums = add_keys(sums, logits_BKGS[:, :, :, None], value)
  out_BKG1H, _ = finish_sums(sums, None if arrays.sinks is None else arrays.sinks[..., None])
  return out_BKG1H[:, :, :, 0].astype(arrays.query.dtype)


def _kernel(
  query: Any,
  key: Any,
  value: Any,
  seen: Any,
  ends: Any,
  most: Any,
  total: Any,
  sums: Any,
  *,
  formula: Formula,
  steps: int,
) -> None:
  """Writes the maximum, the sum and the result of the softmax of a part. The arguments are references to arrays."""
  b, k, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
  (_, _, G, H), S = query.shape, key.shape[2]
  rows = max(_FEWEST_ROWS, pl.next_power_of_2(G))
  g, h, start = jnp.arange(rows), jnp.arange(H), part * steps * _SLOTS
  of_head = (g < G)[:, None] & (h >= 0)[None, :]
  q = triton.load(query.at[b, k, g[:, None], h[None, :]], mask=of_head, other=0.0)
  end = triton.load(ends.at[b])

  def add(i: jax.Array, before: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    highest, weight, result = before
    slot = start + i * _SLOTS + jnp.arange(_SLOTS)
    inside, at = slot < end, (b, k, slot[:, None], h[None, :])
    loaded = jnp.broadcast_to(inside[:, None], (_SLOTS, H))
    x, y = (triton.load(of.at[at], mask=loaded, other=0.0) for of in (key, value))
    found = (triton.load(seen.at[b, slot], mask=inside, other=0) != 0)[None, :]
    logits = jnp.where(found, formula.to_logits(dot(q, x.T)), MASKED)
    after = jnp.maximum(highest, jnp.max(logits, axis=1))
    weights = jnp.where(found, jnp.exp(logits - after[:, None]), 0.0)
    shrunk = jnp.exp(highest - after)
    weight = weight * shrunk + jnp.sum(weights, axis=1)
    return after, weight, result * shrunk[:, None] + dot(weights.astype(y.dtype), y)

  nothing = jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros((rows, H), jnp.float32)
  left = jnp.clip(pl.cdiv(jnp.minimum(end, S) - start, _SLOTS), 0, steps)
  found = jax.lax.fori_loop(0, left, add, nothing)
  for of, x in zip((most, total), found):
    triton.store(of.at[part, b, k, g], x, mask=g < G)
  triton.store(sums.at[part, b, k, g[:, None], h[None, :]], found[2], mask=of_head)
