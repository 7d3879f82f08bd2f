"""Sampler: continues prompts token by token, with any model that has `DecodingSteps`.

B batch, P length of the prompts, M maximum number of tokens to decode, T tokens in one step, V vocabulary, C candidates
(the most probable tokens, in descending order).

    logits = extend(prompts)                      one pass over all prompts, of different lengths
    token 0 = sample(logits)
    for i = 1 ... M - 1, while a row continues:   token i = sample(extend(token i - 1))

Values that differ between calls are arrays, not constants of the program: lengths of prompts, and numbers of tokens.
Prompts may be read in chunks, up to the end of the longest one, so arrays much wider than the prompts cost nothing.

A model may see only a limited number of tokens, its context. If prompts and continuations are longer, each token for
which the state has no room is sampled after a pass over the last tokens of its row, at positions from 0 on, from the
state at the start.

Decoding is a pure function that runs inside jit. The program contains the model twice: for prompts and for the loop.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Configurable
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.models.decoding.steps import DecodingState, DecodingSteps


def sample_tokens(
  logits_BV: jax.Array,
  keys_B: jax.Array | None,
  *,
  temperature: float = 1.0,
  top_k: int | None = None,
  top_p: float | None = None,
) -> jax.Array:
  """Returns a token for each row, [B] int32, drawn from softmax(logits / temperature) restricted to its candidates.

  Args:
    logits_BV: logits of the next token.
    keys_B: a PRNG key for each row; may be None if the temperature is 0.
    temperature: 0, or less than the smallest normal float32, takes the most probable token; of equals, the lowest id.
    top_k: candidates are the k most probable tokens (Fan et al., 2018); of equals, the lower ids. None takes all.
    top_p: of those, the fewest whose probabilities sum to at least top_p (nucleus sampling, Holtzman et al., 2020);
      None takes all.

  Raises:
    ConfigError: the temperature is negative or NaN; or it is not 0 and there are no keys.
  """
  if not temperature >= 0:
    raise ConfigError(f'Sampler.temperature: expected at least 0, got {temperature}')
  if temperature < jnp.finfo(jnp.float32).tiny:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
  if keys_B is None:
    raise ConfigError(f'Sampler.temperature: {temperature} draws random numbers, which needs a PRNG key')
  logits_BV = _scale(logits_BV.astype(jnp.float32), temperature)
  if top_k is None and top_p is None:
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
  vocab_size = logits_BV.shape[-1]
  logits_BC, ids_BC = jax.lax.top_k(logits_BV, min(top_k or vocab_size, vocab_size))
  if top_p is not None:
    probs_BC = jax.nn.softmax(logits_BC)
    more_probable_BC = jnp.cumsum(probs_BC, axis=-1) - probs_BC
    logits_BC = jnp.where(more_probable_BC < top_p, logits_BC, -jnp.inf)
  choice_B = jax.vmap(jax.random.categorical)(keys_B, logits_BC)
  return jnp.take_along_axis(ids_BC, choice_B[:, None], axis=-1)[:, 0].astype(jnp.int32)


def _scale(logits_BV: jax.Array, temperature: float) -> jax.Array:
  """Returns logits / temperature, float32, or if that would overflow, logits with the same softmax."""
  if temperature * float(jnp.finfo(jnp.float32).tiny) > 1:  # A factor of 1 / temperature would be zero.
    return jnp.where(logits_BV == -jnp.inf, -jnp.inf, 0.0)  # All possible tokens become equally probable.
  if temperature >= 1:
    return logits_BV / temperature
  most_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
  return jnp.where(logits_BV == most_B1, 0.0, (logits_BV - most_B1) / temperature)


def prompt_step(
  ids_BT: jax.Array, lengths_B: jax.Array, start: jax.Array | int = 0
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the first three arguments of `DecodingSteps.extend` for prompts, or a chunk of them.

  Args:
    ids_BT: tokens; those after the end of a prompt are arbitrary.
    lengths_B: int32 lengths of the prompts.
    start: position of the first of these tokens.
  """
  column_T = start + jnp.arange(ids_BT.shape[1], dtype=jnp.int32)
  pos_BT = jnp.where(column_T < lengths_B[:, None], column_T, -1)
  known_BT = jnp.where(pos_BT < 0, 0, ids_BT)  # Padding may be an invalid id, whose vector is NaN.
  return known_BT, pos_BT, jnp.clip(lengths_B - 1 - start, 0, ids_BT.shape[1] - 1)


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


class _Seen(NamedTuple):
  """What the sampler knows of the rows, besides the state of the model.

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


class Sampler(Configurable):
  """Settings of decoding, and its loop.

  Attributes:
    max_decode_steps: M, the maximum number of tokens after a prompt.
    temperature: 0 is greedy; 1 is the model's distribution.
    top_k, top_p: see `sample_tokens`.
    max_context: number of last tokens that the model sees; None means all, limited only by its number of positions.
    stop_ids: tokens that end a row.
  """

  max_decode_steps: int = 128
  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None
  max_context: int | None = None
  stop_ids: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    for field, valid, expected in (
      ('max_decode_steps', self.max_decode_steps >= 1, 'at least 1'),
      ('temperature', self.temperature >= 0, 'at least 0'),
      ('top_k', self.top_k is None or self.top_k >= 1, 'at least 1, or None'),
      ('max_context', self.max_context is None or self.max_context >= 1, 'at least 1, or None'),
      ('top_p', self.top_p is None or 0 < self.top_p <= 1, 'more than 0 and at most 1, or None'),
    ):
      if not valid:
        raise ConfigError(f'Sampler.{field}: expected {expected}, got {getattr(self, field)}')

  def context(self, num_positions: int | None = None) -> int | None:
    """Returns how many tokens a model with `num_positions` positions sees at once; None means all."""
    limits = [limit for limit in (self.max_context, num_positions) if limit is not None]
    return min(limits, default=None)

  def num_slots(self, prompt_length: int, context: int | None = None) -> int:
    """Returns for how many tokens a state needs room, after prompts padded to `prompt_length`: all but the last one."""
    length = prompt_length + self.max_decode_steps - 1
    return length if context is None else min(length, context)

  def decode(
    self,
    steps: DecodingSteps[DecodingState],
    prompt_ids_BP: jax.Array,
    prompt_lengths_B: jax.Array,
    key: jax.Array | None,
    max_tokens_B: jax.Array | None = None,
    chunk: int | None = None,
  ) -> Decoded:
    """Continues prompts. Each row has its own keys, so its tokens do not depend on the number of rows.

    Args:
      steps: the model.
      prompt_ids_BP: prompts, padded on the right with any ids.
      prompt_lengths_B: int32 lengths of the prompts; a row of length 0 is padding and gets no tokens.
      key: PRNG key; may be None if the temperature is 0.
      max_tokens_B: int32, the largest number of tokens after each prompt, at most `max_decode_steps`; None uses that.
      chunk: tokens of a prompt that are read at once, a divisor of the slots. The cost of reading then depends on the
        longest prompt, rounded up, and not on P. None reads all P at once.
    """
    num_rows, prompt_length = prompt_ids_BP.shape
    slots = self.num_slots(prompt_length, self.context(steps.max_positions))
    # Texts of this length fit into the state, so no row is read again.
    fits = slots == self.num_slots(prompt_length)
    chunk = chunk or (prompt_length if fits else slots)
    start_state = steps.start(num_rows, slots)
    limits_B = jnp.minimum(self.max_decode_steps if max_tokens_B is None else max_tokens_B, self.max_decode_steps)

    def keys(number: jax.Array) -> jax.Array | None:
      """Returns the keys of token `number` of each row."""
      if key is None:
        return None
      of_token = jax.random.fold_in(key, number)
      return jax.vmap(lambda row: jax.random.fold_in(of_token, row))(jnp.arange(num_rows))

    def choose(logits_BV: jax.Array, seen: _Seen) -> _Seen:
      """Draws the next token of each row that is not done."""
      number, _, (ids_BM, lengths_B, log_probs_BM), done_B = seen
      ids_B = sample_tokens(logits_BV, keys(number), temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
      log_probs_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32))
      log_probs_B = jnp.take_along_axis(log_probs_BV, ids_B[:, None], axis=-1)[:, 0]
      decoded = Decoded(
        ids_BM.at[:, number].set(jnp.where(done_B, 0, ids_B)),
        lengths_B + ~done_B,
        log_probs_BM.at[:, number].set(jnp.where(done_B, 0.0, log_probs_B)),
      )
      done_B |= jnp.isin(ids_B, jnp.array(self.stop_ids, jnp.int32)) | (decoded.lengths >= limits_B)
      return _Seen(number + 1, ids_B, decoded, done_B)

    def read(seen: _Seen) -> tuple[jax.Array, DecodingState, jax.Array]:
      """Reads as many last tokens of each row as there are slots; returns logits, state, and the slots taken."""
      length_B = jnp.where(seen.done_B, 0, prompt_lengths_B + seen.number)
      kept_B = jnp.minimum(length_B, slots)

      def read_chunk(start: jax.Array | int, state: DecodingState) -> tuple[jax.Array, DecodingState]:
        place_BT = (length_B - kept_B)[:, None] + start + jnp.arange(chunk, dtype=jnp.int32)
        ids_BT = jnp.take_along_axis(prompt_ids_BP, place_BT, axis=1, mode='clip')
        if not fits:
          after_BT = jnp.take_along_axis(seen.decoded.ids, place_BT - prompt_lengths_B[:, None], axis=1, mode='clip')
          ids_BT = jnp.where(place_BT < prompt_lengths_B[:, None], ids_BT, after_BT)
        return steps.extend(*prompt_step(ids_BT, kept_B, start), state)

      def next_chunk(carry: tuple[jax.Array, jax.Array, DecodingState]) -> tuple[jax.Array, jax.Array, DecodingState]:
        start, logits_BV, state = carry
        new_BV, state = read_chunk(start, state)
        is_last_B = (start < kept_B) & (kept_B <= start + chunk)
        return start + chunk, jnp.where(is_last_B[:, None], new_BV, logits_BV), state

      taken = jnp.max(kept_B)
      if chunk >= (prompt_length if fits else slots):
        return *read_chunk(0, start_state), taken
      shape = jax.eval_shape(read_chunk, 0, start_state)[0]
      first = jnp.int32(0), jnp.zeros(shape.shape, shape.dtype), start_state
      _, logits_BV, state = jax.lax.while_loop(lambda carry: carry[0] < taken, next_chunk, first)
      return logits_BV, state, taken

    def extend(carry: tuple[jax.Array, DecodingState, _Seen]) -> tuple[jax.Array, DecodingState, _Seen]:
      taken, state, seen = carry
      pos_B = prompt_lengths_B + seen.number - 1
      logits_BV, state = steps.extend(seen.last_ids_B[:, None], pos_B[:, None], jnp.zeros_like(seen.last_ids_B), state)
      return taken + 1, state, choose(logits_BV, seen)

    def read_and_extend(seen: _Seen) -> _Seen:
      """Continues the rows until they are done, or the state is full."""
      logits_BV, state, taken = read(seen)
      carry = taken, state, choose(logits_BV, seen)
      return jax.lax.while_loop(lambda carry: (carry[0] < slots) & has_unfinished(carry[-1]), extend, carry)[-1]

    def has_unfinished(seen: _Seen) -> jax.Array:
      return ~jnp.all(seen.done_B)

    empty_BM = jnp.zeros((num_rows, self.max_decode_steps))
    none_B = jnp.zeros(num_rows, jnp.int32)
    decoded = Decoded(empty_BM.astype(jnp.int32), none_B, empty_BM)
    seen = _Seen(jnp.int32(0), none_B, decoded, (prompt_lengths_B == 0) | (limits_B <= 0))
    seen = read_and_extend(seen) if fits else jax.lax.while_loop(has_unfinished, read_and_extend, seen)
    return seen.decoded
