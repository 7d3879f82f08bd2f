"""Drafts: guesses of the next tokens of rows, found by a look-up in the rows themselves or by a smaller model.

B batch, K largest number of tokens in a draft, L maximum length of a row in tokens, S length of sources, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from praxis_lite.models.decoding.processors import LogitProcessor
from praxis_lite.models.decoding.reading import RowReader
from praxis_lite.models.decoding.steps import DecodingState

DraftState = TypeVar('DraftState')
# (logits [B, V], index of each token in its continuation [B]) -> tokens [B], and the logits from which they were drawn,
# or None if the tokens were not drawn.
DrawDraft = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]]


class Draft(NamedTuple):
  """Guesses of the next tokens."""

  ids: jax.Array  # [B, K] int32.
  counts: jax.Array  # [B] int32, the number of guesses in each row.
  # [B, K, V] float32; the guesses were drawn from their softmax. None if the guesses were not drawn.
  logits: jax.Array | None = None


class OpenRows(NamedTuple):
  """Rows in the middle of decoding."""

  ids: jax.Array  # [B, L] int32 tokens of prompt and continuation, then arbitrary numbers.
  lengths: jax.Array  # [B] int32 number of tokens of prompt and continuation.
  numbers: jax.Array  # [B] int32 number of tokens of the continuation.
  most: jax.Array  # [B] int32, the largest number of tokens of a draft that may be used; 0 if the row has ended.


class Drafter(Protocol[DraftState]):
  """An object that guesses the next tokens; `model_state` is the state of the model that checks the guesses."""

  def start(self, model_state: Any) -> DraftState:
    """Returns the state after the prompts, which the model has read."""
    ...

  def propose(self, rows: OpenRows, state: DraftState, model_state: Any) -> tuple[Draft, DraftState]:
    """Returns guesses of the next tokens, and the new state. The model has read all tokens but the last of each row."""
    ...


@dataclasses.dataclass(frozen=True)
class LookupDrafter:
  """A `Drafter` that copies what followed the last tokens earlier in the row (prompt lookup decoding; Saxena, 2023).

  It finds the longest suffix of the row, of at most `size` tokens, that also occurs earlier, and takes the latest such
  occurrence. The draft is the tokens after it.
  """

  size: int  # The largest number of tokens that are compared, at least 1.
  num_tokens: int  # K.
  # int32 tokens that are also searched, such as the source of a translation; -1 for padding.
  source_ids_BS: jax.Array | None = None

  def start(self, model_state: Any) -> tuple[()]:
    return ()

  def propose(self, rows: OpenRows, state: tuple[()], model_state: Any) -> tuple[Draft, tuple[()]]:
    if self.source_ids_BS is not None:
      ids_BL = jnp.concatenate([self.source_ids_BS, rows.ids], axis=1)
      rows = rows._replace(ids=ids_BL, lengths=rows.lengths + self.source_ids_BS.shape[1])
    place_L = jnp.arange(rows.ids.shape[1], dtype=jnp.int32)
    last_B1 = rows.lengths[:, None] - 1
    # For each index, whether the i + 1 tokens that end there are also the last i + 1 tokens of the row, and the largest
    # such number of tokens. The row's last index does not count.
    matches_BL, count_BL = place_L < last_B1, jnp.zeros(rows.ids.shape, jnp.int32)
    for i in range(self.size):
      wanted_B1 = jnp.take_along_axis(rows.ids, last_B1 - i, axis=1, mode='clip')
      there_BL = jnp.roll(rows.ids, i, axis=1)
      matches_BL &= (there_BL == wanted_B1) & (place_L >= i)
      count_BL += matches_BL
    end_B1 = jnp.argmax(count_BL * len(place_L) + place_L, axis=1)[:, None].astype(jnp.int32)
    is_found_B = jnp.take_along_axis(count_BL, end_B1, axis=1)[:, 0] > 0
    place_BK = end_B1 + 1 + jnp.arange(self.num_tokens, dtype=jnp.int32)
    # If fewer than K tokens follow the occurrence that is found, the guesses repeat these tokens.
    period_B1 = jnp.maximum(last_B1 - end_B1, 1)
    place_BK = jnp.where(place_BK > last_B1, end_B1 + 1 + (place_BK - end_B1 - 1) % period_B1, place_BK)
    ids_BK = jnp.take_along_axis(rows.ids, place_BK, axis=1, mode='clip')
    most_B = jnp.minimum(jnp.sum(jnp.cumprod(ids_BK >= 0, axis=1), axis=1), rows.most)  # Up to the end of a source.
    return Draft(jnp.maximum(ids_BK, 0), jnp.where(is_found_B, most_B, 0)), state


@dataclasses.dataclass(frozen=True)
class ModelDrafter(Generic[DecodingState]):
  """A `Drafter` that continues rows with a smaller model.

  For each draft, it first reads the last two tokens of the row: the smaller model may not have read
  the last guess of the previous draft.
  Wrong guesses need no clean-up: the state stores tokens by position, so later tokens overwrite them.
  """

  reader: RowReader[DecodingState]  # Reads the prompts into the state of the smaller model.
  num_tokens: int  # K.
  draw: DrawDraft  # Returns a token for each row.
  adjust: LogitProcessor | None  # The logit processor of the model itself; None if there is none.

  def start(self, model_state: Any) -> DecodingState:
    reader = self.reader
    nothing_BM = jnp.zeros((len(reader.prompt_lengths_B), reader.num_steps), jnp.int32)
    none_B = jnp.zeros(len(reader.prompt_lengths_B), bool)
    return reader.read(nothing_BM, jnp.int32(0), none_B, reader.start())[1]

  def propose(self, rows: OpenRows, state: DecodingState, model_state: Any) -> tuple[Draft, DecodingState]:
    extend = self.reader.steps.extend
    row_B = jnp.arange(len(rows.lengths))

    def draw(logits_BV: jax.Array, ids_BL: jax.Array, i: jax.Array | int) -> tuple[jax.Array, jax.Array, Any]:
      """Returns guess i of each row, the tokens with this guess added, and the logits that it was drawn from."""
      if self.adjust is not None:
        logits_BV = self.adjust(logits_BV, ids_BL, rows.lengths + i)
      ids_B, from_BV = self.draw(logits_BV, rows.numbers + i)
      return ids_B, ids_BL.at[row_B, rows.lengths + i].set(ids_B, mode='drop'), from_BV

    place_BT = rows.lengths[:, None] - 2 + jnp.arange(2, dtype=jnp.int32)
    pos_BT = jnp.where(rows.most[:, None] > 0, place_BT, -1)
    last_ids_BT = jnp.take_along_axis(rows.ids, place_BT, axis=1, mode='clip')
    logits_BV, state = extend(last_ids_BT, pos_BT, jnp.ones_like(rows.lengths), state)
    first_B, ids_BL, first_BV = draw(logits_BV, rows.ids, 0)

    def guess_next(
      carry: tuple[jax.Array, jax.Array, DecodingState], i: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array, DecodingState], tuple[jax.Array, Any]]:
      ids_B, ids_BL, state = carry
      pos_B = jnp.where(i < rows.most, rows.lengths + i - 1, -1)
      logits_BV, state = extend(ids_B[:, None], pos_B[:, None], jnp.zeros_like(ids_B), state)
      ids_B, ids_BL, from_BV = draw(logits_BV, ids_BL, i)
      return (ids_B, ids_BL, state), (ids_B, from_BV)

    (_, _, state), others = jax.lax.scan(
      guess_next, (first_B, ids_BL, state), jnp.arange(1, self.num_tokens, dtype=jnp.int32)
    )
    ids_BK, logits_BKV = jax.tree.map(
      lambda first, rest: jnp.concatenate([first[:, None], jnp.moveaxis(rest, 0, 1)], axis=1),
      (first_B, first_BV),
      others,
    )
    return Draft(ids_BK, jnp.minimum(self.num_tokens, rows.most), logits_BKV), state
