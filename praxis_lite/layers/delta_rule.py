"""The gated delta rule, computed in chunks by matrix products (Yang et al., 2024, arXiv:2412.06464).

    state_t = exp(decay_t) state_(t-1) + rate_t key_t (value_t - exp(decay_t) state_(t-1)^T key_t)^T        [S, H]
    out_t   = state_t^T query_t                                                                             [H]

A token so replaces what the state has under its key, by the share `rate`. With total_i, the sum of the decays up to
token i of a chunk, what token i writes, w_i, depends on what earlier ones have written:

    w_i + rate_i sum over j < i of  (key_i . key_j) exp(total_i - total_j) w_j
        = rate_i (value_i - exp(total_i) state^T key_i)

which is a triangular system for all w of a chunk. Then

    out_i  = exp(total_i) state^T query_i + sum over j <= i of  (query_i . key_j) exp(total_i - total_j) w_j
    state' = exp(total_L) state + sum over j of  exp(total_L - total_j) key_j w_j^T

A segment starts with a state of zeros. Sums, and the system, are in float32.

B batch, T length, L and M tokens of a chunk, N heads, G groups of heads with the same keys and queries, H dims of
values, S dims of keys.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.layers.precision import sum_dtype
from praxis_lite.layers.state_space import ChunkDecay, expand_groups, scan_chunks


class DeltaTokens(NamedTuple):
  """What the rule reads.

  Attributes:
    value: [B, T, N, H].
    decay: [B, T, N], at most 0, in the dtype of sums.
    rate: [B, T, N], from 0, which writes nothing, to 1, in the dtype of sums.
    key, query: [B, T, G, S]; keys have a length of at most 1.
    starts: [B, T] bool, at which tokens a segment starts, so that the state before it is forgotten; None: at none.
  """

  value: jax.Array
  decay: jax.Array
  rate: jax.Array
  key: jax.Array
  query: jax.Array
  starts: jax.Array | None = None


def scan_delta_rule(
  tokens: DeltaTokens, state_BNSH: jax.Array | None = None, chunk: int = 64
) -> tuple[jax.Array, jax.Array]:
  """Returns the outputs, [B, T, N, H] in the dtype of the values, and the state after them, [B, N, S, H].

  Args:
    tokens: what the rule reads.
    state_BNSH: the state before the first token, in the dtype of sums; None means zeros.
    chunk: L.
  """
  (B, _, N, H), S = tokens.value.shape, tokens.key.shape[-1]
  if state_BNSH is None:
    state_BNSH = jnp.zeros((B, N, S, H), sum_dtype(tokens.value))
  return scan_chunks(_read_chunk, tokens, state_BNSH, chunk)


def _read_chunk(state_BNSH: jax.Array, tokens: DeltaTokens) -> tuple[jax.Array, jax.Array]:
  """Returns the state after a chunk, and the outputs in it."""
  value_BMNH, decay_BLN, rate_BLN, key_BMGS, query_BLGS, starts_BL = tokens
  L, N, dtype, sums = *value_BMNH.shape[1:3], value_BMNH.dtype, sum_dtype(value_BMNH)
  decay = ChunkDecay.from_decays(decay_BLN, starts_BL)
  key_BMNS, query_BLNS = expand_groups(key_BMGS, 2, N), expand_groups(query_BLGS, 2, N)

  def product(formula: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(formula, *(x.astype(dtype) for x in arrays), preferred_element_type=sums)

  rate_BNL = jnp.swapaxes(rate_BLN, 1, 2)
  overlap_BNLM = rate_BNL[..., None] * product('BLNS,BMNS->BNLM', key_BMNS, key_BMNS) * decay.between_BNLM
  system_BNLM = jnp.where(jnp.tri(L, k=-1, dtype=bool), overlap_BNLM, 0) + jnp.eye(L, dtype=sums)
  known_BMNH = product('BMNS,BNSH->BMNH', key_BMNS, state_BNSH) * decay.from_before_BLN[..., None]
  wanted_BMNH = rate_BLN[..., None] * (value_BMNH.astype(sums) - known_BMNH)
  written_BNMH = jax.lax.linalg.triangular_solve(
    system_BNLM, jnp.swapaxes(wanted_BMNH, 1, 2), left_side=True, lower=True, unit_diagonal=True
  )
  weights_BNLM = product('BLNS,BMNS->BNLM', query_BLNS, key_BMNS) * decay.between_BNLM
  out_BLNH = product('BNLM,BNMH->BLNH', weights_BNLM, written_BNMH)
  out_BLNH += product('BLNS,BNSH->BLNH', query_BLNS, state_BNSH) * decay.from_before_BLN[..., None]
  added_BNSH = product('BMNS,BNMH->BNSH', key_BMNS * decay.to_after_BMN[..., None], written_BNMH)
  return decay.kept_BN[..., None, None] * state_BNSH + added_BNSH, out_BLNH.astype(dtype)
