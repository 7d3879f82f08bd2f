"""`praxis-lite scaling`: how the loss of finished runs falls with size, and the best size for more compute."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from praxis_lite.cli.command import Command
from praxis_lite.cli.command_flags import CommandFlags
from praxis_lite.common.errors import UserError, prefix_errors
from praxis_lite.common.foreign_text import printable

if TYPE_CHECKING:
  from praxis_lite.instruments.plan.scaling_law import BestSize, FittedLaw

_STEPS = (1.0, 3.0, 10.0)  # Budgets to propose sizes for, as multiples of the largest run's compute.
_HOUR = 3600.0


def _run(values: flags.FlagValues) -> int:
  from praxis_lite.cli.scaling_runs import read_finished_runs, say_left_out
  from praxis_lite.instruments.plan.scaling_law import fit_scaling_law

  budgets = _read_budgets(values.flops)
  prices: dict[str, float] = {}
  if values.prices:
    from praxis_lite.cli.plan_cheapest import read_prices

    prices = dict(read_prices(values))
  found = read_finished_runs(values.dir, values.metric, values.trust)
  say_left_out(found)
  with prefix_errors(values.dir):
    fitted = fit_scaling_law(found.runs)
  most = max(run.flops for run in found.runs)
  sizes = [fitted.best_size(flops) for flops in budgets or [step * most for step in _STEPS]]
  for line in (*_describe_runs(fitted, found.metric), *_describe_law(fitted), *_describe_sizes(sizes, most, prices)):
    print(printable(line))
  if values.svg:
    from praxis_lite.instruments.plan.scaling_picture import draw_scaling

    Path(values.svg).write_text(draw_scaling(fitted, sizes), encoding='utf-8')
    print(f'wrote {values.svg}')
  return 0


def _read_budgets(texts: list[str]) -> list[float]:
  try:
    budgets = [float(text) for text in texts]
  except ValueError:
    budgets = [0.0]
  if not all(0 < budget < float('inf') for budget in budgets):
    raise UserError(f'--flops={",".join(texts)}: expected operations of a training, as in 1e21 or 1e20,1e21')
  return budgets


def _describe_runs(fitted: FittedLaw, metric: str) -> Iterator[str]:
  """Yields a table of the runs: their sizes and losses, and the error of the law for each loss."""
  from praxis_lite.common.figures import short_number
  from praxis_lite.instruments.explain.explanation import align_columns

  rows = [('run', 'parameters', 'tokens', 'FLOPs', 'loss', 'law', 'off')]
  for run in sorted(fitted.runs, key=operator.attrgetter('flops')):
    law = fitted.law.loss(run.parameters, run.tokens)
    sizes = short_number(run.parameters), short_number(run.tokens), f'{run.flops:.2e}'
    rows.append((run.name, *sizes, f'{run.loss:.4g}', f'{law:.4g}', f'{law / run.loss - 1:+.2%}'))
  yield f'the losses are {metric}'
  yield from align_columns(rows, right=range(1, 7))
  yield ''


def _describe_law(fitted: FittedLaw) -> Iterator[str]:
  """Yields the law and its constants, with ranges that come from fits to resampled losses."""
  from praxis_lite.instruments.plan.loss_goal import format_law

  yield format_law(fitted)
  names = {'irreducible': 'E', 'a': 'A', 'alpha': 'alpha', 'b': 'B', 'beta': 'beta'}
  ranges = {name: fitted.interval(operator.attrgetter(field)) for field, name in names.items()}
  text = ', '.join(f'{name} {low:.3g} to {high:.3g}' for name, (low, high) in ranges.items())
  yield f'90 % of fits to resampled losses: {text}'
  low, high = fitted.interval(operator.attrgetter('growth_of_parameters'))
  share = fitted.law.growth_of_parameters
  yield (
    f'for the least loss, parameters grow with C^{share:.2f} ({low:.2f} to {high:.2f}) and tokens with '
    f'C^{1 - share:.2f}, where C = 6 N D is the compute'
  )
  yield ''


def _describe_sizes(sizes: list[BestSize], most: float, prices: dict[str, float]) -> Iterator[str]:
  """Yields a table of the best sizes for more compute, and their costs; then a command that plans the last size."""
  from praxis_lite.common.figures import short_number
  from praxis_lite.instruments.explain.explanation import align_columns

  def format_with_range(value: str, low: str, high: str) -> str:
    return f'{value} ({low} to {high})'

  rows = [('FLOPs', 'of the most', 'parameters', 'tokens', 'loss', *(f'{name}-hours, cost' for name in prices))]
  for size in sizes:
    n, d = (
      format_with_range(*map(short_number, (value, *ends)))
      for value, ends in ((size.parameters, size.of_parameters), (size.tokens, size.of_tokens))
    )
    loss = format_with_range(*(f'{value:.4g}' for value in (size.loss, *size.of_loss)))
    costs = [_cost(name, price, size.flops) for name, price in prices.items()]
    rows.append((f'{size.flops:.2e}', f'{size.flops / most:.3g} x', n, d, loss, *costs))
  yield 'the best sizes, with the ranges of 90 % of fits; farther from the runs, the law itself may not hold'
  yield from align_columns(rows, right=(0, 1))
  if prices:
    yield 'hours and costs assume the share of the peak that large products reach; a plan counts the rest too'
  tokens = sizes[-1].tokens
  wanted = ','.join(f'{name}={price:g}' for name, price in prices.items()) or 'h100=2.5'
  yield f'to plan one: praxis-lite plan --exp=... --cheapest --prices={wanted} --tokens={tokens:.3g}'


def _cost(name: str, price: float, flops: float) -> str:
  """Returns the hours that a kind of chip needs, and their price, as text."""
  from praxis_lite.common.figures import short_number
  from praxis_lite.instruments.plan.targets import find_target

  target = find_target(name)
  hours = flops / (target.peaks['bf16'] * target.efficiency.compute) / _HOUR
  return f'{short_number(hours)}, {short_number(hours * price)}'


def _flags() -> CommandFlags:
  values = CommandFlags()
  values.add_text('dir', 'Directory that contains the finished runs, at any depth.', 'runs/sizes', 'runs')
  metric = 'Metric to use as the loss; by default the evaluation loss, or else the mean training loss at the end.'
  values.add_text('metric', metric, 'eval/validation/loss')
  flops = 'Training FLOPs to propose sizes for; by default 1, 3 and 10 times those of the largest run.'
  values.add_list('flops', flops, '1e20,1e21')
  values.add_list('prices', 'Price per hour of each kind of chip, for rough costs.', 'h100=2.5,v5p=4')
  values.add_text('svg', 'Write a picture of the runs and the law.', 'scaling.svg')
  values.add_texts('trust', 'Module or file whose code the recorded configs may name.', 'my_layers.py')
  return values


COMMAND = Command(
  'scaling',
  'fit a scaling law to runs, and propose the next size',
  'fit the loss of finished runs of several sizes against parameters and tokens, as Hoffmann et al. (2022) do, with '
  'ranges from resampled fits; then print the sizes with the least loss for more compute, and how to plan them.',
  'praxis-lite scaling runs/sizes --prices=h100=2.5 --svg=scaling.svg',
  _flags(),
  _run,
  bare='dir',
)
