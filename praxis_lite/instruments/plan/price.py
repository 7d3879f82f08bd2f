"""The cost of training on a number of tokens: chip-hours, money, and the time, which includes that lost to failures."""

from __future__ import annotations

import dataclasses
import math

from praxis_lite.common.figures import duration, format_seconds, short_number, significant_digits
from praxis_lite.instruments.plan.goodput import EXPECTED, ExpectedGoodput, Interruptions, goodput
from praxis_lite.instruments.plan.planning import Plan

CHINCHILLA = 20  # Tokens per parameter that give the best model at a given training cost (Hoffmann et al., 2022).
_NEARLY_ALL = 0.9995  # Failures are mentioned only if the share of the time that is useful work is smaller.


@dataclasses.dataclass(frozen=True)
class Price:
  """The cost of training on a number of tokens.

  Attributes:
    tokens: number of tokens.
    steps: number of steps with the planned batch.
    steps_seconds: time of all steps.
    goodput: the effect of saves, failures, restarts and waits for inputs.
    seconds: time that includes this effect, without evaluations.
    chip_hours: total over all chips.
    money: cost at the given price of a chip-hour; None if no price was given.
  """

  tokens: float
  steps: float
  steps_seconds: float
  goodput: ExpectedGoodput
  seconds: float
  chip_hours: float
  money: float | None


def chinchilla_tokens(plan: Plan) -> float:
  """Returns 20 tokens for each active parameter."""
  return float(CHINCHILLA * plan.work.active_parameters)


def price_of(
  plan: Plan,
  tokens: float | None = None,
  per_chip_hour: float | None = None,
  interruptions: Interruptions = EXPECTED,
  step_seconds: float | None = None,
) -> Price | None:
  """Returns the cost of training; None if the tokens of a step or its time are not known.

  `tokens` are by default `chinchilla_tokens`; `step_seconds` may be a better estimate of the time than the plan's.
  """
  if plan.work.tokens is None or not plan.is_time_known:
    return None
  tokens = chinchilla_tokens(plan) if tokens is None else tokens
  steps = tokens / plan.work.tokens
  seconds = steps * (plan.step_seconds if step_seconds is None else step_seconds)
  chips = plan.topology.num_chips
  found = goodput(chips, plan.memory.state.total, interruptions)
  whole = seconds / found.share if found.share else math.inf
  chip_hours = whole / 3600 * chips
  money = None if per_chip_hour is None else chip_hours * per_chip_hour
  return Price(tokens, steps, seconds, found, whole, chip_hours, money)


def format_price(plan: Plan, tokens: float | None = None, price: Price | None = None) -> str:
  """Returns a price, by default `price_of(plan, tokens)`, as a few lines; '' if `price_of` returns None."""
  price = price or price_of(plan, tokens)
  if price is None:
    return ''
  if math.isinf(price.seconds):
    return 'failures are so frequent that a run makes no progress: a chip fails sooner than it restarts and saves'
  active = 'active ' if plan.work.active_parameters != plan.work.parameters else ''
  known = f'{CHINCHILLA} for each {active}parameter, which Hoffmann et al. (2022) found best for its cost'
  money = '' if price.money is None else f', {price.money:,.0f} in money'
  lines = [
    f'{short_number(price.tokens)} tokens take {price.steps:,.0f} steps, {duration(price.seconds)}: '
    f'{_hours(price.chip_hours)} chip-hours{money}{f" ({known})" if tokens is None else ""}'
  ]
  lines += [_format_goodput(price)] if price.goodput.share < _NEARLY_ALL else []
  lines += [] if tokens is None else [f'{short_number(chinchilla_tokens(plan))} tokens would be {known}']
  return '\n'.join(lines)


def _hours(hours: float) -> str:
  return f'{hours:,.0f}' if hours >= 10 else significant_digits(hours, 2)


def _format_goodput(price: Price) -> str:
  found = price.goodput
  if math.isinf(found.seconds_to_failure):
    return f'{found.share:.1%} of this time is work; the rest waits for inputs'
  return (
    f'{found.share:.1%} of this time is work that is kept: some chip fails every {duration(found.seconds_to_failure)}, '
    f'and a save stalls the run for {format_seconds(found.save_seconds)}, best every {duration(found.save_interval)}'
  )
