"""Profiles steps: writes traces for TensorBoard's profile plugin and Perfetto.

    job_log_dir/profile/plugins/profile/<time>/*.xplane.pb

A trace covers the steps chosen when the run starts, or the next steps after `kill -USR1 <pid>`.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Self

import jax

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.files import KnownFolder
from praxis_lite.runs.hooks import Hook
from praxis_lite.runs.observer import Run
from praxis_lite.runs.records.metrics import DeviceMetrics

_PROFILE = 'profile'


class ProfiledSteps(NamedTuple):
  """The first and the last step of a trace, counted from 1, like steps in the log."""

  first: int
  last: int

  @classmethod
  def parse(cls, steps: str | tuple[int, int]) -> ProfiledSteps:
    """Returns the steps of a text like '10:15', or of a pair; raises ConfigError if `steps` is neither."""
    ends = steps.split(':') if isinstance(steps, str) else [str(step) for step in steps]
    if len(ends) != 2 or not all(end.isdecimal() for end in ends) or not 1 <= int(ends[0]) <= int(ends[1]):
      raise ConfigError(f'profile_steps = {steps!r}: expected the first and the last step, as in 10:15')
    return cls(*map(int, ends))


# The number of steps in a trace that a signal starts.
STEPS_OF_A_SIGNAL = 5


class Profiler(Hook):
  """Writes traces of steps below the run's directory; a context manager, because a run may end within a trace.

  Args:
    steps: the first and the last step of a trace. With None, SIGUSR1 starts a trace of the next steps; this does not
      work on Windows or outside the main thread, where signals cannot be caught.

  Raises:
    ConfigError: `steps` is not a valid pair of steps.
  """

  def __init__(self, steps: tuple[int, int] | None):
    self._steps = None if steps is None else ProfiledSteps.parse(steps)  # The steps of the current or the next trace.
    self._first: int | None = None  # The first step of the current trace.
    self._is_asked = False
    self._run: Run | None = None
    self._previous: Callable[[int, FrameType | None], object] | int | None = None
    in_main_thread = threading.current_thread() is threading.main_thread()
    self._catches = steps is None and sys.platform != 'win32' and in_main_thread

  def on_start(self, run: Run) -> None:
    self._run, self._folder = run, KnownFolder(run.directory)
    self._start_if_due(run)

  def on_step(self, run: Run, metrics: DeviceMetrics) -> None:
    if self._first is not None and self._steps is not None and run.step >= self._steps.last:
      jax.block_until_ready((run.state, metrics))
      self._stop(run)
    if self._is_asked and self._steps is None and run.step < run.total_steps:
      self._steps = ProfiledSteps(run.step + 1, min(run.step + STEPS_OF_A_SIGNAL, run.total_steps))
      self._is_asked = False
    self._start_if_due(run)

  def _start_if_due(self, run: Run) -> None:
    """Starts the trace before its first step, or later if the run resumes after that step."""
    if self._first is None and self._steps is not None and self._steps.first <= run.step + 1 <= self._steps.last:
      jax.block_until_ready(run.state)
      jax.profiler.start_trace(run.directory / _PROFILE)
      self._first = run.step + 1

  def _stop(self, run: Run) -> None:
    folder = run.directory / _PROFILE
    if self._folder.is_elsewhere():
      _stop_without_trace(folder)
    else:
      jax.profiler.stop_trace()
      run.line(
        f'profile of steps {self._first} to {run.step} in {folder}; tensorboard --logdir={run.directory} shows it'
      )
    self._first = self._steps = None

  def __enter__(self) -> Self:
    if self._catches:
      self._previous = signal.signal(signal.SIGUSR1, self._ask)
    return self

  def __exit__(self, *exc_info: object) -> None:
    if self._catches:
      signal.signal(signal.SIGUSR1, self._previous)
    if self._run is not None and self._first is not None:
      self._stop(self._run)
    elif self._run is not None and self._steps is not None:
      self._run.line(f'no step from {self._steps.first} to {self._steps.last} was taken, so there is no profile')

  def _ask(self, number: int, frame: FrameType | None) -> None:
    self._is_asked = self._steps is None  # A signal before the end of a trace has no effect.


def _stop_without_trace(folder: Path) -> None:
  """Ends the trace of a run whose directory is gone, and removes the files that JAX writes anyway."""

  def parts() -> set[Path]:
    return {folder, *folder.parents, *folder.rglob('*')}

  before = {part for part in parts() if part.exists()}
  jax.profiler.stop_trace()
  with contextlib.suppress(OSError):
    for made in sorted(parts() - before, key=lambda part: -len(part.parts)):
      made.rmdir() if made.is_dir() else made.unlink()
