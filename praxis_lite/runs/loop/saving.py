"""Saves a run while it trains: if a save fails, training goes on, and earlier checkpoints are kept."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.checkpoints.failures import PartedError
from praxis_lite.common.errors import CheckpointError, UserError
from praxis_lite.common.files import KnownFolder, remove_all
from praxis_lite.common.processes import gather_texts, is_primary_process, note_progress
from praxis_lite.inputs.manifest import DataManifest
from praxis_lite.runs.improvement import Watched
from praxis_lite.runs.loop.directory import HeldDirectory, LostDirectoryError, gather_paths, rescue_directory
from praxis_lite.runs.loop.feed import Feed
from praxis_lite.runs.loop.progress import Progress, evaluations_in
from praxis_lite.runs.nonfinite import NonFiniteError
from praxis_lite.runs.observer import InputState, Observer, Observers, PauseReason, Run, StateToCopy
from praxis_lite.runs.records.history import note_event
from praxis_lite.runs.records.metrics import SummaryWriter
from praxis_lite.runs.records.record import has_record
from praxis_lite.runs.trouble import GoBack, LossSpikeError
from praxis_lite.training.state import TrainState

JsonDict = dict[str, Any] | None
# A failed save counts as finished if it has written nothing for this many seconds.
_LATE_S = 1.0


class Saving(Observer):
  """Saves a run, with the `true_shapes` of its state, and reports each save that fails; the next save tries again.

  With several processes, a save that fails in one of them fails in all.
  """

  def __init__(self, checkpointer: Checkpointer, true_shapes: TrainState, line: Callable[[str], object]):
    self._checkpointer = checkpointer
    self._true_shapes = true_shapes
    self._line = line
    self._step, self._is_good = 0, True  # The step of the last save, and False once this save has failed.
    self._stalled = 0.0
    # TensorStore may create a directory in the place of one that was moved.
    self._folder = KnownFolder(Path(checkpointer.directory).parent)

  def save(self, step: int, state: TrainState, input_state: JsonDict, progress: JsonDict = None) -> bool:
    """Waits for the previous save and begins this one; returns whether this step has, or will have, a checkpoint."""
    start = time.perf_counter()
    self._tolerate(self._checkpointer.wait_until_complete)  # An error here is about an earlier step.
    self._step, self._is_good = step, True
    self._tolerate(lambda: self._checkpointer.save(step, state, self._true_shapes, input_state, progress))
    self._stalled += time.perf_counter() - start
    return self._is_good

  @property
  def newest_step(self) -> int:
    """The step of the newest checkpoint; 0 if there is none."""
    return self._checkpointer.latest_step() or 0

  def newly_complete(self) -> list[tuple[int, Path]]:
    """Returns (step, folder) of each checkpoint that has become complete since the last call; does not wait."""
    return self._tolerate(self._checkpointer.newly_complete) or []

  def finish(self, step: int, state: TrainState, input_state: JsonDict, progress: JsonDict = None) -> None:
    """Waits until this step is saved; raises CheckpointError if saving it has failed twice."""
    self._tolerate(self._checkpointer.wait_until_complete)
    try:
      if not (self._step == step and self._is_good):
        self._checkpointer.save(step, state, self._true_shapes, input_state, progress)
      self._checkpointer.wait()
    except CheckpointError as error:
      raise CheckpointError(f'{error}; step {step} is not saved{self._last_good()}') from error

  def abandon(self, directory: Path) -> None:
    """Waits for the current save in a run's directory that was lost, and removes the files that this save has made."""
    try:
      self._checkpointer.wait_until_complete()
    except CheckpointError:
      self._is_good = False
    gather_texts('')  # From here on, no process writes to this directory.
    if is_primary_process():
      _remove_save(directory, Path(self._checkpointer.directory), self._step, 0.0 if self._is_good else _LATE_S)
    gather_texts('')  # From here on, all processes see the same files.

  def save_elsewhere(
    self, directory: Path, step: int, state: TrainState, input_state: JsonDict, progress: JsonDict
  ) -> None:
    """Saves in another directory, where no checkpoint is removed; raises CheckpointError if that fails."""
    with contextlib.closing(Checkpointer(directory)) as checkpointer:
      checkpointer.save(step, state, self._true_shapes, input_state, progress)

  def figures(self) -> dict[str, float]:
    """Returns, for summaries, the seconds that training has waited for saves since the last call."""
    stalled, self._stalled = self._stalled, 0.0
    return {'speed/save_stall_seconds': stalled} if stalled else {}

  def _tolerate(self, call: Callable[[], Any]) -> Any:
    """Returns what `call` returns; if it raises CheckpointError, but not PartedError, reports it and returns None."""
    try:
      return call()
    except PartedError:
      raise
    except CheckpointError as error:
      self._is_good = False
      self._line(f'step {self._step}: {error}; training goes on{self._last_good()}')
      if is_primary_process():
        note_event(self._folder, 'save_failed', self._step, str(error))
      return None

  def _last_good(self) -> str:
    step = self._checkpointer.latest_step()
    return ', and there is no checkpoint yet' if step is None else f', and the newest checkpoint is of step {step}'


def _remove_save(directory: Path, folder: Path, step: int, seconds: float) -> None:
  """Removes the files that a save of `step` has written to `folder`, and the directory if it is then empty.

  After an error, TensorStore goes on writing for a moment, and creates the folders again. So this repeats the removal
  until nothing was created for `seconds` seconds.
  """
  end = time.monotonic() + seconds
  while not has_record(directory):  # Another run may be using the directory by now.
    with contextlib.suppress(OSError):
      for made in folder.iterdir():
        if made.name.split('.')[0] == str(step):
          remove_all(made)
      folder.rmdir()
      directory.rmdir()
      end = time.monotonic() + seconds
    if time.monotonic() >= end:
      return
    time.sleep(0.02)


@dataclasses.dataclass(frozen=True)
class RunSaver:
  """Saves a run, with its position in the input and its progress.

  Attributes:
    directory: the run's directory; nothing is saved if it is lost.
    observers: called before and after saves; they add the other fields of the saved `Progress`.
  """

  saving: Saving
  directory: HeldDirectory
  feed: Feed
  data: DataManifest | None
  watched: Watched
  writer: SummaryWriter
  observers: Observers

  def copy(self, run: Run) -> None:
    """Lets the observers make an emergency copy of the state."""
    self._pause(run, 'copy')
    with self.observers.measure('saving'):
      step, state, position, progress = self._position(run)
      snapshot = StateToCopy(step, state, position, self.saving.newest_step, self.writer.unwritten, progress)
      for observer in self.observers:
        observer.keep_copy(run, snapshot)

  def save(self, run: Run) -> bool:
    """Begins to save a checkpoint, unless this step already has one; returns False if saving fails."""
    self._pause(run, 'save')
    with self.observers.measure('saving'):
      return self.saving.save(*self._position(run))

  def finish(self, run: Run) -> None:
    """Waits until the last step is saved; raises CheckpointError or LostDirectoryError if saving fails."""
    self.directory.check()
    with self.observers.measure('saving'):
      self.saving.finish(*self._position(run))
      for observer in self.observers:
        observer.remove_copies(run)
    self.announce_checkpoints(run)

  def announce_checkpoints(self, run: Run) -> None:
    """Notifies the observers of the checkpoints that have become complete since the last call."""
    for step, folder in self.saving.newly_complete():
      run.last_save = step, time.time()
      for observer in self.observers:
        observer.on_checkpoint(run, step, folder)

  def rescue(self, run: Run, lost: LostDirectoryError, make: Callable[[Path], object]) -> str:
    """Saves a run whose directory was lost; returns a message that says where the run is saved, and how to continue it.

    If the directory was moved, the run is saved in its new place; otherwise, `make` makes a directory for it.
    """
    self.saving.abandon(self.directory.path)
    lost = self.directory.why_lost() or lost  # The given `lost` may describe a folder that a save has created since.
    unwritten = ''
    try:
      if lost.moved_to is not None:
        self.writer.move(lost.moved_to)
      for observer in self.observers:  # `on_pause` writes the metrics of the last steps.
        observer.on_pause(run, 'rescue')
    except OSError as error:  # Only one process writes metrics. It must go on, because all processes save together.
      unwritten = f'; the metrics of its last steps could not be written: {error}'
    except (GoBack, LossSpikeError, NonFiniteError) as error:
      return f'{lost}; step {run.step} is not saved: {error.trouble.what if isinstance(error, GoBack) else error}'
    name = error_of_first = ''
    if is_primary_process():
      try:
        name = str(rescue_directory(lost, self.directory.path, make))
      except (UserError, OSError) as error:
        error_of_first = str(error)
    name, error_of_first = gather_paths(name)[0], gather_paths(error_of_first)[0]
    try:
      if not name:
        raise UserError(error_of_first)
      self.saving.save_elsewhere(Path(name), *self._position(run))
      for observer in self.observers:
        observer.remove_copies(run)
    except (UserError, OSError) as error:
      return f'{lost}; step {run.step} could not be saved: {error}'
    without = '' if lost.moved_to else ', with its config and without metrics'
    return (
      f'{lost}; step {run.step} of {run.total_steps} is saved in {Path(name)}{without}: to go on, train with '
      f'--job_log_dir={Path(name)}{unwritten}'
    )

  def _pause(self, run: Run, reason: PauseReason) -> None:
    self.directory.check()
    note_progress(f'saving step {run.step}')
    for observer in self.observers:  # Raises an error if the state is not finite and must not be saved.
      observer.on_pause(run, reason)

  def _position(self, run: Run) -> tuple[int, TrainState, InputState, dict[str, Any]]:
    progress = Progress(
      evaluations=evaluations_in(run.results, self.watched),
      lines=self.writer.num_lines if is_primary_process() else None,
      data=self.data,
      **self.observers.progress(),
    )
    return run.step, run.state, self.feed.position, progress.record()
