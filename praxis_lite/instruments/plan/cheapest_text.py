"""The result of `find_cheapest` as text for a terminal."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence

from praxis_lite.common.figures import duration, format_axes, format_bytes, format_seconds, short_number
from praxis_lite.instruments.plan.cheapest import CheapestRun, Goal, Option, excess
from praxis_lite.instruments.plan.loss_goal import format_tokens
from praxis_lite.instruments.plan.report import format_table, wrap_line

_MOST_ROWS = 24
_NO_LIMIT = 'no limit'  # Stands for infinity, if the loss may never be reached.


def format_cheapest(found: CheapestRun, command: Sequence[str] = ('praxis-lite', 'plan')) -> str:
  """Returns a table of the options, a recommendation, and the offers that were left out.

  `command` is the beginning of a command line that plans the experiment, to which the chips and the setting are added.
  """
  sections = [_table(found)] if found.options else []
  sections.append('\n'.join(wrap_line(line, 2) for line in recommendation(found)))
  if (best := found.best) is not None:
    settings = [f'--set={line}' for line in best.overrides]
    sections.append(f'to plan it: {shlex.join([*command, f"--topology={best.topology.name}", *settings])}')
  if found.left_out:
    sections.append('\n'.join(wrap_line(line, 4) for line in ['left out:', *left_out_lines(found)]))
  return '\n\n'.join(sections)


def _table(found: CheapestRun) -> str:
  frontier, has_limits = found.frontier, found.goal.budget is not None or found.goal.seconds is not None
  rows = [('', 'chips', 'time', 'at most', 'money', 'at most', 'goal', 'step', 'memory', 'mesh, and what else differs')]
  for option in found.options[:_MOST_ROWS]:
    time, money = option.seconds, option.money
    known = option.factors is not None
    most = [most_text(duration, option, time), most_text(format_money, option, money)] if known else ['', '']
    rows.append(
      (
        mark_of(option),
        f'{"*" if option in frontier else " "} {option.topology.name}',
        *(duration(time), most[0], format_money(money), most[1]),
        format_reached(option, found.goal) if has_limits else '',
        *(format_seconds(option.step_seconds), format_bytes(option.peak), setting_text(option)),
      )
    )
  kept = [i for i in range(len(rows[0])) if i == 0 or any(row[i] for row in rows[1:])]
  shown = [[row[i] for i in kept] for row in rows]
  right = [i for i, name in enumerate(shown[0]) if name in ('time', 'at most', 'money', 'step', 'memory')]
  table = format_table(shown, right=right)
  more = len(found.options) - _MOST_ROWS
  return '\n'.join([table, *([f'and {more} dearer ones'] if more > 0 else []), '* no other is both faster and cheaper'])


def most_text(form: Callable[[float], str], option: Option, value: float) -> str:
  """Returns `option.largest(value)` as text: formatted by `form`, or 'no limit' if it is infinite."""
  largest = option.largest(value)
  return _NO_LIMIT if math.isinf(largest) else form(largest)


def format_money(value: float) -> str:
  """Returns a price without a currency: three digits below 100, whole numbers from 100."""
  return f'{value:,.0f}' if value >= 100 else f'{value:,.3g}'


def mark_of(option: Option) -> str:
  return 'compiled' if option.is_compiled else 'compiler failed' if option.failure else 'estimated'


def setting_text(option: Option) -> str:
  """Returns an option's mesh and its other overrides, without the first parts of their paths."""
  changes = [line for line in option.overrides if 'mesh_shape' not in line]
  return ', '.join([format_axes(option.plan.mesh), *(line.rpartition('.')[2] for line in changes)])


def format_reached(option: Option, goal: Goal) -> str:
  """Returns 'yes', 'as planned' if only the planned time and price reach the goal, or 'no, 1.3 x' (the `excess`)."""
  if (missed := excess(option, goal)) > 1:
    return f'no, {missed:.3g} x'
  return 'yes' if excess(option, goal, at_most=True) <= 1 else 'as planned'


def format_goal(goal: Goal) -> str:
  """Returns the goal as text, such as '1.00T tokens within 30.0 d for at most 50,000'."""
  tokens = '' if goal.tokens is None else f'{short_number(goal.tokens)} tokens'
  tokens = tokens if goal.loss is None else f'a loss of {goal.loss.loss:g}, {tokens} ({format_tokens(goal.loss)})'
  within = '' if goal.seconds is None else f' within {duration(goal.seconds)}'
  budget = '' if goal.budget is None else f' for at most {format_money(goal.budget)}'
  return f'{tokens}{within}{budget}'


def recommendation(found: CheapestRun) -> list[str]:
  """Returns lines that say which option to take, what is uncertain about it, and how many options were compared."""
  best, goal = found.best, found.goal
  if best is None:
    return [f'no setting fits on any of the {len(found.left_out)} numbers of chips']
  lines = [] if found.is_reached else [f'nothing reaches the goal, {format_goal(goal)}; the nearest:']
  what = 'fastest' if goal.budget is not None and goal.seconds is None else 'cheapest'
  if found.is_reached:
    lines.append(f'the {what} for {format_goal(goal)}:')
  lines[-1] += f' {describe(best)}'
  if found.is_reached and excess(best, goal, at_most=True) > 1:
    safe = [option for option in found.options if excess(option, goal, at_most=True) <= 1]
    text = 'by the errors of earlier plans, it may miss the goal'
    text = text if goal.loss is None else 'by the errors of earlier plans and of the tokens, it may miss the goal'
    more = f'the cheapest that reaches it even so: {describe(safe[0])}' if safe else 'so may all others'
    lines.append(f'{text}; {more}')
  elif goal.budget is None and goal.seconds is None and len(found.frontier) > 1:
    lines.append(f'the fastest: {describe(found.frontier[-1])}')
  return [*lines, *(goal.loss.notes if goal.loss else ()), *_doubts(found, best)]


def describe(option: Option) -> str:
  """Returns an option in a few words: chips, time and money with their ranges, and where these figures come from."""
  figures = []
  for form, value in ((duration, option.seconds), (format_money, option.money)):
    least = None if option.factors is None else form(option.factors.least * value)
    figures.append(form(value) + (f' ({least} to {most_text(form, option, value)})' if least else ''))
  return f'{option.topology.name}, {figures[0]}, {figures[1]} in money, {mark_of(option)}'


def _doubts(found: CheapestRun, best: Option) -> Iterator[str]:
  compiled = [option for option in found.options if option.is_compiled]
  text = f'{found.estimates:,} settings on {len(found.options)} offers were estimated, {len(compiled)} of them compiled'
  estimated = len(found.options) - len(compiled)
  if compiled and estimated:
    text += '; estimates are corrected by the compiled ones of the same kind of chip'
  if not best.is_compiled:
    text += '; this one is only an estimate'
  yield text


def left_out_lines(found: CheapestRun) -> list[str]:
  """Returns why offers were left out, with one line for each reason."""
  names: dict[str, list[str]] = {}
  for name, reason in found.left_out.items():
    names.setdefault(reason, []).append(name)
  return [f'  {", ".join(group)}: {reason}' for reason, group in names.items()]
