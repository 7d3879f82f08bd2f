"""Hooks: the user's code that a training run calls after its steps, saves and evaluations.

    class Halve(Hook):
      def on_eval(self, run, split, metrics):
        run.line(f'half of the loss is {metrics["loss"] / 2}')

    run_train(config, 'runs/1', hooks=[Halve()])

Early stopping and the best checkpoint are hooks too: see `improvement.py`.

Hooks are called in the order of the list, in the thread that trains. If a hook raises an error, the state is saved and
the run ends. With several processes, each calls its own hooks, and all must save and stop at the same step; if a hook
raises an error, all processes agree on a step, stop after it, and save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.common.errors import ConfigError, UserError, did_you_mean
from praxis_lite.runs.observer import InputState, Observer, Run
from praxis_lite.runs.programs import InputProgram, ProgramResult
from praxis_lite.runs.records.metrics import DeviceMetrics, HostMetrics
from praxis_lite.training.steps import TrainStepOutput


class Hook:
  """Code that is called while a run trains. A subclass defines the methods that it needs."""

  def on_start(self, run: Run) -> None:
    """Called once, before the first step of this process; `run.step` is the number of steps taken before."""

  def on_step(self, run: Run, metrics: DeviceMetrics) -> None:
    """Called after each step.

    `metrics` are pairs (mean, weight) by name, on the devices. Reading a value waits until the devices have computed
    it, so read values only every hundredth step or so.
    """

  def on_eval(self, run: Run, split: str, metrics: HostMetrics) -> None:
    """Called after each pass over an input; `split` is 'eval/<input>' or 'decode/<input>', `metrics` are numbers."""

  def on_checkpoint(self, run: Run, step: int, path: Path) -> None:
    """Called when the checkpoint of `step` is complete in the folder `path`. The run may then be some steps further."""


def check_hooks(hooks: object) -> None:
  """Raises ConfigError unless `hooks` is a list of hooks that define no `on_...` methods other than those of `Hook`."""
  if not isinstance(hooks, Sequence):
    raise ConfigError(f'hooks: expected a list, as in hooks=[MyHook()], got {hooks!r}')
  known = [name for name in vars(Hook) if name.startswith('on_')]
  for i, hook in enumerate(hooks):
    if not isinstance(hook, Hook):
      raise ConfigError(f'hooks[{i}]: expected an object of a class derived from Hook, got {hook!r}')
    for name in dir(type(hook)):
      if name.startswith('on_') and name not in known:
        close, methods = did_you_mean(name, known), ', '.join(known)
        raise ConfigError(f'hooks[{i}]: {type(hook).__name__}.{name} is never called.{close} A run calls {methods}')


class Hooks(Observer):
  """Calls hooks, and names one that raises an error; with several processes, `stop_all` then stops every process."""

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

  def on_evaluation(self, run: Run, program: InputProgram, result: ProgramResult) -> None:
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
  """Saves the state; returns a clause that says whether this worked."""
  try:
    return 'the state is saved' if run.save() else 'it was not saved'
  except UserError as error:
    return f'it was not saved: {error}'
