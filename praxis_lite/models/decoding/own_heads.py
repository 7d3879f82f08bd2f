"""OwnHeadsDrafter: guesses of the next tokens by heads of the model itself, such as a `MultiTokenPrediction`.

Heads are counted from 1; head 0 is the model. At position j, head k reads token j + k and the output of head k - 1, and
predicts token j + k + 1. Say a row has n tokens, 0 to n - 1, and the model has read all but the last. Then head 1 reads
the last token at position n - 2, and guesses token n. Head 2 reads that guess at the same position, and guesses token
n + 1.

The state of a head may contain guesses that turned out wrong. So each head always reads the last K + 1 positions again,
because a pass adds at most K + 1 tokens.

B batch, T tokens in one step, K tokens in a draft, L maximum length of a row in tokens, P length of the prompts,
D model dims, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp

from praxis_lite.models.decoding.drafting import Draft, DrawDraft, OpenRows
from praxis_lite.models.decoding.processors import LogitProcessor
from praxis_lite.models.decoding.reading import RowReader

HeadState = TypeVar('HeadState')


class FurtherHeads(Protocol[HeadState]):
  """Heads of a model that predict later tokens. A call of `extend` may repeat positions of earlier calls."""

  num_heads: int

  def start(self, num_rows: int, num_slots: int) -> HeadState:
    """Returns the state of rows without tokens, with room for `num_slots` tokens in each."""
    ...

  def read_hidden(self, model_state: Any, place_BT: jax.Array) -> jax.Array:
    """Returns the model's outputs at these positions, [B, T, D]; arbitrary numbers where no token was read."""
    ...

  def extend(
    self,
    number: int,
    hidden_BTD: jax.Array,
    ids_BT: jax.Array,
    pos_BT: jax.Array,
    last_B: jax.Array,
    state: HeadState,
  ) -> tuple[jax.Array, jax.Array, HeadState]:
    """Reads tokens with head `number` + 1; returns its logits [B, V] at `last_B`, its outputs [B, T, D], and the state.

    `hidden_BTD` are the outputs of the previous head, or of the model. `pos_BT` are positions, -1 for padding, and
    `ids_BT` are the tokens `number` + 1 places after them. `last_B` are indices in [0, T).
    """
    ...


@dataclasses.dataclass(frozen=True)
class OwnHeadsDrafter(Generic[HeadState]):
  """A `Drafter` that uses heads of the model itself."""

  heads: FurtherHeads[HeadState]  # The heads.
  reader: RowReader[Any]  # Reads the prompts into the state of the model.
  num_tokens: int  # K, at most the number of heads.
  draw: DrawDraft  # Returns a token for each row.
  adjust: LogitProcessor | None  # The logit processor of the model itself; None if there is none.

  def start(self, model_state: Any) -> HeadState:
    reader = self.reader
    ids_BP, lengths_B = reader.prompt_ids_BP, reader.prompt_lengths_B
    width = ids_BP.shape[1]
    chunk = min(reader.chunk or width, width)
    last = jnp.max(lengths_B) - 1  # The last position needs a token that is not known yet.

    def read(carry: tuple[jax.Array, HeadState]) -> tuple[jax.Array, HeadState]:
      start, state = carry
      place_T = start + jnp.arange(chunk, dtype=jnp.int32)
      pos_BT = jnp.where(place_T < lengths_B[:, None] - 1, place_T, -1)
      hidden_BTD = self.heads.read_hidden(model_state, pos_BT)
      for k in range(self.num_tokens):
        ids_BT = _pick(ids_BP, pos_BT + k + 1, lengths_B)
        _, hidden_BTD, state = self.heads.extend(k, hidden_BTD, ids_BT, pos_BT, jnp.zeros_like(lengths_B), state)
      return start + chunk, state

    first = jnp.int32(0), self.heads.start(len(lengths_B), reader.slots)
    return jax.lax.while_loop(lambda carry: carry[0] < last, read, first)[1]

  def propose(self, rows: OpenRows, state: HeadState, model_state: Any) -> tuple[Draft, HeadState]:
    K, row_B = self.num_tokens, jnp.arange(len(rows.lengths))
    place_BT = rows.lengths[:, None] - 2 - K + jnp.arange(K + 1, dtype=jnp.int32)
    pos_BT = jnp.where((rows.most[:, None] > 0) & (place_BT >= 0), place_BT, -1)
    hidden_BTD, ids_BL = self.heads.read_hidden(model_state, pos_BT), rows.ids
    drawn = []
    for k in range(K):
      ids_BT = _pick(ids_BL, pos_BT + k + 1, rows.lengths + k)
      logits_BV, hidden_BTD, state = self.heads.extend(
        k, hidden_BTD, ids_BT, pos_BT, jnp.full_like(rows.lengths, K), state
      )
      if self.adjust is not None:
        logits_BV = self.adjust(logits_BV, ids_BL, rows.lengths + k)
      ids_B, from_BV = self.draw(logits_BV, rows.numbers + k)
      ids_BL = ids_BL.at[row_B, rows.lengths + k].set(ids_B, mode='drop')
      drawn.append((ids_B, from_BV))
    ids_BK, logits_BKV = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *drawn)
    return Draft(ids_BK, jnp.minimum(K, rows.most), logits_BKV), state


def _pick(ids_BL: jax.Array, place_BT: jax.Array, lengths_B: jax.Array) -> jax.Array:
  """Returns the tokens at these positions of rows, and 0 at positions outside of a row."""
  is_there_BT = (place_BT >= 0) & (place_BT < lengths_B[:, None])
  return jnp.where(is_there_BT, jnp.take_along_axis(ids_BL, place_BT, axis=1, mode='clip'), 0)
