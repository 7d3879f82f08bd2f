"""Drawing the next token from logits.

B batch, V vocabulary, C candidates, the most probable tokens first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from praxis_lite.errors import ConfigError


def sample_tokens(
  logits_BV: jax.Array,
  keys_B: jax.Array | None,
  *,
  temperature: float = 1.0,
  top_k: int | None = None,
  top_p: float | None = None,
) -> jax.Array:
  """Returns a token for each row, [B] int32, drawn from softmax(logits / temperature) cut down to its candidates.

  Args:
    logits_BV: logits of the next token.
    keys_B: a PRNG key for each row; None where the temperature is 0.
    temperature: 0 takes the most probable token, the lowest id among equals.
    top_k: candidates are the k most probable tokens (Fan et al., 2018), the lower ids among equals.
    top_p: of those, the fewest whose probabilities sum to at least top_p (nucleus sampling, Holtzman et al., 2020).
  """
  if temperature == 0:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
  if keys_B is None:
    raise ConfigError(f'Sampler.temperature: {temperature} draws random numbers, which needs a PRNG key')
  logits_BV = logits_BV.astype(jnp.float32) / temperature
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
