"""Hooks: code of one's own in a training run.

    class Halve(Hook):
      def on_eval(self, run, split, metrics):
        run.line(f'half of the loss is {metrics["loss"] / 2}')

    run_train(config, 'runs/1', hooks=[Halve()])

Early stopping and the best checkpoint are hooks too: see `improvement.py`.

Hooks are called in their order, in the thread that trains. What one of them raises ends the run, after the state has
been saved. With several processes each calls its own hooks, and all must save and stop at the same step; when one of
them raises, all processes stop after a step that they agree on, and save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from praxis_lite.errors import ConfigError, UserError
from praxis_lite.records.metrics import DeviceMetrics, EvalResult, HostMetrics
from praxis_lite.task import SingleTask
from praxis_lite.training.state import TrainState


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
    """Called once, before the first step of this process; `run.step` is that of the checkpoint it resumes from."""

  def on_step(self, run: Run, metrics: DeviceMetrics) -> None:
    """Called after each step.

    `metrics` are pairs (mean, weight) by name, on the devices, which may still be computing them: reading a value waits
    for that, so read them every hundredth step, say.
    """

  def on_eval(self, run: Run, split: str, metrics: HostMetrics) -> None:
    """Called after each pass over an input: `split` is 'eval/<input>' or 'decode/<input>', `metrics` are numbers."""

  def on_checkpoint(self, run: Run, step: int, path: Path) -> None:
    """Called once the checkpoint of `step` is complete in the folder `path`: some steps later than it was taken."""


def check_hooks(hooks: Iterable[object]) -> None:
  """Raises ConfigError unless all of them are hooks."""
  for i, hook in enumerate(hooks):
    if not isinstance(hook, Hook):
      raise ConfigError(f'hooks[{i}]: expected an object of a class derived from Hook, got {hook!r}')


class Hooks:
  """Calls hooks, and names the one that raises.

  Args:
    hooks: the hooks of this process.
    stop_all: asks all processes to stop after the same step, where there are several; None: there is one.

  Attributes:
    error: with several processes, what a hook has raised, which is to be raised once the state is saved. One process
      alone could neither save nor end: the others would wait for it.
  """

  def __init__(self, hooks: Iterable[Hook], stop_all: Callable[[], object] | None = None):
    self._hooks = list(hooks)
    self._stop_all = stop_all
    self.error: Exception | None = None

  def on_start(self, run: Run) -> None:
    self._call('on_start', run)

  def on_step(self, run: Run, metrics: DeviceMetrics) -> None:
    self._call('on_step', run, metrics)

  def on_eval(self, run: Run, split: str, metrics: HostMetrics) -> None:
    self._call('on_eval', run, split, metrics)

  def on_checkpoint(self, run: Run, step: int, path: Path) -> None:
    self._call('on_checkpoint', run, step, path)

  def _call(self, method: str, run: Run, *args: object) -> None:
    for hook in list(self._hooks):
      try:
        getattr(hook, method)(run, *args)
      except Exception as error:
        what = f'{type(hook).__name__}.{method} raised {type(error).__name__} after step {run.step}'
        note = f'{what}; {_saved(run) if self._stop_all is None else "all processes stop after a step, and save"}'
        run.line(note)
        error.add_note(f'praxis_lite: the hook {note}')
        if self._stop_all is None:
          raise
        self._hooks.remove(hook)
        self.error = self.error or error
        self._stop_all()


def _saved(run: Run) -> str:
  """Saves the state, and returns what became of that."""
  try:
    return 'the state is saved' if run.save() else 'it was not saved'
  except UserError as error:
    return f'it was not saved: {error}'
