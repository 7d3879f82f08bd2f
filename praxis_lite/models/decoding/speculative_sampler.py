"""SpeculativeSampler: continues prompts like a `Sampler`, but by several tokens in each pass of the model.

B batch, P length of the prompts, S length of sources, K largest number of tokens in a draft, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError
from praxis_lite.models.decoding.drafting import Draft, Drafter, LookupDrafter, ModelDrafter
from praxis_lite.models.decoding.loop import Draws, row_keys
from praxis_lite.models.decoding.own_heads import FurtherHeads, OwnHeadsDrafter
from praxis_lite.models.decoding.sampler import DrawingDecoder
from praxis_lite.models.decoding.sampling import candidate_logits
from praxis_lite.models.decoding.speculative_loop import SpeculativeDecoded, SpeculativeLoop
from praxis_lite.models.decoding.steps import DecodingState, DecodingSteps
from praxis_lite.models.decoding.verifying import Verified, compare_drafts, reject_drafts

# Purposes of the keys that are derived from the key of a token.
_OF_DRAFT, _OF_ACCEPTANCE, _OF_MODEL = range(1, 4)


class SpeculativeSampler(DrawingDecoder):
  """Settings of speculative decoding: one pass of the model checks cheap guesses, and accepts those before a wrong one.

  It draws from the distribution of a `Sampler` with the same settings; guesses only change the time. Greedy tokens are
  the same as those of a `Sampler`. Random tokens are the same with `lookup`. With a draft model or own heads they
  differ, because other random numbers are drawn.

  Attributes: the same as for `Sampler`, and
    draft_tokens: K, the largest number of tokens that are guessed at a time.
    lookup: the largest number of last tokens that a `LookupDrafter` compares with earlier ones of the row, in order to
      guess what follows. None means that guesses come from a draft model, an argument of `decode`, or from own heads.
    own_heads: whether guesses come from the heads of the model itself, a `MultiTokenPrediction`; `draft_tokens` is at
      most their number.
  """

  draft_tokens: int = 4
  lookup: int | None = None
  own_heads: bool = False

  def _checks(self) -> Iterator[tuple[str, bool, str]]:
    yield from super()._checks()
    yield 'draft_tokens', self.draft_tokens >= 1, 'at least 1'
    yield 'lookup', self.lookup is None or self.lookup >= 1, 'at least 1, or None for a draft model'
    yield 'own_heads', not (self.own_heads and self.lookup is not None), 'False with a lookup'

  @property
  def goes_back(self) -> bool:
    return True

  def decode(
    self,
    steps: DecodingSteps[DecodingState],
    prompt_ids_BP: jax.Array,
    prompt_lengths_B: jax.Array,
    key: jax.Array | None,
    max_tokens_B: jax.Array | None = None,
    chunk: int | None = None,
    draws: Draws | None = None,
    draft_steps: DecodingSteps[Any] | None = None,
    heads: FurtherHeads[Any] | None = None,
    source_ids_BS: jax.Array | None = None,
  ) -> SpeculativeDecoded:
    """Continues prompts.

    Args:
      steps, prompt_ids_BP, prompt_lengths_B, key, max_tokens_B, chunk, draws: see `Sampler.decode`. The caller ensures
        that the model sees all tokens of a row at once.
      draft_steps: the draft model, with the same vocabulary; None with `lookup` or `own_heads`.
      heads: the heads of the model, with `own_heads`; the state of `steps` must then store the inputs of the heads.
      source_ids_BS: tokens that a look-up also searches, see `LookupDrafter`.

    Raises:
      ConfigError: not exactly one of look-up, draft model and heads is set; or a model cannot go back to earlier
        tokens.
    """
    if self.own_heads and (heads is None or draft_steps is not None):
      instead = 'this model has no heads that guess' if heads is None else 'a draft model needs False'
      raise ConfigError(f'{type(self).__name__}.own_heads: got True; {instead}')
    if not self.own_heads and (self.lookup is None) == (draft_steps is None):
      instead = 'expected a number, such as 3, or a draft model' if self.lookup is None else 'a draft model needs None'
      raise ConfigError(f'{type(self).__name__}.lookup: got {self.lookup}; {instead}')
    for model in (steps, *(() if draft_steps is None else (draft_steps,))):
      if not getattr(model, 'can_go_back', False):
        raise ConfigError(
          f'{type(self).__name__}: the steps of this model cannot go back to an earlier token of a row (they set no '
          'can_go_back), so guesses cannot be taken back; use a Sampler'
        )
    draws = draws or Draws()
    adjust = self._adjuster(draws.given_lengths(prompt_lengths_B))
    keys = functools.partial(row_keys, key, draws, prompt_lengths_B)

    def draw(logits_BV: jax.Array, number_B: jax.Array) -> jax.Array:
      return self.draw(logits_BV, keys(number_B))

    def draw_draft(logits_BV: jax.Array, number_B: jax.Array) -> tuple[jax.Array, jax.Array | None]:
      if not self.is_random:
        return draw(logits_BV, number_B), None
      from_BV = candidate_logits(logits_BV, **self._settings)
      return jax.vmap(jax.random.categorical)(_fold(keys(number_B), _OF_DRAFT), from_BV).astype(jnp.int32), from_BV

    def verify(logits_BNV: jax.Array, draft: Draft, number_B: jax.Array) -> Verified:
      places = range(logits_BNV.shape[1])
      if draft.logits is None:
        ids_BN = jnp.stack([draw(logits_BNV[:, i], number_B + i) for i in places], axis=1)
        return compare_drafts(ids_BN, draft)
      from_BNV = jnp.stack([candidate_logits(logits_BNV[:, i], **self._settings) for i in places], axis=1)
      keys_BN = jnp.stack([_fold(keys(number_B + i), _OF_MODEL) for i in places], axis=1)
      uniform_BN = jax.vmap(jax.vmap(jax.random.uniform))(_fold(keys_BN, _OF_ACCEPTANCE))
      return reject_drafts(from_BNV, draft, uniform_BN, keys_BN)

    drafter: Drafter[Any]
    reader = self._reader(steps, prompt_ids_BP, prompt_lengths_B, chunk)
    if self.own_heads:
      assert heads is not None
      drafter = OwnHeadsDrafter(heads, reader, self.draft_tokens, draw_draft, adjust)
    elif self.lookup is not None:
      drafter = LookupDrafter(self.lookup, self.draft_tokens, source_ids_BS)
    else:
      assert draft_steps is not None
      draft_reader = self._reader(draft_steps, prompt_ids_BP, prompt_lengths_B, chunk)
      drafter = ModelDrafter(draft_reader, self.draft_tokens, draw_draft, adjust)
    return SpeculativeLoop(
      reader,
      drafter,
      self.draft_tokens,
      draw,
      verify,
      adjust,
      self.stop_ids,
      limits_B=self._limits(prompt_lengths_B, max_tokens_B),
    ).run()


def _fold(keys: jax.Array | None, purpose: int) -> jax.Array:
  """Returns PRNG keys for a purpose, derived from `keys`; raises ConfigError if `keys` is None."""
  if keys is None:
    raise ConfigError('SpeculativeSampler.temperature: random numbers need a PRNG key')
  fold = functools.partial(jax.random.fold_in, data=purpose)
  for _ in range(keys.ndim):
    fold = jax.vmap(fold)
  return fold(keys)
