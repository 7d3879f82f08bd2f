"""Losses of pairs of answers to a prompt, a preferred (chosen) and a rejected one, from their log-probabilities.

log p, log q    log-probability of an answer, the sum over its tokens, under the model and under the reference
ratio r         log p - log q
mean m          log p / number of tokens

Dpo      -log sigmoid(beta (r_chosen - r_rejected))
Ipo      (r_chosen / tokens - r_rejected / tokens - 1 / (2 beta))^2
Kto      chosen: 1 - sigmoid(beta (r - z))    rejected: 1 - sigmoid(beta (z - r))    z: mean r of mismatched answers
Orpo     -m_chosen - weight log sigmoid(logit(exp m_chosen) - logit(exp m_rejected))
SimPo    -log sigmoid(beta (m_chosen - m_rejected) - margin)            B batch, S pairs of a row
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Configurable
from praxis_lite.common.errors import check_range

_ALMOST_0 = -1e-7  # Larger mean log-probabilities are clipped: the odds of a probability of 1 are infinite.


class AnswerScores(NamedTuple):
  """Scores of the chosen, or of the rejected, answers: float32 arrays [B] or [B, S], an entry for each pair."""

  log_prob: jax.Array  # Log-probability of the answer, the sum over its tokens, in nats.
  reference: jax.Array  # The same under the reference; zeros if the loss needs no reference.
  tokens: jax.Array  # Number of tokens; 0 if the pair has no such answer.

  @property
  def ratio(self) -> jax.Array:
    """The log-ratio of the answer's probabilities under the model and under the reference, in nats."""
    return self.log_prob - self.reference

  def mean_per_token(self, sums: jax.Array) -> jax.Array:
    """Returns the mean over the tokens of each answer, given the sums; a sum over no tokens stays as it is."""
    return sums / jnp.maximum(self.tokens, 1)


class PairScores(NamedTuple):
  """The inputs of a loss for a batch of pairs."""

  chosen: AnswerScores
  rejected: AnswerScores
  weights: jax.Array  # The weights of the pairs, float32 [B] or [B, S].
  divergence: jax.Array  # Scalar z of `Kto`, in nats; 0 for other losses.

  @property
  def weights_of_both(self) -> jax.Array:
    """The weights of the pairs, with 0 for pairs without both answers."""
    return jnp.where((self.chosen.tokens > 0) & (self.rejected.tokens > 0), self.weights, 0)

  @property
  def weights_of_chosen(self) -> jax.Array:
    """The weights of the pairs, with 0 for pairs without a chosen answer."""
    return jnp.where(self.chosen.tokens > 0, self.weights, 0)

  @property
  def weights_of_rejected(self) -> jax.Array:
    """The weights of the pairs, with 0 for pairs without a rejected answer."""
    return jnp.where(self.rejected.tokens > 0, self.weights, 0)


Terms = tuple[jax.Array, jax.Array]  # Losses and their weights, of the same shape.


class PreferenceLoss(Configurable):
  """Base of the losses of pairs. Subclasses define `terms` and `rewards`."""

  needs_reference: ClassVar[bool] = True  # Whether the loss compares the model with a reference.
  needs_mismatched: ClassVar[bool] = False  # Whether the loss needs mismatched answers, those to other prompts.
  takes_single: ClassVar[bool] = False  # Whether an example may have only one of the answers.

  def terms(self, pairs: PairScores) -> Terms:
    """Returns n losses for each pair, [n, B] or [n, B, S], and their weights; the loss is the weighted mean."""
    raise NotImplementedError

  def rewards(self, answers: AnswerScores) -> jax.Array:
    """Returns the implicit reward of each answer, in the shape of the scores. The loss raises it for chosen answers."""
    raise NotImplementedError


class _SigmoidLoss(PreferenceLoss):
  """Base of losses -log sigmoid(margin), with smoothed labels."""

  label_smoothing: float = 0.0

  def __post_init__(self) -> None:
    check_range(f'{type(self).__name__}.label_smoothing', self.label_smoothing, least=0, below=0.5)

  def _margin_loss(self, margin: jax.Array) -> jax.Array:
    right, wrong = jax.nn.log_sigmoid(margin), jax.nn.log_sigmoid(-margin)
    return -(1 - self.label_smoothing) * right - self.label_smoothing * wrong


class Dpo(_SigmoidLoss):
  """Direct preference optimization (Rafailov et al., 2023).

  Attributes:
    beta: factor of the rewards; a larger factor keeps the model closer to the reference.
    label_smoothing: the probability that the labels of a pair are swapped (conservative DPO; Mitchell, 2023).
  """

  beta: float = 0.1

  def __post_init__(self) -> None:
    super().__post_init__()
    check_range('Dpo.beta', self.beta, above=0)

  def rewards(self, answers: AnswerScores) -> jax.Array:
    return self.beta * answers.ratio

  def terms(self, pairs: PairScores) -> Terms:
    margin = self.rewards(pairs.chosen) - self.rewards(pairs.rejected)
    return self._margin_loss(margin)[None], pairs.weights_of_both[None]


class Ipo(PreferenceLoss):
  """Identity preference optimization (Azar et al., 2023), whose margins have a finite target.

  Attributes:
    beta: the ratio of the chosen answer should be larger than that of the rejected one by 1 / (2 beta).
    per_token: whether ratios are means over tokens, as in TRL, so that the target suits answers of any length; False
      means sums, as in the paper.
  """

  beta: float = 0.1
  per_token: bool = True

  def __post_init__(self) -> None:
    check_range('Ipo.beta', self.beta, above=0)

  def rewards(self, answers: AnswerScores) -> jax.Array:
    return self.beta * (answers.mean_per_token(answers.ratio) if self.per_token else answers.ratio)

  def terms(self, pairs: PairScores) -> Terms:
    margin = (self.rewards(pairs.chosen) - self.rewards(pairs.rejected)) / self.beta
    return jnp.square(margin - 1 / (2 * self.beta))[None], pairs.weights_of_both[None]


class Kto(PreferenceLoss):
  """Kahneman-Tversky optimization (Ethayarajh et al., 2024), which also takes single answers that are good or bad.

  The divergence z is the mean ratio of mismatched answers, that is, of answers to other prompts, over a batch or
  microbatch, but at least 0. No gradient flows through it.

  Attributes:
    beta: factor of the rewards.
    desirable_weight, undesirable_weight: factors of the losses of chosen and of rejected answers. They can compensate
      for unequal numbers of both.
  """

  needs_mismatched = True
  takes_single = True

  beta: float = 0.1
  desirable_weight: float = 1.0
  undesirable_weight: float = 1.0

  def __post_init__(self) -> None:
    check_range('Kto.beta', self.beta, above=0)
    for name in ('desirable_weight', 'undesirable_weight'):
      check_range(f'Kto.{name}', getattr(self, name), least=0)

  def rewards(self, answers: AnswerScores) -> jax.Array:
    return self.beta * answers.ratio

  def terms(self, pairs: PairScores) -> Terms:
    z = jax.lax.stop_gradient(self.beta * jnp.maximum(pairs.divergence, 0))
    of_chosen = self.desirable_weight * jax.nn.sigmoid(z - self.rewards(pairs.chosen))
    of_rejected = self.undesirable_weight * jax.nn.sigmoid(self.rewards(pairs.rejected) - z)
    return jnp.stack([of_chosen, of_rejected]), jnp.stack([pairs.weights_of_chosen, pairs.weights_of_rejected])


class Orpo(PreferenceLoss):
  """Odds ratio preference optimization (Hong et al., 2024): imitates chosen answers, and needs no reference.

  Attributes:
    weight: factor of the odds ratio term, lambda in the paper.
  """

  needs_reference = False

  weight: float = 0.1

  def __post_init__(self) -> None:
    check_range('Orpo.weight', self.weight, least=0)

  def rewards(self, answers: AnswerScores) -> jax.Array:
    return answers.mean_per_token(answers.log_prob)

  def terms(self, pairs: PairScores) -> Terms:
    chosen, rejected = self.rewards(pairs.chosen), self.rewards(pairs.rejected)
    odds = jax.nn.log_sigmoid(_log_odds(chosen) - _log_odds(rejected))
    return (-chosen - self.weight * odds)[None], pairs.weights_of_both[None]


class SimPo(_SigmoidLoss):
  """Simple preference optimization (Meng et al., 2024): means over tokens, a margin, and no reference.

  Attributes:
    beta: factor of the rewards.
    margin: how much larger the reward of the chosen answer should be than that of the rejected one, gamma in the paper.
    label_smoothing: see `Dpo`.
  """

  needs_reference = False

  beta: float = 2.0
  margin: float = 1.0

  def __post_init__(self) -> None:
    super().__post_init__()
    check_range('SimPo.beta', self.beta, above=0)
    check_range('SimPo.margin', self.margin, least=0)

  def rewards(self, answers: AnswerScores) -> jax.Array:
    return self.beta * answers.mean_per_token(answers.log_prob)

  def terms(self, pairs: PairScores) -> Terms:
    margin = self.rewards(pairs.chosen) - self.rewards(pairs.rejected) - self.margin
    return self._margin_loss(margin)[None], pairs.weights_of_both[None]


def _log_odds(log_prob: jax.Array) -> jax.Array:
  """Returns log(p / (1 - p)), given log p; finite even for p = 1, such as for answers without tokens."""
  log_prob = jnp.minimum(log_prob, _ALMOST_0)
  is_near_1 = log_prob > -math.log(2)
  # Each branch gets arguments for which its gradient is finite.
  near_1 = jnp.log(-jnp.expm1(jnp.where(is_near_1, log_prob, -1.0)))
  others = jnp.log1p(-jnp.exp(jnp.where(is_near_1, -1.0, log_prob)))
  return log_prob - jnp.where(is_near_1, near_1, others)
