"""The gated delta rule, computed in chunks by matrix products (Yang et al., 2024, arXiv:2412.06464).

    state_t = exp(decay_t) state_(t-1) + rate_t key_t (value_t - exp(decay_t) state_(t-1)^T key_t)^T        [S, H]
    out_t   = state_t^T query_t                                                                             [H]

So a token replaces, by the share `rate`, what the state holds under its key. Let total_i be the sum of the decays up to
token i of a chunk. What token i writes, w_i, depends on what earlier tokens have written:

    w_i + rate_i sum over j < i of  (key_i . key_j) exp(total_i - total_j) w_j
        = rate_i (value_i - exp(total_i) state^T key_i)

which is a triangular system for all w of a chunk. It is solved for both parts of the right side, so w = a - b state,
where a and b do not depend on the state. They are computed for several chunks at once, and then the state passes
through the chunks. Then

    out_i  = exp(total_i) state^T query_i + sum over j <= i of  (query_i . key_j) exp(total_i - total_j) w_j
    state' = exp(total_L) state + sum over j of  exp(total_L - total_j) key_j w_j^T

A segment starts with a state of zeros. Sums, and the system, are in float32.

B batch, T length, L and M tokens of a chunk, N heads, G groups of heads with the same keys and queries, H dims of
values, S dims of keys.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from praxis_lite.layers.block_arrays import join_blocks, to_blocks
from praxis_lite.layers.precision import sum_dtype
from praxis_lite.layers.state_space import ChunkDecay, expand_groups, scan_chunks


class DeltaTokens(NamedTuple):
  """What the rule reads."""

  value: jax.Array  # [B, T, N, H].
  decay: jax.Array  # [B, T, N], at most 0, in the dtype of sums.
  rate: jax.Array  # [B, T, N], from 0, which writes nothing, to 1, in the dtype of sums.
  key: jax.Array  # [B, T, G, S], of length at most 1.
  query: jax.Array  # [B, T, G, S].
  starts: jax.Array | None = None  # See `StateTokens`.


# How many chunks are prepared at once. More chunks make fewer and larger operations, and need more memory.
_CHUNKS_AT_ONCE = 16


class _Chunk(NamedTuple):
  """What a chunk does to a state; L and M are tokens of the chunk, and P = 2 L."""

  own_BNLH: jax.Array  # What tokens write if the state before the chunk is zero, in the dtype of sums.
  # P vectors that are multiplied by the state: first L vectors b, whose products are subtracted from `own_BNLH`, then L
  # decayed queries.
  from_state_BNPS: jax.Array
  weights_BNLM: jax.Array  # In the output of token L: the weight of what token M writes.
  key_BNMS: jax.Array  # In the state after the chunk: the key, decayed until then, of what token M writes.
  kept_BN: jax.Array  # The decay of the state over the whole chunk.


def scan_delta_rule(
  tokens: DeltaTokens, state_BNSH: jax.Array | None = None, chunk: int = 64, at_once: int = _CHUNKS_AT_ONCE
) -> tuple[jax.Array, jax.Array]:
  """Returns the outputs, [B, T, N, H] in the dtype of the values, and the state after them, [B, N, S, H].

  `state_BNSH` is the state before the first token, in the dtype of sums; None means zeros. `chunk` is L. `at_once`
  chunks are prepared at once; the backward pass keeps only the states between these groups.
  """
  (B, _, N, H), S = tokens.value.shape, tokens.key.shape[-1]
  if state_BNSH is None:
    state_BNSH = jnp.zeros((B, N, S, H), sum_dtype(tokens.value))

  def read(state_BNSH: jax.Array, tokens: DeltaTokens) -> tuple[jax.Array, jax.Array]:
    length, dtype = tokens.value.shape[1], tokens.value.dtype
    pass_on = functools.partial(_pass_on, dtype=dtype)
    if length <= chunk:
      state_BNSH, out_BNLH = pass_on(state_BNSH, _prepare(tokens))
      return state_BNSH, jnp.swapaxes(out_BNLH, 1, 2)
    chunks = jax.tree.map(lambda x: to_blocks(x, chunk), tokens)
    state_BNSH, out_CBNLH = jax.lax.scan(pass_on, state_BNSH, jax.vmap(_prepare)(chunks))
    return state_BNSH, join_blocks(jnp.swapaxes(out_CBNLH, 2, 3), length)

  return scan_chunks(read, tokens, state_BNSH, chunk * at_once)


def _prepare(tokens: DeltaTokens) -> _Chunk:
  """Returns what can be computed from a chunk's tokens without the state before it."""
  value_BMNH, decay_BLN, rate_BLN, key_BMGS, query_BLGS, starts_BL = tokens
  L, N, dtype, sums = *value_BMNH.shape[1:3], value_BMNH.dtype, sum_dtype(value_BMNH)
  decay = ChunkDecay.compute(decay_BLN, starts_BL)
  value_BNLH, rate_BNL1, before_BNL1, after_BNL1 = (
    jnp.swapaxes(x, 1, 2)
    for x in (value_BMNH, rate_BLN[..., None], decay.from_before_BLN[..., None], decay.to_after_BMN[..., None])
  )
  key_BNLS, query_BNLS = (jnp.swapaxes(expand_groups(x, 2, N), 1, 2) for x in (key_BMGS, query_BLGS))

  def overlaps(one_BNLS: jax.Array) -> jax.Array:
    product_BNLM = jnp.einsum('BNLS,BNMS->BNLM', one_BNLS, key_BNLS, preferred_element_type=sums)
    return product_BNLM * decay.between_BNLM

  system_BNLM = jnp.where(jnp.tri(L, k=-1, dtype=bool), rate_BNL1 * overlaps(key_BNLS), 0) + jnp.eye(L, dtype=sums)
  wanted = rate_BNL1 * value_BNLH.astype(sums), rate_BNL1 * before_BNL1 * key_BNLS.astype(sums)
  solved = jax.lax.linalg.triangular_solve(
    system_BNLM, jnp.concatenate(wanted, axis=-1), left_side=True, lower=True, unit_diagonal=True
  )
  own_BNLH, known_BNLS = jnp.split(solved, [value_BNLH.shape[-1]], axis=-1)
  from_state_BNPS = jnp.concatenate([known_BNLS, before_BNL1 * query_BNLS], axis=2).astype(dtype)
  weights_BNLM, after_BNLS = overlaps(query_BNLS).astype(dtype), (after_BNL1 * key_BNLS).astype(dtype)
  return _Chunk(own_BNLH, from_state_BNPS, weights_BNLM, after_BNLS, decay.kept_BN)


def _pass_on(state_BNSH: jax.Array, chunk: _Chunk, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
  """Returns the state after a chunk, and the outputs in the chunk, [B, N, L, H] in `dtype`."""
  sums = chunk.own_BNLH.dtype

  def product(formula: str, one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.einsum(formula, one, other.astype(dtype), preferred_element_type=sums)

  of_state_BNPH = product('BNPS,BNSH->BNPH', chunk.from_state_BNPS, state_BNSH)
  known_BNLH, read_BNLH = jnp.split(of_state_BNPH, 2, axis=2)
  written_BNLH = chunk.own_BNLH - known_BNLH
  out_BNLH = read_BNLH + product('BNLM,BNMH->BNLH', chunk.weights_BNLM, written_BNLH)
  added_BNSH = product('BNMS,BNMH->BNSH', chunk.key_BNMS, written_BNLH)
  return chunk.kept_BN[..., None, None] * state_BNSH + added_BNSH, out_BNLH.astype(dtype)
