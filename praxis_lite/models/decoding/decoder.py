"""Decoder: the settings that all decoding methods share. `Sampler` and `BeamSearch` add their own.

B batch, P length of the prompts, M maximum number of tokens to decode.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Config, Configurable
from praxis_lite.common.errors import ConfigError
from praxis_lite.models.decoding.constraint import Constraint
from praxis_lite.models.decoding.processors import (
  LogitProcessor,
  apply_processors,
  exclude_early_stops,
  exclude_ngrams,
  penalize_counts,
  penalize_repetition,
)
from praxis_lite.models.decoding.reading import RowReader
from praxis_lite.models.decoding.steps import DecodingState, DecodingSteps


class Decoder(Configurable):
  """Settings that do not depend on how the tokens are chosen.

  Attributes:
    max_decode_steps: M, the maximum number of tokens after a prompt.
    min_decode_steps: number of tokens that a continuation must have before a stop token is allowed.
    repetition_penalty: see `penalize_repetition`; prompts count as part of a row.
    presence_penalty, frequency_penalty: see `penalize_counts`; prompts do not count.
    no_repeat_ngram_size: see `exclude_ngrams`; 0 and None allow repetitions.
    max_context: number of last tokens that the model sees; None means all, up to the model's number of positions.
    stop_ids: tokens that end a row; the stop tokens of a `Constraint` are added.
    logit_processors: user functions, or a `Constraint`, that change the logits after all penalties; see
      `processors.py`.
  """

  max_decode_steps: int = 128
  min_decode_steps: int = 0
  repetition_penalty: float = 1.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  no_repeat_ngram_size: int | None = None
  max_context: int | None = None
  stop_ids: tuple[int, ...] = ()
  logit_processors: tuple[LogitProcessor | Constraint, ...] = ()

  def __post_init__(self) -> None:
    for field, valid, expected in self._checks():
      if not valid:
        raise ConfigError(f'{type(self).__name__}.{field}: expected {expected}, got {getattr(self, field)}')
    for processor in self.logit_processors:
      if isinstance(processor, Constraint):
        self.stop_ids = (*self.stop_ids, *processor.stop_ids)

  def _checks(self) -> Iterator[tuple[str, bool, str]]:
    """Yields (field, whether its value is valid, the valid values as text)."""
    size = self.no_repeat_ngram_size
    yield 'max_decode_steps', 1 <= self.max_decode_steps < 2**31, f'from 1 to {2**31 - 1:,}'
    yield 'min_decode_steps', self.min_decode_steps >= 0, 'at least 0'
    for penalty in ('presence_penalty', 'frequency_penalty'):
      yield penalty, math.isfinite(getattr(self, penalty)), 'a finite number'
    yield 'logit_processors', all(map(callable, self.logit_processors)), 'a tuple of functions'
    yield 'max_context', self.max_context is None or self.max_context >= 1, 'at least 1, or None'
    yield 'repetition_penalty', 0 < self.repetition_penalty < math.inf, 'a finite number above 0'
    yield 'no_repeat_ngram_size', size is None or size >= 0, 'at least 1, or 0 or None to allow repetitions'

  @property
  def is_random(self) -> bool:
    """Whether tokens are drawn, which needs a PRNG key."""
    return False

  @property
  def goes_back(self) -> bool:
    """Whether the state must be able to go back to earlier tokens; see `DecodingSteps`."""
    return False

  @property
  def needs_coverage(self) -> bool:
    """Whether the state must say how much of each source has been attended to; see `DecodingSteps`."""
    return False

  @property
  def state_copies(self) -> int:
    """How many states are in memory for each prompt, each as large as the state of one row."""
    return 1

  def context(self, num_positions: int | None = None) -> int | None:
    """Returns the number of tokens that a model with `num_positions` positions sees at once; None means all."""
    limits = [limit for limit in (self.max_context, num_positions) if limit is not None]
    return min(limits, default=None)

  def num_slots(self, prompt_length: int, context: int | None = None) -> int:
    """Returns how many slots a row needs, for a prompt padded to `prompt_length` and the tokens after it.

    Each token needs one, except the last. A model that sees only `context` tokens at once needs at most this many.
    """
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

  def _adjuster(self, prompt_lengths_B: jax.Array) -> LogitProcessor | None:
    """Returns the function that applies all processors to rows with these prompt lengths; None without processors."""
    processors = list(self._processors(prompt_lengths_B))
    return functools.partial(apply_processors, processors) if processors else None

  def _processors(self, prompt_lengths_B: jax.Array) -> Iterator[tuple[str, LogitProcessor]]:
    """Yields pairs of a name for messages and a processor, in the order in which they apply."""
    own = type(self).__name__
    if self.repetition_penalty != 1:
      yield f'{own}.repetition_penalty', functools.partial(penalize_repetition, penalty=self.repetition_penalty)
    if self.presence_penalty or self.frequency_penalty:
      count = functools.partial(penalize_counts, presence=self.presence_penalty, frequency=self.frequency_penalty)
      yield f'{own}.presence_penalty', functools.partial(count, prompt_lengths_B=prompt_lengths_B)
    if self.no_repeat_ngram_size:
      yield f'{own}.no_repeat_ngram_size', functools.partial(exclude_ngrams, size=self.no_repeat_ngram_size)
    if self.min_decode_steps and self.stop_ids:
      early = functools.partial(exclude_early_stops, stop_ids=self.stop_ids, least=self.min_decode_steps)
      yield f'{own}.min_decode_steps', functools.partial(early, prompt_lengths_B=prompt_lengths_B)
    for i, processor in enumerate(self.logit_processors):
      if isinstance(processor, Constraint):
        processor = functools.partial(processor, prompt_lengths_B=prompt_lengths_B)
      yield f'{own}.logit_processors[{i}]', processor


def continues_prompts(model: Config) -> bool:
  """Whether a config of a model has a decoder of tokens; for example, the `decoder_tpl` of a `VqVae` makes images."""
  return hasattr(getattr(model, 'decoder_tpl', None), 'stop_ids')
