"""BeamSearch: continues prompts by the most probable continuations that a beam search finds.

B batch, P length of the prompts, M maximum number of tokens to decode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from praxis_lite.models.decoding.beam_loop import BeamDecoded, BeamLoop
from praxis_lite.models.decoding.decoder import Decoder
from praxis_lite.models.decoding.loop import Draws
from praxis_lite.models.decoding.steps import DecodingState, DecodingSteps


class BeamSearch(Decoder):
  """Settings of beam search.

  The search keeps the `beam_size` most probable beginnings of each prompt's continuation. A continuation is complete
  when it ends with a stop token that is among the `beam_size` best next tokens of all beams, or when it has as many
  tokens as the prompt allows. Its score is

      sum of the log-probabilities of its tokens / ((5 + length) / 6) ** length_penalty

  with the number of its tokens as the length, stop token included (GNMT, Wu et al., 2016). The search for a prompt ends
  when no beam can still reach a score above that of the `num_best`-th best complete continuation.

  With several groups, the search is diverse (Vijayakumar et al., 2018): each group of `beam_size / num_groups` beams
  searches by itself, and the groups choose one after the other. A group avoids tokens that earlier groups have just
  chosen: when it ranks candidates, it subtracts `diversity_penalty` for each beam of an earlier group that goes on
  with the token. Scores do not include the penalty. The `num_best` continuations have the best scores of all groups.

  With one beam, and a length penalty of 0 or early stopping, the search is greedy decoding. There is no
  coverage penalty: it needs the probabilities of attention to each token of the source, and fused attention does not
  return them.

  Attributes: the same as for `Decoder`, where penalties change the scores, and
    beam_size: K, the number of beams.
    num_best: N, how many continuations of a prompt are returned, at most K.
    length_penalty: 0 ranks by probability; the larger, the more long continuations are preferred.
    early_stopping: whether the search for a prompt also ends as soon as K continuations are complete.
    length_norm: 'gnmt' divides by ((5 + length) / 6) ** length_penalty; 'length' by length ** length_penalty, as
      transformers does.
    num_groups: number of groups of beams, a divisor of K.
    diversity_penalty: see above, in nats; 0 makes all groups alike.
  """

  beam_size: int = 4
  num_best: int = 1
  length_penalty: float = 0.6
  early_stopping: bool = False
  length_norm: str = 'gnmt'
  num_groups: int = 1
  diversity_penalty: float = 0.0

  def _checks(self) -> Iterator[tuple[str, bool, str]]:
    yield from super()._checks()
    yield 'beam_size', self.beam_size >= 1, 'at least 1'
    yield 'num_best', 1 <= self.num_best <= self.beam_size, f'from 1 to beam_size, which is {self.beam_size}'
    yield 'length_norm', self.length_norm in ('gnmt', 'length'), "'gnmt' or 'length'"
    is_divisor = self.num_groups >= 1 and self.beam_size % self.num_groups == 0
    yield 'num_groups', is_divisor, f'a divisor of beam_size, which is {self.beam_size}'
    yield 'diversity_penalty', 0 <= self.diversity_penalty < math.inf, 'a finite number of at least 0'
    yield 'length_penalty', 0 <= self.length_penalty < math.inf, 'a finite number of at least 0'

  @property
  def state_copies(self) -> int:
    return 2 * self.beam_size + 1  # Beams are reordered from one copy to another; prompts are read into a third.

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
    """Continues prompts. Those of a row do not depend on other rows.

    Args:
      steps: the model. If rows are not dimension 0 of all arrays of its state, it has a method `row_axes`; see
        `DecodingSteps`.
      prompt_ids_BP, prompt_lengths_B, max_tokens_B, chunk: see `Sampler.decode`. A prompt is read once for all beams.
      key, draws: not used, since nothing is drawn.
    """
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
    ).run()

  def _length_norm(self, length: jax.Array) -> jax.Array:
    base = (5.0 + length) / 6.0 if self.length_norm == 'gnmt' else jnp.asarray(length, jnp.float32)
    return base**self.length_penalty
