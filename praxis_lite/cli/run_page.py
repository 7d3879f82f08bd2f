"""The runs below a directory as one self-contained HTML page: their curves, and a table for each group."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from praxis_lite.cli.run_table import drop_module, name_below
from praxis_lite.common.foreign_text import printable
from praxis_lite.instruments.explain.page import fill_page, write_file
from praxis_lite.runs.records.comparing import RunGroup, values_over_time
from praxis_lite.runs.records.curves import MetricsTable
from praxis_lite.runs.records.runs import age, format_number

_MOST_POINTS = 400  # The most points of a curve.


def write_run_page(path: str, groups: Sequence[RunGroup], folder: str) -> pathlib.Path:
  """Writes the page to the file `path` and returns its path. Raises UserError if the file cannot be written.

  Creates missing parent directories. `folder` contains the runs.
  """
  data = {'title': printable(folder, one_line=True), 'groups': [_group(group, folder) for group in groups]}
  return write_file(path, fill_page('praxis_lite.cli', f'{folder}: runs', data, 'runs', ['runs']))


def _group(group: RunGroup, folder: str) -> Mapping[str, object]:
  runs = []
  for i, run in enumerate(group.runs):
    best = run.best(group.metric, group.mode)
    runs.append(
      {
        'name': printable(name_below(folder, run), one_line=True),
        'step': f'{run.step:,}{"" if run.num_steps is None else f" / {run.num_steps:,}"}',
        'age': age(run),
        'loss': format_number(run.last_loss),
        'best': None if best is None else [format_number(best[0]), best[1]],
        'fields': [printable(drop_module(value), one_line=True) for value in values_over_time(group, i)],
        'curves': {printable(name, one_line=True): _points(run.metrics, name) for name in run.metrics},
      }
    )
  return {
    'title': printable(group.title, one_line=True),
    'metric': printable(group.metric, one_line=True),
    'mode': group.mode,
    'columns': [printable(name, one_line=True) for name in group.columns],
    'runs': runs,
  }


def _points(metrics: MetricsTable, name: str) -> list[list[float]]:
  """Returns the finite points (step, value) of a curve; averages neighbours if there are more than `_MOST_POINTS`."""
  steps, values = metrics.curve(name)
  finite = np.isfinite(values)
  parts = min(_MOST_POINTS, int(finite.sum()))
  pairs = [np.array_split(part, parts) for part in (steps[finite], values[finite])] if parts else [[], []]
  return [[float(s.mean()), float(f'{v.mean():.5g}')] for s, v in zip(*pairs)]
