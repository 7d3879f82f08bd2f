"""`praxis-lite plan --cheapest`: the chips and settings with which a run costs little money and time."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping

from absl import flags

from praxis_lite.cli.command import experiment_arguments
from praxis_lite.cli.plan_job import PlanJob, read_interruptions, read_topology
from praxis_lite.cli.scaling_runs import count_active_parameters, read_finished_runs, say_left_out
from praxis_lite.common.errors import UserError, prefix_errors
from praxis_lite.instruments.plan.cheapest import CheapestRun, Goal, Offer, find_cheapest, offers_of
from praxis_lite.instruments.plan.cheapest_text import format_cheapest
from praxis_lite.instruments.plan.loss_goal import LossGoal, tokens_to_reach
from praxis_lite.instruments.plan.page import write_page_of_cheapest
from praxis_lite.instruments.plan.scaling_law import fit_scaling_law
from praxis_lite.instruments.plan.targets import TARGETS, find_target
from praxis_lite.instruments.plan.topology import smallest_of

_MOST_CHIPS = 4096
_PRICES = '--prices=h100=2.5,v5p=4.2'
_UNITS = {'h': 3600.0, 'd': 86400.0}


def check_cheapest_flags(values: flags.FlagValues) -> None:
  """Raises UserError if flags of --cheapest are missing or invalid."""
  if values.hf and not any('batch_size' in line for line in values.set):
    raise UserError("--cheapest compares runs with the same batch: --hf needs --set 'datasets[*].batch_size=256'")
  if values.loss is None and (values.runs or values.metric):
    raise UserError(f'--{"runs" if values.runs else "metric"} needs --loss, the loss to reach, as in --loss=2.5')
  if values.loss is not None and not values.runs:
    raise UserError('--loss needs --runs, the folder of finished runs of several sizes, as in --runs=runs/sizes')
  if values.loss is not None and values.tokens is not None:
    raise UserError('--loss and --tokens both say how long to train; use one of them')
  if values.budget == 0:
    raise UserError('--budget=0: expected a price of more than 0')
  read_prices(values)
  read_numbers(values)
  if values.deadline is not None:
    read_deadline(values.deadline)


def read_prices(values: flags.FlagValues) -> Mapping[str, float]:
  """Returns the price per hour of a chip, by the name of the chip; raises UserError unless --prices is valid."""
  known = ', '.join(name for name, target in TARGETS.items() if target.kind != 'cpu')
  if not values.prices:
    raise UserError(f'--cheapest needs the price per hour of each kind of chip to consider: {_PRICES} ({known})')
  found: dict[str, float] = {}
  for part in values.prices:
    name, equals, text = part.partition('=')
    try:
      price = float(text)
    except ValueError:
      price = 0.0
    if not equals or not 0 < price < float('inf'):
      raise UserError(f'--prices: expected chips with a price of more than 0, as in {_PRICES}, got {part!r}')
    target = find_target(name.strip())
    if target.kind == 'cpu' or target.name in found:
      what = 'simulated devices have no price' if target.kind == 'cpu' else 'it has two prices'
      raise UserError(f'--prices={part}: {what}; name each of {known} at most once')
    found[target.name] = price
  return found


def read_numbers(values: flags.FlagValues) -> list[int]:
  """Returns the numbers of chips to consider: those of --chips, or all powers of 2; raises UserError for others."""
  if wrong := [text for text in values.chips if not re.fullmatch(r'[1-9]\d{0,6}', text.strip())]:
    raise UserError(f'--chips: expected numbers of chips such as 64,128, got {wrong[0]!r}')
  powers = [2**i for i in range(_MOST_CHIPS.bit_length())]
  return [int(text) for text in values.chips] or powers


def read_deadline(text: str, now: datetime.datetime | None = None) -> float:
  """Returns the seconds until a deadline: '30d', '36h', or the end of a date such as '2026-12-24'.

  Raises UserError for other texts, and for a date in the past.
  """
  found = re.fullmatch(r'(\d+(?:\.\d+)?)([dh])', text.strip())
  if found and float(found[1]) > 0:
    return float(found[1]) * _UNITS[found[2]]
  try:
    day = datetime.date.fromisoformat(text.strip())
  except ValueError:
    raise UserError(f'--deadline={text}: expected days, hours or a date, as in 30d, 36h or 2027-01-31') from None
  now = datetime.datetime.now() if now is None else now
  seconds = (datetime.datetime.combine(day, datetime.time.max) - now).total_seconds()
  if seconds <= 0:
    raise UserError(f'--deadline={text} has passed; today is {now:%Y-%m-%d}')
  return seconds


def read_offers(values: flags.FlagValues) -> list[Offer]:
  """Returns the offers of the flags: each kind of chip in several numbers, corrected by measurements."""
  prices = read_prices(values)
  kinds = [Offer(read_topology(smallest_of(name), values), price) for name, price in prices.items()]
  offers = offers_of(kinds, read_numbers(values))
  if not offers:
    raise UserError(f'--chips={",".join(values.chips)}: none of {", ".join(prices)} comes in such numbers')
  return offers


def find_cheapest_run(job: PlanJob, offers: list[Offer]) -> CheapestRun:
  """Returns the time and the price of the run on each offer, and the cheapest one."""
  values = job.values
  limit = None if values.deadline is None else read_deadline(values.deadline)
  loss = None if values.loss is None else read_loss_goal(job)
  tokens = values.tokens if loss is None else loss.tokens
  return find_cheapest(
    *(job.config, None, offers, Goal(tokens, values.budget, limit, loss)),
    interruptions=read_interruptions(values),
    verify=values.verify if values.compile else 0,
    seconds=values.search_seconds,
    cache=job.cache,
    elsewhere=lambda topology, overrides: job._replace(topology=topology).elsewhere(overrides),
    report=job.report,
  )


def read_loss_goal(job: PlanJob) -> LossGoal:
  """Returns the tokens that the planned model needs for --loss, by a scaling law fitted to the finished runs in --runs.

  Raises:
    UserError: the runs do not determine the law, their vocabulary differs from the model's, or the model cannot reach
      the loss.
  """
  values, task = job.values, job.config.task
  job.report(f'reading {values.runs}')
  found = read_finished_runs(values.runs, values.metric, values.trust)
  say_left_out(found)
  vocab_size = str(getattr(task.model, 'vocab_size', ''))
  if found.vocab_size and vocab_size != found.vocab_size:
    what = f'the runs have vocab_size = {found.vocab_size}, and the planned model {vocab_size or "none"}'
    raise UserError(f'--loss: losses of different vocabularies are not comparable; {what}')
  with prefix_errors(f'--runs={values.runs}'):
    fitted = fit_scaling_law(found.runs)
  return tokens_to_reach(values.loss, count_active_parameters(task), fitted)


def cheapest_text(job: PlanJob, found: CheapestRun) -> str:
  """Returns the result as text, with the command that plans the best option."""
  arguments = experiment_arguments(job.values)
  if job.values.hf:
    arguments = [f'--hf={job.values.hf}', *arguments[1:]]
  tokens = [] if job.values.tokens is None and found.goal.loss is None else [f'--tokens={found.goal.tokens:g}']
  return format_cheapest(found, ('praxis-lite', 'plan', *arguments, *tokens))


def write_cheapest_page(job: PlanJob, found: CheapestRun) -> None:
  """Writes the page of --html, and prints its path; does nothing without the flag."""
  if job.values.html:
    title = job.values.exp or job.values.hf or job.values.job_log_dir
    print(f'\nwrote {write_page_of_cheapest(job.values.html, found, title)}')
