"""DecodingLoop: continues prompts token by token, with any model that has `DecodingSteps`.

B batch, P length of the prompts, M maximum number of tokens to decode, T tokens in one step, V vocabulary.

    logits = extend(prompts)                      one pass over all prompts, of different lengths
    token 0 = draw(logits)
    for i = 1 ... M - 1, while a row continues:   token i = draw(extend(token i - 1))

Values that differ between calls are arrays, not constants of the program: lengths of prompts, and numbers of tokens.
Prompts may be read in chunks, up to the end of the longest one, so arrays much wider than the prompts cost nothing.

A model may see only a limited number of tokens, its context. Once the state is full, each further token is drawn after
a new pass over the last tokens of its row, which begins with the initial state and at position 0.

Decoding is a pure function that runs inside jit. The program contains the model twice: for prompts and for the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.layers.base.expected_trips import expected_trips
from praxis_lite.models.decoding.steps import DecodingState, DecodingSteps, prompt_step

READ_PROMPTS, NEXT_TOKEN = 'read_prompts', 'next_token'  # Scopes of the operations of a program.


class Decoded(NamedTuple):
  """Continuations of prompts.

  Attributes:
    ids: [B, M] int32 tokens after the prompt, up to the stop token, if any, and including it; then zeros.
    lengths: [B] int32 number of those tokens.
    log_probs: [B, M] float32 log-probability of each under the model at temperature 1; then zeros.
  """

  ids: jax.Array
  lengths: jax.Array
  log_probs: jax.Array

  def metrics(self, rows_B: jax.Array) -> WeightedScalars:
    """Returns `decoded_length`, the mean number of tokens of the rows in `rows_B`, and `log_prob`, nats per token."""
    is_token_BM = jnp.arange(self.ids.shape[1]) < self.lengths[:, None]
    return {
      'decoded_length': weighted_mean(self.lengths, rows_B),
      'log_prob': weighted_mean(self.log_probs, is_token_BM),
    }


class Draws(NamedTuple):
  """Where a call begins among the random numbers of its rows; None stands for rows 0, 1, ... and no earlier tokens.

  Attributes:
    row_B: int32, the number of each row.
    num_drawn_B: int32, how many last tokens of its prompt were drawn by earlier calls.
  """

  row_B: jax.Array | None = None
  num_drawn_B: jax.Array | None = None


class _Progress(NamedTuple):
  """The progress of the rows, besides the state of the model.

  Attributes:
    number: int32, the number of the next token.
    last_ids_B: int32, the previous tokens.
    decoded: the continuations so far.
    done_B: bool, which rows have ended.
  """

  number: jax.Array
  last_ids_B: jax.Array
  decoded: Decoded
  done_B: jax.Array

  @property
  def continues(self) -> jax.Array:
    """Whether any row still continues."""
    return ~jnp.all(self.done_B)


@dataclasses.dataclass(frozen=True)
class DecodingLoop(Generic[DecodingState]):
  """One call of `Sampler.decode`.

  Attributes:
    steps: the model.
    draw: (logits [B, V], a key for each row or None) -> tokens [B].
    adjust: (logits [B, V], tokens of the rows [B, L], their number [B]) -> the logits to draw from; None keeps them.
    stop_ids: tokens that end a row.
    num_steps: M.
    slots: number of tokens per row for which the state has room.
    chunk: number of tokens of a prompt that are read at once; None reads whole prompts.
    prompt_ids_BP, prompt_lengths_B, key, draws: see `Sampler.decode`.
    limits_B: int32, the largest number of tokens after each prompt, at most M.
  """

  steps: DecodingSteps[DecodingState]
  draw: Callable[[jax.Array, jax.Array | None], jax.Array]
  adjust: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None
  stop_ids: tuple[int, ...]
  num_steps: int
  slots: int
  chunk: int | None
  prompt_ids_BP: jax.Array
  prompt_lengths_B: jax.Array
  key: jax.Array | None
  draws: Draws
  limits_B: jax.Array

  def run(self) -> Decoded:
    """Continues the prompts."""
    num_rows = len(self.prompt_lengths_B)
    zeros_BM, zeros_B = jnp.zeros((num_rows, self.num_steps)), jnp.zeros(num_rows, jnp.int32)
    decoded = Decoded(zeros_BM.astype(jnp.int32), zeros_B, zeros_BM)
    is_done_B = (self.prompt_lengths_B == 0) | (self.limits_B <= 0)
    start_state = self.steps.start(num_rows, self.slots)

    def read_and_extend(progress: _Progress) -> _Progress:
      """Continues the rows until they are done, or the state is full."""
      with jax.named_scope(READ_PROMPTS):
        logits_BV, state, taken = self._read(progress, start_state)
        carry = taken, state, self._append(logits_BV, progress)
      with expected_trips(self.num_steps - 1):
        return jax.lax.while_loop(lambda c: (c[0] < self.slots) & c[-1].continues, self._extend, carry)[-1]

    progress = _Progress(jnp.int32(0), zeros_B, decoded, is_done_B)
    if self._fits:
      return read_and_extend(progress).decoded
    return jax.lax.while_loop(lambda progress: progress.continues, read_and_extend, progress).decoded

  @property
  def _fits(self) -> bool:
    """Whether the state has room for all tokens but the last, so that no row is read again."""
    return self.slots == self.prompt_ids_BP.shape[1] + self.num_steps - 1

  def _read(self, progress: _Progress, state: DecodingState) -> tuple[jax.Array, DecodingState, jax.Array]:
    """Reads the last tokens of each row that fit in the slots; returns logits, state, and the number of slots used."""
    length_B = jnp.where(progress.done_B, 0, self.prompt_lengths_B + progress.number)
    kept_B = jnp.minimum(length_B, self.slots)
    taken = jnp.max(kept_B)
    width = self.prompt_ids_BP.shape[1] if self._fits else self.slots  # The most that a row may have to read.
    chunk = self.chunk or width

    def read_chunk(start: jax.Array | int, state: DecodingState) -> tuple[jax.Array, DecodingState]:
      place_BT = (length_B - kept_B)[:, None] + start + jnp.arange(chunk, dtype=jnp.int32)
      ids_BT = self._prompt_tokens(place_BT) if self._fits else self._tokens(place_BT, progress)
      return self.steps.extend(*prompt_step(ids_BT, kept_B, start), state)

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

  def _prompt_tokens(self, place_BT: jax.Array) -> jax.Array:
    return jnp.take_along_axis(self.prompt_ids_BP, place_BT, axis=1, mode='clip')

  def _tokens(self, place_BT: jax.Array, progress: _Progress) -> jax.Array:
    """Returns the tokens at these indices of each row, which consists of its prompt and its continuation."""
    ids_BT = self._prompt_tokens(place_BT)
    length_B1 = self.prompt_lengths_B[:, None]
    after_BT = jnp.take_along_axis(progress.decoded.ids, place_BT - length_B1, axis=1, mode='clip')
    return jnp.where(place_BT < length_B1, ids_BT, after_BT)

  def _extend(self, carry: tuple[jax.Array, DecodingState, _Progress]) -> tuple[jax.Array, DecodingState, _Progress]:
    """Reads the last token of each row and draws the next one; the carry begins with the number of slots taken."""
    taken, state, progress = carry
    pos_B = self.prompt_lengths_B + progress.number - 1
    last_B = jnp.zeros_like(progress.last_ids_B)
    with jax.named_scope(NEXT_TOKEN):
      logits_BV, state = self.steps.extend(progress.last_ids_B[:, None], pos_B[:, None], last_B, state)
      return taken + 1, state, self._append(logits_BV, progress)

  def _append(self, logits_BV: jax.Array, progress: _Progress) -> _Progress:
    """Draws the next token of each row that is not done."""
    number, _, (ids_BM, lengths_B, log_probs_BM), done_B = progress
    ids_B = self.draw(self._adjust(logits_BV, progress), self._keys(number))
    log_probs_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32))
    log_probs_B = jnp.take_along_axis(log_probs_BV, ids_B[:, None], axis=-1)[:, 0]
    decoded = Decoded(
      ids_BM.at[:, number].set(jnp.where(done_B, 0, ids_B)),
      lengths_B + ~done_B,
      log_probs_BM.at[:, number].set(jnp.where(done_B, 0.0, log_probs_B)),
    )
    done_B |= jnp.isin(ids_B, jnp.array(self.stop_ids, jnp.int32)) | (decoded.lengths >= self.limits_B)
    return _Progress(number + 1, ids_B, decoded, done_B)

  def _adjust(self, logits_BV: jax.Array, progress: _Progress) -> jax.Array:
    if self.adjust is None:
      return logits_BV
    place_L = jnp.arange(self.prompt_ids_BP.shape[1] + self.num_steps, dtype=jnp.int32)
    place_BL = jnp.broadcast_to(place_L, (len(logits_BV), len(place_L)))
    return self.adjust(logits_BV, self._tokens(place_BL, progress), self.prompt_lengths_B + progress.number)

  def _keys(self, number: jax.Array) -> jax.Array | None:
    """Returns the keys of token `number` of each row."""
    key = self.key
    if key is None:
      return None
    zeros_B = jnp.zeros_like(self.prompt_lengths_B)
    row_B = jnp.arange(len(zeros_B), dtype=jnp.int32) if self.draws.row_B is None else self.draws.row_B
    number_B = number + (zeros_B if self.draws.num_drawn_B is None else self.draws.num_drawn_B)
    return jax.vmap(lambda row, at: jax.random.fold_in(jax.random.fold_in(key, at), row))(row_B, number_B)
