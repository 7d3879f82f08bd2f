"""The result of `find_cheapest` as one self-contained HTML page: a plot of time against money, and a table."""

from __future__ import annotations

import math
import pathlib

from praxis_lite.common.figures import duration
from praxis_lite.instruments.explain.page import fill_page, write_file
from praxis_lite.instruments.plan.cheapest import CheapestRun, Option
from praxis_lite.instruments.plan.cheapest_text import (
  format_goal,
  format_money,
  format_reached,
  left_out_lines,
  mark_of,
  most_text,
  recommendation,
  setting_text,
)


def write_page_of_cheapest(path: str, found: CheapestRun, title: str) -> pathlib.Path:
  """Writes the page to the file `path`, as `write_file` does. `title` says what is trained."""
  return write_file(path, render_page_of_cheapest(found, title))


def render_page_of_cheapest(found: CheapestRun, title: str) -> str:
  """Returns the page as HTML."""
  data = page_of_cheapest(found, title)
  return fill_page('praxis_lite.instruments.plan', f'{title}: cheapest run', data, 'cheapest', ('cheapest',))


def page_of_cheapest(found: CheapestRun, title: str) -> dict[str, object]:
  """Returns the data of the page, ready for JSON. Times are in seconds."""
  return {
    'title': title,
    'goal': format_goal(found.goal),
    'budget': found.goal.budget,
    'seconds': found.goal.seconds,
    'hasGoal': found.goal.budget is not None or found.goal.seconds is not None,
    'verdict': recommendation(found),
    'leftOut': [line.strip() for line in left_out_lines(found)],
    'options': [_option(option, found) for option in found.options],
  }


def _option(option: Option, found: CheapestRun) -> dict[str, object]:
  known, is_limited = option.factors, math.isfinite(option.largest(1.0))
  return {
    'name': option.topology.name,
    'kind': option.topology.target.name,
    'chips': option.topology.num_chips,
    'how': mark_of(option),
    'isCompiled': option.is_compiled,
    'isBest': option is found.best,
    'isUnbeaten': option in found.frontier,
    'seconds': option.seconds,
    'money': option.money,
    'factors': [known.least, known.largest] if known and is_limited else None,
    'timeText': duration(option.seconds),
    'timeMost': '' if known is None else most_text(duration, option, option.seconds),
    'moneyText': format_money(option.money),
    'moneyMost': '' if known is None else most_text(format_money, option, option.money),
    'reached': format_reached(option, found.goal),
    'step': option.step_seconds,
    'memory': option.peak,
    'setting': setting_text(option),
  }
