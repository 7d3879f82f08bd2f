"""What a run does between its steps, when it is due: emergency copies, checkpoints, evaluations, decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from praxis_lite.errors import UserError
from praxis_lite.hosts.processes import is_primary_process
from praxis_lite.hosts.watchdog import doing
from praxis_lite.records.run_config import is_due
from praxis_lite.runtime.hooks import Run
from praxis_lite.runtime.loop.directory import HeldDirectory, LostDirectoryError, gather_paths, rescue_directory
from praxis_lite.runtime.loop.feed import Feed
from praxis_lite.runtime.loop.job import Job
from praxis_lite.runtime.loop.observers import Observers
from praxis_lite.runtime.loop.progress import Progress
from praxis_lite.runtime.loop.saving import Json, Saving
from praxis_lite.runtime.nonfinite import NonFiniteError
from praxis_lite.runtime.programs import Program, Programs
from praxis_lite.runtime.trouble import GoBack, InputState, LossSpikeError
from praxis_lite.training.state import TrainState


class Duties:
  """Saves, evaluates and decodes a run.

  Args:
    job: says what is evaluated and decoded, and when each is due.
    feed: knows the position in the input, which is saved with the state.
    saving, programs: do it.
    observers: are told.
    directory: of the run; nothing is done where it is not any more.
    progress: returns what is saved beside the state.
  """

  def __init__(
    self,
    job: Job,
    feed: Feed,
    saving: Saving,
    programs: Programs,
    observers: Observers,
    directory: HeldDirectory,
    progress: Callable[[], Progress],
  ):
    self._job = job
    self._feed = feed
    self._saving = saving
    self._programs = programs
    self._observers = observers
    self._directory = directory
    self._progress = progress

  def do_those_due(self, run: Run) -> None:
    """Does what is due after the steps taken until now; raises LostDirectoryError where it cannot be done."""
    if jax.process_count() == 1:  # Several processes look together, when there is something to do.
      self._directory.check()
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
    """Waits until the last step is saved; raises CheckpointError or LostDirectoryError if it cannot be."""
    self._directory.check()
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
    self._directory.check()
    self._observers.log.drain()
    with self._observers.doing('evaluating'):
      for result in self._programs.run(programs, run.step, run.state):
        self._observers.evaluated(run, result)

  def _prepare_save(self, run: Run, *, is_copy: bool) -> None:
    self._directory.check()
    doing(f'saving step {run.step}')
    self._observers.will_save(run, is_copy=is_copy)

  def rescue(self, run: Run, lost: LostDirectoryError, make: Callable[[Path], object]) -> str:
    """Saves a run whose directory was lost in another one; returns a message that says where, and how it goes on.

    Args:
      run: its state is saved.
      lost: what has happened.
      make: makes a new directory, where there is none any more.
    """
    self._saving.abandon(self._job.directory)
    lost = self._directory.why_lost() or lost  # What is in its place may have been made by the save that was ended.
    unwritten = ''
    try:
      if lost.moved_to is not None:
        self._observers.log.move(lost.moved_to)
      self._observers.log.drain()  # The lines of the last steps.
    except OSError as error:  # In the process that writes metrics alone: the others save the state with it.
      unwritten = f'; the metrics of its last steps could not be written: {error}'
    except (GoBack, LossSpikeError, NonFiniteError) as error:
      return f'{lost}; step {run.step} is not saved: {error.trouble.what if isinstance(error, GoBack) else error}'
    name = error_of_first = ''
    if is_primary_process():
      try:
        name = str(rescue_directory(lost, self._job.directory, make))
      except (UserError, OSError) as error:
        error_of_first = str(error)
    told, error_of_first = gather_paths(name)[0], gather_paths(error_of_first)[0]
    try:
      if not told:
        raise UserError(error_of_first)
      directory = Path(told)
      self._saving.save_elsewhere(directory, *self._position(run))
    except (UserError, OSError) as error:
      return f'{lost}; step {run.step} could not be saved: {error}'
    without = '' if lost.moved_to else ', with its config and without metrics'
    return (
      f'{lost}; step {run.step} of {run.total_steps} is saved in {directory}{without}: to go on, train with '
      f'--job_log_dir={directory}{unwritten}'
    )

  def _position(self, run: Run) -> tuple[int, TrainState, InputState, Json]:
    return run.step, run.state, self._feed.position, self._progress().record()
