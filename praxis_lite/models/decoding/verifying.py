"""What is kept of a draft: the tokens that the model itself would have drawn, with the right probabilities.

B batch, K largest number of tokens in a draft, N = K + 1, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.models.decoding.drafting import Draft


class Verified(NamedTuple):
  """The next tokens of rows: the accepted tokens of a draft, and then one of the model.

  Attributes:
    ids: [B, N] int32; the first `accepted + 1` of a row are its next tokens.
    accepted: [B] int32, how many tokens of the draft are accepted.
  """

  ids: jax.Array
  accepted: jax.Array


def compare_drafts(ids_BN: jax.Array, draft: Draft) -> Verified:
  """Keeps the tokens of a draft that equal those which the model drew at their places.

  The result is what the model draws without a draft, token by token. If the draft was not drawn itself, no other way to
  keep tokens keeps more of them.

  Args:
    ids_BN: int32, what the model drew after the row, and after each token of the draft.
    draft: the draft.
  """
  return Verified(ids_BN, _count_first(ids_BN[:, :-1] == draft.ids, draft.counts))


def reject_drafts(logits_BNV: jax.Array, draft: Draft, uniform_BN: jax.Array, keys_BN: jax.Array) -> Verified:
  """Keeps tokens of a draft so that the result is distributed like what the model draws (Leviathan et al., 2023).

  With the model's probabilities p and the draft's q, a token x of the draft is kept with probability
  min(1, p(x) / q(x)). After the first that is not, a token is drawn from max(p - q, 0), normalized; after a whole
  draft, from p.

  Args:
    logits_BNV: float32, whose softmax p the model would draw from after the row, and after each token of the draft.
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
  # Probabilities that are equal up to rounding may leave nothing, though a token was rejected.
  is_residual_B = (accepted_B < draft.counts) & (jnp.sum(residual_BV, axis=-1) > 0)
  drawn_from_BV = jnp.where(is_residual_B[:, None], residual_BV, p_BV)
  keys_B = jax.vmap(lambda keys_N, i: keys_N[i])(keys_BN, accepted_B)
  own_B = jax.vmap(jax.random.categorical)(keys_B, jnp.log(drawn_from_BV)).astype(jnp.int32)
  whole_BN = jnp.pad(draft.ids, ((0, 0), (0, 1)))
  return Verified(jnp.where(jnp.arange(whole_BN.shape[1]) == accepted_B[:, None], own_B[:, None], whole_BN), accepted_B)


def _count_first(is_kept_BK: jax.Array, counts_B: jax.Array) -> jax.Array:
  """Returns how many first tokens of each draft are kept, before the first that is not, [B] int32."""
  is_kept_BK &= jnp.arange(is_kept_BK.shape[1]) < counts_B[:, None]
  return jnp.sum(jnp.cumprod(is_kept_BK.astype(jnp.int32), axis=1), axis=1)
