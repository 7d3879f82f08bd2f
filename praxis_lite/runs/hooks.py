"""Hooks and observers: code that a training run calls after its steps, saves and evaluations.

Hooks are the code of a user:

    class Halve(Hook):
      def on_eval(self, run, split, metrics):
        run.line(f'half of the loss is {metrics["loss"] / 2}')

    run_train(config, 'runs/1', hooks=[Halve()])

Early stopping and the best checkpoint are hooks too: see `improvement.py`.

Hooks are called in their order, in the thread that trains. What a hook raises ends the run, after the state has been
saved. With several processes each calls its own hooks, and all must save and stop at the same step; if a hook raises,
all processes stop after a step that they agree on, and save.

Observers are parts of the run itself: its log, heartbeat and mirror, and what looks for trouble. They see more than
hooks, and what they raise ends the run at once. `Hooks` is the observer that calls hooks. `loop/observers.py` has the
list of all observers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from praxis_lite.common.errors import UserError
from praxis_lite.runs.nonfinite import Hints
from praxis_lite.runs.programs import Program, ProgramResult
from praxis_lite.runs.records.metrics import DeviceMetrics, EvalResult, HostMetrics
from praxis_lite.training.state import TrainState
from praxis_lite.training.steps import TrainStepOutput
from praxis_lite.training.task import SingleTask

InputState = dict[str, Any]
PauseReason = Literal['save', 'copy', 'evaluate', 'rescue']


class Run:
  """A training run as its hooks see it.

  Attributes:
    task: the task that is trained.
    directory: the run's directory.
    total_steps: number of steps of the whole run.
    step: number of steps taken.
    state: the train state after `step` steps, on the mesh, padded; the next step overwrites its arrays.
    results: the evaluations and decoding runs so far, in order, those before a restart included.
    stop_reason: why the run stops after this step; None if it goes on.
    last_save: step of the last checkpoint that this process knows to be complete, and when that was, in seconds since
      1970; None before the first one.
    ended_by: how the run ended, see `TrainResult`; '' until then.
    error: with several processes, what a hook has raised. It ends the run once the state is saved: one process alone
      could neither save nor end, because the others would wait for it.
    save: saves a checkpoint of `step`, unless there is one; returns False if that failed, which has been reported.
    line: prints a line.
  """

  def __init__(
    self,
    task: SingleTask,
    directory: Path,
    state: TrainState,
    results: Sequence[EvalResult],
    *,
    save: Callable[[], bool],
    line: Callable[[str], object],
  ):
    self.task = task
    self.directory = directory
    self.total_steps: int = task.train.num_train_steps
    self.step = int(state.step)
    self.state = state
    self.results = list(results)
    self.stop_reason: str | None = None
    self.last_save: tuple[int, float] | None = None
    self.ended_by = ''
    self.error: Exception | None = None
    self.save = save
    self.line = line

  def stop(self, reason: str) -> None:
    """Ends the run after this step, with a checkpoint; does nothing after the last step. The first reason counts."""
    if self.step < self.total_steps and self.stop_reason is None:
      self.stop_reason = reason
      self.line(f'step {self.step} of {self.total_steps}: {reason}')


class Hook:
  """Is called while a run trains. A subclass defines the methods that it needs."""

  def on_start(self, run: Run) -> None:
    """Called once, before the first step of this process; `run.step` is the number of steps taken before."""

  def on_step(self, run: Run, metrics: DeviceMetrics) -> None:
    """Called after each step.

    `metrics` are pairs (mean, weight) by name, on the devices, which may still be computing them: reading a value waits
    for that, so read them every hundredth step, say.
    """

  def on_eval(self, run: Run, split: str, metrics: HostMetrics) -> None:
    """Called after each pass over an input: `split` is 'eval/<input>' or 'decode/<input>', `metrics` are numbers."""

  def on_checkpoint(self, run: Run, step: int, path: Path) -> None:
    """Called once the checkpoint of `step` is complete in the folder `path`: some steps later than it was taken."""


class Observer:
  """Watches a run; a subclass defines the methods that it needs, and the others do nothing.

  All methods are called in the thread that trains. What one of them raises ends the run.
  """

  def on_start(self, run: Run) -> None:
    """Called once, before the training step is compiled; `run.step` is the number of steps taken before."""

  def on_ready(self, run: Run) -> None:
    """Called once, before the first batch is read."""

  def on_step(self, run: Run, out: TrainStepOutput, read_from: InputState) -> None:
    """Called after each step, which `run.step` counts, was dispatched: the devices may still be computing `out`.

    `read_from` is the state of the training input from which the batch of this step was read.
    """

  def on_pause(self, run: Run, reason: PauseReason) -> None:
    """Called before the run does something else than steps; raises an error if the steps until now must not be kept."""

  def on_resume(self, run: Run) -> None:
    """Called before the steps that follow a pause."""

  def on_evaluation(self, run: Run, program: Program, result: ProgramResult) -> None:
    """Called after an input was evaluated or decoded."""

  def on_checkpoint(self, run: Run, step: int, folder: Path) -> None:
    """Called once the checkpoint of `step` is complete in `folder`: some steps later than it was taken."""

  def on_end(self, run: Run) -> None:
    """Called once, after the last step is saved; not called if an error ends the run."""

  def measure(self, activity: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager whose time belongs to an activity, one of `records.goodput.ACTIVITIES`."""
    return contextlib.nullcontext()

  def figures(self) -> Mapping[str, float]:
    """Returns figures for the summaries of a step."""
    return {}

  def progress(self) -> Mapping[str, Any]:
    """Returns fields of `loop.progress.Progress`, which are saved with the state."""
    return {}

  def failure(self, *, is_over: bool) -> Callable[[Hints], Exception] | None:
    """Returns what makes the error that ends the run once its state is saved, if the run failed or has failed when it
    `is_over`; None otherwise."""
    return None


class Observers:
  """The observers of a run.

  Attributes:
    all: the observers, in the order in which they are called. At the start of a run, there is only a timer.
    measure: measures time; see `Observer.measure`.
  """

  def __init__(self, timer: Observer):
    self.all: Sequence[Observer] = [timer]
    self.measure = timer.measure

  def __iter__(self) -> Iterator[Observer]:
    return iter(self.all)

  def figures(self) -> Mapping[str, float]:
    return {name: value for observer in self for name, value in observer.figures().items()}

  def progress(self) -> Mapping[str, Any]:
    return {name: value for observer in self for name, value in observer.progress().items()}

  def failure(self, *, is_over: bool) -> Callable[[Hints], Exception] | None:
    return next(filter(None, (observer.failure(is_over=is_over) for observer in self)), None)


class Hooks(Observer):
  """Calls hooks, and names the one that raises.

  Args:
    hooks: the hooks of this process.
    stop_all: asks all processes to stop after the same step; None if there is only one process.
    measure: measures the time of hooks after steps; see `Observer.measure`.
  """

  def __init__(
    self,
    hooks: Iterable[Hook],
    stop_all: Callable[[], object] | None,
    measure: Callable[[str], contextlib.AbstractContextManager[Any]],
  ):
    self._hooks = list(hooks)
    self._stop_all = stop_all
    self._measure = measure

  def on_start(self, run: Run) -> None:
    self._call('on_start', run)

  def on_step(self, run: Run, out: TrainStepOutput, read_from: InputState) -> None:
    with self._measure('hooks'):
      self._call('on_step', run, out.mean_metrics)

  def on_evaluation(self, run: Run, program: Program, result: ProgramResult) -> None:
    self._call('on_eval', run, program.split, result.metrics)

  def on_checkpoint(self, run: Run, step: int, folder: Path) -> None:
    self._call('on_checkpoint', run, step, folder)

  def _call(self, method: str, run: Run, *args: object) -> None:
    for hook in list(self._hooks):
      try:
        getattr(hook, method)(run, *args)
      except Exception as error:
        what = f'{type(hook).__name__}.{method} raised {type(error).__name__} after step {run.step}'
        note = f'{what}; {_try_to_save(run) if self._stop_all is None else "all processes stop after a step, and save"}'
        run.line(note)
        error.add_note(f'praxis_lite: the hook {note}')
        if self._stop_all is None:
          raise
        self._hooks.remove(hook)
        run.error = run.error or error
        self._stop_all()


def _try_to_save(run: Run) -> str:
  """Saves the state, and returns a clause that says whether that worked."""
  try:
    return 'the state is saved' if run.save() else 'it was not saved'
  except UserError as error:
    return f'it was not saved: {error}'
