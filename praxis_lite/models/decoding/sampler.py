"""Sampler: continues prompts token by token; each is drawn at random, or is the most probable one.

B batch, P length of the prompts, M maximum number of tokens to decode.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax

from praxis_lite.models.decoding.decoder import Decoder
from praxis_lite.models.decoding.loop import Decoded, DecodingLoop, Draws
from praxis_lite.models.decoding.row_loop import RowLoop
from praxis_lite.models.decoding.sampling import CANDIDATE_SETTINGS, sample_rows, sample_tokens
from praxis_lite.models.decoding.steps import DecodingState, DecodingSteps


class DrawingDecoder(Decoder):
  """Settings of decoders that draw one token after the other, or take the most probable one.

  Attributes: the same as for `Decoder`, and
    temperature: 0 is greedy; 1 is the model's distribution.
    top_k, top_p, min_p, typical_p, top_n_sigma: see `sample_tokens`.
  """

  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  typical_p: float | None = None
  top_n_sigma: float | None = None

  def _checks(self) -> Iterator[tuple[str, bool, str]]:
    yield from super()._checks()
    yield 'temperature', self.temperature >= 0, 'at least 0'
    yield 'top_k', self.top_k is None or self.top_k >= 0, 'at least 1, or 0 or None for all tokens'
    for mass in ('top_p', 'typical_p'):
      value = getattr(self, mass)
      yield mass, value is None or 0 < value <= 1, 'more than 0 and at most 1, or None'
    yield 'top_n_sigma', self.top_n_sigma is None or self.top_n_sigma > 0, 'more than 0, or None'
    yield 'min_p', self.min_p is None or 0 <= self.min_p <= 1, 'at least 0 and at most 1, or None'

  @property
  def is_random(self) -> bool:
    return self.temperature != 0

  @property
  def _restrictions(self) -> dict[str, Any]:
    """The arguments of `sample_tokens` that restrict which tokens may be drawn."""
    return {name: getattr(self, name) for name in CANDIDATE_SETTINGS}

  @property
  def _settings(self) -> dict[str, Any]:
    """The arguments of `sample_tokens`."""
    return {'temperature': self.temperature, **self._restrictions}

  def draw(self, logits_BV: jax.Array, keys_B: jax.Array | None) -> jax.Array:
    """Returns a token for each row; see `sample_tokens`."""
    return sample_tokens(logits_BV, keys_B, **self._settings)


class Sampler(DrawingDecoder):
  """Settings of sampling.

  Attributes: the same as for `DrawingDecoder`.
  """

  def row_loop(
    self, steps: DecodingSteps[DecodingState], prompt_lengths_B: jax.Array, num_tokens: int, num_top: int = 0
  ) -> RowLoop[DecodingState]:
    """Returns a `RowLoop`, which continues rows that begin at different times.

    Each row has its own temperature, `top_p` and PRNG key, so these fields of the sampler are not used.

    Args:
      steps: the model; `can_go_back` must be True, see `DecodingSteps`.
      prompt_lengths_B: int32, lengths of the prompts.
      num_tokens: the number of tokens that a call adds to each row.
      num_top: the number of most probable tokens to report for each new token.
    """
    draw = functools.partial(sample_rows, **{name: x for name, x in self._restrictions.items() if name != 'top_p'})
    return RowLoop(steps, draw, self._adjuster(prompt_lengths_B), self.stop_ids, num_tokens, num_top)

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
    """Continues prompts. Each row has its own PRNG keys, so its tokens do not depend on the number of rows.

    Args:
      steps: the model.
      prompt_ids_BP: prompts, padded on the right with any ids.
      prompt_lengths_B: int32 lengths of the prompts; a row of length 0 is padding and gets no tokens.
      key: PRNG key; may be None if the temperature is 0.
      max_tokens_B: int32, the largest number of tokens after each prompt, at most `max_decode_steps`; None means
        `max_decode_steps` for all.
      chunk: number of tokens of a prompt that are read at once, a divisor of the slots. The cost of reading then
        depends on the longest prompt, rounded up, and not on P. None reads all P at once.
      draws: which random numbers of `key` the rows use; None means rows 0, 1, ... and no tokens drawn before.
    """
    draws = draws or Draws()
    return DecodingLoop(
      self._reader(steps, prompt_ids_BP, prompt_lengths_B, chunk),
      self.draw,
      self._adjuster(draws.given_lengths(prompt_lengths_B)),
      self.stop_ids,
      key=key,
      draws=draws,
      limits_B=self._limits(prompt_lengths_B, max_tokens_B),
    ).run()
