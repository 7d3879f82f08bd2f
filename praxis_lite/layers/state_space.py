"""Linear recurrences: in chunks of matrix products if a head has one decay per token, otherwise by a tree.

    state_t = exp(decay_t) state_(t-1) + value_t key_t^T          [H, S]
    out_t   = state_t query_t                                     [H]

(state space duality of Mamba-2; Dao and Gu, 2024). Inside a chunk of L tokens this is attention without a softmax, with
the decay between two tokens as a mask; the state carries the contribution of earlier chunks:

    out_i    = sum over j <= i of  (query_i . key_j) exp(total_i - total_j) value_j   +   exp(total_i) state query_i
    state'   = exp(total_L) state + sum over j of  exp(total_L - total_j) value_j key_j^T

where total_i is the sum of the decays up to token i. A segment starts with a state of zeros. Sums are in float32, or in
float64 for float64 values.

Each entry of a state may have a decay of its own. Two consecutive steps then still combine into one of the same form:
the decays multiply, and the later decay applies to the earlier input. This operation is associative, so a tree of
depth log T computes all states (Blelloch, 1990).

B batch, T length, L and M tokens of a chunk, N heads, G groups of heads with the same keys and queries, H dims per
head, S dims of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from praxis_lite.layers.block_arrays import join_blocks, to_blocks
from praxis_lite.layers.precision import sum_dtype

TokensT = TypeVar('TokensT')  # A tree of arrays [B, T, ...].
_Pair = tuple[jax.Array, jax.Array]


class StateTokens(NamedTuple):
  """What the recurrence reads."""

  value: jax.Array  # [B, T, N, H].
  decay: jax.Array  # [B, T, N], at most 0, in the dtype of sums.
  key: jax.Array  # [B, T, G, S].
  query: jax.Array  # [B, T, G, S].
  # [B, T] bool, True where a segment starts, so that the state before it is forgotten; None means False everywhere.
  starts: jax.Array | None = None


def scan_states(decay: jax.Array, inputs: jax.Array, state: jax.Array | None = None) -> jax.Array:
  """Returns the state after each token, [B, T, ...].

  Args:
    decay: [B, T, ...], real or complex; 0 forgets the state before a token, as at the start of a segment.
    inputs: [B, T, ...].
    state: [B, ...], the state before the first token; None means zeros.
  """
  if state is not None:
    inputs = inputs.at[:, 0].add(decay[:, 0] * state)
  if inputs.shape[1] == 1:
    return inputs

  def combine(earlier: _Pair, later: _Pair) -> _Pair:
    return earlier[0] * later[0], later[0] * earlier[1] + later[1]

  states: jax.Array = jax.lax.associative_scan(combine, (jnp.broadcast_to(decay, inputs.shape), inputs), axis=1)[1]
  return states


def segment_starts(segment_ids: jax.Array | None) -> jax.Array | None:
  """Returns [B, T] bool, True for the first token of each segment except the row's first; None without segments."""
  if segment_ids is None:
    return None
  return jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))


def scan_in_chunks(
  tokens: StateTokens, state_BNHS: jax.Array | None = None, chunk: int = 256
) -> tuple[jax.Array, jax.Array]:
  """Returns the outputs, [B, T, N, H] in the dtype of the values, and the state after the last token, [B, N, H, S].

  `state_BNHS` is the state before the first token, in the dtype of sums; None means zeros. `chunk` is L.
  """
  (B, _, N, H), S = tokens.value.shape, tokens.key.shape[-1]
  if state_BNHS is None:
    state_BNHS = jnp.zeros((B, N, H, S), sum_dtype(tokens.value))
  return scan_chunks(_read_chunk, tokens, state_BNHS, chunk)


def scan_chunks(
  read: Callable[[jax.Array, TokensT], tuple[jax.Array, jax.Array]], tokens: TokensT, state: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the outputs of all tokens, [B, T, ...], and the state after the last one; `chunk` tokens are one chunk.

  `read` takes a state and the tokens of a chunk, and returns the state after them and their outputs. Tokens of zeros,
  which fill up the last chunk, must leave the state as it is. The backward pass keeps the state before each chunk, and
  computes the chunk again.
  """
  T = jax.tree.leaves(tokens)[0].shape[1]
  if chunk >= T:
    state, out = read(state, tokens)
    return out, state
  chunks = jax.tree.map(lambda x: to_blocks(x, chunk), tokens)
  state, out = jax.lax.scan(jax.checkpoint(read, prevent_cse=False), state, chunks)
  return join_blocks(out, T), state


class ChunkDecay(NamedTuple):
  """Factors in a chunk: how much is left, after decay, of the state before it and of what its tokens have written.

  A factor is 0 if a new segment has started in between.
  """

  between_BNLM: jax.Array  # What remains at token L of what token M has written; 0 if M is later than L.
  from_before_BLN: jax.Array  # What remains, at each token, of the state before the chunk.
  to_after_BMN: jax.Array  # What remains, after the chunk, of what each token has written.
  kept_BN: jax.Array  # What remains, after the chunk, of the state before the chunk.

  @classmethod
  def compute(cls, decay_BLN: jax.Array, starts_BL: jax.Array | None) -> ChunkDecay:
    """Returns the factors of a chunk; for the arguments, see `decay` and `starts` in `StateTokens`."""
    total_BLN = jnp.cumsum(decay_BLN, axis=1)
    last_BN = total_BLN[:, -1]
    visible_BLM = jnp.tri(decay_BLN.shape[1], dtype=bool)[None]
    from_before_BLN, to_after_BMN = jnp.exp(total_BLN), jnp.exp(last_BN[:, None] - total_BLN)
    kept_BN = jnp.exp(last_BN)
    if starts_BL is not None:
      segment_BL = jnp.cumsum(starts_BL, axis=1)
      visible_BLM &= segment_BL[:, :, None] == segment_BL[:, None, :]
      from_before_BLN = jnp.where(segment_BL[..., None] == 0, from_before_BLN, 0)
      to_after_BMN = jnp.where(segment_BL[..., None] == segment_BL[:, -1:, None], to_after_BMN, 0)
      kept_BN = jnp.where(segment_BL[:, -1:] == 0, kept_BN, 0)
    total_BNL = jnp.swapaxes(total_BLN, 1, 2)
    between_BNLM = total_BNL[..., :, None] - total_BNL[..., None, :]
    between_BNLM = jnp.exp(jnp.where(visible_BLM[:, None], between_BNLM, -jnp.inf))
    return cls(between_BNLM, from_before_BLN, to_after_BMN, kept_BN)


def _read_chunk(state_BNHS: jax.Array, tokens: StateTokens) -> tuple[jax.Array, jax.Array]:
  """Returns the state after a chunk, [B, N, H, S], and the chunk's outputs, [B, L, N, H]."""
  value_BMNH, decay_BLN, key_BMGS, query_BLGS, starts_BL = tokens
  N, dtype, sums = value_BMNH.shape[2], value_BMNH.dtype, sum_dtype(value_BMNH)
  decay = ChunkDecay.compute(decay_BLN, starts_BL)

  def product(formula: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(formula, *(x.astype(dtype) for x in arrays), preferred_element_type=sums)

  products_BGLM = product('BLGS,BMGS->BGLM', query_BLGS, key_BMGS)
  weights_BNLM = expand_groups(products_BGLM, 1, N) * decay.between_BNLM
  query_BLNS, key_BMNS = expand_groups(query_BLGS, 2, N), expand_groups(key_BMGS, 2, N)
  out_BLNH = product('BNLM,BMNH->BLNH', weights_BNLM, value_BMNH)
  out_BLNH += product('BLNS,BNHS->BLNH', query_BLNS, state_BNHS) * decay.from_before_BLN[..., None]
  added_BNHS = product('BMNS,BMNH->BNHS', key_BMNS, value_BMNH * decay.to_after_BMN[..., None])
  return decay.kept_BN[..., None, None] * state_BNHS + added_BNHS, out_BLNH.astype(dtype)


def expand_groups(x: jax.Array, axis: int, num_heads: int) -> jax.Array:
  """Returns `x` with each group along `axis` repeated for its heads, so that `axis` has size `num_heads`."""
  groups = x.shape[axis]
  if groups == 1:
    return jnp.broadcast_to(x, (*x.shape[:axis], num_heads, *x.shape[axis + 1 :]))
  return x if groups == num_heads else jnp.repeat(x, num_heads // groups, axis=axis)
