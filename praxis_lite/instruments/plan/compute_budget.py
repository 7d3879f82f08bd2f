"""The best model size for an amount of compute, by a scaling law.

Training N parameters on D tokens takes C = 6 N D operations. For a given C, L(N, D) = E + A / N^alpha + B / D^beta is
least at (Hoffmann et al., 2022, section 3.3)

    N = G (C / 6)^(beta / (alpha + beta))     D = (C / 6)^(alpha / (alpha + beta)) / G
    G = (alpha A / (beta B))^(1 / (alpha + beta))

and falls with compute as E + K / C^gamma, gamma = alpha beta / (alpha + beta).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from praxis_lite.instruments.plan.scaling_law import FinishedRun, FittedLaw, ScalingLaw

OPERATIONS = 6.0  # Per parameter and token: two forward, four backward.

Range = tuple[float, float]


class BestSize(NamedTuple):
  """The model size with the least loss for an amount of compute, with ranges.

  Attributes:
    flops: operations of the whole training.
    parameters, tokens, loss: the size, and its loss by the law.
    of_parameters, of_tokens, of_loss: the ranges of these three that contain 90 % of the fits to resampled losses.
  """

  flops: float
  parameters: float
  tokens: float
  loss: float
  of_parameters: Range
  of_tokens: Range
  of_loss: Range


def flops_of(run: FinishedRun) -> float:
  """Returns the operations of a run, 6 N D."""
  return OPERATIONS * run.parameters * run.tokens


def best_parameters(law: ScalingLaw, flops: float) -> float:
  """Returns the number of parameters with the least loss for an amount of compute."""
  total = law.alpha + law.beta
  ratio = (law.alpha * law.a / (law.beta * law.b)) ** (1 / total)
  return ratio * (flops / OPERATIONS) ** (law.beta / total)


def best_loss(law: ScalingLaw, flops: float) -> float:
  """Returns the least loss for an amount of compute."""
  parameters = best_parameters(law, flops)
  return law.loss(parameters, flops / OPERATIONS / parameters)


def growth_of_parameters(law: ScalingLaw) -> float:
  """Returns the exponent a of compute in the best number of parameters; in the best number of tokens, it is 1 - a."""
  return law.beta / (law.alpha + law.beta)


def best_size(fitted: FittedLaw, flops: float) -> BestSize:
  """Returns the size with the least loss for an amount of compute, with ranges."""

  def value_with_range(value: Callable[[ScalingLaw], float]) -> tuple[float, Range]:
    middle = value(fitted.law)
    low, high = fitted.interval(value)
    return middle, (min(low, middle), max(high, middle))

  parameters, of_parameters = value_with_range(lambda law: best_parameters(law, flops))
  tokens, of_tokens = value_with_range(lambda law: flops / OPERATIONS / best_parameters(law, flops))
  loss, of_loss = value_with_range(lambda law: best_loss(law, flops))
  return BestSize(flops, parameters, tokens, loss, of_parameters, of_tokens, of_loss)
