"""Early stopping, and keeping the best checkpoint.

Both are hooks. They decide by the recorded evaluations of the whole run, so they lose no state if the run is killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from praxis_lite.checkpoints import BestCheckpoint, Checkpointer
from praxis_lite.common.errors import ConfigError, did_you_mean
from praxis_lite.runs.hooks import Hook
from praxis_lite.runs.observer import Run
from praxis_lite.runs.records.metric_modes import mode_of_metric
from praxis_lite.runs.records.metrics import EvalResult, HostMetrics
from praxis_lite.training.task import EarlyStoppingParams, TrainParams


class WatchedMetric(NamedTuple):
  """A metric of one input, and whether lower ('min') or higher ('max') values are better."""

  split: str
  name: str
  mode: str

  @property
  def path(self) -> str:
    return f'{self.split}/{self.name}'

  def values(self, results: Iterable[EvalResult]) -> list[tuple[int, float]]:
    """Returns (step, value) of the metric for each evaluation of its input."""
    return [(r.step, float(r.metrics.get(self.name, np.nan))) for r in results if r.split == self.split]

  def is_better(self, value: float, best: float | None, by: float = 0.0) -> bool:
    """Whether `value` is better than `best` by more than `by`. NaN is never better; any number is better than None."""
    if np.isnan(value) or best is None:
      return not np.isnan(value)
    return value < best - by if self.mode == 'min' else value > best + by


def watched_metric(field: str, metric: str, modes: Mapping[str, str], splits: dict[str, list[str]]) -> WatchedMetric:
  """Returns the metric that a field of the config names.

  Args:
    field: path of the field, for messages.
    metric: a name, or `eval/<input>/<name>`.
    modes: 'min', 'max' or 'auto', by the path of the field that sets it. If all are 'auto', the metric's name decides.
    splits: the names of the metrics of each evaluation, by split, such as 'eval/valid'.

  Raises:
    ConfigError: there is no such metric, or its input or mode is ambiguous.
  """
  if not splits:
    raise ConfigError(f'{field} = {metric!r}: there is no input with is_training=False to evaluate on')
  known = {f'{split}/{name}': (split, name) for split, names in splits.items() for name in names}
  found = [metric] if metric in known else [path for path, (_, name) in known.items() if name == metric]
  if len(found) > 1:
    raise ConfigError(f'{field} = {metric!r}: several inputs have it; write {" or ".join(found)}')
  if not found:
    close = did_you_mean(metric, [*known, *(name for _, name in known.values())])
    raise ConfigError(f'{field} = {metric!r}: there is no such metric.{close} There are {", ".join(known)}.')
  split, name = known[found[0]]
  if (mode := mode_of_metric(name, *modes.values())) is None:
    raise ConfigError(
      f'{field} = {metric!r}: its name does not tell whether lower or higher values are better; set '
      f"{next(iter(modes))} to 'min' or 'max'"
    )
  return WatchedMetric(split, name, mode)


class Watched(NamedTuple):
  """The metrics that decide which checkpoint is the best, and when to stop; None if the config names none."""

  best: WatchedMetric | None
  stopping: WatchedMetric | None


def watched_metrics(settings: TrainParams, splits: dict[str, list[str]]) -> Watched:
  """Returns the metrics that a config names; for `splits` and errors see `watched_metric`."""
  early, best = settings.early_stopping, None
  of_best = {'task.train.best_metric_mode': settings.best_metric_mode}
  if settings.best_metric is not None:
    best = watched_metric('task.train.best_metric', settings.best_metric, of_best, splits)
  if early.patience is None:
    return Watched(best, None)
  if settings.eval_interval_steps is None:
    raise ConfigError(
      'task.train.early_stopping.patience is set, but there is no evaluation before the end; set '
      'task.train.eval_interval_steps'
    )
  stopping = best
  if best is None or early.metric != EarlyStoppingParams.metric:
    modes = {'task.train.early_stopping.mode': early.mode, **(of_best if best is None else {})}
    stopping = watched_metric('task.train.early_stopping.metric', early.metric, modes, splits)
  if best is not None and (stopping is None or stopping.path == best.path):
    if (early.mode, best.mode) == ('max', 'min'):
      raise ConfigError(
        f"task.train.early_stopping.mode = 'max', but task.train.best_metric_mode = {settings.best_metric_mode!r}, for "
        f'the same metric, {best.path}: the modes contradict each other; set only best_metric_mode'
      )
    stopping = best
  return Watched(best or stopping, stopping)


class EarlyStopping(Hook):
  """Stops a run after `settings.patience` evaluations in a row in which a metric did not improve."""

  def __init__(self, watched: WatchedMetric, settings: EarlyStoppingParams):
    self._watched = watched
    self._settings = settings

  def on_start(self, run: Run) -> None:
    # A run that stopped early stays stopped when it is started again.
    self._decide(run, '; to go on, raise task.train.early_stopping.patience, or set it to None')

  def on_eval(self, run: Run, split: str, metrics: HostMetrics) -> None:
    if split == self._watched.split:
      self._decide(run)

  def _decide(self, run: Run, remedy: str = '') -> None:
    best_step, best, waited = 0, None, 0
    for step, value in self._watched.values(run.results):
      if self._watched.is_better(value, best, self._settings.min_delta):
        best_step, best, waited = step, value, 0
      else:
        waited += 1
    if self._settings.patience is not None and waited >= self._settings.patience:
      than = 'was never a number' if best is None else f'did not improve on {best:.5g}, of step {best_step},'
      better = 'lower' if self._watched.mode == 'min' else 'higher'
      run.stop(f'stopping early: {self._watched.path} {than} in {waited} evaluations ({better} is better){remedy}')


class KeepBest(Hook):
  """Saves a checkpoint after each evaluation that is the best so far, and keeps the best one from being deleted."""

  def __init__(self, watched: WatchedMetric, checkpointer: Checkpointer):
    self._watched = watched
    self._checkpointer = checkpointer

  def on_start(self, run: Run) -> None:
    best = self._checkpointer.best()
    if best is not None and (best.metric, best.mode) != (self._watched.path, self._watched.mode):
      self._checkpointer.keep_best(None)
    # A run that was killed may not have recorded its newest best checkpoint.
    saved = self._checkpointer.steps()
    for step, value in self._watched.values(run.results):
      if step in saved:
        self._offer(step, value)

  def on_eval(self, run: Run, split: str, metrics: HostMetrics) -> None:
    if split == self._watched.split:
      value = float(metrics.get(self._watched.name, np.nan))
      if self._is_best(value) and run.save():
        self._offer(run.step, value)

  def _is_best(self, value: float) -> bool:
    best = self._checkpointer.best()
    return self._watched.is_better(value, None if best is None else best.value)

  def _offer(self, step: int, value: float) -> None:
    if self._is_best(value):
      self._checkpointer.keep_best(BestCheckpoint(step, self._watched.path, self._watched.mode, value))
