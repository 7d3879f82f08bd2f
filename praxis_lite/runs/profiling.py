"""A trace of some steps, which TensorBoard's profile plugin and Perfetto open.

job_log_dir/profile/plugins/profile/<time>/*.xplane.pb

Either of steps that are named when the run starts, or of the next ones when the process receives SIGUSR1:

kill -USR1 <pid>
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
from praxis_lite.runs.hooks import Hook, Run
from praxis_lite.runs.records.metrics import DeviceMetrics


class ProfiledSteps(NamedTuple):
  """The first and the last step of a trace, counted from 1, as steps are in the log."""

  first: int
  last: int

  @classmethod
  def parse(cls, steps: str | tuple[int, int]) -> ProfiledSteps:
    """Returns the steps of a text like '10:15', or of a pair; raises ConfigError if they are not such."""
    ends = steps.split(':') if isinstance(steps, str) else [str(step) for step in steps]
    if len(ends) != 2 or not all(end.isdecimal() for end in ends) or not 1 <= int(ends[0]) <= int(ends[1]):
      raise ConfigError(f'profile_steps = {steps!r}: expected the first and the last step, as in 10:15')
    return cls(*map(int, ends))


class ProfileSteps(Hook):
  """Writes a trace of some steps below the run's directory. A context manager: a run may end within these steps.

  Attributes:
    is_done: whether it was written.
  """

  def __init__(self, steps: ProfiledSteps):
    self._steps = steps
    self._to: Path | None = None
    self._run: Run | None = None
    self.is_done = False

  def on_start(self, run: Run) -> None:
    self._run = run
    self._start_if_due(run)

  def on_step(self, run: Run, metrics: DeviceMetrics) -> None:
    if self._to is not None and run.step >= self._steps.last:
      jax.block_until_ready((run.state, metrics))
      self._stop(run)
    self._start_if_due(run)

  def _start_if_due(self, run: Run) -> None:
    """Starts before the first of the steps, or later in a run that resumes among them."""
    if self._to is None and not self.is_done and self._steps.first <= run.step + 1 <= self._steps.last:
      jax.block_until_ready(run.state)
      self._to, self._folder = run.directory / 'profile', KnownFolder(run.directory)
      jax.profiler.start_trace(self._to)
      self._first = run.step + 1

  def _stop(self, run: Run) -> None:
    assert self._to is not None
    if self._folder.is_elsewhere():
      _stop_without_trace(self._to)
    else:
      jax.profiler.stop_trace()
      run.line(
        f'profile of steps {self._first} to {run.step} in {self._to}; tensorboard --logdir={run.directory} shows it'
      )
    self._to, self.is_done = None, True

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc_info: object) -> None:
    if self._run is None:
      return
    if self._to is not None:
      self._stop(self._run)
    elif not self.is_done:
      self._run.line(f'no step from {self._steps.first} to {self._steps.last} was taken, so there is no profile')


def _stop_without_trace(folder: Path) -> None:
  """Ends a trace of a run whose directory is gone, and removes what JAX makes for it, which cannot be told not to."""

  def parts() -> set[Path]:
    return {folder, *folder.parents, *folder.rglob('*')}

  before = {part for part in parts() if part.exists()}
  jax.profiler.stop_trace()
  with contextlib.suppress(OSError):
    for made in sorted(parts() - before, key=lambda part: -len(part.parts)):
      made.rmdir() if made.is_dir() else made.unlink()


# Steps of a trace that a signal asks for.
STEPS_OF_A_SIGNAL = 5


class ProfileOnSignal(Hook):
  """Writes a trace of the next steps each time the process receives SIGUSR1; a context manager.

  Outside the main thread, and on Windows, it does nothing. The end of the run ends a trace.
  """

  def __init__(self) -> None:
    self._is_asked = False
    self._profile: ProfileSteps | None = None
    self._previous: Callable[[int, FrameType | None], object] | int | None = None
    self._is_caught = sys.platform != 'win32' and threading.current_thread() is threading.main_thread()

  def on_step(self, run: Run, metrics: DeviceMetrics) -> None:
    if self._profile is not None:
      self._profile.on_step(run, metrics)
      if self._profile.is_done:
        self._profile = None
    elif self._is_asked and run.step < run.total_steps:
      last = min(run.step + STEPS_OF_A_SIGNAL, run.total_steps)
      self._profile = ProfileSteps(ProfiledSteps(run.step + 1, last))
      self._profile.on_start(run)
    self._is_asked = self._is_asked and self._profile is None

  def __enter__(self) -> Self:
    if self._is_caught:
      self._previous = signal.signal(signal.SIGUSR1, self._ask)
    return self

  def __exit__(self, *exc_info: object) -> None:
    if self._is_caught:
      signal.signal(signal.SIGUSR1, self._previous)
    if self._profile is not None:
      self._profile.__exit__()

  def _ask(self, number: int, frame: FrameType | None) -> None:
    self._is_asked = True


def make_profiler(steps: tuple[int, int] | None) -> ProfileSteps | ProfileOnSignal:
  """Returns the one profiler of a run: of the steps from the first to the last, or, with None, of those after a signal.

  Raises:
    ConfigError: they are not the numbers of steps.
  """
  return ProfileOnSignal() if steps is None else ProfileSteps(ProfiledSteps.parse(steps))
