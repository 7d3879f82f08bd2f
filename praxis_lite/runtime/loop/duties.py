"""What a run does between its steps, when it is due: emergency copies, checkpoints, evaluations, decoding."""

from __future__ import annotations

from collections.abc import Sequence

from praxis_lite.hosts.watchdog import doing
from praxis_lite.records.run_config import is_due
from praxis_lite.runtime.hooks import Run
from praxis_lite.runtime.loop.feed import Feed
from praxis_lite.runtime.loop.job import Job
from praxis_lite.runtime.loop.observers import Observers
from praxis_lite.runtime.loop.saving import Saving
from praxis_lite.runtime.programs import Program, Programs
from praxis_lite.runtime.trouble import InputState
from praxis_lite.training.state import TrainState


class Duties:
  """Saves, evaluates and decodes a run.

  Args:
    job: says what is evaluated and decoded, and when each is due.
    feed: knows the position in the input, which is saved with the state.
    saving, programs: do it.
    observers: are told.
  """

  def __init__(self, job: Job, feed: Feed, saving: Saving, programs: Programs, observers: Observers):
    self._job = job
    self._feed = feed
    self._saving = saving
    self._programs = programs
    self._observers = observers

  def do_those_due(self, run: Run) -> None:
    """Does what is due after the steps taken until now."""
    settings = self._job.settings
    # Saving comes first: the disk writes while the devices evaluate, and a run killed in an evaluation loses no step.
    for interval, do in (
      (settings.emergency_copies.every_n_steps, self.copy),
      (settings.save_interval_steps, self.save),
      (settings.eval_interval_steps, self.evaluate),
      (settings.decode_interval_steps, self.decode),
    ):
      if is_due(run.step, interval):
        do(run)
        self._observers.log.restart_clock(run.step)
    self.announce_checkpoints(run)

  def copy(self, run: Run) -> None:
    """Begins an emergency copy."""
    self._prepare_save(run, is_copy=True)
    with self._observers.doing('saving'):
      self._saving.copy(*self._position(run), self._observers.log.unwritten)

  def save(self, run: Run) -> bool:
    """Begins to save a checkpoint, unless there is one of this step; returns False if that failed."""
    self._prepare_save(run, is_copy=False)
    with self._observers.doing('saving'):
      return self._saving.save(*self._position(run))

  def finish_saving(self, run: Run) -> None:
    """Waits until the last step is saved; raises CheckpointError if it cannot be."""
    with self._observers.doing('saving'):
      self._saving.finish(*self._position(run))
    self._observers.watch.saved(run.step)

  def evaluate(self, run: Run) -> None:
    """Evaluates on all inputs for that, unless this was done at this step."""
    self._run(self._job.evaluation, run)

  def decode(self, run: Run) -> None:
    """Decodes all inputs for that, unless this was done at this step."""
    self._run(self._job.decoding, run)

  def announce_checkpoints(self, run: Run) -> None:
    """Tells of the checkpoints that have become complete since the last time."""
    for step, folder in self._saving.newly_complete():
      self._observers.saved(run, step, folder)

  def _run(self, programs: Sequence[Program], run: Run) -> None:
    self._observers.log.drain()
    with self._observers.doing('evaluating'):
      for result in self._programs.run(programs, run.step, run.state):
        self._observers.evaluated(run, result)

  def _prepare_save(self, run: Run, *, is_copy: bool) -> None:
    doing(f'saving step {run.step}')
    self._observers.will_save(run, is_copy=is_copy)

  def _position(self, run: Run) -> tuple[int, TrainState, InputState]:
    return run.step, run.state, self._feed.position
