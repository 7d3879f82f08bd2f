"""Logit processors: functions that change the logits of the next token, given the tokens of the row so far.

A processor is any pure function (logits [B, V] float32, ids [B, L] int32, lengths [B] int32) -> logits [B, V]. `ids`
holds the tokens of each row, prompt and continuation; entries after the length of a row are arbitrary. A logit of -inf
excludes a token. `prompt_lengths_B`, int32, says how many first tokens of each row are its prompt.

B rows, V vocabulary, L maximum length of a row in tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError

LogitProcessor: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""A function of logits [B, V], the tokens of each row so far [B, L] and their number [B], which returns logits."""


def apply_processors(
  processors: Sequence[tuple[str, LogitProcessor]], logits_BV: jax.Array, ids_BL: jax.Array, lengths_B: jax.Array
) -> jax.Array:
  """Returns the logits, float32, after applying all processors in order; error messages use the processors' names.

  Raises:
    ConfigError: a processor does not return logits of the same shape.
  """
  logits_BV = logits_BV.astype(jnp.float32)
  for name, process in processors:
    new = process(logits_BV, ids_BL, lengths_B)
    if jnp.shape(new) != logits_BV.shape:
      raise ConfigError(
        f'{name}: expected logits of shape {logits_BV.shape} from {getattr(process, "__name__", process)}, got '
        + (f'shape {jnp.shape(new)}' if isinstance(new, jax.Array) else repr(new))
      )
    logits_BV = new.astype(jnp.float32)
  return logits_BV


def penalize_repetition(logits_BV: jax.Array, ids_BL: jax.Array, lengths_B: jax.Array, penalty: float) -> jax.Array:
  """Makes tokens that already occur in the row less probable; returns the new logits (CTRL, Keskar et al., 2019).

  `penalty` divides the positive logits of these tokens, and multiplies the negative ones; 1 changes nothing.
  """
  is_in_row_BV = _scatter(ids_BL, jnp.arange(ids_BL.shape[1]) < lengths_B[:, None], logits_BV.shape[1])
  return jnp.where(is_in_row_BV, jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)


def exclude_ngrams(logits_BV: jax.Array, ids_BL: jax.Array, lengths_B: jax.Array, size: int) -> jax.Array:
  """Sets the logits of tokens that would repeat an n-gram of the row, n = `size`, to -inf (Paulus et al., 2017).

  A size of 1 excludes all tokens that occur in the row.
  """
  width = ids_BL.shape[1]
  if width < size:
    return logits_BV
  count = width - size + 1  # Number of indices where an n-gram may begin.
  matches_BL = jnp.arange(size - 1, width) < lengths_B[:, None]
  for i in range(size - 1):
    last_B1 = jnp.take_along_axis(ids_BL, lengths_B[:, None] - size + 1 + i, axis=1, mode='clip')
    matches_BL &= ids_BL[:, i : i + count] == last_B1
  return jnp.where(_scatter(ids_BL[:, size - 1 :], matches_BL, logits_BV.shape[1]), -jnp.inf, logits_BV)


def penalize_counts(
  logits_BV: jax.Array,
  ids_BL: jax.Array,
  lengths_B: jax.Array,
  *,
  prompt_lengths_B: jax.Array,
  presence: float = 0.0,
  frequency: float = 0.0,
) -> jax.Array:
  """Subtracts `presence` from logits of tokens in the continuation, and `frequency` for each time that they occur.

  These are the penalties of OpenAI's API. Unlike `penalize_repetition`, they ignore the prompt. Negative values make
  repetitions more probable.
  """
  place_L = jnp.arange(ids_BL.shape[1])
  is_new_BL = (place_L >= prompt_lengths_B[:, None]) & (place_L < lengths_B[:, None])
  row_B1 = jnp.arange(len(ids_BL))[:, None]
  count_BV = jnp.zeros(logits_BV.shape).at[row_B1, ids_BL].add(is_new_BL.astype(jnp.float32), mode='drop')
  return logits_BV - frequency * count_BV - presence * (count_BV > 0)


def exclude_early_stops(
  logits_BV: jax.Array,
  ids_BL: jax.Array,
  lengths_B: jax.Array,
  *,
  prompt_lengths_B: jax.Array,
  stop_ids: tuple[int, ...],
  least: int,
) -> jax.Array:
  """Sets the logits of `stop_ids` to -inf in rows whose continuation has fewer than `least` tokens."""
  is_stop_V = jnp.isin(jnp.arange(logits_BV.shape[1]), jnp.array(stop_ids, jnp.int32))
  is_early_B = lengths_B - prompt_lengths_B < least
  return jnp.where(is_stop_V & is_early_B[:, None], -jnp.inf, logits_BV)


def _scatter(ids_BL: jax.Array, is_chosen_BL: jax.Array, vocab_size: int) -> jax.Array:
  """Returns which tokens of the vocabulary are among the chosen tokens of each row, [B, V]."""
  row_B1 = jnp.arange(len(ids_BL))[:, None]
  return jnp.zeros((len(ids_BL), vocab_size), bool).at[row_B1, ids_BL].max(is_chosen_BL, mode='drop')
