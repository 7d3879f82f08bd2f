"""What training costs: time, chip-hours and money for a number of tokens."""

from __future__ import annotations

import dataclasses

from praxis_lite.figures import duration, short_number
from praxis_lite.plan.planning import Plan

# Tokens for each parameter at which a model of a given training cost is best (Hoffmann et al., 2022).
CHINCHILLA = 20


@dataclasses.dataclass(frozen=True)
class Price:
  """What a number of tokens costs.

  Attributes:
    tokens: how many.
    steps: of the planned batch.
    seconds: of all steps; neither evaluation nor checkpoints nor failures.
    chip_hours: of all chips together.
    money: at the price of a chip-hour; None if that was not given.
  """

  tokens: float
  steps: float
  seconds: float
  chip_hours: float
  money: float | None


def chinchilla_tokens(plan: Plan) -> float:
  """20 tokens for each active parameter."""
  return float(CHINCHILLA * plan.work.active_parameters)


def price_of(plan: Plan, tokens: float | None = None, per_chip_hour: float | None = None) -> Price | None:
  """Returns what a number of tokens costs, by default `chinchilla_tokens`; None if a batch has no tokens."""
  if plan.work.tokens is None:
    return None
  tokens = chinchilla_tokens(plan) if tokens is None else tokens
  steps = tokens / plan.work.tokens
  seconds = steps * plan.step_seconds
  chip_hours = seconds / 3600 * plan.topology.num_chips
  return Price(tokens, steps, seconds, chip_hours, None if per_chip_hour is None else chip_hours * per_chip_hour)


def format_price(plan: Plan, tokens: float | None = None, per_chip_hour: float | None = None) -> str:
  """Returns a line or two; '' if a batch has no tokens."""
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
