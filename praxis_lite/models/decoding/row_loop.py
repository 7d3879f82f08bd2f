"""RowLoop: adds a few tokens to each row of a batch whose rows began at different times (continuous batching).

    row 0   prompt, tokens 5 and 6 of its continuation
    row 1   unused
    row 2   prompt, tokens 0 and 1

Arrays say which rows are used, and how long each of them is, so one compiled program serves all requests.

B rows, L maximum length of a row in tokens, N tokens in one call, V vocabulary, K most probable tokens.
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
  """Arrays that stay on the devices between calls."""

  model: DecodingState  # The state of the model; `can_go_back` is True, see `DecodingSteps`.
  ids: jax.Array  # [B, L] int32 tokens of each row; entries after its length are arbitrary.


class RowSettings(NamedTuple):
  """Lengths, limits and sampling settings of each row."""

  lengths: jax.Array  # [B] int32, number of tokens of a row so far. The model has read all but the last one.
  prompt_lengths: jax.Array  # [B] int32, the length of each row's prompt.
  limits: jax.Array  # [B] int32, the largest number of tokens after the prompt; 0 for a row that is not continued.
  temperatures: jax.Array  # [B] float32, see `sample_tokens`.
  keys: jax.Array  # [B], the PRNG key of each row.
  top_ps: jax.Array  # [B] float32, see `sample_rows`.


class NewTokens(NamedTuple):
  """The tokens that one call adds."""

  ids: jax.Array  # [B, N] int32.
  counts: jax.Array  # [B] int32, number of new tokens of each row.
  log_probs: jax.Array  # [B, N] float32, log-probability of each token under the model at temperature 1.
  top_ids: jax.Array  # [B, N, K], for each new token, the K most probable tokens at its position, best first.
  top_log_probs: jax.Array  # [B, N, K], their log-probabilities.


@dataclasses.dataclass(frozen=True)
class RowLoop(Generic[DecodingState]):
  """Adds up to N tokens to each row."""

  steps: DecodingSteps[DecodingState]  # The model.
  # (logits [B, V], keys [B], temperatures [B], top_ps [B]) -> tokens [B].
  draw: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
  adjust: LogitProcessor | None  # See `DecodingLoop`. Its result depends on the lengths of the rows' prompts.
  stop_ids: tuple[int, ...]  # Tokens that end a row.
  num_tokens: int  # N.
  num_top: int = 0  # K.

  def run(self, state: RowsState[DecodingState], rows: RowSettings) -> tuple[RowsState[DecodingState], NewTokens]:
    """Adds up to N tokens to each row."""
    row_B = jnp.arange(len(rows.lengths))
    stops = jnp.array(self.stop_ids, jnp.int32)

    def add_token(
      carry: tuple[jax.Array, RowsState[DecodingState], NewTokens, jax.Array],
    ) -> tuple[jax.Array, RowsState[DecodingState], NewTokens, jax.Array]:
      turn, (model, ids_BL), new, goes_on_B = carry
      lengths_B = rows.lengths + new.counts
      last_B1 = jnp.take_along_axis(ids_BL, lengths_B[:, None] - 1, axis=1, mode='clip')
      pos_B1 = jnp.where(goes_on_B, lengths_B - 1, -1)[:, None]
      with jax.named_scope(NEXT_TOKEN):
        logits_BV, model = self.steps.extend(last_B1, pos_B1, jnp.zeros_like(lengths_B), model)
        adjusted_BV = logits_BV if self.adjust is None else self.adjust(logits_BV, ids_BL, lengths_B)
        number_B = lengths_B - rows.prompt_lengths
        keys_B = jax.vmap(token_key, in_axes=(0, 0, None))(rows.keys, number_B, 0)  # The same as in a batch of one row.
        ids_B = self.draw(adjusted_BV, keys_B, rows.temperatures, rows.top_ps)
        new = self._note(new, turn, jnp.where(goes_on_B, ids_B, 0), new.counts + goes_on_B, logits_BV)
      place_B = jnp.where(goes_on_B, lengths_B, ids_BL.shape[1])
      state = RowsState(model, ids_BL.at[row_B, place_B].set(ids_B, mode='drop'))
      return turn + 1, state, new, goes_on_B & ~jnp.isin(ids_B, stops) & (number_B + 1 < rows.limits)

    zeros_B = jnp.zeros_like(rows.lengths)
    zeros_BN = jnp.zeros((len(row_B), self.num_tokens))
    zeros_BNK = jnp.zeros((*zeros_BN.shape, self.num_top))
    nothing = NewTokens(zeros_BN.astype(jnp.int32), zeros_B, zeros_BN, zeros_BNK.astype(jnp.int32), zeros_BNK)
    goes_on_B = rows.lengths - rows.prompt_lengths < rows.limits
    carry = jnp.int32(0), state, nothing, goes_on_B
    _, state, new, _ = jax.lax.while_loop(lambda c: (c[0] < self.num_tokens) & jnp.any(c[-1]), add_token, carry)
    return state, new

  def _note(
    self, new: NewTokens, turn: jax.Array, ids_B: jax.Array, count_B: jax.Array, logits_BV: jax.Array
  ) -> NewTokens:
    """Returns `new` with the tokens `ids_B` at index `turn`, their log-probabilities, and the counts `count_B`."""
    log_probs_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32))
    log_prob_B = jnp.take_along_axis(log_probs_BV, ids_B[:, None], axis=-1)[:, 0]
    new = new._replace(
      ids=new.ids.at[:, turn].set(ids_B), counts=count_B, log_probs=new.log_probs.at[:, turn].set(log_prob_B)
    )
    if not self.num_top:
      return new
    top_BK, top_ids_BK = jax.lax.top_k(log_probs_BV, self.num_top)
    return new._replace(
      top_ids=new.top_ids.at[:, turn].set(top_ids_BK.astype(jnp.int32)),
      top_log_probs=new.top_log_probs.at[:, turn].set(top_BK),
    )
