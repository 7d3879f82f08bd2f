"""Hooks: code of one's own in a training run.

    class Halve(Hook):
      def on_eval(self, run, split, metrics):
        run.line(f'half of the loss is {metrics["loss"] / 2}')

    run_train(config, 'runs/1', hooks=[Halve()])

Early stopping and keeping the best checkpoint are hooks too. Both decide from the evaluations of the whole run, those
before a restart included, so they need no state of their own.

Hooks are called in their order, in the thread that trains. What one of them raises ends the run, after the state has
been saved. With several processes each calls its own hooks, and all must save and stop at the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from praxis_lite.errors import ConfigError, UserError, did_you_mean
from praxis_lite.runtime.checkpoints import BestCheckpoint, Checkpointer
from praxis_lite.runtime.metrics import DeviceMetrics, EvalResult, HostMetrics
from praxis_lite.task import EarlyStoppingParams, SingleTask, TrainParams
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
    save: saves a checkpoint of `step`, unless there is one.
    line: prints a line.
  """

  def __init__(
    self,
    task: SingleTask,
    directory: Path,
    state: TrainState,
    results: Sequence[EvalResult],
    *,
    save: Callable[[], object],
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
  """Calls hooks, and names the one that raises."""

  def __init__(self, hooks: Iterable[Hook]):
    self._hooks = list(hooks)

  def on_start(self, run: Run) -> None:
    self._call('on_start', run)

  def on_step(self, run: Run, metrics: DeviceMetrics) -> None:
    self._call('on_step', run, metrics)

  def on_eval(self, run: Run, split: str, metrics: HostMetrics) -> None:
    self._call('on_eval', run, split, metrics)

  def on_checkpoint(self, run: Run, step: int, path: Path) -> None:
    self._call('on_checkpoint', run, step, path)

  def _call(self, method: str, run: Run, *args: object) -> None:
    for hook in self._hooks:
      try:
        getattr(hook, method)(run, *args)
      except Exception as error:
        what = f'{type(hook).__name__}.{method} raised {type(error).__name__} after step {run.step}'
        note = f'{what}; {_saved(run)}'
        run.line(note)
        error.add_note(f'praxis_lite: the hook {note}')
        raise


def _saved(run: Run) -> str:
  """Saves the state, and returns what became of that."""
  if jax.process_count() > 1:  # Saving takes all processes, and the others do not know of the error.
    return 'it was not saved, because there are several processes'
  try:
    run.save()
  except UserError as error:
    return f'it was not saved: {error}'
  return 'the state is saved'


# -------------------------------------------------------------------- metrics that decide


class WatchedMetric(NamedTuple):
  """A metric of one input, and which of its values are better.

  Attributes:
    split, name: as in `EvalResult`.
    mode: 'min' or 'max'.
  """

  split: str
  name: str
  mode: str

  @property
  def path(self) -> str:
    return f'{self.split}/{self.name}'

  def values(self, results: Iterable[EvalResult]) -> list[tuple[int, float]]:
    """Returns (step, value) of each evaluation of its input."""
    return [(r.step, float(r.metrics.get(self.name, np.nan))) for r in results if r.split == self.split]

  def is_better(self, value: float, best: float | None, by: float = 0.0) -> bool:
    """Whether `value` is better than `best` by more than `by`; NaN never is, and None is worse than any number."""
    if np.isnan(value) or best is None:
      return not np.isnan(value)
    return value < best - by if self.mode == 'min' else value > best + by


def watched_metric(field: str, metric: str, mode: str, splits: dict[str, list[str]]) -> WatchedMetric:
  """Returns the metric that a field of the config names.

  Args:
    field: path of the field, for messages.
    metric: a name, or `eval/<input>/<name>`.
    mode: 'min' or 'max'.
    splits: the names of the metrics of each evaluation, by its split.

  Raises:
    ConfigError: there is no such metric, or its input has to be named.
  """
  known = [f'{split}/{name}' for split, names in splits.items() for name in names]
  if not splits:
    raise ConfigError(f'{field} = {metric!r}: there is no input with is_training=False to evaluate on')
  for split, names in splits.items():
    if metric.startswith(f'{split}/') and metric.removeprefix(f'{split}/') in names:
      return WatchedMetric(split, metric.removeprefix(f'{split}/'), mode)
  having = [split for split, names in splits.items() if metric in names]
  if len(having) == 1:
    return WatchedMetric(having[0], metric, mode)
  if having:
    raise ConfigError(f'{field} = {metric!r}: of which input? Write {" or ".join(f"{s}/{metric}" for s in having)}')
  short = [name for names in splits.values() for name in names]
  close = did_you_mean(metric, [*known, *short])
  raise ConfigError(f'{field} = {metric!r}: there is no such metric.{close} There are {", ".join(known)}.')


class Watched(NamedTuple):
  """The metrics that decide which checkpoint is the best, and when to stop; None where nothing asks for one."""

  best: WatchedMetric | None
  stopping: WatchedMetric | None


def watched_metrics(settings: TrainParams, splits: dict[str, list[str]]) -> Watched:
  """Returns the metrics that a config names; `splits` and errors are those of `watched_metric`."""
  early, best, stopping = settings.early_stopping, None, None
  if early.patience is not None:
    if settings.eval_interval_steps is None:
      raise ConfigError(
        'task.train.early_stopping.patience is set, but there is no evaluation before the end; set '
        'task.train.eval_interval_steps'
      )
    stopping = best = watched_metric('task.train.early_stopping.metric', early.metric, early.mode, splits)
  if settings.best_metric is not None:
    best = watched_metric('task.train.best_metric', settings.best_metric, settings.best_metric_mode, splits)
  return Watched(best, stopping)


def own_hooks(settings: TrainParams, watched: Watched, checkpointer: Checkpointer) -> list[Hook]:
  """Returns the hooks that a config asks for."""
  hooks: list[Hook] = []
  if watched.best is not None:
    hooks.append(KeepBest(watched.best, checkpointer))
  if watched.stopping is not None:
    hooks.append(EarlyStopping(watched.stopping, settings.early_stopping))
  return hooks


class EarlyStopping(Hook):
  """Stops a run once a metric has not improved for `settings.patience` evaluations in a row."""

  def __init__(self, watched: WatchedMetric, settings: EarlyStoppingParams):
    self._watched = watched
    self._settings = settings

  def on_start(self, run: Run) -> None:
    self._decide(run)  # A run that has stopped does not go on when it is started again.

  def on_eval(self, run: Run, split: str, metrics: HostMetrics) -> None:
    if split == self._watched.split:
      self._decide(run)

  def _decide(self, run: Run) -> None:
    best_step, best, waited = 0, None, 0
    for step, value in self._watched.values(run.results):
      if self._watched.is_better(value, best, self._settings.min_delta):
        best_step, best, waited = step, value, 0
      else:
        waited += 1
    if self._settings.patience is not None and waited >= self._settings.patience:
      than = 'has not been a number' if best is None else f'has not improved on {best:.5g}, of step {best_step},'
      better = 'lower' if self._watched.mode == 'min' else 'higher'
      run.stop(f'stopping early: {self._watched.path} {than} in {waited} evaluations ({better} is better)')


class KeepBest(Hook):
  """Saves a checkpoint after each evaluation that is the best so far, and keeps the best one from being deleted."""

  def __init__(self, watched: WatchedMetric, checkpointer: Checkpointer):
    self._watched = watched
    self._checkpointer = checkpointer

  def on_start(self, run: Run) -> None:
    best = self._checkpointer.best()
    if best is not None and (best.metric, best.mode) != (self._watched.path, self._watched.mode):
      self._checkpointer.keep_best(None)
    # A run that was killed may not have recorded its last one.
    saved = self._checkpointer.all_steps()
    for step, value in self._watched.values(run.results):
      if step in saved:
        self._offer(step, value)

  def on_eval(self, run: Run, split: str, metrics: HostMetrics) -> None:
    if split == self._watched.split:
      value = float(metrics.get(self._watched.name, np.nan))
      if self._is_best(value):
        run.save()
        self._offer(run.step, value)

  def _is_best(self, value: float) -> bool:
    best = self._checkpointer.best()
    return self._watched.is_better(value, None if best is None else best.value)

  def _offer(self, step: int, value: float) -> None:
    if self._is_best(value):
      self._checkpointer.keep_best(BestCheckpoint(step, self._watched.path, self._watched.mode, value))
