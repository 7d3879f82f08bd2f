"""Compares the results of a run with those of an undisturbed run: parameters, metrics and event files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from praxis_lite.checkpoints.stored import checkpoints_at
from praxis_lite.checkpoints.streamed import stored_arrays, whole_box

# Metrics about durations and the machine, which differ in every run.
_OF_THE_MACHINE = ('speed/', 'goodput/', 'memory/', 'time/', 'input/')

MetricsLine = tuple[int, str, str]  # step, split, the metrics as JSON
Curves = dict[str, list[tuple[int, bytes]]]  # (step, value) by split and name, in order


class Results(NamedTuple):
  """What a finished run has written.

  Attributes:
    step: the step of its newest checkpoint.
    arrays: the bytes of each array of that checkpoint, by name.
    lines: the lines of metrics.jsonl, in order.
    curves: the curves of its event files, as TensorBoard shows them.
  """

  step: int
  arrays: dict[str, bytes]
  lines: list[MetricsLine]
  curves: Curves


def results_of(directory: Path) -> Results:
  """Reads a run directory. Raises if its newest checkpoint is damaged, or if an event file is, except at its end."""
  newest = [c for c in checkpoints_at(directory) if not c.is_set_aside][-1]
  stored = stored_arrays(str(newest.folder / 'state'), dict.fromkeys(newest.variables()))
  arrays = {name: np.asarray(a.read(whole_box(a.shape))).tobytes() for name, a in stored.items()}
  return Results(newest.step, arrays, _lines(directory / 'metrics.jsonl'), curves_of(directory / 'summaries'))


def differences(ours: Results, expected: Results, *, lost_before: int | None = None) -> list[str]:
  """Returns the differences of a run from the undisturbed one, one line for each.

  Args:
    ours: results of the run.
    expected: results of the undisturbed run.
    lost_before: metrics up to this step may be missing, because a fault has damaged their files.
  """
  found = [] if ours.step == expected.step else [f'it ended at step {ours.step}']
  found += [f'{n} differs' for n in expected.arrays | ours.arrays if ours.arrays.get(n) != expected.arrays.get(n)]
  found += _compare('metrics.jsonl', ours.lines, expected.lines, lost_before)
  for name in expected.curves | ours.curves:
    found += _compare(f'event files, {name}', ours.curves.get(name, []), expected.curves.get(name, []), lost_before)
  return found


def _compare(what: str, ours: list[Any], expected: list[Any], lost_before: int | None) -> list[str]:
  if lost_before is not None:
    if len(set(ours)) < len(ours) or [x[0] for x in ours] != sorted(x[0] for x in ours):
      return [f'{what}: steps twice or not in order: {[x[0] for x in ours]}']
    ours, expected = ([x for x in entries if x[0] > lost_before] for entries in (ours, expected))
  if ours == expected:
    return []
  if [x[:-1] for x in ours] != [x[:-1] for x in expected]:
    return [f'{what}: steps {[x[0] for x in ours]} instead of {[x[0] for x in expected]}']
  return [f'{what}: other values at steps {[a[0] for a, b in zip(ours, expected) if a != b]}']


def _lines(path: Path) -> list[MetricsLine]:
  lines = []
  for text in path.read_text(errors='replace').splitlines():
    try:
      record = json.loads(text)
      metrics = {k: v for k, v in record['metrics'].items() if not k.startswith(_OF_THE_MACHINE)}
      lines.append((record['step'], record['split'], json.dumps(metrics, sort_keys=True)))
    except (ValueError, TypeError, KeyError, AttributeError):
      lines.append((-1, 'not a record', text))
  return lines


def curves_of(folder: Path) -> Curves:
  """Reads event files as TensorBoard does: in the order of their names; a restart at a step removes later points."""
  from tensorboardX.proto import event_pb2

  curves: Curves = {}
  for split in sorted({path.parent for path in folder.rglob('*tfevents*')}):
    for file in sorted(split.glob('*tfevents*')):
      for record in _event_records(file):
        try:
          event = event_pb2.Event.FromString(record)
        except Exception:  # A byte of the record was changed.
          continue
        if event.session_log.status == event_pb2.SessionLog.START:
          for name, points in curves.items():
            if name.startswith(f'{split.relative_to(folder)}:'):
              curves[name] = [point for point in points if point[0] < event.step]
        for value in event.summary.value:
          if not value.tag.startswith(_OF_THE_MACHINE):
            point = event.step, struct.pack('f', value.simple_value)
            curves.setdefault(f'{split.relative_to(folder)}:{value.tag}', []).append(point)
  return curves


def _event_records(file: Path) -> Iterator[bytes]:
  """Yields the records of an event file up to the first damaged one, where TensorBoard stops too."""
  from tensorboardX.crc32c import crc32c

  data, at = file.read_bytes(), 0
  while at + 12 <= len(data):
    size, sum_of_size = struct.unpack_from('<QI', data, at)
    if _mask(crc32c(data[at : at + 8])) != sum_of_size or at + 16 + size > len(data):
      return
    record = data[at + 12 : at + 12 + size]
    if _mask(crc32c(record)) != struct.unpack_from('<I', data, at + 12 + size)[0]:
      return
    yield record
    at += 16 + size


def _mask(crc: int) -> int:
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
