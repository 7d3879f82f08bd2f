"""Curves on disk: TensorBoard event files, and the same numbers as one JSON object a line.

    job_log_dir/metrics.jsonl              {"step": 10, "split": "train", "time": 1760000000.0, "metrics": {"loss":
    2.345, ...}} job_log_dir/summaries/<split>/         event files, one folder a split so that TensorBoard overlays
    them

A run that resumes at step s drops what was written for later steps: curves go on, and nothing is in them twice.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from praxis_lite.call import Summary
from praxis_lite.errors import UserError

JSONL_NAME = 'metrics.jsonl'
_MAX_IMAGES = 4


class SummaryWriter:
  """Writes metrics of all splits of a run.

  Args:
    directory: the run's job_log_dir, which exists.
    resumed_step: the step of the restored checkpoint; 0 for a run that starts anew.
    enabled: False writes nothing: with several processes one writes.
  """

  def __init__(self, directory: str | os.PathLike[str], *, resumed_step: int = 0, enabled: bool = True):
    self._directory = Path(directory)
    self._resumed_step = resumed_step
    self._enabled = enabled
    self._event_writers: dict[str, Any] = {}
    self._at_resumed_step: set[str] = set()
    if enabled:
      self._at_resumed_step = truncate_jsonl(self.jsonl_path, resumed_step)
      self._jsonl = open(self.jsonl_path, 'a', encoding='utf-8')  # noqa: SIM115

  @property
  def jsonl_path(self) -> Path:
    return self._directory / JSONL_NAME

  def was_written(self, split: str) -> bool:
    """Whether the run that was resumed got as far as writing `split` at the restored step."""
    return split in self._at_resumed_step

  def write(
    self, step: int, split: str, metrics: Mapping[str, Any], summaries: Mapping[str, Summary] | None = None
  ) -> None:
    """Writes scalars, and summaries of any kind, for one step.

    Args:
      step: number of steps taken.
      split: 'train', 'eval/<input>' or 'decode/<input>'.
      metrics: numbers, or arrays whose leading dimensions are layers: `name` becomes `name/0`, `name/1`, ...
      summaries: what layers have added, with values on the host or the device. Scalars among them go to both files, the
        rest to the event files only.

    Raises:
      UserError: nothing more can be written there: the disk is full, say.
    """
    if not self._enabled:
      return
    try:
      self._write(step, split, metrics, summaries or {})
    except OSError as error:
      raise UserError(f'metrics cannot be written to {self._directory}: {error.strerror or error}') from error

  def close(self) -> None:
    """Closes all files."""
    if not self._enabled:
      return
    # All that could be written has been flushed; the rest has been told.
    for file in (self._jsonl, *self._event_writers.values()):
      with contextlib.suppress(OSError):
        file.close()

  def _write(self, step: int, split: str, metrics: Mapping[str, Any], summaries: Mapping[str, Summary]) -> None:
    scalars = expand_scalars(metrics)
    scalars |= expand_scalars({name: s.value for name, s in summaries.items() if s.kind == 'scalar'})
    # JSON has no NaN: a value that is not finite is null.
    finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
    record = {'step': step, 'split': split, 'time': round(time.time(), 3), 'metrics': finite}
    self._jsonl.write(json.dumps(record, allow_nan=False) + '\n')
    self._jsonl.flush()
    events = self._events(split)
    for name, value in scalars.items():
      events.add_scalar(name, value, step)
    for name, summary in summaries.items():
      if summary.kind != 'scalar':
        _add_summary(events, name, summary.kind, np.asarray(summary.value), step)
    events.flush()

  def _events(self, split: str) -> Any:
    if split not in self._event_writers:
      import tensorboardX

      # TensorBoard hides what earlier files hold from purge_step on. File names have seconds only: the suffix keeps a
      # run that resumes at once from writing over the file before.
      self._event_writers[split] = tensorboardX.SummaryWriter(
        str(self._directory / 'summaries' / split),
        purge_step=self._resumed_step + 1,
        filename_suffix=f'.{time.time_ns()}',
      )
    return self._event_writers[split]


def expand_scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
  """Returns one number a name: an array over layers becomes `name/0`, `name/1`, ...; over two axes, `name/0/0`, ..."""
  expanded: dict[str, float] = {}
  for name, value in metrics.items():
    array = np.asarray(value, np.float64)
    for index in np.ndindex(array.shape):
      expanded['/'.join([name, *map(str, index)])] = float(array[index])
  return expanded


def truncate_jsonl(path: Path, step: int) -> set[str]:
  """Drops lines of steps after `step`, and a line that was cut off; returns the splits written at `step` itself."""
  if not path.exists():
    return set()
  kept, splits = [], set()
  with open(path, encoding='utf-8') as lines:
    for record, line in _records(lines):
      if record['step'] <= step:
        kept.append(line if line.endswith('\n') else line + '\n')
      if record['step'] == step:
        splits.add(record['split'])
  # Through a second file, so that a run killed here still has the old one whole.
  shortened = path.with_suffix('.jsonl.tmp')
  shortened.write_text(''.join(kept), encoding='utf-8')
  os.replace(shortened, path)
  return splits


def _records(lines: Iterable[str]) -> Iterable[tuple[dict[str, Any], str]]:
  for line in lines:
    try:
      record = json.loads(line)
    except json.JSONDecodeError:
      continue
    if isinstance(record, dict) and 'step' in record and 'split' in record:
      yield record, line


def _add_summary(events: Any, name: str, kind: str, value: np.ndarray, step: int) -> None:
  if kind == 'histogram':
    events.add_histogram(name, value.astype(np.float32).ravel(), step)
  elif kind == 'image':
    images = value.reshape((-1, *value.shape[-3:]))[:_MAX_IMAGES]  # [..., H, W, C]
    events.add_images(name, images.astype(np.float32), step, dataformats='NHWC')
  elif kind == 'text':
    # A summary is an array, so text comes as the codes of its bytes.
    events.add_text(name, bytes(value.astype(np.uint8).ravel()).decode('utf-8', 'replace'), step)
