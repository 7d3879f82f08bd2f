"""Constraint: a logit processor that only allows tokens with which the text can still take a given form, such as JSON.

The compiled loop calls the host for each token; the host computes the allowed tokens from the continuation so far. So
the loop carries no state of a constraint, and rows may end, be repeated, or branch into beams.

B rows, V vocabulary, L maximum length of a row in tokens.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.errors import ConfigError


class Constraint:
  """A logit processor that also gets the lengths of the prompts from the decoder. Subclasses define `allowed_tokens`.

  Attributes:
    stop_ids: tokens that end a text that meets the constraint; a decoder adds them to its own stop tokens.
  """

  stop_ids: tuple[int, ...] = ()

  def allowed_tokens(self, continuation: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """Returns which tokens may follow, [V] bool, at least one of them. Runs on the host.

    Args:
      continuation: the tokens after the prompt so far; each was allowed, unless the row has ended.
      vocab_size: V.
    """
    raise NotImplementedError

  def __call__(
    self, logits_BV: jax.Array, ids_BL: jax.Array, lengths_B: jax.Array, prompt_lengths_B: jax.Array | None = None
  ) -> jax.Array:
    """Sets logits of forbidden tokens to -inf; if all allowed tokens are already -inf, they become equally probable.

    Rows whose prompt has length 0 are padding. Raises ConfigError if the lengths of the prompts are missing.
    """
    if prompt_lengths_B is None:
      raise ConfigError(f'{type(self).__name__}: a constraint needs prompt_lengths_B, which a decoder passes to it')
    shape = jax.ShapeDtypeStruct(logits_BV.shape, np.bool_)
    ask = functools.partial(self._ask, vocab_size=logits_BV.shape[1])
    allowed_BV = jax.pure_callback(ask, shape, ids_BL, lengths_B, prompt_lengths_B)
    logits_BV = jnp.where(allowed_BV, logits_BV, -jnp.inf)
    # Other processors may have excluded all allowed tokens.
    is_empty_B1 = ~jnp.any(jnp.isfinite(logits_BV), axis=1, keepdims=True)
    return jnp.where(is_empty_B1 & allowed_BV, 0.0, logits_BV)

  def _ask(self, ids_BL: jax.Array, lengths_B: jax.Array, prompt_lengths_B: jax.Array, vocab_size: int) -> np.ndarray:
    rows = zip(np.asarray(ids_BL), np.asarray(lengths_B), np.asarray(prompt_lengths_B))
    anything = np.ones(vocab_size, bool)
    return np.stack([
      self.allowed_tokens(tuple(ids[first:length].tolist()), vocab_size) if first else anything
      for ids, length, first in rows
    ])  # fmt: skip
