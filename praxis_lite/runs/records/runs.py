"""Finds the runs below a directory, and reads their progress, their results, and how their configs differ."""

from __future__ import annotations

import contextlib
import fnmatch
import math
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from praxis_lite.checkpoints import saved_steps
from praxis_lite.common.config.text import fields_of
from praxis_lite.common.errors import UserError, did_you_mean
from praxis_lite.common.figures import duration
from praxis_lite.common.files import user_path
from praxis_lite.runs.records.curves import MetricsTable, read_metrics
from praxis_lite.runs.records.record import has_record, read_record
from praxis_lite.runs.records.run_config import is_held


class RunState(NamedTuple):
  """The progress and the results of a run.

  Attributes:
    directory: the run directory.
    step, num_steps: the last step in the run's files, and the number of steps in its config, if known.
    is_running: whether a process is training in it.
    written: when the run last wrote something, in seconds since 1970.
    metrics: all metrics.
    fields: its recorded config, as values by path; empty if it has no record.
  """

  directory: Path
  step: int
  num_steps: int | None
  is_running: bool
  written: float
  metrics: MetricsTable
  fields: Mapping[str, str]

  @property
  def last_loss(self) -> float | None:
    """The last training loss that was written."""
    return float(self.metrics.curve('train/loss').values[-1]) if 'train/loss' in self.metrics else None

  def best(self, metric: str, mode: str) -> tuple[float, int] | None:
    """Returns the best value of a metric, and its step; None if it was never written, or never finite.

    `metric` is a full name, or a pattern such as `eval/*/loss` that matches one metric of the run.
    """
    found = [metric] if metric in self.metrics else fnmatch.filter(self.metrics, metric)
    if not found:
      return None
    steps, values = self.metrics.curve(found[0])
    finite = np.isfinite(values)
    if not finite.any():
      return None
    best = (np.argmin if mode == 'min' else np.argmax)(values[finite])
    return float(values[finite][best]), int(steps[finite][best])


def find_runs(folder: str | os.PathLike[str]) -> list[Path]:
  """Returns the run directories at or below a folder, sorted by name.

  Raises:
    UserError: the folder does not exist.
  """
  if not os.path.isdir(folder):
    raise UserError(f'there is no directory {os.fspath(folder)!r}')
  found = []
  for path, folders, files in os.walk(folder):
    if has_record(path) or 'metrics.jsonl' in files or 'checkpoints' in folders:
      found.append(Path(path))
      folders.clear()  # Folders below a run belong to it.
    folders[:] = sorted(name for name in folders if not name.startswith('.'))
  return found


def runs_near(directory: str | os.PathLike[str]) -> str:
  """Returns which runs are near a directory that is not a run, as the end of a message; '' if there are none."""
  path = user_path(directory)
  for folder in path.parents:
    if has_record(folder):
      return f'; it is a part of the run {folder}'
  if path.is_dir():
    found = [str(run) for run in find_runs(path)]
    more = f' and {len(found) - _MOST_NEAR} more' if len(found) > _MOST_NEAR else ''
    return f'; the runs below it are {", ".join(found[:_MOST_NEAR])}{more}' if found else ''
  beside = [other.name for other in path.parent.iterdir() if has_record(other)] if path.parent.is_dir() else []
  return f'; there is no such directory.{did_you_mean(path.name, beside)}'


_MOST_NEAR = 3


def read_run(directory: Path) -> RunState:
  """Returns the state of a run; a record that cannot be read counts as missing."""
  fields: dict[str, str] = {}
  with contextlib.suppress(UserError):
    fields = fields_of(read_record(directory).text)
  metrics = read_metrics(directory)
  num_steps = fields.get('task.train.num_train_steps', '')
  return RunState(
    directory,
    max([0, *metrics.steps.tolist(), *saved_steps(directory)]),
    int(num_steps) if num_steps.isdecimal() else None,
    is_held(directory),
    max(_write_times(directory), default=0.0),
    metrics,
    fields,
  )


def metric_to_compare(runs: Sequence[RunState], metric: str | None, mode: str | None) -> tuple[str, str]:
  """Returns the full name of the metric for comparing runs, and 'min' or 'max'.

  If the metric belongs to a different input in each run, the name is a pattern, such as `eval/*/accuracy`.

  Args:
    runs: the runs.
    metric: a full name, such as 'eval/validation/loss', or the end of one. None uses the `best_metric` that the configs
      agree on, or otherwise the loss; if several inputs have that metric, the input that most runs have.
    mode: 'min' if lower is better, otherwise 'max'. None uses 'max' for `accuracy`, the mode of the configs for their
      own metric, and 'min' for other metrics.

  Raises:
    UserError: no run has the metric, or several inputs of one run have it.
  """
  recorded = {run.fields.get('task.train.best_metric', 'None').strip('\'"') for run in runs}
  modes = {run.fields.get('task.train.best_metric_mode', '').strip('\'"') for run in runs}
  agreed = next(iter(recorded)) if len(recorded) == 1 else 'None'
  if mode is None:
    mode = 'max' if modes == {'max'} and metric in (None, agreed) and agreed != 'None' else 'min'
    mode = 'max' if metric is not None and metric.rpartition('/')[2] == 'accuracy' else mode
  wanted = metric or (agreed if agreed != 'None' else 'loss')
  known = sorted({name for run in runs for name in run.metrics})
  if wanted in known:
    return wanted, mode
  found = [name for name in known if name.startswith('eval/') and name.endswith(f'/{wanted}')]
  if metric is not None and len(found) > 1:
    if any(sum(name in run.metrics for name in found) > 1 for run in runs):
      raise UserError(f'--metric={metric}: several inputs have it; write {" or ".join(found)}')
    return f'eval/*/{metric}', mode
  if metric is not None and not found:
    close = did_you_mean(metric, known)
    raise UserError(f'--metric={metric}: no run has it.{close} They have {", ".join(known) or "no metrics"}')
  return max(found, key=lambda name: sum(name in run.metrics for run in runs), default=wanted), mode


def best_run(runs: Sequence[RunState], metric: str, mode: str) -> RunState | None:
  """Returns the run with the best value of a metric; None if no run has the metric."""
  sign = 1 if mode == 'min' else -1
  scored = [(sign * best[0], i) for i, run in enumerate(runs) if (best := run.best(metric, mode)) is not None]
  return runs[min(scored)[1]] if scored else None


def differing_fields(runs: Sequence[RunState]) -> list[dict[str, str]]:
  """Returns for each run the fields in which the recorded configs differ, by the shortest unambiguous names.

  The most important fields come first. If the class of a config differs between runs, as with different models, its
  fields are compared only among the runs that have the same class.
  """
  recorded = [run.fields for run in runs if run.fields]
  paths = dict.fromkeys(path for fields in recorded for path in fields)
  classes = [p for p in paths if p != 'task' and len({f[p] for f in recorded if p in f and _is_class(f, p)}) > 1]
  differing: dict[str, None] = {}
  by_run: list[set[str]] = [set() for _ in runs]
  for path in sorted(paths, key=_importance):
    above = [c for c in classes if path.startswith((f'{c}.', f'{c}['))]
    alike: dict[tuple[str | None, ...], list[int]] = {}
    for i, run in enumerate(runs):
      if run.fields:
        alike.setdefault(tuple(run.fields.get(c) for c in above), []).append(i)
    for group in alike.values():
      if len({runs[i].fields.get(path) for i in group}) > 1:
        differing[path] = None
        for i in group:
          by_run[i].add(path)
  merged = _merged_entries(list(differing), recorded)
  names = short_names(set(merged.values()))
  return [
    {names[merged[path]]: run.fields[path] for path in differing if path in run.fields and path in own}
    for run, own in zip(runs, by_run)
  ]


def _is_class(fields: Mapping[str, str], path: str) -> bool:
  """Whether the entry at a path names the class of a config, so that fields below the path belong to it."""
  return any(other.startswith(f'{path}.') for other in fields)


def _importance(path: str) -> tuple[int, int]:
  """Returns a sort key: fields that change results come first, from the root down; shardings come last."""
  if re.search(r'split|mesh|axis_rules|strategy|partitioning', path):
    return 2, 0
  if path == 'task.model':
    return 0, 0
  if path == 'task' or re.search(r'\.name$|interval_steps$|^task\.(evaluate|decode)|decoder_tpl|max_to_keep', path):
    return 1, 0
  return 0, 1 if path.endswith(('_tpl', '.optimizer')) else path.count('.')


def _merged_entries(paths: Sequence[str], recorded: Sequence[Mapping[str, str]]) -> dict[str, str]:
  """Returns for each path the one to show: `datasets[*].path` if in each run all datasets have the same value."""
  groups: dict[str, list[str]] = {}
  for path in paths:
    groups.setdefault(re.sub(r'\[\d+\]', '[*]', path), []).append(path)
  shown: dict[str, str] = {}
  for pattern, members in groups.items():
    are_equal = all(len({fields.get(path) for path in members}) == 1 for fields in recorded)
    shown |= {path: pattern if are_equal and len(members) > 1 else path for path in members}
  return shown


def short_names(paths: Collection[str]) -> dict[str, str]:
  """Returns for each path its shortest ending, in whole names, that no other path has."""
  endings = {path: _endings(path) for path in paths}
  counts: dict[str, int] = {}
  for found in endings.values():
    for ending in found:
      counts[ending] = counts.get(ending, 0) + 1
  return {path: next((e for e in found if counts[e] == 1), path) for path, found in endings.items()}


def _endings(path: str) -> list[str]:
  parts = path.split('.')
  return ['.'.join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]


def format_number(value: float | None) -> str:
  """Returns a number with four digits, or '-' for None."""
  return '-' if value is None else f'{value:.4g}' if math.isfinite(value) else str(value)


def age(run: RunState) -> str:
  """Returns 'running', or how long ago the run last wrote something; '-' if it never did."""
  if run.is_running or not run.written:
    return 'running' if run.is_running else '-'
  return duration(time.time() - run.written)


# -------------------------------------------------------------------- files


def _write_times(directory: Path) -> Iterator[float]:
  for name in ('run.json', 'metrics.jsonl', 'checkpoints'):
    with contextlib.suppress(OSError):
      yield (directory / name).stat().st_mtime
