"""Sampler: the settings of decoding.

B batch, P length of the prompts, M maximum number of tokens to decode.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Configurable
from praxis_lite.common.errors import ConfigError
from praxis_lite.models.decoding.loop import Decoded, DecodingLoop, Draws
from praxis_lite.models.decoding.sampling import exclude_ngrams, penalize_repetition, sample_tokens
from praxis_lite.models.decoding.steps import DecodingState, DecodingSteps


class Sampler(Configurable):
  """Settings of decoding.

  Attributes:
    max_decode_steps: M, the maximum number of tokens after a prompt.
    temperature: 0 is greedy; 1 is the model's distribution.
    top_k, top_p, min_p: see `sample_tokens`.
    repetition_penalty: see `penalize_repetition`; prompts count as part of a row.
    no_repeat_ngram_size: see `exclude_ngrams`; 0 and None allow repetitions.
    max_context: number of last tokens that the model sees; None means all, limited only by its number of positions.
    stop_ids: tokens that end a row.
  """

  max_decode_steps: int = 128
  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  repetition_penalty: float = 1.0
  no_repeat_ngram_size: int | None = None
  max_context: int | None = None
  stop_ids: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    for field, valid, expected in (
      ('max_decode_steps', 1 <= self.max_decode_steps < 2**31, f'from 1 to {2**31 - 1:,}'),
      ('temperature', self.temperature >= 0, 'at least 0'),
      ('top_k', self.top_k is None or self.top_k >= 0, 'at least 1, or 0 or None for all tokens'),
      ('max_context', self.max_context is None or self.max_context >= 1, 'at least 1, or None'),
      ('top_p', self.top_p is None or 0 < self.top_p <= 1, 'more than 0 and at most 1, or None'),
      ('min_p', self.min_p is None or 0 <= self.min_p <= 1, 'at least 0 and at most 1, or None'),
      ('repetition_penalty', 0 < self.repetition_penalty < math.inf, 'a finite number above 0'),
      (
        'no_repeat_ngram_size',
        self.no_repeat_ngram_size is None or self.no_repeat_ngram_size >= 0,
        'at least 1, or 0 or None to allow repetitions',
      ),
    ):
      if not valid:
        raise ConfigError(f'Sampler.{field}: expected {expected}, got {getattr(self, field)}')

  def context(self, num_positions: int | None = None) -> int | None:
    """Returns the number of tokens that a model with `num_positions` positions sees at once; None means all."""
    limits = [limit for limit in (self.max_context, num_positions) if limit is not None]
    return min(limits, default=None)

  def num_slots(self, prompt_length: int, context: int | None = None) -> int:
    """Returns the slots that a row needs after a prompt padded to `prompt_length`: one per token except the last."""
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
    draws: Draws | None = None,
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
      draws: which random numbers of `key` the rows use; None uses the first ones.
    """
    prompt_length, most = prompt_ids_BP.shape[1], self.max_decode_steps
    slots = self.num_slots(prompt_length, self.context(steps.max_positions))
    return DecodingLoop(
      steps,
      functools.partial(
        sample_tokens, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
      ),
      self._adjust if self.repetition_penalty != 1 or self.no_repeat_ngram_size else None,
      self.stop_ids,
      num_steps=most,
      slots=slots,
      chunk=chunk,
      prompt_ids_BP=prompt_ids_BP,
      prompt_lengths_B=prompt_lengths_B,
      key=key,
      draws=draws or Draws(),
      limits_B=jnp.minimum(most if max_tokens_B is None else max_tokens_B, most),
    ).run()

  def _adjust(self, logits_BV: jax.Array, ids_BL: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """Returns the logits, float32, in which tokens that repeat earlier ones are less probable."""
    logits_BV = logits_BV.astype(jnp.float32)
    if self.repetition_penalty != 1:
      logits_BV = penalize_repetition(logits_BV, ids_BL, lengths_B, self.repetition_penalty)
    if self.no_repeat_ngram_size:
      logits_BV = exclude_ngrams(logits_BV, ids_BL, lengths_B, self.no_repeat_ngram_size)
    return logits_BV
