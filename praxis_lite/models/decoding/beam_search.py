"""BeamSearch and FlatBeamSearch: continue prompts by the most probable continuations that a beam search finds.

B batch, R rows of all beams, P length of the prompts, S length of the sources, M maximum number of tokens to decode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.errors import ConfigError
from praxis_lite.models.decoding.beam_loop import BeamDecoded, BeamLoop
from praxis_lite.models.decoding.decoder import Decoder
from praxis_lite.models.decoding.loop import Draws
from praxis_lite.models.decoding.steps import DecodingState, DecodingSteps

_LEAST_COVERED = float(np.finfo(np.float32).tiny)  # A lower limit: the logarithm of 0 would exclude a continuation.


class BeamSearch(Decoder):
  """Settings of beam search.

  The search keeps the `beam_size` most probable beginnings of each prompt's continuation. There are two ways for a
  continuation to be complete: its last token is a stop token that was among the `beam_size` best next tokens of all
  beams, or it has as many tokens as the prompt allows. Its score is

      sum of the log-probabilities of its tokens / ((5 + length) / 6) ** length_penalty

  with the number of its tokens as the length, stop token included (GNMT, Wu et al., 2016). The search for a prompt ends
  when no beam can still reach a score above that of the `num_best`-th best complete continuation.

  With several groups, the search is diverse (Vijayakumar et al., 2018): each group of `beam_size / num_groups` beams
  searches by itself, and the groups choose one after the other. A group avoids tokens that earlier groups have just
  chosen: when it ranks candidates, it subtracts `diversity_penalty` for each beam of an earlier group that goes on
  with the token. Scores do not include the penalty. The `num_best` continuations have the best scores of all groups.

  With a coverage penalty c, the score of a continuation of an encoder-decoder has a further term,

      c * sum over the tokens i of the source of log(min(1, sum over its own tokens j of p_ij))

  where p_ij is the probability with which the decoder attends to i when it predicts j, averaged over heads and layers.
  The term is at most 0, and lower if parts of the source are left out (GNMT, Wu et al., 2016). It sums over all target
  tokens that the model sees, including a given beginning. Attention to the source is dense if c is not 0.

  With one beam, and a length penalty of 0 or early stopping, the search is greedy decoding.

  Attributes: the same as for `Decoder`, where penalties change the scores, and
    beam_size: K, the number of beams.
    num_best: N, how many continuations of a prompt are returned, at most K.
    length_penalty: 0 ranks by probability; larger values favor long continuations.
    early_stopping: whether the search for a prompt also ends as soon as K continuations are complete.
    length_norm: 'gnmt' divides by ((5 + length) / 6) ** length_penalty; 'length' by length ** length_penalty, as
      transformers does.
    num_groups: number of groups of beams, a divisor of K.
    diversity_penalty: see above, in nats; 0 makes all groups alike.
    coverage_penalty: c, see above; 0 disables it. Models other than encoder-decoders only allow 0.
  """

  beam_size: int = 4
  num_best: int = 1
  length_penalty: float = 0.6
  early_stopping: bool = False
  length_norm: str = 'gnmt'
  num_groups: int = 1
  diversity_penalty: float = 0.0
  coverage_penalty: float = 0.0

  _is_flat: ClassVar[bool] = False

  def _checks(self) -> Iterator[tuple[str, bool, str]]:
    yield from super()._checks()
    yield 'beam_size', self.beam_size >= 1, 'at least 1'
    yield 'num_best', 1 <= self.num_best <= self.beam_size, f'from 1 to beam_size, which is {self.beam_size}'
    yield 'length_norm', self.length_norm in ('gnmt', 'length'), "'gnmt' or 'length'"
    is_divisor = self.num_groups >= 1 and self.beam_size % self.num_groups == 0
    yield 'num_groups', is_divisor, f'a divisor of beam_size, which is {self.beam_size}'
    yield 'diversity_penalty', 0 <= self.diversity_penalty < math.inf, 'a finite number of at least 0'
    yield 'coverage_penalty', 0 <= self.coverage_penalty < math.inf, 'a finite number of at least 0'
    yield 'length_penalty', 0 <= self.length_penalty < math.inf, 'a finite number of at least 0'

  @property
  def state_copies(self) -> int:
    return 2 * self.beam_size + 1  # Two for reordering the beams, and one for the prompts.

  @property
  def needs_coverage(self) -> bool:
    return self.coverage_penalty > 0

  def decode(
    self,
    steps: DecodingSteps[DecodingState],
    prompt_ids_BP: jax.Array,
    prompt_lengths_B: jax.Array,
    key: jax.Array | None = None,
    max_tokens_B: jax.Array | None = None,
    chunk: int | None = None,
    draws: Draws | None = None,
  ) -> BeamDecoded:
    """Continues prompts. The continuations of a row do not depend on other rows.

    Args:
      steps: the model. If rows are not dimension 0 of all arrays of its state, it has a method `row_axes`; see
        `DecodingSteps`.
      prompt_ids_BP, prompt_lengths_B, max_tokens_B, chunk: see `Sampler.decode`. A prompt is read once for all beams.
      key, draws: not used, since nothing is drawn.

    Raises:
      ConfigError: the model does not support the settings, or the search needs stop tokens and there are none.
    """
    self._check_stops()
    return BeamLoop(
      self._reader(steps, prompt_ids_BP, prompt_lengths_B, chunk),
      self._adjuster(jnp.repeat(prompt_lengths_B, self.beam_size)),
      self.stop_ids,
      limits_B=self._limits(prompt_lengths_B, max_tokens_B),
      beam_size=self.beam_size,
      num_best=self.num_best,
      early_stopping=self.early_stopping,
      length_norm=self._length_norm,
      num_groups=self.num_groups,
      diversity_penalty=self.diversity_penalty,
      coverage=self._coverage(steps) if self.needs_coverage else None,
      is_flat=self._is_flat,
    ).run()

  def _check_stops(self) -> None:
    """Raises a `ConfigError` if the search needs stop tokens and there are none."""

  def _coverage(self, steps: DecodingSteps[DecodingState]) -> Callable[[DecodingState], jax.Array]:
    """Returns the function that computes the coverage term [R] from a state.

    Raises ConfigError if the model has no sources.
    """
    coverage_of: Callable[[DecodingState], jax.Array] | None = getattr(steps, 'coverage', None)
    if coverage_of is None:
      raise ConfigError(
        f'{type(self).__name__}.coverage_penalty: expected 0 for a model without sources, got {self.coverage_penalty}; '
        'only an encoder-decoder attends to a source that it can cover'
      )

    def term(state: DecodingState) -> jax.Array:
      covered_RS = jnp.clip(coverage_of(state), _LEAST_COVERED, 1.0)
      return self.coverage_penalty * jnp.sum(jnp.log(covered_RS), axis=-1)

    return term

  def _length_norm(self, length: jax.Array) -> jax.Array:
    base = (5.0 + length) / 6.0 if self.length_norm == 'gnmt' else jnp.asarray(length, jnp.float32)
    return base**self.length_penalty


class FlatBeamSearch(BeamSearch):
  """Settings of Praxis's flat beam search, in which every beam may end at every step.

  It differs from `BeamSearch` in what completes a continuation. There, a stop token counts if it is among the
  `beam_size` best next tokens of all beams. Here, at each step, every beam followed by any stop token is a complete
  continuation. Only the `beam_size` best of them so far, by score, are kept, and the beams go on with other tokens. So
  complete continuations never take the place of a beam, and one that is improbable at first may still win by its
  length. A beam that reaches the largest number of tokens without a stop token is dropped. So there may be fewer than
  `num_best` continuations if stop tokens are impossible, such as before `min_decode_steps`.

  Praxis keeps the tokens of all beams in one flat cache, and masks those of other beams in attention; this search
  reorders caches as `BeamSearch` does. The results are the same.

  It has the fields of `BeamSearch`, but `length_penalty` is 0.8 as in Praxis, `stop_ids` must not be empty when it
  decodes, and `early_stopping` is not supported.
  """

  length_penalty: float = 0.8

  _is_flat: ClassVar[bool] = True

  def _checks(self) -> Iterator[tuple[str, bool, str]]:
    yield from super()._checks()
    yield 'early_stopping', not self.early_stopping, 'False, since all beams end at each step'

  def _check_stops(self) -> None:
    if not self.stop_ids:
      raise ConfigError(
        f'{type(self).__name__}.stop_ids: expected at least one token, got (); a flat search returns only '
        'continuations that end with one'
      )
