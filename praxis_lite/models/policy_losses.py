"""Losses of scored answers that a model has sampled itself: group relative policy optimization.

p, q, o     probability of a token under the model, under the reference, and under the model that sampled the answer
ratio       p / o of a token; or the ratio of an answer, the geometric mean of p / o over its tokens
A           advantage of an answer: its reward relative to the other answers to its prompt

loss of a token = -min(ratio A, clip(ratio, 1 - low, 1 + high) A) + kl_weight KL
KL              = q / p - log(q / p) - 1        an estimate, never negative (Schulman, 2020)

B batch, T length.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Configurable
from praxis_lite.common.errors import check_choice, check_range
from praxis_lite.common.weighted import WeightedScalar, weighted_mean

RATIOS = ('token', 'answer')
MEANS = ('answers', 'tokens', 'constant')


class PolicyTokens(NamedTuple):
  """The inputs of a loss of sampled answers.

  Attributes:
    log_probs, reference, old: [B, T] float32 log-probabilities, in nats, of the tokens of answers: under the model,
      under the reference (zeros if the loss needs no reference), and under the model that sampled them.
    weights: [B, T] float32, 1 for tokens of answers, 0 elsewhere.
    advantages: [B] float32.
  """

  log_probs: jax.Array
  reference: jax.Array
  old: jax.Array
  weights: jax.Array
  advantages: jax.Array

  @property
  def has_answer(self) -> jax.Array:
    """Whether each row has an answer, [B] bool; rows without an answer are padding."""
    return jnp.any(self.weights > 0, axis=1)


class PolicyTerms(NamedTuple):
  """Terms of the loss."""

  loss: jax.Array  # [B, T] float32 losses of tokens.
  divergence: jax.Array  # [B, T] float32 estimates of the KL divergence from the reference, in nats.
  # [B, T] bool, whether clipping stops the gradient of a token, because its ratio has already moved too far in the
  # direction of its advantage.
  is_clipped: jax.Array


def ratios(tokens: PolicyTokens, of: str) -> jax.Array:
  """Returns the ratio p / o of each token, [B, T], or of its answer if `of` is 'answer'; `of` is one of `RATIOS`."""
  change_BT = jnp.where(tokens.weights > 0, tokens.log_probs - tokens.old, 0)
  if of == 'answer':
    mean_B, _ = weighted_mean(change_BT, tokens.weights, axis=1)
    change_BT = jnp.broadcast_to(mean_B[:, None], change_BT.shape)
  return jnp.exp(change_BT)


def estimate_divergence(log_probs: jax.Array, reference: jax.Array) -> jax.Array:
  """Returns q / p - log(q / p) - 1, whose mean over samples of p is KL(p || q), in nats."""
  change = reference - log_probs
  return jnp.expm1(change) - change


class Grpo(Configurable):
  """Group relative policy optimization (Shao et al., 2024) and its variants.

      Config(Grpo, kl_weight=0.04)                                    GRPO
      Config(Grpo, mean='tokens', clip_high=0.28)                     DAPO (Yu et al., 2025)
      Config(Grpo, mean='constant')                                   Dr. GRPO (Liu et al., 2025)
      Config(Grpo, ratio='answer', clip_low=3e-4, clip_high=4e-4)     GSPO (Zheng et al., 2025)

  Dr. GRPO also needs an input with `scale_rewards='none'`.

  Attributes:
    clip_low, clip_high: how far ratios may go below and above 1; a `clip_high` of None means `clip_low`.
    kl_weight: factor of the divergence from the reference; with 0, no reference is needed.
    ratio: 'token' or 'answer', see above.
    mean: how the losses of tokens are averaged. 'answers' averages over the tokens of each answer, then over answers;
      'tokens' averages over all tokens; 'constant' divides the sum over each answer by the largest number of tokens
      that an answer may have, then averages over answers.
  """

  clip_low: float = 0.2
  clip_high: float | None = None
  kl_weight: float = 0.0
  ratio: Literal['token', 'answer'] = 'token'
  mean: Literal['answers', 'tokens', 'constant'] = 'answers'

  def __post_init__(self) -> None:
    check_range('Grpo.clip_low', self.clip_low, above=0)
    if self.clip_high is not None:
      check_range('Grpo.clip_high', self.clip_high, above=0)
    check_range('Grpo.kl_weight', self.kl_weight, least=0)
    check_choice('Grpo.ratio', self.ratio, RATIOS)
    check_choice('Grpo.mean', self.mean, MEANS)

  @property
  def needs_reference(self) -> bool:
    """Whether the loss reads log-probabilities under the reference."""
    return self.kl_weight > 0

  def terms(self, tokens: PolicyTokens) -> PolicyTerms:
    """Returns the terms of the loss of each token; they are not multiplied by weights."""
    ratio_BT, advantages_B1 = ratios(tokens, self.ratio), tokens.advantages[:, None]
    low, high = 1 - self.clip_low, 1 + (self.clip_low if self.clip_high is None else self.clip_high)
    loss_BT = -jnp.minimum(ratio_BT * advantages_B1, jnp.clip(ratio_BT, low, high) * advantages_B1)
    is_clipped_BT = ((ratio_BT < low) & (advantages_B1 < 0)) | ((ratio_BT > high) & (advantages_B1 > 0))
    divergence_BT = jnp.zeros_like(loss_BT)
    if self.needs_reference:
      divergence_BT = estimate_divergence(tokens.log_probs, tokens.reference)
      loss_BT += self.kl_weight * divergence_BT
    return PolicyTerms(loss_BT, divergence_BT, is_clipped_BT)

  def average(self, loss_BT: jax.Array, tokens: PolicyTokens, max_tokens: int) -> WeightedScalar:
    """Returns two things: the loss of a batch; and its weight, which is the number of answers or of tokens.

    Args:
      loss_BT: float32 losses of tokens.
      tokens: the inputs from which they were computed.
      max_tokens: the largest number of tokens that an answer may have.
    """
    if self.mean == 'tokens':
      return weighted_mean(loss_BT, tokens.weights)
    if self.mean == 'answers':
      loss_B, _ = weighted_mean(loss_BT, tokens.weights, axis=1)
    else:
      loss_B = jnp.sum(jnp.where(tokens.weights > 0, loss_BT * tokens.weights, 0), axis=1) / max_tokens
    return weighted_mean(loss_B, tokens.has_answer)
