"""What a run prints: plain lines in a pipe, a live progress bar on a terminal.

    step 120/1000 loss 2.345 lr 3.0e-04 grad_norm 0.81 12.3 step/s 50.3k tok/s
    step 120 eval/valid loss 2.401 accuracy 0.4120 (57 batches, 3.1 s)

On a terminal the figures of training stand below the bar, and only the other lines scroll.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

import numpy as np

from praxis_lite.runtime.throughput import Rates

# The metrics of a training line and what they are called there; the others are in the summaries only.
_TRAIN_COLUMNS = {'loss': 'loss', 'learning_rate': 'lr', 'grad_norm': 'grad_norm'}


class Console:
  """Prints a run, one line an event.

  Args:
    total_steps: steps of the whole run.
    stream: where to; standard output by default.
    enabled: False prints nothing: with several processes one prints.
  """

  def __init__(self, total_steps: int, *, stream: TextIO | None = None, enabled: bool = True):
    self._total = total_steps
    self._stream = stream or sys.stdout
    self._enabled = enabled

  def train_step(self, step: int, metrics: Mapping[str, Any], rates: Rates | None) -> None:
    """Shows the figures of a training step."""
    self.line(train_line(step, self._total, metrics, rates))

  def line(self, text: str) -> None:
    """Prints a line of any kind."""
    if self._enabled:
      print(text, file=self._stream, flush=True)

  def close(self) -> None:
    """Leaves the screen as it should stay."""


class LiveConsole(Console):
  """As `Console`, on a terminal: a bar with the time left, and below it the latest figures, are redrawn in place."""

  def __init__(self, total_steps: int, *, stream: TextIO | None = None, first_step: int = 0):
    super().__init__(total_steps, stream=stream)
    from rich import console, live, progress

    self._progress = progress.Progress(
      progress.TextColumn('step {task.completed}/{task.total}'),
      progress.BarColumn(bar_width=None),
      progress.TaskProgressColumn(),
      progress.TimeRemainingColumn(compact=True),
      expand=True,
      speed_estimate_period=120,
    )
    self._bar = self._progress.add_task('train', total=total_steps, completed=first_step)
    self._screen = console.Console(file=self._stream, highlight=False)
    self._live = live.Live(self._rows([]), console=self._screen, refresh_per_second=4)
    self._live.start()
    self._screen.show_cursor(True)  # It would stay hidden after a kill.

  def train_step(self, step: int, metrics: Mapping[str, Any], rates: Rates | None) -> None:
    self._progress.update(self._bar, completed=step)
    self._live.update(self._rows(train_figures(metrics, rates)))

  def line(self, text: str) -> None:
    self._screen.print(text, markup=False, soft_wrap=True)

  def close(self) -> None:
    self._live.stop()

  def _rows(self, figures: list[str]) -> Any:
    from rich.console import Group
    from rich.text import Text

    return Group(self._progress, Text('  '.join(figures), no_wrap=True, overflow='ellipsis'))


def make_console(total_steps: int, *, first_step: int = 0, enabled: bool = True) -> Console:
  """Returns the console that suits standard output: live on a terminal, plain in a pipe, silent if not `enabled`."""
  if enabled and sys.stdout.isatty():
    return LiveConsole(total_steps, first_step=first_step)
  return Console(total_steps, enabled=enabled)


def train_line(step: int, total: int, metrics: Mapping[str, Any], rates: Rates | None) -> str:
  """Returns the line of a training step: it fits into 80 columns, with MFU a little more."""
  return ' '.join([f'step {step}/{total}', *train_figures(metrics, rates)])


def train_figures(metrics: Mapping[str, Any], rates: Rates | None) -> list[str]:
  """Returns what a training line shows beside the step."""
  figures = [f'{label} {_format(name, metrics[name])}' for name, label in _TRAIN_COLUMNS.items() if name in metrics]
  if rates is not None:
    figures.append(f'{short_number(rates.steps_per_second)} step/s')
    if rates.tokens_per_second is None:
      figures.append(f'{short_number(rates.examples_per_second)} ex/s')
    else:
      figures.append(f'{short_number(rates.tokens_per_second)} tok/s')
    if rates.mfu is not None:
      figures.append(f'MFU {rates.mfu:.0%}')
  return figures


def metrics_line(step: int, split: str, metrics: Mapping[str, Any], note: str = '') -> str:
  """Returns the line of an evaluation: the loss first, then the other scalars by name."""
  names = sorted((n for n in metrics if np.ndim(metrics[n]) == 0), key=lambda n: (n != 'loss', n))
  shown = [f'{name} {_digits(float(metrics[name]), 4)}' for name in names]
  return ' '.join([f'step {step} {split}', *shown, *([f'({note})'] if note else [])])


def short_number(value: float) -> str:
  """Three digits: 0.123, 12.3, 50.0k, 1.23M."""
  for size, suffix in ((1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
    if value >= 0.9995 * size:
      return f'{_digits(value / size, 3)}{suffix}'
  return _digits(value, 3)


def _digits(value: float, count: int) -> str:
  """So many digits, zeros at the end among them: a figure is as long as the one in the line above it."""
  return f'{value:#.{count}g}'.removesuffix('.')


def _format(name: str, value: Any) -> str:
  number = float(np.mean(value))
  if name == 'learning_rate':
    return f'{number:.1e}'
  if name == 'loss' and abs(number) < 1000:
    return f'{number:.3f}'
  return _digits(number, 2 if abs(number) < 9.95 else 3)
