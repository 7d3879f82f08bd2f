"""Metrics on the host: averages them over batches, and writes curves to disk.

    job_log_dir/metrics.jsonl        {"step": 10, "split": "train", "time": 1760000000.0, "metrics": {"loss": 2.3, ...}}
    job_log_dir/summaries/<split>/   event files for TensorBoard, which draws the splits in one chart

A run that resumes at step s drops what was written for later steps, so curves continue without repeated points.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from praxis_lite.common.errors import UserError
from praxis_lite.common.files import KnownFolder, PatientFile, parse_json, read_plain, replace_file
from praxis_lite.common.foreign_text import printable
from praxis_lite.layers.base.call import Summary
from praxis_lite.runs.records.event_files import EventFile

Record = dict[str, Any]  # The object in a line of metrics.jsonl.
HostMetrics = dict[str, float | np.ndarray]  # Scalars are Python floats, which print plainly.
DeviceMetrics = Mapping[str, tuple[ArrayLike, ArrayLike]]  # (mean, weight) by name
# How many steps are dispatched before the metrics of the oldest are read. This keeps devices busy and bounds memory.
MAX_STEPS_IN_FLIGHT = 2
_RECORDS = 'metrics.jsonl'


class MetricsAverage:
  """Weighted means of named metrics over batches of any sizes, equal to those of one batch of all examples.

  Computes the same as `common/weighted.py`, with sums in float64: a mean of weight zero does not count, even if it is
  NaN. Unlike there, a metric with a total weight of zero is NaN, so that it is noticed.
  """

  def __init__(self) -> None:
    self._sums: dict[str, np.ndarray] = {}
    self._weights: dict[str, np.ndarray] = {}

  def add(self, metrics: DeviceMetrics) -> None:
    """Adds one batch's (mean, weight) pairs; elements of arrays, such as one per layer, are averaged separately."""
    for name, (value, weight) in jax.device_get(dict(metrics)).items():
      values = np.asarray(value, np.float64)
      weights = np.broadcast_to(np.asarray(weight, np.float64), values.shape)
      self._sums[name] = self._sums.get(name, 0.0) + np.where(weights == 0, 0.0, values * weights)
      self._weights[name] = self._weights.get(name, 0.0) + weights

  def means(self) -> HostMetrics:
    """Returns the mean of each metric; NaN if its total weight is zero."""
    with np.errstate(invalid='ignore', divide='ignore'):
      return {name: _plain(self._sums[name] / self._weights[name]) for name in self._sums}

  def weights(self) -> HostMetrics:
    """Returns the total weight of each metric."""
    return {name: _plain(weight) for name, weight in self._weights.items()}


def mean_values(metrics: DeviceMetrics) -> HostMetrics:
  """Returns the means of one step's (mean, weight) pairs, float64 on the host.

  A metric of weight zero has no meaningful value, and is left out, unless it is the loss.
  """
  return {
    name: _plain(np.asarray(value, np.float64))
    for name, (value, weight) in jax.device_get(dict(metrics)).items()
    if name == 'loss' or np.any(np.asarray(weight) != 0)
  }


def _plain(value: np.ndarray) -> float | np.ndarray:
  return float(value) if np.ndim(value) == 0 else value


class EvalResult(NamedTuple):
  """The metrics of one pass over an input.

  Attributes:
    split: 'eval/<input>' or 'decode/<input>'.
    metrics: numbers by name; if read from a file, they were expanded by `expand_scalars`.
  """

  step: int
  split: str
  metrics: HostMetrics


def read_results(directory: str | os.PathLike[str], up_to_step: int) -> list[EvalResult]:
  """Returns the evaluations and decoding runs that a run has recorded up to a step, in order."""
  results = []
  for _, record in metric_lines(Path(directory) / _RECORDS):
    if record['step'] <= up_to_step and record['split'] != 'train':
      numbers: HostMetrics = {name: np.nan if x is None else x for name, x in record.get('metrics', {}).items()}
      results.append(EvalResult(record['step'], record['split'], numbers))
  return results


class SummaryWriter:
  """Writes the metrics of all splits of a run.

  Args:
    resumed_step: the step of the restored checkpoint; 0 for a new run.
    lost: the `unwritten` lines of the earlier process, which are written now.
    enabled: False writes nothing; only one of several processes writes.
    report: prints a line when metrics cannot be written, and when they can be written again.
    log: called with step, split and scalars after they are written; see `runs/loggers`.

  Attributes:
    num_lines: the number of lines in metrics.jsonl, including lines that could not be written yet; 0 if not `enabled`.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    *,
    resumed_step: int = 0,
    lost: Sequence[Record] = (),
    enabled: bool = True,
    report: Callable[[str], object] = lambda line: None,
    log: Callable[[int, str, Mapping[str, float]], object] = lambda step, split, scalars: None,
  ):
    self._folder = KnownFolder(Path(directory).absolute())
    self._report = report
    self._log = log
    self._reported = ''
    self._resumed_step = resumed_step
    self._enabled = enabled
    self._event_files: dict[str, EventFile] = {}
    self._at_resumed_step: set[str] = set()
    self._unwritten: list[Record] = []
    self._without_file: list[tuple[Record, Mapping[str, Summary]]] = []  # The records that are in no event file yet.
    self.num_lines = 0
    if enabled:
      path = self._folder.path / _RECORDS
      written = _truncate_jsonl(path, resumed_step)
      self._jsonl = PatientFile(path)
      for record in lost:
        if _is_record(record) and record['step'] <= resumed_step:
          self._put(record, {}, is_new=(record['step'], record['split']) not in written)
          written.add((record['step'], record['split']))
      self.num_lines = len(written)
      self._at_resumed_step = {split for step, split in written if step == resumed_step}

  @property
  def unwritten(self) -> Sequence[Record]:
    """The lines for metrics.jsonl that are not completely on the disk yet."""
    return tuple(self._unwritten)

  def was_written(self, split: str) -> bool:
    """Whether the resumed run had written `split` at the restored step."""
    return split in self._at_resumed_step

  def write(
    self, step: int, split: str, metrics: Mapping[str, ArrayLike], summaries: Mapping[str, Summary] | None = None
  ) -> None:
    """Writes scalars, and summaries of any kind, for one step.

    If this fails, for example because the disk is full, it is reported, and the values are written with later ones.

    Args:
      metrics: numbers, or arrays whose leading dimensions are layers, for which `name` becomes `name/0`, `name/1`, ...
      summaries: summaries added by layers, with values on the host or the device. Scalars are written to metrics.jsonl
        and to the event files, other kinds only to the event files.
    """
    if not self._enabled:
      return
    summaries = summaries or {}
    scalars = expand_scalars({**metrics, **{name: s.value for name, s in summaries.items() if s.kind == 'scalar'}})
    # JSON has no NaN or infinity: such values become null.
    finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
    record = {'step': step, 'split': split, 'time': round(time.time(), 3), 'metrics': finite}
    self._put(record, {name: s for name, s in summaries.items() if s.kind != 'scalar'})
    self._log(step, split, scalars)

  def _put(self, record: Record, others: Mapping[str, Summary], *, is_new: bool = True) -> None:
    """Writes a record and other summaries to event files. A record that `is_new` is also written to metrics.jsonl."""
    if is_new:
      self.num_lines += 1
      self._jsonl.write(f'{json.dumps(record, allow_nan=False)}\n'.encode())
    self._without_file.append((record, others))
    if (error := self._add_events()) is None:
      self._unwritten.clear()
    else:
      self._unwritten.append(record)
    self._tell(error)

  def _add_events(self) -> OSError | None:
    """Writes pending records to event files, in order; returns the error if some cannot be written."""
    waiting, self._without_file = self._without_file, []
    failed: dict[str, OSError] = {}  # The error of each split whose events could not be written.
    for record, others in waiting:
      split = record['split']
      try:
        if split not in failed:
          events = self._events(split, record['step'])
          for name, value in record.get('metrics', {}).items():
            events.add(record['step'], name, 'scalar', math.nan if value is None else value)
          for name, summary in others.items():
            events.add(record['step'], name, summary.kind, np.asarray(summary.value))
          continue
      except OSError as cannot_be_made:
        failed[split] = cannot_be_made
      self._without_file.append((record, jax.device_get(dict(others))))
    errors = [*failed.values(), *(file.error for file in self._files())]
    return next((error for error in errors if error is not None), None)

  def move(self, directory: Path) -> None:
    """Sets the new path of the run's directory after a move; further files are created there."""
    if self._enabled:
      self._folder = KnownFolder(directory)

  def close(self) -> None:
    """Closes all files; raises UserError if some metrics cannot be written.

    If the directory itself is gone, this does not raise: the metrics would be lost with it anyway.
    """
    if not self._enabled:
      return
    cannot_be_made = self._add_events() if self._without_file else None
    for file in self._files():
      with contextlib.suppress(OSError):
        file.close()
    errors = [*(file.error for file in self._files()), cannot_be_made if self._without_file else None]
    error = next((error for error in errors if error is not None), None)
    if error is not None and not self._folder.is_elsewhere():
      raise UserError(_not_written(self._folder.path, error))

  def _files(self) -> list[EventFile | PatientFile]:
    return [self._jsonl, *self._event_files.values()]

  def _tell(self, error: OSError | None) -> None:
    """Reports when metrics can no longer be written, and when they can be written again."""
    if (line := '' if error is None else _not_written(self._folder.path, error)) != self._reported:
      later = '' if self._folder.is_elsewhere() else '; they are kept, and written later'
      self._report(f'{line}{later}' if line else f'metrics are written to {self._folder.path}')
      self._reported = line

  def _events(self, split: str, step: int) -> EventFile:
    if split not in self._event_files:
      # TensorBoard hides the entries after the resumed step. If metrics.jsonl has lost an evaluation of the resumed
      # step itself, that evaluation is repeated, and TensorBoard hides the entries of that step too.
      purge_step = min(step, self._resumed_step + 1)
      self._event_files[split] = EventFile(self._folder.subfolder(f'summaries/{split}'), purge_step)
    return self._event_files[split]


def _not_written(directory: Path, error: OSError) -> str:
  return f'metrics cannot be written to {directory}: {error.strerror or error}'


def expand_scalars(metrics: Mapping[str, ArrayLike]) -> dict[str, float]:
  """Returns one number per name: an array over layers becomes `name/0`, `name/1`, ...; with two axes, `name/0/0`."""
  expanded: dict[str, float] = {}
  for name, value in metrics.items():
    array = np.asarray(value, np.float64)
    for index in np.ndindex(array.shape):
      expanded['/'.join([name, *map(str, index)])] = float(array[index])
  return expanded


def metric_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields the lines of a metrics file with their parsed content; skips incomplete and damaged lines.

  If a file has damaged lines, a line on stderr says so, once in a process.

  Raises:
    UserError: the file exists, but cannot be read.
  """
  try:
    text = read_plain(path).decode(errors='replace')
  except FileNotFoundError:
    return
  except OSError as error:
    raise UserError(f'{path} cannot be read: {error.strerror or error}') from None
  lines, damaged = text.split('\n'), []
  for number, line in enumerate(lines, 1):
    try:
      record = parse_json(line)
    except ValueError:
      record = None
    if _is_record(record):
      yield line, record
    elif line.strip() and number < len(lines):  # The last line may be incomplete, because it is still being written.
      damaged.append(number)
  if damaged and path not in _reported:
    _reported.add(path)
    more = f' and {len(damaged) - 1} more are' if len(damaged) > 1 else ' is'
    print(printable(f'{path}: line {damaged[0]}{more} damaged, and left out', one_line=True), file=sys.stderr)


# The files of metrics whose damaged lines this process has reported.
_reported: set[Path] = set()


def _is_record(record: object) -> bool:
  if not isinstance(record, dict) or not isinstance(record.get('split'), str):
    return False
  step, metrics = record.get('step'), record.get('metrics', {})
  if type(step) is not int or not 0 <= step < 2**63 or not isinstance(metrics, dict):
    return False
  return all(x is None or type(x) is float or (type(x) is int and abs(x) < 2**63) for x in metrics.values())


def _truncate_jsonl(path: Path, step: int) -> set[tuple[int, str]]:
  """Drops the lines of steps after `step` and incomplete lines; returns the (step, split) of the lines that stay."""
  if not path.exists():
    return set()
  records = list(metric_lines(path))
  kept = [f'{line}\n' for line, record in records if record['step'] <= step]
  replace_file(path, ''.join(kept))  # Atomic: if the run is killed here, the old file stays complete.
  return {(record['step'], record['split']) for _, record in records if record['step'] <= step}
