"""Saving a run while it trains: where a save fails, training goes on, and what was saved before stays."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.checkpoints.emergency import EmergencyCopies
from praxis_lite.checkpoints.failures import PartedError
from praxis_lite.errors import CheckpointError
from praxis_lite.files import remove_all
from praxis_lite.hosts.processes import gather_texts
from praxis_lite.records.record import has_record
from praxis_lite.training.state import TrainState

Json = dict[str, Any] | None


class Saving:
  """Saves a run, and reports each save that fails; the next one tries again.

  With several processes, a save that fails in one of them fails in all.

  Args:
    checkpointer: saves, in the background.
    true_shapes: the shapes of the state without padding.
    line: prints a line.
    copies: the emergency copies between checkpoints; None: there are none.
  """

  def __init__(
    self,
    checkpointer: Checkpointer,
    true_shapes: TrainState,
    line: Callable[[str], object],
    copies: EmergencyCopies | None = None,
  ):
    self._checkpointer = checkpointer
    self._copies = copies
    self._true_shapes = true_shapes
    self._line = line
    self._step = 0  # Of the last save, and whether it has not failed until now.
    self._is_good = True
    self._stalled = 0.0

  def save(self, step: int, state: TrainState, input_state: Json, progress: Json = None) -> bool:
    """Begins a save; returns whether there is, or will be, a checkpoint of this step. Waits for the save before.

    Args:
      step, state, input_state, progress: as of `Checkpointer.save`.
    """
    start = time.perf_counter()
    self._tolerated(self._checkpointer.wait_until_complete)  # Its failure is one of an earlier step.
    self._step, self._is_good = step, True
    self._tolerated(lambda: self._checkpointer.save(step, state, self._true_shapes, input_state, progress))
    self._stalled += time.perf_counter() - start
    return self._is_good

  def copy(
    self, step: int, state: TrainState, input_state: Json, progress: Json, metrics: Sequence[dict[str, Any]]
  ) -> None:
    """Begins an emergency copy, with lines of metrics that the disk has not taken; reports the first that fails."""
    if self._copies is not None:
      said = self._copies.write(step, state, input_state, self._checkpointer.latest_step() or 0, metrics, progress)
      if said:
        self._line(said)

  def newly_complete(self) -> list[tuple[int, Path]]:
    """Returns (step, folder) of each checkpoint that has become complete since the last call; does not wait."""
    return self._tolerated(self._checkpointer.newly_complete) or []

  def finish(self, step: int, state: TrainState, input_state: Json, progress: Json = None) -> None:
    """Waits until this step is saved, and removes emergency copies.

    Raises:
      CheckpointError: saving it has failed, and again when it was tried again.
    """
    self._tolerated(self._checkpointer.wait_until_complete)
    try:
      if not (self._step == step and self._is_good):
        self._checkpointer.save(step, state, self._true_shapes, input_state, progress)
      self._checkpointer.wait()
    except CheckpointError as error:
      raise CheckpointError(f'{error}; step {step} is not saved{self._last_good()}') from error
    if self._copies is not None:
      self._copies.remove()

  def abandon(self, directory: Path) -> None:
    """Ends what is being saved in the directory of a run that is not there any more, and removes what that has made."""
    with contextlib.suppress(CheckpointError):
      self._checkpointer.wait_until_complete()
    gather_texts('')  # None writes any more.
    folder = Path(self._checkpointer.directory)
    if jax.process_index() == 0 and not has_record(directory):  # Another run may be there by now.
      with contextlib.suppress(OSError):
        for made in folder.iterdir():
          if made.name.split('.')[0] == str(self._step):
            remove_all(made)
        folder.rmdir()
        directory.rmdir()
    gather_texts('')  # All look at what is left.

  def save_elsewhere(self, directory: Path, step: int, state: TrainState, input_state: Json, progress: Json) -> None:
    """Saves in another directory, where no checkpoint is removed; raises CheckpointError if that fails."""
    with contextlib.closing(Checkpointer(directory)) as checkpointer:
      checkpointer.save(step, state, self._true_shapes, input_state, progress)
    if self._copies is not None:
      self._copies.remove()

  def figures(self) -> dict[str, float]:
    """Returns the seconds for which saving has kept training waiting since the last call, for summaries."""
    stalled, self._stalled = self._stalled, 0.0
    return {'speed/save_stall_seconds': stalled} if stalled else {}

  def _tolerated(self, call: Callable[[], Any]) -> Any:
    try:
      return call()
    except PartedError:
      raise
    except CheckpointError as error:
      self._is_good = False
      self._line(f'step {self._step}: {error}; training goes on{self._last_good()}')
      return None

  def _last_good(self) -> str:
    step = self._checkpointer.latest_step()
    return ', and there is no checkpoint yet' if step is None else f', and the newest checkpoint is of step {step}'
