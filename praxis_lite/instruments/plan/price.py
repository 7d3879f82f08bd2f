"""The cost of training on a number of tokens: time, chip-hours and money."""

from __future__ import annotations

import dataclasses

from praxis_lite.common.figures import duration, short_number
from praxis_lite.instruments.plan.planning import Plan

# Tokens per parameter that give the best model at a given training cost (Hoffmann et al., 2022).
CHINCHILLA = 20


@dataclasses.dataclass(frozen=True)
class Price:
  """The cost of training on a number of tokens.

  Attributes:
    tokens: number of tokens.
    steps: number of steps with the planned batch.
    seconds: time of all steps. Evaluation, checkpoints and failures are not included.
    chip_hours: total over all chips.
    money: cost at the given price of a chip-hour; None if no price was given.
  """

  tokens: float
  steps: float
  seconds: float
  chip_hours: float
  money: float | None


def chinchilla_tokens(plan: Plan) -> float:
  """Returns 20 tokens for each active parameter."""
  return float(CHINCHILLA * plan.work.active_parameters)


def price_of(plan: Plan, tokens: float | None = None, per_chip_hour: float | None = None) -> Price | None:
  """Returns the cost of training on `tokens`, by default `chinchilla_tokens`; None if the plan has no tokens."""
  if plan.work.tokens is None:
    return None
  tokens = chinchilla_tokens(plan) if tokens is None else tokens
  steps = tokens / plan.work.tokens
  seconds = steps * plan.step_seconds
  chip_hours = seconds / 3600 * plan.topology.num_chips
  return Price(tokens, steps, seconds, chip_hours, None if per_chip_hour is None else chip_hours * per_chip_hour)


def format_price(plan: Plan, tokens: float | None = None, per_chip_hour: float | None = None) -> str:
  """Returns the cost as one or two lines; '' if the plan has no tokens."""
  price = price_of(plan, tokens, per_chip_hour)
  if price is None:
    return ''
  best = chinchilla_tokens(plan)
  active = 'active ' if plan.work.active_parameters != plan.work.parameters else ''
  known = f'{CHINCHILLA} for each {active}parameter, which Hoffmann et al. (2022) found best for its cost'
  line = f'{short_number(price.tokens)} tokens take {price.steps:,.0f} steps, {duration(price.seconds)}: '
  line += f'{price.chip_hours:,.0f} chip-hours' + ('' if price.money is None else f', {price.money:,.0f} in money')
  if tokens is None:
    return f'{line} ({known})'
  return f'{line}\n{short_number(best)} tokens would be {known}'
