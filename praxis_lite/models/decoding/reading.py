"""RowReader: reads prompts, or the last tokens of rows, into the state of a model.

B batch, P length of the prompts, M maximum number of tokens to decode, T tokens in one step, V vocabulary.

Prompts may be read in chunks, up to the end of the longest one, so an array that is much wider than the prompts costs
nothing.

A model may see only a limited number of tokens, its context. Once the state is full, each further token needs a new
pass over the last tokens of its row. This pass begins with the initial state, at position 0.
"""

from __future__ import annotations

import dataclasses
from typing import Generic

import jax
import jax.numpy as jnp

from praxis_lite.models.decoding.steps import DecodingState, DecodingSteps, prompt_step

READ_PROMPTS, NEXT_TOKEN = 'read_prompts', 'next_token'  # Scope names of operations in a program.


@dataclasses.dataclass(frozen=True)
class RowReader(Generic[DecodingState]):
  """Reads rows into the state; a row is a prompt and its continuation so far."""

  steps: DecodingSteps[DecodingState]  # The model.
  prompt_ids_BP: jax.Array  # See `Sampler.decode`.
  prompt_lengths_B: jax.Array  # See `Sampler.decode`.
  num_steps: int  # M.
  slots: int  # Number of tokens per row for which the state has room.
  chunk: int | None  # Number of tokens of a prompt that are read at once; None means whole prompts.

  @property
  def fits(self) -> bool:
    """Whether the state has room for all tokens of a row but the last. If so, no row is read again."""
    return self.slots == self.prompt_ids_BP.shape[1] + self.num_steps - 1

  def start(self) -> DecodingState:
    """Returns the state of rows that have no tokens yet."""
    return self.steps.start(len(self.prompt_lengths_B), self.slots)

  def read(
    self, ids_BM: jax.Array, number: jax.Array, done_B: jax.Array, state: DecodingState
  ) -> tuple[jax.Array, DecodingState, jax.Array]:
    """Reads the last tokens of each row into `state`, which `start` returned; it reads one token for each slot.

    `ids_BM` are the continuations so far, of `number` tokens each. Rows that are done are not read.

    Returns:
      Logits [B, V] of the next token, the new state, and the number of slots that are used.
    """
    length_B = jnp.where(done_B, 0, self.prompt_lengths_B + number)
    kept_B = jnp.minimum(length_B, self.slots)
    taken = jnp.max(kept_B)
    width = self.prompt_ids_BP.shape[1] if self.fits else self.slots  # The largest number of tokens to read in a row.
    chunk = self.chunk or width

    extend = self.steps.extend
    if self.fits and chunk >= width:  # Whole prompts, before the state has any tokens.
      extend = getattr(self.steps, 'read_prompts', extend)

    def read_chunk(start: jax.Array | int, state: DecodingState) -> tuple[jax.Array, DecodingState]:
      place_BT = (length_B - kept_B)[:, None] + start + jnp.arange(chunk, dtype=jnp.int32)
      ids_BT = self._prompt_tokens(place_BT) if self.fits else self._tokens(place_BT, ids_BM)
      return extend(*prompt_step(ids_BT, kept_B, start), state)

    def next_chunk(carry: tuple[jax.Array, jax.Array, DecodingState]) -> tuple[jax.Array, jax.Array, DecodingState]:
      start, logits_BV, state = carry
      new_BV, state = read_chunk(start, state)
      is_last_B = (start < kept_B) & (kept_B <= start + chunk)
      return start + chunk, jnp.where(is_last_B[:, None], new_BV, logits_BV), state

    if chunk >= width:
      return *read_chunk(0, state), taken
    shape = jax.eval_shape(read_chunk, 0, state)[0]
    first = jnp.int32(0), jnp.zeros(shape.shape, shape.dtype), state
    _, logits_BV, state = jax.lax.while_loop(lambda carry: carry[0] < taken, next_chunk, first)
    return logits_BV, state, taken

  def row_tokens(self, ids_BM: jax.Array) -> jax.Array:
    """Returns the tokens of each row, [B, P + M]: prompt, continuation `ids_BM`, and then arbitrary tokens."""
    place_L = jnp.arange(self.prompt_ids_BP.shape[1] + self.num_steps, dtype=jnp.int32)
    return self._tokens(jnp.broadcast_to(place_L, (len(ids_BM), len(place_L))), ids_BM)

  def _prompt_tokens(self, place_BT: jax.Array) -> jax.Array:
    return jnp.take_along_axis(self.prompt_ids_BP, place_BT, axis=1, mode='clip')

  def _tokens(self, place_BT: jax.Array, ids_BM: jax.Array) -> jax.Array:
    """Returns the tokens at these indices of each row, [B, T]."""
    ids_BT = self._prompt_tokens(place_BT)
    length_B1 = self.prompt_lengths_B[:, None]
    after_BT = jnp.take_along_axis(ids_BM, place_BT - length_B1, axis=1, mode='clip')
    return jnp.where(place_BT < length_B1, ids_BT, after_BT)
