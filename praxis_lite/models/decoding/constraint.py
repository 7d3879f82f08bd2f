"""Constraint: a logit processor that allows only the tokens with which a text can still become one of a given form.

The host computes which tokens these are, from the tokens of the continuation so far, and the compiled loop asks it for
each token. So a constraint has no state in the loop: rows end, repeat and, as beams, branch as they like.

B rows, V vocabulary, L places for the tokens of a row.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.errors import ConfigError


class Constraint:
  """A logit processor to which a decoder passes the lengths of prompts too. Subclasses define `allowed_tokens`.

  Attributes:
    stop_ids: tokens that end a text of the form, which are stop tokens of a decoder with this constraint.
  """

  stop_ids: tuple[int, ...] = ()

  def allowed_tokens(self, continuation: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """Returns which tokens may follow, [V] bool, at least one of them. It runs on the host.

    Args:
      continuation: the tokens after the prompt so far; they are allowed ones, or the row has ended.
      vocab_size: V.
    """
    raise NotImplementedError

  def __call__(
    self, logits_BV: jax.Array, ids_BL: jax.Array, lengths_B: jax.Array, prompt_lengths_B: jax.Array | None = None
  ) -> jax.Array:
    """Returns logits of -inf for tokens that are not allowed; if no other ones remain, allowed tokens are equal.

    Args:
      logits_BV, ids_BL, lengths_B: see `LogitProcessor`.
      prompt_lengths_B: int32, how many first tokens of each row are its prompt; rows without one are padding.

    Raises:
      ConfigError: the lengths of the prompts are missing.
    """
    if prompt_lengths_B is None:
      raise ConfigError(f'{type(self).__name__}: a constraint needs prompt_lengths_B, which a decoder passes to it')
    shape = jax.ShapeDtypeStruct(logits_BV.shape, np.bool_)
    ask = functools.partial(self._ask, vocab_size=logits_BV.shape[1])
    allowed_BV = jax.pure_callback(ask, shape, ids_BL, lengths_B, prompt_lengths_B)
    logits_BV = jnp.where(allowed_BV, logits_BV, -jnp.inf)
    is_empty_B1 = ~jnp.any(jnp.isfinite(logits_BV), axis=1, keepdims=True)  # Other processors excluded the rest.
    return jnp.where(is_empty_B1 & allowed_BV, 0.0, logits_BV)

  def _ask(self, ids_BL: jax.Array, lengths_B: jax.Array, prompt_lengths_B: jax.Array, vocab_size: int) -> np.ndarray:
    rows = zip(np.asarray(ids_BL), np.asarray(lengths_B), np.asarray(prompt_lengths_B))
    anything = np.ones(vocab_size, bool)
    return np.stack([
      self.allowed_tokens(tuple(ids[first:length].tolist()), vocab_size) if first else anything
      for ids, length, first in rows
    ])  # fmt: skip
