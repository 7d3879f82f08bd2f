"""What a run prints while it trains: lines in a pipe, a live progress bar on a terminal.

    step 120/1000 loss 2.345 lr 3.0e-04 grad_norm 0.81 12.3 step/s 50.3k tok/s
    step 120 eval/valid loss 2.401 accuracy 0.4120 (57 batches, 3.1 s)

On a terminal the figures of training are shown below the bar, and only the other lines scroll.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TextIO

import jax
import numpy as np
from jax.typing import ArrayLike

from praxis_lite.common.figures import short_number, significant_digits
from praxis_lite.common.foreign_text import printable
from praxis_lite.runs.throughput import Rates

# The metrics that a training line shows, and their labels; other metrics are only in the summaries. The learning rates
# of the rules of a `MultiLearner`, such as 'learning_rate/head', are shown as 'lr/head'.
_TRAIN_COLUMNS = {'loss': 'loss', 'reward': 'reward', 'learning_rate': 'lr', 'grad_norm': 'grad_norm'}
# The metric of the share of time that devices wait for input, and the least share that a training line shows.
_INPUT_WAIT, _LEAST_WAIT = 'speed/input_wait', 0.05


class Console:
  """Prints a run of `total_steps` steps, one line per event.

  `stream` is standard output by default. With `enabled` False nothing is printed; of several processes, only one
  prints.
  """

  def __init__(self, total_steps: int, *, stream: TextIO | None = None, enabled: bool = True):
    self._total = total_steps
    self._stream = stream or sys.stdout
    self._enabled = enabled

  def train_step(self, step: int, metrics: Mapping[str, ArrayLike], rates: Rates | None) -> None:
    """Shows the figures of a training step."""
    self.line(train_line(step, self._total, metrics, rates))

  def progress(self, step: int) -> None:
    """Records that a step was taken; prints no line."""

  def line(self, text: str) -> None:
    if self._enabled:
      print(printable(text), file=self._stream, flush=True)

  def close(self) -> None:
    """Ends live output; the last state stays on the screen."""


class LiveConsole(Console):
  """A `Console` on a terminal: redraws a bar with the time left, and the latest figures below it, in place."""

  def __init__(self, total_steps: int, *, stream: TextIO | None = None, first_step: int = 0):
    super().__init__(total_steps, stream=stream)
    from rich import console, live, progress, text

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
    self._figures = text.Text(no_wrap=True, overflow='ellipsis')
    shown = console.Group(self._progress, self._figures)
    self._live = live.Live(shown, console=self._screen, refresh_per_second=4)
    self._live.start()
    self._screen.show_cursor(True)  # Otherwise the cursor stays hidden if the run is killed.

  def train_step(self, step: int, metrics: Mapping[str, ArrayLike], rates: Rates | None) -> None:
    self.progress(step)
    self._figures.plain = '  '.join(train_figures(metrics, rates))

  def progress(self, step: int) -> None:
    self._progress.update(self._bar, completed=step)

  def line(self, text: str) -> None:
    self._screen.print(printable(text), markup=False, soft_wrap=True)

  def close(self) -> None:
    self._live.stop()


def make_console(total_steps: int, *, first_step: int = 0, enabled: bool = True) -> Console:
  """Returns the console for standard output: live on a terminal, plain in a pipe, silent if not `enabled`.

  With several processes it is plain: `mpirun` and others give each process a terminal, and interleave their lines.
  """
  if enabled and sys.stdout.isatty() and jax.process_count() == 1:
    return LiveConsole(total_steps, first_step=first_step)
  return Console(total_steps, enabled=enabled)


def train_line(step: int, total: int, metrics: Mapping[str, ArrayLike], rates: Rates | None) -> str:
  """Returns the line of a training step, of at most 80 columns, or a few more with MFU."""
  return ' '.join([f'step {step}/{total}', *train_figures(metrics, rates)])


def train_figures(metrics: Mapping[str, ArrayLike], rates: Rates | None) -> list[str]:
  """Returns the figures that follow the step number in a training line."""
  figures = [
    f'{label}{name.removeprefix(column)} {_format(column, metrics[name])}'
    for column, label in _TRAIN_COLUMNS.items()
    for name in metrics
    if name == column or (column == 'learning_rate' and name.startswith(f'{column}/'))
  ]
  if rates is not None:
    examples, tokens = rates.examples_per_second, rates.tokens_per_second
    figures.append(f'{short_number(rates.steps_per_second)} step/s')
    figures.append(f'{short_number(examples)} ex/s' if tokens is None else f'{short_number(tokens)} tok/s')
    if rates.mfu is not None:
      figures.append(f'MFU {rates.mfu:.0%}')
  if (wait := float(np.mean(metrics.get(_INPUT_WAIT, 0.0)))) >= _LEAST_WAIT:
    figures.append(f'waiting for input {wait:.0%}')
  return figures


def metrics_line(step: int, split: str, metrics: Mapping[str, ArrayLike], note: str = '') -> str:
  """Returns the line of an evaluation: the loss first, then the other scalars by name."""
  names = sorted((n for n in metrics if np.ndim(metrics[n]) == 0), key=lambda n: (n != 'loss', n))
  shown = [f'{name} {significant_digits(float(np.asarray(metrics[name])), 4)}' for name in names]
  return ' '.join([f'step {step} {split}', *shown, *([f'({note})'] if note else [])])


def _format(name: str, value: ArrayLike) -> str:
  number = float(np.mean(value))
  if name == 'learning_rate':
    return f'{number:.1e}'
  if name == 'loss' and abs(number) < 1000:
    return f'{number:.3f}' if abs(number) >= 0.1 or number == 0 else significant_digits(number, 3)
  return significant_digits(number, 2 if abs(number) < 9.95 else 3)
