"""SpeculativeLoop: continues prompts by several tokens in each pass of the model (Leviathan et al., 2023).

B batch, P length of the prompts, M maximum number of tokens to decode, L = P + M, K largest number of tokens in a
draft, N = K + 1, V vocabulary.

    logits = extend(prompts); token 0 = draw(logits)
    while a row continues:
      draft = guesses of the next K tokens
      logits = extend(last token, draft)            one pass over N tokens of each row
      the next 1 to N tokens = the accepted tokens of the draft, and one token of the model

Rows accept different numbers of tokens. `can_go_back` of the steps must be True, see `DecodingSteps`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.layers.base.expected_trips import expected_trips
from praxis_lite.models.decoding.drafting import Draft, Drafter, OpenRows
from praxis_lite.models.decoding.loop import Decoded
from praxis_lite.models.decoding.processors import LogitProcessor
from praxis_lite.models.decoding.reading import NEXT_TOKEN, READ_PROMPTS, RowReader
from praxis_lite.models.decoding.steps import DecodingState
from praxis_lite.models.decoding.verifying import Verified


class SpeculativeDecoded(NamedTuple):
  """Continuations of prompts, as in `Decoded`, and how many guesses were right.

  Attributes:
    ids, lengths, log_probs: see `Decoded`.
    num_passes: [B] int32, number of passes of the model for a row, including the pass over its prompt.
    num_drafted: [B] int32, number of guessed tokens.
    num_accepted: [B] int32, number of guessed tokens that became part of the continuation.
  """

  ids: jax.Array
  lengths: jax.Array
  log_probs: jax.Array
  num_passes: jax.Array
  num_drafted: jax.Array
  num_accepted: jax.Array

  def metrics(self, rows_B: jax.Array) -> WeightedScalars:
    """Returns the metrics of `Decoded`, and two more.

    They are `accepted_drafts`, the accepted fraction of the guesses, and `tokens_per_pass`, the mean number of tokens
    that a pass of the model adds to a row.
    """
    passes_B, drafted_B = self.num_passes.astype(jnp.float32), self.num_drafted.astype(jnp.float32)
    return {
      **Decoded(self.ids, self.lengths, self.log_probs).metrics(rows_B),
      'accepted_drafts': weighted_mean(self.num_accepted / jnp.maximum(drafted_B, 1.0), drafted_B * rows_B),
      'tokens_per_pass': weighted_mean(self.lengths / jnp.maximum(passes_B, 1.0), passes_B * rows_B),
    }


class _Progress(NamedTuple):
  """The progress of the rows, besides the states of the models."""

  decoded: SpeculativeDecoded
  done_B: jax.Array


_Carry = tuple[DecodingState, Any, _Progress]


@dataclasses.dataclass(frozen=True)
class SpeculativeLoop(Generic[DecodingState]):
  """One call of `SpeculativeSampler.decode`."""

  # Reads the prompts. Its state has room for all tokens, so no row has to be read again when it grows.
  reader: RowReader[DecodingState]
  drafter: Drafter[Any]  # Guesses tokens.
  num_drafts: int  # K.
  # (logits [B, V], index of the token in its continuation [B]) -> tokens [B].
  draw: Callable[[jax.Array, jax.Array], jax.Array]
  # (logits [B, N, V], draft, index of its first token in the continuation [B]) -> the next tokens.
  verify: Callable[[jax.Array, Draft, jax.Array], Verified]
  # (logits [B, V], tokens [B, L] of the rows, number of tokens [B]) -> the logits to draw from. If None, these are the
  # model's logits.
  adjust: LogitProcessor | None
  stop_ids: tuple[int, ...]  # Tokens that end a row.
  limits_B: jax.Array  # int32, the largest number of tokens after each prompt, at most M.

  def run(self) -> SpeculativeDecoded:
    """Continues the prompts."""
    reader = self.reader
    B, M = len(reader.prompt_lengths_B), reader.num_steps
    zeros_B = jnp.zeros(B, jnp.int32)
    nothing = SpeculativeDecoded(jnp.zeros((B, M), jnp.int32), zeros_B, jnp.zeros((B, M)), zeros_B, zeros_B, zeros_B)
    progress = _Progress(nothing, (reader.prompt_lengths_B == 0) | (self.limits_B <= 0))
    with jax.named_scope(READ_PROMPTS):
      logits_BV, state, _ = reader.read(nothing.ids, jnp.int32(0), progress.done_B, reader.start())
      adjusted_BV = self._adjust(logits_BV, reader.row_tokens(nothing.ids), reader.prompt_lengths_B)
      first = Verified(self.draw(adjusted_BV, zeros_B)[:, None], zeros_B)
      progress = self._append(first, zeros_B, logits_BV[:, None], progress)
      draft_state = self.drafter.start(state)
    carry = state, draft_state, progress
    with expected_trips(M - 1):
      return jax.lax.while_loop(lambda c: ~jnp.all(c[-1].done_B), self._extend, carry)[-1].decoded

  def _extend(self, carry: _Carry[DecodingState]) -> _Carry[DecodingState]:
    """Guesses tokens, reads them, and keeps those that are accepted, and one token of the model."""
    state, draft_state, progress = carry
    decoded, K = progress.decoded, self.num_drafts
    lengths_B = self.reader.prompt_lengths_B + decoded.lengths
    # At most one guess less than the tokens that a row may still get, because each pass also adds a token of the model.
    # So the last token of a row needs no slot.
    most_B = jnp.where(progress.done_B, 0, jnp.minimum(self.limits_B - decoded.lengths - 1, K))
    with jax.named_scope(NEXT_TOKEN):
      rows = OpenRows(self.reader.row_tokens(decoded.ids), lengths_B, decoded.lengths, most_B)
      draft, draft_state = self.drafter.propose(rows, draft_state, state)
      last_B1 = jnp.take_along_axis(rows.ids, lengths_B[:, None] - 1, axis=1, mode='clip')
      ids_BN = jnp.concatenate([last_B1, draft.ids], axis=1)
      i_N = jnp.arange(K + 1, dtype=jnp.int32)
      is_read_BN = (i_N <= draft.counts[:, None]) & ~progress.done_B[:, None]
      pos_BN = jnp.where(is_read_BN, lengths_B[:, None] - 1 + i_N, -1)
      all_BN = jnp.broadcast_to(i_N, pos_BN.shape)
      logits_BNV, state = self.reader.steps.extend(ids_BN, pos_BN, all_BN, state)
      if logits_BNV.ndim != 3:
        raise ConfigError(
          f'speculative decoding: {type(self.reader.steps).__name__}.extend returned logits of shape '
          f'{logits_BNV.shape} for several tokens of each row; expected {(*pos_BN.shape, logits_BNV.shape[-1])}'
        )
      verified = self.verify(self._adjust_all(logits_BNV, rows, draft), draft, decoded.lengths)
      return state, draft_state, self._append(verified, draft.counts, logits_BNV, progress)

  def _append(self, verified: Verified, drafted_B: jax.Array, logits_BNV: jax.Array, progress: _Progress) -> _Progress:
    """Adds the next tokens to each row that is not done, up to its first stop token."""
    decoded, done_B = progress
    ids_BN, i_N = verified.ids, jnp.arange(verified.ids.shape[1])
    is_stop_BN = jnp.isin(ids_BN, jnp.array(self.stop_ids, jnp.int32)) & (i_N <= verified.accepted[:, None])
    stops_B = jnp.any(is_stop_BN, axis=1)
    num_new_B = jnp.where(stops_B, jnp.argmax(is_stop_BN, axis=1), verified.accepted) + 1
    num_new_B = jnp.where(done_B, 0, num_new_B).astype(jnp.int32)
    log_probs_BNV = jax.nn.log_softmax(logits_BNV.astype(jnp.float32))
    log_probs_BN = jnp.take_along_axis(log_probs_BNV, ids_BN[..., None], axis=-1)[..., 0]
    M, row_B1 = decoded.ids.shape[1], jnp.arange(len(ids_BN))[:, None]
    place_BN = jnp.where(i_N < num_new_B[:, None], decoded.lengths[:, None] + i_N, M)
    lengths_B = decoded.lengths + num_new_B
    decoded = SpeculativeDecoded(
      decoded.ids.at[row_B1, place_BN].set(ids_BN, mode='drop'),
      lengths_B,
      decoded.log_probs.at[row_B1, place_BN].set(log_probs_BN, mode='drop'),
      decoded.num_passes + ~done_B,
      decoded.num_drafted + jnp.where(done_B, 0, drafted_B),
      decoded.num_accepted + jnp.minimum(verified.accepted, num_new_B),
    )
    return _Progress(decoded, done_B | stops_B | (lengths_B >= self.limits_B))

  def _adjust_all(self, logits_BNV: jax.Array, rows: OpenRows, draft: Draft) -> jax.Array:
    """Returns the logits [B, N, V] to draw from; logits i are adjusted for the row and the first i draft tokens."""
    if self.adjust is None:
      return logits_BNV
    place_BK = rows.lengths[:, None] + jnp.arange(self.num_drafts)
    ids_BL = rows.ids.at[jnp.arange(len(place_BK))[:, None], place_BK].set(draft.ids, mode='drop')
    each = [self._adjust(logits_BNV[:, i], ids_BL, rows.lengths + i) for i in range(self.num_drafts + 1)]
    return jnp.stack(each, axis=1)

  def _adjust(self, logits_BV: jax.Array, ids_BL: jax.Array, lengths_B: jax.Array) -> jax.Array:
    return logits_BV if self.adjust is None else self.adjust(logits_BV, ids_BL, lengths_B)
