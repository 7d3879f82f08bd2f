"""Finds the runs below a directory, and reads their progress, their results and their configs."""

from __future__ import annotations

import contextlib
import fnmatch
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from praxis_lite.checkpoints import saved_steps
from praxis_lite.common.config.text import fields_of
from praxis_lite.common.errors import UserError, did_you_mean, first_names
from praxis_lite.common.figures import duration
from praxis_lite.common.files import user_path
from praxis_lite.runs.records.certificate import Certificate, read_certificate
from praxis_lite.runs.records.curves import MetricsTable, read_metrics
from praxis_lite.runs.records.record import RunRecord, has_record, read_record, remedy_for_damage
from praxis_lite.runs.records.run_config import is_held


class RunState(NamedTuple):
  """The progress and the results of a run.

  Attributes:
    step, num_steps: the last step in the run's files, and the number of steps in its config, if known.
    is_running: whether a process is training in the directory.
    written: when the run last wrote something, in seconds since 1970.
    fields: the values of its recorded config, by path, and its seed; empty if it has no record.
    experiment: the experiment named in the command line, such as 'lm.StdlibLm', or 'mine' if only its file mine.py was
      named; '' if unknown.
    changed: the values of fields that changed between launches, such as '1.0 -> 3.0', by path.
    certificate: the predictions of a plan and the measurements; None if the run has no prediction.
    fault: why its record cannot be read, and what to do; '' if it can be read, or if there is none.
  """

  directory: Path
  step: int
  num_steps: int | None
  is_running: bool
  written: float
  metrics: MetricsTable
  fields: Mapping[str, str]
  experiment: str = ''
  changed: Mapping[str, str] = {}
  certificate: Certificate | None = None
  fault: str = ''

  @property
  def last_loss(self) -> float | None:
    """The last training loss that was written; None without one."""
    return float(self.metrics.curve('train/loss').values[-1]) if 'train/loss' in self.metrics else None

  def best(self, metric: str, mode: str) -> tuple[float, int] | None:
    """Returns the best value of a metric, and its step; None if it was never written or never finite.

    `metric` is a full name, or a pattern such as `eval/*/loss` that matches one metric of the run.
    """
    found = [metric] if metric in self.metrics else fnmatch.filter(self.metrics, metric)
    if not found:
      return None
    steps, values = self.metrics.curve(found[0])
    if not (finite := np.isfinite(values)).any():
      return None
    best = (np.argmin if mode == 'min' else np.argmax)(values[finite])
    return float(values[finite][best]), int(steps[finite][best])


def find_runs(folder: str | os.PathLike[str]) -> list[Path]:
  """Returns the run directories at or below a folder, sorted by name; raises UserError if the folder does not exist."""
  if not os.path.isdir(folder):
    what = 'is a file; name a directory' if os.path.exists(folder) else 'does not exist'
    raise UserError(f'{os.fspath(folder)} {what}')
  found = []
  for path, folders, files in os.walk(folder):
    if has_record(path) or 'metrics.jsonl' in files or 'checkpoints' in folders:
      found.append(Path(path))
      folders.clear()  # Folders inside a run belong to it.
    folders[:] = sorted(name for name in folders if not name.startswith('.'))
  return found


def runs_near(directory: str | os.PathLike[str]) -> str:
  """Returns the end of a message that helps to find a run near a directory that is not a run; '' if there is none.

  The directory may contain runs, be inside a run or next to one, or be a checkpoint from Hugging Face.
  """
  path = user_path(directory)
  if (path / 'config.json').is_file() and any(path.glob('*.safetensors')):
    command = f'praxis-lite import-hf {directory} --job_log_dir=runs/{path.absolute().name}'
    return f'; it is a checkpoint from Hugging Face, and `{command}` makes a run from it'
  for folder in path.parents:
    if has_record(folder):
      return f'; it is a part of the run {folder}'
  if path.is_file():
    return '; it is a file, and a run is a directory'
  if path.is_dir():
    if (found := [str(run) for run in find_runs(path)]) == [str(path)]:
      return f', though there are other files of a run; {remedy_for_damage(path)}'
    return f'; the runs below it are {first_names(found, _MOST_NEAR)}' if found else ''
  beside = [other.name for other in path.parent.iterdir() if has_record(other)] if path.parent.is_dir() else []
  return f'; there is no such directory.{did_you_mean(path.name, beside, cutoff=0.8)}'


_MOST_NEAR = 3


def read_run(directory: Path) -> RunState:
  """Returns the state of a run; a record that cannot be read counts as missing."""
  fields: dict[str, str] = {}
  experiment, changed, fault = '', dict[str, str](), ''
  try:
    record = read_record(directory)
    fields = fields_of(record.text) | {'seed': str(record.seed)}
    experiment = next(filter(None, map(_experiment_in, record.commands)), '')
    changed = _changed_fields(record)
  except UserError as error:
    fault = str(error) if has_record(directory) else ''
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
    experiment,
    changed,
    read_certificate(directory, metrics),
    fault,
  )


def _experiment_in(command: str) -> str:
  """Returns the experiment that a command line names, such as 'mine.Points' for dir/mine.py:Points; '' without one."""
  found = re.search(r"--?exp(?:=|\s+)'?([^\s']+)", command)
  folder, _, name = found[1].rpartition('/') if found else ('', '', '')
  if folder and not re.search(r'\.py(:|$)', name):  # --exp names the directory of another run.
    return ''
  return re.sub(r'\.py(?=:|$)', '', name).replace(':', '.')


def _changed_fields(record: RunRecord) -> dict[str, str]:
  values: dict[str, str] = {}
  for line in (line for launch in record.launches if launch.step for line in launch.changes):
    path, _, change = line.partition(': ')
    before, arrow, now = change.partition(' -> ')
    if arrow:
      values[path] = f'{values.get(path, before)} -> {now}'
  return values


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
