"""DecodingLoop: continues prompts token by token, with any model that has `DecodingSteps`.

B batch, P length of the prompts, M maximum number of tokens to decode, T tokens in one step, V vocabulary.

    logits = extend(prompts)                      one pass over all prompts, of different lengths
    token 0 = draw(logits)
    for i = 1 ... M - 1, while a row continues:   token i = draw(extend(token i - 1))

Lengths of prompts and numbers of tokens are arrays, so calls with other values do not compile another program.
`reading.py` says how prompts are read, and what happens once the state is full.

Decoding is a pure function that runs inside jit. The program contains the model twice: for prompts and for the loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.layers.base.expected_trips import expected_trips
from praxis_lite.models.decoding.reading import NEXT_TOKEN, READ_PROMPTS, RowReader
from praxis_lite.models.decoding.steps import DecodingState


class Decoded(NamedTuple):
  """Continuations of prompts.

  Attributes:
    ids: [B, M] int32 tokens after the prompt, up to and including the stop token, if any; then zeros.
    lengths: [B] int32 number of those tokens.
    log_probs: [B, M] float32 log-probability of each token under the model at temperature 1; then zeros.
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
  """What the random numbers of a call depend on: the number of each row, and how many of its tokens were drawn before.

  Attributes:
    row_B: int32, the number of each row; None means 0, 1, ...
    num_drawn_B: int32, how many tokens at the end of each prompt were drawn by earlier calls; None means 0.
  """

  row_B: jax.Array | None = None
  num_drawn_B: jax.Array | None = None

  def given_lengths(self, prompt_lengths_B: jax.Array) -> jax.Array:
    """Returns the lengths of the prompts without the tokens that earlier calls have drawn."""
    return prompt_lengths_B if self.num_drawn_B is None else prompt_lengths_B - self.num_drawn_B


class _Progress(NamedTuple):
  """The progress of the rows, besides the state of the model."""

  number: jax.Array  # int32, the index of the next token in each continuation.
  last_ids_B: jax.Array  # int32, the previous tokens.
  decoded: Decoded  # The continuations so far.
  done_B: jax.Array  # bool, which rows have ended.

  @property
  def continues(self) -> jax.Array:
    """Whether any row still continues."""
    return ~jnp.all(self.done_B)


@dataclasses.dataclass(frozen=True)
class DecodingLoop(Generic[DecodingState]):
  """One call of `Sampler.decode`."""

  reader: RowReader[DecodingState]  # Reads the prompts.
  draw: Callable[[jax.Array, jax.Array | None], jax.Array]  # (logits [B, V], a key for each row or None) -> tokens [B].
  # (logits [B, V], tokens [B, P + M] of the rows, number of tokens [B]) -> the logits to draw from; None keeps them.
  adjust: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None
  stop_ids: tuple[int, ...]  # Tokens that end a row.
  key: jax.Array | None  # See `Sampler.decode`.
  draws: Draws  # See `Sampler.decode`.
  limits_B: jax.Array  # int32, the largest number of tokens after each prompt, at most M.

  def run(self) -> Decoded:
    """Continues the prompts."""
    reader, lengths_B = self.reader, self.reader.prompt_lengths_B
    zeros_BM, zeros_B = jnp.zeros((len(lengths_B), reader.num_steps)), jnp.zeros(len(lengths_B), jnp.int32)
    decoded = Decoded(zeros_BM.astype(jnp.int32), zeros_B, zeros_BM)
    is_done_B = (lengths_B == 0) | (self.limits_B <= 0)
    start_state = reader.start()

    def read_and_extend(progress: _Progress) -> _Progress:
      """Reads all tokens so far into a new state, and continues the rows until they are done or the state is full."""
      with jax.named_scope(READ_PROMPTS):
        logits_BV, state, taken = reader.read(progress.decoded.ids, progress.number, progress.done_B, start_state)
        carry = taken, state, self._append(logits_BV, progress)
      with expected_trips(reader.num_steps - 1):
        return jax.lax.while_loop(lambda c: (c[0] < reader.slots) & c[-1].continues, self._extend, carry)[-1]

    progress = _Progress(jnp.int32(0), zeros_B, decoded, is_done_B)
    if reader.fits:
      return read_and_extend(progress).decoded
    return jax.lax.while_loop(lambda progress: progress.continues, read_and_extend, progress).decoded

  def _extend(self, carry: tuple[jax.Array, DecodingState, _Progress]) -> tuple[jax.Array, DecodingState, _Progress]:
    """Reads the last token of each row and draws the next one.

    The carry is the number of slots taken, the state of the model and the progress.
    """
    taken, state, progress = carry
    pos_B = self.reader.prompt_lengths_B + progress.number - 1
    last_B = jnp.zeros_like(progress.last_ids_B)
    with jax.named_scope(NEXT_TOKEN):
      logits_BV, state = self.reader.steps.extend(progress.last_ids_B[:, None], pos_B[:, None], last_B, state)
      return taken + 1, state, self._append(logits_BV, progress)

  def _append(self, logits_BV: jax.Array, progress: _Progress) -> _Progress:
    """Draws the next token of each row that is not done; returns the new progress."""
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
    ids_BL = self.reader.row_tokens(progress.decoded.ids)
    return self.adjust(logits_BV, ids_BL, self.reader.prompt_lengths_B + progress.number)

  def _keys(self, number: jax.Array) -> jax.Array | None:
    """Returns the PRNG key of token `number` of each row, [B]; None if the loop has no key."""
    return row_keys(self.key, self.draws, self.reader.prompt_lengths_B, number)


def row_keys(key: jax.Array | None, draws: Draws, lengths_B: jax.Array, number: jax.Array) -> jax.Array | None:
  """Returns the PRNG key of token `number` of each row's continuation, [B]; None if `key` is None.

  `number` is a scalar for all rows, or [B]; `Sampler.decode` describes `key` and `draws`.
  """
  if key is None:
    return None
  zeros_B = jnp.zeros_like(lengths_B)
  row_B = jnp.arange(len(zeros_B), dtype=jnp.int32) if draws.row_B is None else draws.row_B
  number_B = number + (zeros_B if draws.num_drawn_B is None else draws.num_drawn_B)
  return jax.vmap(functools.partial(token_key, key))(number_B, row_B)


def token_key(key: jax.Array, number: jax.Array, row: jax.Array | int) -> jax.Array:
  """Returns the PRNG key of token `number` of a row, derived from the key of the batch."""
  return jax.random.fold_in(jax.random.fold_in(key, number), row)
