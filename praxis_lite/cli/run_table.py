"""The table of runs that `runs` and `sweep` print, for a terminal of any width or as plain lines for a pipe."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from praxis_lite.common.foreign_text import printable

if TYPE_CHECKING:
  from praxis_lite.runs.records.runs import RunState

_MOST_FIELDS, _MOST_CHARACTERS = 6, 24  # Largest number of fields in a row, and of characters in a value.
_CLASS = re.compile(r'^([^\W\d]\w*\.)+(?=\w+$)')  # The module path in front of the name of a class or function.
_HEADER = ('run', 'step', 'age', 'loss', 'best', 'differs in')


def print_runs(runs: Sequence[RunState], folder: str, metric: str, mode: str) -> None:
  """Prints a row for each run: step, age, last loss, best value of a metric, and the fields in which configs differ.

  If the terminal is too narrow for the table, it prints a few short lines for each run instead.
  """
  from praxis_lite.instruments.explain.explanation import align_columns
  from praxis_lite.runs.records.runs import age, differing_fields, format_number

  rows = []
  for run, fields in zip(runs, differing_fields(runs)):
    total = '' if run.num_steps is None else f'/{run.num_steps}'
    best = run.best(metric, mode)
    shown = [f'{name}={_short(value)}' for name, value in list(fields.items())[:_MOST_FIELDS]]
    shown += [f'+{len(fields) - _MOST_FIELDS} more'] if len(fields) > _MOST_FIELDS else []
    rows.append(
      (
        printable(os.path.relpath(run.directory, folder), one_line=True),
        f'{run.step}{total}',
        age(run),
        format_number(run.last_loss),
        '-' if best is None else f'{format_number(best[0])} @{best[1]}',
        printable(', '.join(shown), one_line=True) if run.fields else 'no record',
      )
    )
  lines, columns = align_columns([_HEADER, *rows], right={1, 2, 3, 4}), shutil.get_terminal_size().columns
  if not sys.stdout.isatty() or max(map(len, lines)) <= columns:
    print('\n'.join(lines))
  else:
    for run_name, step, since, loss, best_value, differs in rows:
      print(_wrap(run_name, columns))
      print(_wrap(f'step {step}, {since}, loss {loss}, best {best_value}', columns, '  '))
      if differs:
        print(_wrap(differs, columns, '  '))
  print(_wrap(f'best: {metric}, {"lower" if mode == "min" else "higher"} is better, @ its step', columns))


def _short(value: str) -> str:
  """Returns the text of a value, without the module path of a class and cut if it is long."""
  value = _CLASS.sub('', value)
  return value if len(value) <= _MOST_CHARACTERS else f'{value[: _MOST_CHARACTERS - 3]}...'


def _wrap(text: str, columns: int, indent: str = '') -> str:
  if not sys.stdout.isatty():
    return text
  return textwrap.fill(text, columns, initial_indent=indent, subsequent_indent=f'{indent}  ')
