"""Decoder: the settings that all ways of decoding share. `Sampler` and `BeamSearch` add theirs.

B batch, P length of the prompts, M maximum number of tokens to decode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Configurable
from praxis_lite.common.errors import ConfigError
from praxis_lite.models.decoding.reading import RowReader
from praxis_lite.models.decoding.sampling import exclude_ngrams, penalize_repetition
from praxis_lite.models.decoding.steps import DecodingState, DecodingSteps


class Decoder(Configurable):
  """Settings of decoding, whatever chooses the tokens.

  Attributes:
    max_decode_steps: M, the maximum number of tokens after a prompt.
    repetition_penalty: see `penalize_repetition`; prompts count as part of a row.
    no_repeat_ngram_size: see `exclude_ngrams`; 0 and None allow repetitions.
    max_context: number of last tokens that the model sees; None means all, limited only by its number of positions.
    stop_ids: tokens that end a row.
  """

  max_decode_steps: int = 128
  repetition_penalty: float = 1.0
  no_repeat_ngram_size: int | None = None
  max_context: int | None = None
  stop_ids: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    for field, valid, expected in self._checks():
      if not valid:
        raise ConfigError(f'{type(self).__name__}.{field}: expected {expected}, got {getattr(self, field)}')

  def _checks(self) -> Iterator[tuple[str, bool, str]]:
    """Yields (field, whether its value is valid, what would be)."""
    size = self.no_repeat_ngram_size
    yield 'max_decode_steps', 1 <= self.max_decode_steps < 2**31, f'from 1 to {2**31 - 1:,}'
    yield 'max_context', self.max_context is None or self.max_context >= 1, 'at least 1, or None'
    yield 'repetition_penalty', 0 < self.repetition_penalty < math.inf, 'a finite number above 0'
    yield 'no_repeat_ngram_size', size is None or size >= 0, 'at least 1, or 0 or None to allow repetitions'

  @property
  def is_random(self) -> bool:
    """Whether tokens are drawn, which needs a PRNG key."""
    return False

  @property
  def state_copies(self) -> int:
    """How many times the state of one row is in memory for each prompt."""
    return 1

  def context(self, num_positions: int | None = None) -> int | None:
    """Returns the number of tokens that a model with `num_positions` positions sees at once; None means all."""
    limits = [limit for limit in (self.max_context, num_positions) if limit is not None]
    return min(limits, default=None)

  def num_slots(self, prompt_length: int, context: int | None = None) -> int:
    """Returns the slots that a row needs after a prompt padded to `prompt_length`: one per token except the last."""
    length = prompt_length + self.max_decode_steps - 1
    return length if context is None else min(length, context)

  def _reader(
    self,
    steps: DecodingSteps[DecodingState],
    prompt_ids_BP: jax.Array,
    prompt_lengths_B: jax.Array,
    chunk: int | None,
  ) -> RowReader[DecodingState]:
    slots = self.num_slots(prompt_ids_BP.shape[1], self.context(steps.max_positions))
    return RowReader(steps, prompt_ids_BP, prompt_lengths_B, self.max_decode_steps, slots, chunk)

  def _limits(self, prompt_lengths_B: jax.Array, max_tokens_B: jax.Array | None) -> jax.Array:
    """Returns the largest number of tokens after each prompt, [B]."""
    most_B = jnp.full_like(prompt_lengths_B, self.max_decode_steps)
    return most_B if max_tokens_B is None else jnp.minimum(max_tokens_B, most_B)

  @property
  def _has_penalties(self) -> bool:
    return self.repetition_penalty != 1 or bool(self.no_repeat_ngram_size)

  def _adjust(self, logits_BV: jax.Array, ids_BL: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """Returns the logits, float32, in which tokens that repeat earlier ones are less probable."""
    logits_BV = logits_BV.astype(jnp.float32)
    if self.repetition_penalty != 1:
      logits_BV = penalize_repetition(logits_BV, ids_BL, lengths_B, self.repetition_penalty)
    if self.no_repeat_ngram_size:
      logits_BV = exclude_ngrams(logits_BV, ids_BL, lengths_B, self.no_repeat_ngram_size)
    return logits_BV
