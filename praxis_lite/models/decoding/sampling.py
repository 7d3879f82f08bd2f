"""Draws tokens from logits, restricted to the most probable ones.

B batch, V vocabulary, C candidates (the most probable tokens, in descending order).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError


def sample_tokens(
  logits_BV: jax.Array,
  keys_B: jax.Array | None,
  *,
  temperature: float = 1.0,
  top_k: int | None = None,
  top_p: float | None = None,
) -> jax.Array:
  """Returns a token for each row, [B] int32, drawn from softmax(logits / temperature) restricted to its candidates.

  Args:
    logits_BV: logits of the next token.
    keys_B: a PRNG key for each row; may be None if the temperature is 0.
    temperature: 0, or less than the smallest normal float32, takes the most probable token; of equals, the lowest id.
    top_k: candidates are the k most probable tokens (Fan et al., 2018); of equals, the lower ids. None takes all.
    top_p: of those, the fewest whose probabilities sum to at least top_p (nucleus sampling, Holtzman et al., 2020);
      None takes all.

  Raises:
    ConfigError: the temperature is negative or NaN; or it is not 0 and there are no keys.
  """
  if not temperature >= 0:
    raise ConfigError(f'Sampler.temperature: expected at least 0, got {temperature}')
  if temperature < jnp.finfo(jnp.float32).tiny:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
  if keys_B is None:
    raise ConfigError(f'Sampler.temperature: {temperature} draws random numbers, which needs a PRNG key')
  logits_BV = _scale(logits_BV.astype(jnp.float32), temperature)
  if top_k is None and top_p is None:
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
  vocab_size = logits_BV.shape[-1]
  logits_BC, ids_BC = jax.lax.top_k(logits_BV, min(top_k or vocab_size, vocab_size))
  if top_p is not None:
    probs_BC = jax.nn.softmax(logits_BC)
    more_probable_BC = jnp.cumsum(probs_BC, axis=-1) - probs_BC
    logits_BC = jnp.where(more_probable_BC < top_p, logits_BC, -jnp.inf)
  choice_B = jax.vmap(jax.random.categorical)(keys_B, logits_BC)
  return jnp.take_along_axis(ids_BC, choice_B[:, None], axis=-1)[:, 0].astype(jnp.int32)


def _scale(logits_BV: jax.Array, temperature: float) -> jax.Array:
  """Returns logits / temperature, float32, or if that would overflow, logits with the same softmax."""
  if temperature * float(jnp.finfo(jnp.float32).tiny) > 1:  # A factor of 1 / temperature would be zero.
    return jnp.where(logits_BV == -jnp.inf, -jnp.inf, 0.0)  # All possible tokens become equally probable.
  if temperature >= 1:
    return logits_BV / temperature
  most_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
  return jnp.where(logits_BV == most_B1, 0.0, (logits_BV - most_B1) / temperature)
