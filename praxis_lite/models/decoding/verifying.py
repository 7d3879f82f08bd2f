"""Verification of drafts: accepts tokens such that the result has the distribution of the model.

B batch, K largest number of tokens in a draft, N = K + 1, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.models.decoding.drafting import Draft


class Verified(NamedTuple):
  """The next tokens of rows: the accepted tokens of a draft, and then one token of the model."""

  ids: jax.Array  # [B, N] int32; the first `accepted + 1` of a row are its next tokens.
  accepted: jax.Array  # [B] int32, number of accepted tokens of the draft.


def compare_drafts(ids_BN: jax.Array, draft: Draft) -> Verified:
  """Accepts the tokens of a draft up to the first that differs from what the model drew.

  `ids_BN` are the tokens that the model drew after the row, and after each token of the draft. The result equals what
  the model draws without a draft. For a draft that is not random, no other rule accepts more tokens on average.
  """
  return Verified(ids_BN, _count_first(ids_BN[:, :-1] == draft.ids, draft.counts))


def reject_drafts(logits_BNV: jax.Array, draft: Draft, uniform_BN: jax.Array, keys_BN: jax.Array) -> Verified:
  """Accepts tokens of a random draft such that the result has the model's distribution (Leviathan et al., 2023).

  With the model's probabilities p and the draft's probabilities q, a token x of the draft is accepted with probability
  min(1, p(x) / q(x)). The first token that is not accepted is replaced by one that is drawn from max(p - q, 0),
  normalized. If all are accepted, one more is drawn from p.

  Args:
    logits_BNV: float32, whose softmax is p after the row, and after each token of the draft.
    draft: the draft, with its logits.
    uniform_BN: float32 in [0, 1), random.
    keys_BN: PRNG keys, independent of `uniform_BN`.
  """
  assert draft.logits is not None
  p_BNV, q_BKV = jax.nn.softmax(logits_BNV), jax.nn.softmax(draft.logits)
  ids_BK1 = draft.ids[..., None]
  p_BK = jnp.take_along_axis(p_BNV[:, :-1], ids_BK1, axis=-1)[..., 0]
  q_BK = jnp.take_along_axis(q_BKV, ids_BK1, axis=-1)[..., 0]
  accepted_B = _count_first(uniform_BN[:, :-1] * q_BK < p_BK, draft.counts)
  p_BV = jnp.take_along_axis(p_BNV, accepted_B[:, None, None], axis=1)[:, 0]
  q_BV = jnp.take_along_axis(q_BKV, accepted_B[:, None, None], axis=1, mode='clip')[:, 0]
  residual_BV = jnp.maximum(p_BV - q_BV, 0.0)
  # If p and q are equal up to rounding, a token may be rejected although max(p - q, 0) is 0.
  is_residual_B = (accepted_B < draft.counts) & (jnp.sum(residual_BV, axis=-1) > 0)
  drawn_from_BV = jnp.where(is_residual_B[:, None], residual_BV, p_BV)
  keys_B = jax.vmap(lambda keys_N, i: keys_N[i])(keys_BN, accepted_B)
  own_B = jax.vmap(jax.random.categorical)(keys_B, jnp.log(drawn_from_BV)).astype(jnp.int32)
  whole_BN = jnp.pad(draft.ids, ((0, 0), (0, 1)))
  return Verified(jnp.where(jnp.arange(whole_BN.shape[1]) == accepted_B[:, None], own_B[:, None], whole_BN), accepted_B)


def _count_first(is_kept_BK: jax.Array, counts_B: jax.Array) -> jax.Array:
  """Returns the number of tokens of each draft before the first one that is not accepted, [B] int32."""
  is_kept_BK &= jnp.arange(is_kept_BK.shape[1]) < counts_B[:, None]
  return jnp.sum(jnp.cumprod(is_kept_BK.astype(jnp.int32), axis=1), axis=1)
