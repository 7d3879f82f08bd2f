"""The observers for preemption, for processes that watch each other, and for copies of a run in other places.

`runs/loop/observers.py` attaches them; nothing else in the loop knows what is in this folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from praxis_lite.common.errors import UserError
from praxis_lite.runs.cluster.copy_file import EmergencyCopy
from praxis_lite.runs.cluster.emergency import EmergencyCopies
from praxis_lite.runs.cluster.mirror import Mirror
from praxis_lite.runs.cluster.preemption import preemptible
from praxis_lite.runs.cluster.watchdog import Watchdog, the_watchdog
from praxis_lite.runs.observer import Observer, Run, StateToCopy
from praxis_lite.runs.stop_signals import StopSignals
from praxis_lite.training.state import TrainState
from praxis_lite.training.task import EmergencyCopiesParams, TrainParams


def cluster_observers(
  settings: TrainParams, directory: Path, *, grace_s: float | None, notice: str | None
) -> list[Observer]:
  """Returns the observers that a run in `directory` needs; see `preemptible` for `grace_s` and `notice`."""
  observers: list[Observer] = [Preemptible(directory, grace_s, notice)]
  if (watchdog := the_watchdog()) is not None:
    observers.append(WatchedByOthers(watchdog, directory))
  if settings.emergency_copies.every_n_steps is not None:
    observers.append(CopiesOnHosts(directory, settings.emergency_copies))
  if settings.mirror is not None:
    observers.append(Mirror(settings.mirror, directory, settings.max_to_keep, settings.keep_interval_steps))
  return observers


class Preemptible(Observer):
  """Looks for notices of preemption while the run catches signals."""

  def __init__(self, directory: Path, grace_s: float | None, notice: str | None):
    self._directory, self._grace_s, self._notice = directory, grace_s, notice

  def while_training(self, stop: StopSignals) -> contextlib.AbstractContextManager[None]:
    return preemptible(stop, self._directory, grace_s=self._grace_s, notice=self._notice)


class WatchedByOthers(Observer):
  """Lets the run's processes watch each other, and tells the others the error that ends this one."""

  def __init__(self, watchdog: Watchdog, directory: Path):
    self._watchdog, self._directory = watchdog, directory

  def while_running(self, why_lost: Callable[[], UserError | None]) -> contextlib.AbstractContextManager[None]:
    return self._watchdog.running(self._directory, why_lost)


class CopiesOnHosts(Observer):
  """Keeps emergency copies in folders of each host, between checkpoints."""

  def __init__(self, directory: Path, settings: EmergencyCopiesParams):
    self._directory, self._settings = directory, settings
    self._copies: EmergencyCopies | None = None

  def find_copy(self, checkpoint: int, shapes: TrainState, true_shapes: TrainState) -> tuple[EmergencyCopy | None, str]:
    peers = {'peers': self._settings.peers, 'failure_domain': self._settings.failure_domain}
    self._copies = EmergencyCopies(self._directory, self._settings.directories, shapes, true_shapes, **peers)
    return self._copies.newest(checkpoint)

  def on_start(self, run: Run) -> None:
    if self._copies is not None and self._copies.costs:
      run.line(self._copies.costs)

  def keep_copy(self, run: Run, snapshot: StateToCopy) -> None:
    if self._copies is not None:
      if said := self._copies.write(snapshot):
        run.line(said)
      run.links = self._copies.rates()

  def remove_copies(self, run: Run) -> None:
    if self._copies is not None:
      self._copies.remove()

  def close(self) -> None:
    if self._copies is not None:
      self._copies.close()
