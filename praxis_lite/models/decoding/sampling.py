"""Draws tokens from logits, restricted to the most probable ones, and makes repetitions less probable.

B batch, V vocabulary, C candidates (the most probable tokens, in descending order), L places for the tokens of a row.
"""

from __future__ import annotations

import math

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
  min_p: float | None = None,
) -> jax.Array:
  """Returns a token for each row, [B] int32, drawn from softmax(logits / temperature) restricted to its candidates.

  Args:
    logits_BV: logits of the next token.
    keys_B: a PRNG key for each row; may be None if the temperature is 0.
    temperature: 0, or less than the smallest normal float32, takes the most probable token; of equals, the lowest id.
    top_k: candidates are the k most probable tokens (Fan et al., 2018); of equals, the lower ids. 0 and
      None take all.
    top_p: of those, the fewest whose probabilities sum to at least top_p (nucleus sampling, Holtzman et al., 2020);
      None takes all.
    min_p: of those, the tokens that are at least min_p times as probable as the most probable one (Nguyen et al.,
      2024); None takes all.

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
  if not top_k and top_p is None:
    logits_BV = _keep_probable(logits_BV, min_p)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
  vocab_size = logits_BV.shape[-1]
  logits_BC, ids_BC = jax.lax.top_k(logits_BV, min(top_k or vocab_size, vocab_size))
  if top_p is not None:
    probs_BC = jax.nn.softmax(logits_BC)
    more_probable_BC = jnp.cumsum(probs_BC, axis=-1) - probs_BC
    logits_BC = jnp.where(more_probable_BC < top_p, logits_BC, -jnp.inf)
  choice_B = jax.vmap(jax.random.categorical)(keys_B, _keep_probable(logits_BC, min_p))
  return jnp.take_along_axis(ids_BC, choice_B[:, None], axis=-1)[:, 0].astype(jnp.int32)


def _keep_probable(logits_BV: jax.Array, min_p: float | None) -> jax.Array:
  """Returns logits of -inf for tokens that are less than min_p times as probable as the most probable one."""
  if not min_p:
    return logits_BV
  least_B1 = jnp.max(logits_BV, axis=-1, keepdims=True) + math.log(min_p)
  return jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)


def penalize_repetition(logits_BV: jax.Array, ids_BL: jax.Array, lengths_B: jax.Array, penalty: float) -> jax.Array:
  """Returns logits in which tokens that are in the row already are less probable (CTRL, Keskar et al., 2019).

  Args:
    logits_BV: logits of the next token.
    ids_BL: int32, the tokens of each row so far; those after its length are arbitrary.
    lengths_B: int32, the number of tokens of each row.
    penalty: divides the positive logits of these tokens, and multiplies the negative ones; 1 changes nothing.
  """
  is_in_row_BV = _scatter(ids_BL, jnp.arange(ids_BL.shape[1]) < lengths_B[:, None], logits_BV.shape[1])
  return jnp.where(is_in_row_BV, jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)


def exclude_ngrams(logits_BV: jax.Array, ids_BL: jax.Array, lengths_B: jax.Array, size: int) -> jax.Array:
  """Returns logits of -inf for tokens that would repeat `size` consecutive tokens of the row (Paulus et al., 2017).

  Args:
    logits_BV, ids_BL, lengths_B: see `penalize_repetition`.
    size: number of tokens; 1 excludes each token of the row.
  """
  width = ids_BL.shape[1]
  if width < size:
    return logits_BV
  count = width - size + 1  # Number of places where such a group of tokens may begin.
  matches_BL = jnp.arange(size - 1, width) < lengths_B[:, None]
  for i in range(size - 1):
    last_B1 = jnp.take_along_axis(ids_BL, lengths_B[:, None] - size + 1 + i, axis=1, mode='clip')
    matches_BL &= ids_BL[:, i : i + count] == last_B1
  return jnp.where(_scatter(ids_BL[:, size - 1 :], matches_BL, logits_BV.shape[1]), -jnp.inf, logits_BV)


def _scatter(ids_BL: jax.Array, is_chosen_BL: jax.Array, vocab_size: int) -> jax.Array:
  """Returns which tokens of the vocabulary, [B, V], are among the chosen ones of each row."""
  row_B1 = jnp.arange(len(ids_BL))[:, None]
  return jnp.zeros((len(ids_BL), vocab_size), bool).at[row_B1, ids_BL].max(is_chosen_BL, mode='drop')


def _scale(logits_BV: jax.Array, temperature: float) -> jax.Array:
  """Returns logits / temperature, float32, or if that would overflow, logits with the same softmax."""
  if temperature * float(jnp.finfo(jnp.float32).tiny) > 1:  # A factor of 1 / temperature would be zero.
    return jnp.where(logits_BV == -jnp.inf, -jnp.inf, 0.0)  # All possible tokens become equally probable.
  if temperature >= 1:
    return logits_BV / temperature
  most_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
  return jnp.where(logits_BV == most_B1, 0.0, (logits_BV - most_B1) / temperature)
