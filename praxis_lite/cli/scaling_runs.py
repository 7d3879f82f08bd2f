"""Reads from finished runs the parameters, tokens and losses to which a scaling law is fitted."""

from __future__ import annotations

import fnmatch
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from praxis_lite.common.config import Config
from praxis_lite.common.errors import UserError
from praxis_lite.common.foreign_text import printable
from praxis_lite.instruments.explain.report import batch_of
from praxis_lite.instruments.plan.scaling_law import FinishedRun
from praxis_lite.runs.records.comparing import metric_to_compare
from praxis_lite.runs.records.record import read_record
from praxis_lite.runs.records.runs import RunState, find_runs, read_run

_TRAIN_LOSS = 'train/loss'
_END = 0.1  # The training loss is the mean over the last steps, this share of all steps.
_VOCABULARY = 'task.model.vocab_size'


class FinishedRuns(NamedTuple):
  """Runs to fit a scaling law to."""

  runs: tuple[FinishedRun, ...]
  metric: str  # The metric that is the loss of the runs; a pattern such as `eval/*/loss` if each run has another input.
  left_out: Mapping[str, str]  # Why each other run is left out, by its directory.
  vocab_size: str  # The size of the runs' vocabulary as text; '' if they have none.


def read_finished_runs(folder: str, metric: str | None = None, trusted: Sequence[str] = ()) -> FinishedRuns:
  """Returns the finished runs at or below a folder.

  Args:
    metric: the metric to take as the loss, as in `praxis-lite runs`. The default is the loss on evaluation data, or if
      no run has that, the mean training loss at the end.
    trusted: modules or files whose code the configs may name.

  Raises:
    UserError: the folder has no runs, no run has the metric, or runs have different vocabularies.
  """
  states = [read_run(directory) for directory in find_runs(folder)]
  if not states:
    raise UserError(f'--runs={folder}: there are no runs; name the folder of finished runs')
  found: list[FinishedRun] = []
  left_out: dict[str, str] = {}
  name = _metric_of(states, metric)
  vocabularies: dict[str, str] = {}
  for state in states:
    try:
      found.append(_finished_run(state, name, trusted))
      vocabularies.setdefault(state.fields.get(_VOCABULARY, ''), os.fspath(state.directory))
    except UserError as error:
      left_out[os.fspath(state.directory)] = str(error)
  if len(vocabularies) > 1:
    (one, first), (other, second), *_ = vocabularies.items()
    raise UserError(
      f'--runs={folder}: losses of different vocabularies are not comparable; {first} has vocab_size = {one}, and '
      f'{second} {other}'
    )
  return FinishedRuns(tuple(found), name, left_out, next(iter(vocabularies), ''))


def say_left_out(found: FinishedRuns) -> None:
  """Prints on stderr why runs are left out."""
  for name, reason in found.left_out.items():
    print(printable(f'left out: {name}: {reason}', one_line=True), file=sys.stderr)


def count_active_parameters(task: Config) -> int:
  """Returns the number of parameters that one token uses, for the model of `task`."""
  found: int = task.instantiate().model.active_num_params
  return found


def _metric_of(states: Sequence[RunState], metric: str | None) -> str:
  names = {name for state in states for name in state.metrics}
  if metric is None and not any(name.startswith('eval/') and name.endswith('/loss') for name in names):
    return _TRAIN_LOSS
  return metric_to_compare(states, metric or 'loss', 'min')[0]


def _finished_run(state: RunState, metric: str, trusted: Sequence[str]) -> FinishedRun:
  """Returns a run as a `FinishedRun`; raises a UserError that says why it cannot be one."""
  if state.is_running or state.num_steps is None or state.step < state.num_steps:
    of = '' if state.num_steps is None else f' of {state.num_steps:,}'
    raise UserError(f'it is not finished: step {state.step:,}{of}')
  step, loss = _last_loss(state, metric)
  config = read_record(state.directory, trusted=trusted).config
  batch = batch_of(config.datasets)
  shape = () if batch is None else getattr(batch.get('ids'), 'shape', ())
  if len(shape) != 2:
    raise UserError('the tokens of its batches are not known')
  tokens = step * math.prod(shape)
  return FinishedRun(count_active_parameters(config.task), tokens, loss, os.fspath(state.directory))


def _last_loss(state: RunState, metric: str) -> tuple[int, float]:
  """Returns the last step with a metric, and its value there; for the training loss, the mean of the last steps.

  Raises UserError if the run lacks the metric, if its value is not finite, or if it was last written long before the
  end of the run.
  """
  assert state.num_steps is not None
  names = [metric] if metric in state.metrics else fnmatch.filter(state.metrics, metric)
  if not names:
    raise UserError(f'it has no {metric}')
  steps, values = state.metrics.curve(names[0])
  step, end = int(steps[-1]), (1 - _END) * state.num_steps
  if step < end:
    raise UserError(f'its last {names[0]} is of step {step:,} of {state.num_steps:,}')
  loss = float(np.mean(values[steps > end]) if names[0] == _TRAIN_LOSS else values[-1])
  if not math.isfinite(loss):
    raise UserError(f'its {names[0]} is not finite')
  return step, loss
