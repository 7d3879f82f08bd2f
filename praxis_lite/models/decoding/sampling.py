"""Draws tokens from logits, optionally only from the most probable ones.

B batch, V vocabulary, C candidates (the most probable tokens, in descending order).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError

_TINY = float(jnp.finfo(jnp.float32).tiny)  # Lower temperatures count as 0.
MOST_TEMPERATURE = 1e30  # The limit in `sample_rows`, above which 1 / temperature is not a normal float32.
NO_TOP_P = math.inf  # Stands for a top_p of None in an array.
# Arguments of `sample_tokens` that restrict which tokens may be drawn.
CANDIDATE_SETTINGS = ('top_k', 'top_p', 'min_p', 'typical_p', 'top_n_sigma')


def sample_tokens(
  logits_BV: jax.Array,
  keys_B: jax.Array | None,
  *,
  temperature: float = 1.0,
  top_k: int | None = None,
  top_p: float | None = None,
  min_p: float | None = None,
  typical_p: float | None = None,
  top_n_sigma: float | None = None,
) -> jax.Array:
  """Returns a token for each row, [B] int32, drawn from softmax(logits / temperature), restricted to candidates.

  `top_n_sigma` is applied first, to the logits before they are divided by the temperature; then `top_k`, `top_p`,
  `min_p` and `typical_p`, in this order, each to the candidates that remain.

  Args:
    logits_BV: logits of the next token.
    keys_B: a PRNG key for each row; may be None if the temperature is 0.
    temperature: 0, or less than the smallest normal float32, takes the most probable token; of equals, the lowest id.
    top_k: keeps the k most probable tokens (Fan et al., 2018); of equals, the lower ids. 0 and None keep all.
    top_p: keeps the fewest most probable tokens whose probabilities sum to at least top_p (nucleus sampling, Holtzman
      et al., 2020); None keeps all.
    min_p: keeps the tokens that are at least min_p times as probable as the most probable one (Nguyen et al., 2024);
      None keeps all.
    typical_p: keeps tokens until their probabilities sum to at least typical_p (Meister et al., 2022). Those whose
      log-probability is nearest to the mean log-probability, the negative entropy, come first. None keeps all.
    top_n_sigma: keeps the tokens whose logits are at most this many standard deviations below the largest; the standard
      deviation is over the logits that are not -inf (Tang et al., 2024). None keeps all.

  Raises:
    ConfigError: the temperature is negative or NaN; or it is above 0 and there are no keys.
  """
  if not temperature >= 0:
    raise ConfigError(f'Sampler.temperature: expected at least 0, got {temperature}')
  if is_greedy(temperature):
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
  if keys_B is None:
    raise ConfigError(f'Sampler.temperature: {temperature} draws random numbers, which needs a PRNG key')
  logits_BC, ids_BC = _candidates(
    logits_BV,
    functools.partial(_scale, temperature=temperature),
    top_k=top_k,
    top_p=top_p,
    min_p=min_p,
    typical_p=typical_p,
    top_n_sigma=top_n_sigma,
  )
  choice_B = jax.vmap(jax.random.categorical)(keys_B, logits_BC)
  return _ids_of(choice_B, ids_BC)


def sample_rows(
  logits_BV: jax.Array, keys_B: jax.Array, temperature_B: jax.Array, top_p_B: jax.Array, **settings: Any
) -> jax.Array:
  """Returns a token for each row, [B] int32, like `sample_tokens`, but with a temperature and top_p for each row.

  Args:
    logits_BV, keys_B: see `sample_tokens`.
    temperature_B: float32, from 0 to `MOST_TEMPERATURE`.
    top_p_B: float32; `NO_TOP_P` stands for None.
    **settings: other arguments of `sample_tokens`.
  """
  is_greedy_B = temperature_B < _TINY

  def draw_with(top_p_B1: jax.Array | None) -> jax.Array:
    scale = functools.partial(_scale_rows, temperature_B=jnp.where(is_greedy_B, 1.0, temperature_B))
    logits_BC, ids_BC = _candidates(logits_BV, scale, top_p=top_p_B1, **settings)
    return _ids_of(jax.vmap(jax.random.categorical)(keys_B, logits_BC), ids_BC)

  def draw() -> jax.Array:
    if settings.get('top_k'):
      return draw_with(top_p_B[:, None])
    # What a key draws depends on the order of the candidates, and top_p changes this order. So rows without top_p use
    # the order for a batch without top_p, whatever the other rows have.
    has_top_p_B, drawn_B = top_p_B < NO_TOP_P, draw_with(None)
    return jax.lax.cond(
      jnp.any(has_top_p_B), lambda: jnp.where(has_top_p_B, draw_with(top_p_B[:, None]), drawn_B), lambda: drawn_B
    )

  greedy_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
  drawn_B = jax.lax.cond(jnp.all(is_greedy_B), lambda: greedy_B, draw)
  return jnp.where(is_greedy_B, greedy_B, drawn_B)


def is_greedy(temperature: float) -> bool:
  """Whether this temperature takes the most probable token."""
  return temperature < _TINY


def candidate_logits(logits_BV: jax.Array, *, temperature: float = 1.0, **settings: Any) -> jax.Array:
  """Returns the logits [B, V], float32, from whose softmax `sample_tokens` draws; -inf for excluded tokens.

  The temperature must be above 0; `settings` are the other arguments of `sample_tokens`.
  """
  logits_BC, ids_BC = _candidates(logits_BV, functools.partial(_scale, temperature=temperature), **settings)
  if ids_BC is None:
    return logits_BC
  row_B1 = jnp.arange(len(logits_BC))[:, None]
  return jnp.full(logits_BV.shape, -jnp.inf).at[row_B1, ids_BC].set(logits_BC)


def _ids_of(choice_B: jax.Array, ids_BC: jax.Array | None) -> jax.Array:
  """Returns the tokens of the chosen candidates, [B] int32; if `ids_BC` is None, candidate i is token i."""
  if ids_BC is not None:
    choice_B = jnp.take_along_axis(ids_BC, choice_B[:, None], axis=-1)[:, 0]
  return choice_B.astype(jnp.int32)


def _candidates(
  logits_BV: jax.Array,
  scale: Callable[[jax.Array], jax.Array],
  *,
  top_k: int | None = None,
  top_p: float | jax.Array | None = None,
  min_p: float | None = None,
  typical_p: float | None = None,
  top_n_sigma: float | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """Returns the logits [B, C] and ids [B, C] of the candidates; the ids are None if C = V and ids are 0 to V - 1.

  `scale` divides logits by the temperature. `top_p` may be an array with a value for each row, [B, 1].
  """
  logits_BV = scale(_keep_within_sigmas(logits_BV.astype(jnp.float32), top_n_sigma))
  if not top_k and top_p is None:
    return _keep_typical(_keep_probable(logits_BV, min_p), typical_p), None
  vocab_size = logits_BV.shape[-1]
  logits_BC, ids_BC = jax.lax.top_k(logits_BV, min(top_k or vocab_size, vocab_size))
  if top_p is not None:
    probs_BC = jax.nn.softmax(logits_BC)
    more_probable_BC = jnp.cumsum(probs_BC, axis=-1) - probs_BC
    logits_BC = jnp.where(more_probable_BC < top_p, logits_BC, -jnp.inf)
  return _keep_typical(_keep_probable(logits_BC, min_p), typical_p), ids_BC


def _keep_probable(logits_BV: jax.Array, min_p: float | None) -> jax.Array:
  """Sets the logits of tokens that are less than min_p times as probable as the most probable one to -inf."""
  if not min_p:
    return logits_BV
  least_B1 = jnp.max(logits_BV, axis=-1, keepdims=True) + math.log(min_p)
  return jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)


def _keep_typical(logits_BV: jax.Array, typical_p: float | None) -> jax.Array:
  """Sets the logits of all but the most typical tokens to -inf; see `sample_tokens`."""
  if typical_p is None or typical_p >= 1:
    return logits_BV
  log_probs_BV = jax.nn.log_softmax(logits_BV)
  probs_BV = jnp.exp(log_probs_BV)
  mean_B1 = jnp.sum(jnp.where(probs_BV > 0, probs_BV * log_probs_BV, 0.0), axis=-1, keepdims=True)
  order_BV = jnp.argsort(jnp.abs(log_probs_BV - mean_B1), axis=-1)
  probs_BV = jnp.take_along_axis(probs_BV, order_BV, axis=-1)
  is_kept_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV < typical_p
  is_kept_BV = jnp.take_along_axis(is_kept_BV, jnp.argsort(order_BV, axis=-1), axis=-1)
  return jnp.where(is_kept_BV, logits_BV, -jnp.inf)


def _keep_within_sigmas(logits_BV: jax.Array, top_n_sigma: float | None) -> jax.Array:
  """Sets logits far below the largest logit to -inf; see `sample_tokens`."""
  if top_n_sigma is None:
    return logits_BV
  is_possible_BV = logits_BV > -jnp.inf
  below_BV = logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)
  sigma_B1 = jnp.std(below_BV, axis=-1, keepdims=True, where=is_possible_BV)
  return jnp.where(below_BV >= -top_n_sigma * sigma_B1, logits_BV, -jnp.inf)


def _scale(logits_BV: jax.Array, temperature: float) -> jax.Array:
  """Returns logits / temperature, float32, possibly shifted by a constant, so that nothing overflows."""
  if temperature * _TINY > 1:  # 1 / temperature would be 0 in float32, so all possible tokens become equally probable.
    return jnp.where(logits_BV == -jnp.inf, -jnp.inf, 0.0)
  if temperature >= 1:
    return logits_BV / temperature
  return _scale_up(logits_BV, temperature)


def _scale_up(logits_BV: jax.Array, temperature: float | jax.Array) -> jax.Array:
  """Returns (logits - largest logit of the row) / temperature, for temperatures below 1."""
  most_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
  return jnp.where(logits_BV == most_B1, 0.0, (logits_BV - most_B1) / temperature)


def _scale_rows(logits_BV: jax.Array, temperature_B: jax.Array) -> jax.Array:
  """Does the same as `_scale`, with a temperature of at most `MOST_TEMPERATURE` for each row."""
  temperature_B1 = temperature_B[:, None]
  return jnp.where(temperature_B1 >= 1, logits_BV / temperature_B1, _scale_up(logits_BV, temperature_B1))
