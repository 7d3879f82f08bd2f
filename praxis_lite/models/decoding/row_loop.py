"""RowLoop: continues rows that began at different times by a few tokens, for a batcher.

    row 0   prompt, tokens 5 and 6 of its continuation
    row 1   nobody's
    row 2   prompt, tokens 0 and 1

Which rows there are, and how far each of them is, are arrays, so one compiled program serves all requests.

B rows, L places for the tokens of a row, N tokens in one call, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.models.decoding.loop import token_key
from praxis_lite.models.decoding.processors import LogitProcessor
from praxis_lite.models.decoding.reading import NEXT_TOKEN
from praxis_lite.models.decoding.steps import DecodingState, DecodingSteps


class RowsState(NamedTuple, Generic[DecodingState]):
  """What stays on the devices between calls.

  Attributes:
    model: the state of the model, which can go back; see `DecodingSteps`.
    ids: [B, L] int32 tokens of each row; those after its length are arbitrary.
  """

  model: DecodingState
  ids: jax.Array


class RowSettings(NamedTuple):
  """How each row goes on.

  Attributes:
    lengths: [B] int32, the tokens of a row so far. The model has read all but the last one.
    prompt_lengths: [B] int32, how many of these are its prompt.
    limits: [B] int32, the largest number of tokens after the prompt; 0 for a row that is not continued.
    temperatures: [B] float32, see `sample_tokens`.
    keys: [B], the PRNG key of each row.
  """

  lengths: jax.Array
  prompt_lengths: jax.Array
  limits: jax.Array
  temperatures: jax.Array
  keys: jax.Array


class NewTokens(NamedTuple):
  """The tokens that one call adds.

  Attributes:
    ids: [B, N] int32.
    counts: [B] int32, how many of them there are.
  """

  ids: jax.Array
  counts: jax.Array


@dataclasses.dataclass(frozen=True)
class RowLoop(Generic[DecodingState]):
  """Continues rows.

  Attributes:
    steps: the model.
    draw: (logits [B, V], keys [B], temperatures [B]) -> tokens [B].
    adjust: see `DecodingLoop`, for rows with these lengths of prompts.
    stop_ids: tokens that end a row.
    num_tokens: N.
  """

  steps: DecodingSteps[DecodingState]
  draw: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
  adjust: LogitProcessor | None
  stop_ids: tuple[int, ...]
  num_tokens: int

  def run(self, state: RowsState[DecodingState], rows: RowSettings) -> tuple[RowsState[DecodingState], NewTokens]:
    """Adds up to N tokens to each row."""
    row_B = jnp.arange(len(rows.lengths))
    stops = jnp.array(self.stop_ids, jnp.int32)

    def add_token(
      carry: tuple[jax.Array, RowsState[DecodingState], NewTokens, jax.Array],
    ) -> tuple[jax.Array, RowsState[DecodingState], NewTokens, jax.Array]:
      turn, (model, ids_BL), (new_BN, count_B), goes_on_B = carry
      lengths_B = rows.lengths + count_B
      last_B1 = jnp.take_along_axis(ids_BL, lengths_B[:, None] - 1, axis=1, mode='clip')
      pos_B1 = jnp.where(goes_on_B, lengths_B - 1, -1)[:, None]
      with jax.named_scope(NEXT_TOKEN):
        logits_BV, model = self.steps.extend(last_B1, pos_B1, jnp.zeros_like(lengths_B), model)
        if self.adjust is not None:
          logits_BV = self.adjust(logits_BV, ids_BL, lengths_B)
        number_B = lengths_B - rows.prompt_lengths
        keys_B = jax.vmap(token_key, in_axes=(0, 0, None))(rows.keys, number_B, 0)  # As in a batch of one row.
        ids_B = self.draw(logits_BV, keys_B, rows.temperatures)
      place_B = jnp.where(goes_on_B, lengths_B, ids_BL.shape[1])
      state = RowsState(model, ids_BL.at[row_B, place_B].set(ids_B, mode='drop'))
      new = NewTokens(new_BN.at[:, turn].set(jnp.where(goes_on_B, ids_B, 0)), count_B + goes_on_B)
      return turn + 1, state, new, goes_on_B & ~jnp.isin(ids_B, stops) & (number_B + 1 < rows.limits)

    zeros_B = jnp.zeros_like(rows.lengths)
    nothing = NewTokens(jnp.zeros((len(row_B), self.num_tokens), jnp.int32), zeros_B)
    goes_on_B = rows.lengths - rows.prompt_lengths < rows.limits
    carry = jnp.int32(0), state, nothing, goes_on_B
    _, state, new, _ = jax.lax.while_loop(lambda c: (c[0] < self.num_tokens) & jnp.any(c[-1]), add_token, carry)
    return state, new
