"""The tables of runs that `runs` and `sweep` print, for a terminal of any width or as plain lines for a pipe."""

from __future__ import annotations

import csv
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TextIO

from praxis_lite.common.errors import first_names
from praxis_lite.common.figures import format_bytes, format_seconds, number_of
from praxis_lite.common.foreign_text import printable
from praxis_lite.instruments.explain.explanation import align_columns
from praxis_lite.runs.records.certificate import Certificate, format_communication
from praxis_lite.runs.records.comparing import RunGroup, values_over_time
from praxis_lite.runs.records.runs import RunState, age, format_number

# Columns that a Markdown table has only if at least one run has a value for them.
_FIGURES = ('step time', 'memory', 'communication, as planned')
_MOST_FIELDS, _MOST_CHARACTERS = 8, 24  # The most fields in a list or a piped row, and characters in a value.
_CLASS = re.compile(r'^([^\W\d]\w*\.)+(?=\w+$)')  # The module path in front of the name of a class or function.
_TIMES, _MEMORY = 'step / planned', 'memory / planned'
_FIXED = ('run', 'step', 'age', 'loss', 'best', _TIMES, _MEMORY)
# To show more fields, a narrow terminal leaves out some of these columns, in this order.
_LESS_IMPORTANT = (_MEMORY, _TIMES, 'loss', 'age', 'step')
_FEW_FIELDS = 3
_is_number = re.compile(r'-|-?[\d.]+(e[+-]?\d+)?').fullmatch


def print_groups(groups: Sequence[RunGroup], folder: str, *, all_columns: bool = False) -> None:
  """Prints a table for each group of runs: step, age, last loss, best value of a metric, and the fields that differ.

  Without `all_columns`, shows only the columns that fit, and prints the names of the others. If the terminal is too
  narrow for a table, it prints a few short lines for each run instead. `folder` contains the runs.
  """
  for i, group in enumerate(groups):
    print(end='\n' * (i > 0))
    _print_group(group, folder, all_columns)


def _print_group(group: RunGroup, folder: str, all_columns: bool) -> None:
  width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
  fixed = []
  for run in group.runs:
    quotients = [run.certificate and run.certificate.times, run.certificate and run.certificate.memory]
    cells = [*map(_one_line, _fixed_cells(run, group, folder)), *map(_format_quotient, quotients)]
    fixed.append(dict(zip(_FIXED, cells, strict=True)))
  names = [*map(_one_line, group.columns)]
  needed = len(names) if all_columns else min(_FEW_FIELDS, len(names))
  fields = [[_one_line(_short(v)) or '-' for v in values_over_time(group, i)] for i in range(len(group.runs))]
  has_best = any(row['best'] != '-' for row in fixed)
  about = f'; best: {"lowest" if group.mode == "min" else "highest"} {group.metric}' if has_best else ''
  print(_wrap(_one_line(f'{group.title}, {number_of(len(group.runs), "run")}{about}'), width))

  for left_out in range(len(_LESS_IMPORTANT) + 1):
    empty = [name for name in ('best', _TIMES, _MEMORY) if all(row[name] == '-' for row in fixed)]
    left = (*_LESS_IMPORTANT[:left_out], *empty)
    head = [name for name in _FIXED if name not in left]
    rows = [[*head, *names], *([*(row[name] for name in head), *own] for row, own in zip(fixed, fields))]
    shown = _columns_that_fit(rows, width, needed)
    if shown >= len(head) + needed:
      break
  if shown < len(rows[0]) and (all_columns or shown <= len(head)):
    _print_blocks(group, fixed, width)
    return
  right = set(range(1, len(head))) | {i for i, column in enumerate(zip(*rows[1:])) if all(map(_is_number, column))}
  print('\n'.join(align_columns([row[:shown] for row in rows], right=right)))
  if missing := names[shown - len(head) :]:
    more = first_names(missing, _MOST_FIELDS)
    print(_wrap(f'also differ: {more}; --columns=NAME,NAME chooses, --csv has all', width))


def _columns_that_fit(rows: Sequence[Sequence[str]], width: int | None, needed: int) -> int:
  """Returns how many columns to show: those that fit into `width`, or all up to a limit if `width` is None."""
  if width is None:
    return min(len(rows[0]), len(_FIXED) + max(_MOST_FIELDS, needed))
  used = -2
  for i, column in enumerate(zip(*rows)):
    used += 2 + max(map(len, column))
    if used > width:
      return i
  return len(rows[0])


def _print_blocks(group: RunGroup, fixed: Sequence[dict[str, str]], width: int | None) -> None:
  for i, row in enumerate(fixed):
    print(_wrap(row['run'], width))
    best = '' if row['best'] == '-' else f', best {row["best"]}'
    print(_wrap(f'step {row["step"]}, {row["age"]}, loss {row["loss"]}{best}', width, '  '))
    shown = [f'{name}={_short(value)}' for name, value in zip(group.columns, values_over_time(group, i)) if value]
    more = [f'+{len(shown) - _MOST_FIELDS} more'] if len(shown) > _MOST_FIELDS else []
    if shown:
      print(_wrap(_one_line(', '.join([*shown[:_MOST_FIELDS], *more])), width, '  '))


def write_csv(groups: Sequence[RunGroup], folder: str, file: TextIO) -> None:
  """Writes a row for each run: its group, directory, step, times and best metric, and all columns of all groups."""
  columns = list(dict.fromkeys(name for group in groups for name in group.columns))
  writer = csv.writer(file, lineterminator='\n')
  fixed = ('group', 'run', 'step', 'num_steps', 'running', 'written', 'train/loss', 'metric', 'best', 'best_step')
  planned = tuple(_planned_cells(None)) if any(run.certificate for group in groups for run in group.runs) else ()
  writer.writerow([*fixed, *planned, *columns])
  for group in groups:
    for run, own in zip(group.runs, group.values):
      writer.writerow(
        [_one_line(str(value)) for value in _csv_cells(run, group, folder)]
        + [str(value) for value in _planned_cells(run.certificate).values() if planned]
        + [_one_line(own.get(name, '')) for name in columns]
      )


def _csv_cells(run: RunState, group: RunGroup, folder: str) -> list[object]:
  best, best_step = run.best(group.metric, group.mode) or ('', '')
  written = datetime.fromtimestamp(run.written, UTC).isoformat(timespec='seconds') if run.written else ''
  loss = '' if run.last_loss is None else run.last_loss
  where = name_below(folder, run)
  steps = run.step, '' if run.num_steps is None else run.num_steps
  return [group.title, where, *steps, run.is_running, written, loss, group.metric, best, best_step]


def _planned_cells(certificate: Certificate | None) -> dict[str, object]:
  """Returns the planned and measured figures of a run by the name of their column; '' for unknown ones."""
  predicted, measured = (None, None) if certificate is None else certificate
  cells = {
    'planned_step_seconds': predicted and predicted.step_seconds,
    'measured_step_seconds': measured and measured.seconds,
    'planned_peak_bytes': predicted and predicted.peak_bytes,
    'measured_peak_bytes': measured and measured.device_peak,
    'planned_waiting_seconds': predicted and predicted.waiting_seconds,
    'planned_sent_bytes': predicted and predicted.fast_bytes + predicted.network_bytes,
  }
  return {name: '' if value is None else value for name, value in cells.items()}


def _fixed_cells(run: RunState, group: RunGroup, folder: str) -> list[str]:
  """Returns the path, step, age, last loss and best metric of a run, as texts."""
  best = run.best(group.metric, group.mode)
  step = f'{run.step}{"" if run.num_steps is None else f"/{run.num_steps}"}'
  at = '-' if best is None else f'{format_number(best[0])} @{best[1]}'
  return [name_below(folder, run), step, age(run), format_number(run.last_loss), at]


def _format_quotient(value: float | None) -> str:
  return '-' if value is None else f'{value:.2f}'


def format_markdown(groups: Sequence[RunGroup], folder: str) -> str:
  """Returns a Markdown table for each group of runs, as for a comment in CI.

  The table has the fields that differ, and the planned and measured figures that at least one run has.
  """
  texts = []
  for group in groups:
    head = ['run', 'step', 'age', 'loss', f'best {group.metric}', *group.columns, *_FIGURES]
    rows = []
    for i, run in enumerate(group.runs):
      found = run.certificate
      own = [drop_module(value) or '-' for value in values_over_time(group, i)]
      planned, seen = (None, None) if found is None else found
      time = memory = communication = '-'
      if seen is not None:
        time, memory = format_seconds(seen.seconds), format_bytes(seen.device_peak) if seen.device_peak else '-'
      if planned is not None and found is not None:
        if found.times is not None and planned.step_seconds:
          time += f', {found.times:.2f} x the planned {format_seconds(planned.step_seconds)}'
        if found.memory is not None:
          memory += f', {found.memory:.2f} x the planned {format_bytes(planned.peak_bytes)}'
        communication = format_communication(planned) or '-'
      rows.append([*_fixed_cells(run, group, folder), *own, time, memory, communication])
    kept = [i for i, name in enumerate(head) if name not in _FIGURES or any(row[i] != '-' for row in rows)]
    head, *rows = ([cells[i] for i in kept] for cells in (head, *rows))
    lines = [head, ['---'] * len(head), *rows]
    table = '\n'.join(f'| {" | ".join(map(_escape, cells))} |' for cells in lines)
    texts.append(f'### {_escape(group.title)}\n\n{table}')
  return '\n\n'.join(texts)


def _one_line(text: str) -> str:
  return printable(text, one_line=True)


def _escape(text: str) -> str:
  return _one_line(text).replace('\\', '\\\\').replace('|', '\\|')


def name_below(folder: str, run: RunState) -> str:
  """Returns the path of a run relative to a folder. If the run is the folder itself, returns the folder's name."""
  name = os.path.relpath(run.directory, folder)
  return os.path.basename(os.path.abspath(run.directory)) if name == '.' else name


def drop_module(value: str) -> str:
  """Returns the text of a value, without the module path of a class or function."""
  return _CLASS.sub('', value)


def _short(value: str) -> str:
  value = drop_module(value)
  return value if len(value) <= _MOST_CHARACTERS else f'{value[: _MOST_CHARACTERS - 3]}...'


def _wrap(text: str, width: int | None, indent: str = '') -> str:
  if width is None:
    return f'{indent}{text}'
  return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=f'{indent}  ')
