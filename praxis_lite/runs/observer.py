"""Observers: the parts of a run that the executor notifies of steps, saves and evaluations.

Examples are the log, the heartbeat, the mirror, and the caller of the user's hooks (`hooks.py`). The executor knows
them only by this interface; `loop/observers.py` lists all of them. An error that an observer raises ends the run
immediately.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from praxis_lite.checkpoints import OnDamage
from praxis_lite.common.errors import UserError
from praxis_lite.inputs.rows import Struct
from praxis_lite.runs.nonfinite import Hints
from praxis_lite.runs.programs import InputProgram, ProgramResult
from praxis_lite.runs.records.metrics import DeviceMetrics, EvalResult
from praxis_lite.runs.stop_signals import StopSignals
from praxis_lite.training.state import TrainState
from praxis_lite.training.steps import TrainStepOutput
from praxis_lite.training.task import SingleTask

InputState = dict[str, Any]
PauseReason = Literal['save', 'copy', 'evaluate', 'rescue']


@dataclasses.dataclass(eq=False, repr=False)
class Run:
  """A training run as its observers and hooks see it.

  Attributes:
    task: the task that is trained.
    directory: the run's directory.
    mesh: the size of each mesh axis.
    batch_struct: shapes and dtypes of a global batch of the training input.
    total_steps: number of steps of the whole run.
    step: number of steps taken.
    state: the train state after `step` steps, on the mesh, padded; the next step overwrites its arrays.
    results: the evaluations and decoding runs so far, in order, including those before a restart.
    save: saves a checkpoint of `step`, unless there is one; if this fails, reports it and returns False.
    line: prints a line.
    stop_reason: why the run stops after this step; None if it goes on.
    is_over: whether this process takes no more steps.
    last_save: step of the last checkpoint that this process knows to be complete, and when it was completed, in
      seconds since 1970; None before the first one.
    links: bytes per second at which this process has sent its last emergency copy to each peer.
    ended_by: how the run ended, see `TrainResult`; '' until then.
    error: with several processes, the error that a hook raised. It ends the run only after all processes have saved
      together: a single process cannot save or end by itself, because the others would wait for it.
  """

  task: SingleTask
  directory: Path
  mesh: Mapping[str, int]
  batch_struct: Struct
  total_steps: int
  step: int
  state: TrainState
  results: list[EvalResult]
  save: Callable[[], bool]
  line: Callable[[str], object]
  stop_reason: str | None = None
  is_over: bool = False
  last_save: tuple[int, float] | None = None
  links: Mapping[int, float] = dataclasses.field(default_factory=dict)
  ended_by: str = ''
  error: Exception | None = None

  def stop(self, reason: str) -> None:
    """Ends the run after this step, with a checkpoint; does nothing after the last step. The first reason is kept."""
    if self.step < self.total_steps and self.stop_reason is None:
      self.stop_reason = reason
      self.line(f'step {self.step} of {self.total_steps}: {reason}')


class StateToCopy(NamedTuple):
  """The content of an emergency copy, which is made between checkpoints.

  Attributes:
    step, state: the step, and the padded state on the mesh; the next step overwrites its arrays.
    input_state: the state of the training input after the batch of this step.
    checkpoint: the step of the newest checkpoint; 0 if there is none.
    metrics: lines of metrics that could not be written to the disk.
    progress: a record of `loop.progress.Progress`.
  """

  step: int
  state: TrainState
  input_state: InputState | None
  checkpoint: int
  metrics: Sequence[dict[str, Any]] = ()
  progress: dict[str, Any] | None = None


class StateCopy(Protocol):
  """A copy of the state that an observer kept in an earlier process of the run."""

  step: int
  input_state: InputState | None
  metrics: list[dict[str, Any]]
  progress: dict[str, Any] | None

  def restore(self, shapes: TrainState) -> TrainState:
    """Returns the state on the mesh; `shapes` are padded, and have shardings."""


class Observer:
  """Is notified of the events of a run. A subclass defines the methods that it needs; the others do nothing.

  All methods are called in the thread that trains. An error in one of them ends the run.
  """

  def open(self, on_damage: OnDamage) -> None:
    """Called as soon as this process owns the run's directory, before it reads anything in it.

    `on_damage` says what to do if the newest checkpoint is damaged; see `TrainOptions`.
    """

  def find_copy(self, checkpoint: int, shapes: TrainState, true_shapes: TrainState) -> tuple[StateCopy | None, str]:
    """Returns a pair: the newest copy of the state that this observer has kept (or None), and a text.

    The text is a line about copies that were rejected; '' if there are none.

    Args:
      checkpoint: the step of the newest checkpoint, 0 if there is none. Only newer copies count.
      shapes, true_shapes: shapes of the state with and without padding; `shapes` have shardings.
    """
    return None, ''

  def keep_copy(self, run: Run, snapshot: StateToCopy) -> None:
    """Called every `emergency_copies.every_n_steps` steps; `snapshot` is the content of an emergency copy."""

  def remove_copies(self, run: Run) -> None:
    """Called when the checkpoint of the last step is complete, so copies of the state are no longer needed."""

  def while_running(self, why_lost: Callable[[], UserError | None]) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager for the time from restoring to the end; it sees the error that ends the run.

    `why_lost` returns the error for a run directory that is no longer at its path; None if it is still there.
    """
    return contextlib.nullcontext()

  def while_training(self, stop: StopSignals) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager. It is entered for the whole training; during this time, `stop` catches signals."""
    return contextlib.nullcontext()

  def on_start(self, run: Run) -> None:
    """Called once, before the training step is compiled; `run.step` is the number of steps taken before."""

  def on_ready(self, run: Run) -> None:
    """Called once, before the first batch is read."""

  def on_step(self, run: Run, out: TrainStepOutput, read_from: InputState) -> None:
    """Called after each step is dispatched, with its number as `run.step`; devices may still be computing `out`.

    `read_from` is the state of the training input from which the batch of this step was read.
    """

  def on_metrics(self, step: int, metrics: DeviceMetrics) -> None:
    """Called when the metrics of a step are known, some steps later; not called if the step was not finite."""

  def on_nonfinite(self, step: int, what: str) -> None:
    """Called for a step that was not finite and follows a finite one; `what` says what was not finite."""

  def on_pause(self, run: Run, reason: PauseReason) -> None:
    """Called before training pauses, for example to save; raises an error if the state must not be saved."""

  def on_resume(self, run: Run) -> None:
    """Called after a pause, before the next step."""

  def on_evaluation(self, run: Run, program: InputProgram, result: ProgramResult) -> None:
    """Called after an input was evaluated or decoded."""

  def on_checkpoint(self, run: Run, step: int, folder: Path) -> None:
    """Called when the checkpoint of `step` is complete in `folder`. The run may then be some steps further."""

  def on_end(self, run: Run) -> None:
    """Called once, after the last step is saved; not called if an error ends the run."""

  def close(self) -> None:
    """Called once at the very end, even if an error ends the run."""

  def measure(self, activity: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager; the time in it counts as `activity`, one of `records.goodput.ACTIVITIES`."""
    return contextlib.nullcontext()

  def figures(self) -> Mapping[str, float]:
    """Returns figures for the summaries of a step."""
    return {}

  def progress(self) -> Mapping[str, Any]:
    """Returns fields of `loop.progress.Progress` by name, which are saved with the state."""
    return {}

  def failure(self, run: Run) -> Callable[[Hints], Exception] | None:
    """Returns None if the run can go on. Otherwise, the run must end with an error once its state is saved.

    Then this returns a function that makes the error.

    Some failures are decided only when the run is over.
    """
    return None


class Observers:
  """The observers of a run.

  Attributes:
    all: all observers, in the order in which they are called. More are added before the first step.
  """

  def __init__(self, timer: Observer, others: Sequence[Observer] = ()):
    self.timer = timer
    self.others = others
    self.all: Sequence[Observer] = [timer, *others]
    self.measure = timer.measure

  def __iter__(self) -> Iterator[Observer]:
    return iter(self.all)

  def find_copy(self, checkpoint: int, shapes: TrainState, true_shapes: TrainState) -> tuple[StateCopy | None, str]:
    found = [observer.find_copy(checkpoint, shapes, true_shapes) for observer in self]
    copies = [copy for copy, _ in found if copy is not None]
    return max(copies, key=lambda copy: copy.step, default=None), '; '.join(line for _, line in found if line)

  def while_running(self, why_lost: Callable[[], UserError | None]) -> contextlib.AbstractContextManager[None]:
    return _enter_all(observer.while_running(why_lost) for observer in self)

  def while_training(self, stop: StopSignals) -> contextlib.AbstractContextManager[None]:
    return _enter_all(observer.while_training(stop) for observer in self)

  def figures(self) -> Mapping[str, float]:
    return {name: value for observer in self for name, value in observer.figures().items()}

  def progress(self) -> Mapping[str, Any]:
    return {name: value for observer in self for name, value in observer.progress().items()}

  def failure(self, run: Run) -> Callable[[Hints], Exception] | None:
    return next(filter(None, (observer.failure(run) for observer in self)), None)


@contextlib.contextmanager
def _enter_all(contexts: Iterable[contextlib.AbstractContextManager[None]]) -> Iterator[None]:
  with contextlib.ExitStack() as stack:
    for context in contexts:
      stack.enter_context(context)
    yield
