"""Event files for TensorBoard, written synchronously, so that a killed run loses no events.

tensorboardX makes the files and summaries. Its own writer is not used: it writes in a thread that ends at the first
disk error, and it times its waits by the machine's clock, which may be set back.
"""

from __future__ import annotations

import functools
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from praxis_lite.common.files import PatientFile
from praxis_lite.common.statistics import bin_edges

if TYPE_CHECKING:
  from tensorboardX.proto.event_pb2 import Event
  from tensorboardX.proto.summary_pb2 import Summary

_MAX_IMAGES = 4
_NAME = re.compile(r'events\.out\.tfevents\.(\d{10})')
_PATIENT = 'praxis_lite_patient'  # tensorboardX lets `_PatientFiles` open paths with this prefix.


class EventFile:
  """An event file in a folder. Events that cannot be written yet are kept, and written with the next ones.

  Args:
    folder: an existing folder.
    purge_step: TensorBoard hides the entries of earlier files from this step on.

  Raises:
    OSError: the file cannot be created.
  """

  def __init__(self, folder: Path, purge_step: int):
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.record_writer import register_writer_factory

    patient = _PatientFiles()
    register_writer_factory(_PATIENT, patient)
    logging.getLogger('tensorboardX').setLevel(logging.ERROR)  # It would warn about each NaN and infinity.
    # File names contain whole seconds: without a suffix, a run that resumes within a second would reuse the file.
    self._file = EventsWriter(f'{_PATIENT}:{folder / "events"}', f'.{time.time_ns()}')
    self._on_disk = patient.opened
    self._write(Event(session_log=SessionLog(status=SessionLog.START)), purge_step)

  @property
  def error(self) -> OSError | None:
    """The reason why some events are not written yet; None if all are written."""
    return self._on_disk.error

  def add(self, step: int, name: str, kind: str, value: np.ndarray | float) -> None:
    """Writes a summary of a kind: 'scalar', 'histogram', 'image' ([..., height, width, channels]) or 'text' (as bytes).

    The kind 'bins' is a histogram given by the number of entries in each bin of `common/statistics.py`.
    """
    from tensorboardX import summary
    from tensorboardX.proto.event_pb2 import Event

    x = np.asarray(value)
    match kind:
      case 'scalar':
        made = summary.scalar(name, float(x))
      case 'histogram':
        made = summary.histogram(name, x.astype(np.float32).ravel(), _bins())
      case 'bins':
        made = _summary_of_bins(name, x)
      case 'image':
        images = x.reshape((-1, *x.shape[-3:]))[:_MAX_IMAGES]
        made = summary.image(name, images.astype(np.float32), dataformats='NHWC')
      case 'text':
        made = summary.text(name, bytes(x.astype(np.uint8).ravel()).decode('utf-8', 'replace'))
      case _:
        return
    self._write(Event(summary=made), step)

  def close(self) -> None:
    """Tries once more to write pending events, then closes the file."""
    self._file.close()

  def _write(self, event: Event, step: int) -> None:
    event.step, event.wall_time = step, time.time()
    self._file.write_event(event)


def _summary_of_bins(name: str, counts: np.ndarray) -> Summary:
  """Returns a histogram without the empty bins at both ends. Its sums count each value as the middle of its bin."""
  from tensorboardX import summary

  right = bin_edges()
  left = np.concatenate([2 * right[:1], right[:-1]])
  used = np.flatnonzero(counts)
  low, high = (used[0], used[-1] + 1) if len(used) else (len(right) // 2, len(right) // 2 + 1)
  middles = np.where(np.arange(len(right)) == len(right) // 2, 0, (left + right) / 2)
  totals = counts.sum(), (counts * middles).sum(), (counts * middles**2).sum()
  return summary.histogram_raw(name, left[low], right[high - 1], *totals, right[low:high], counts[low:high])


@functools.cache
def _bins() -> np.ndarray:
  """Returns the edges of histogram bins: 0, and +-1e-12 to +-1e20, each edge 1.1 times the one before."""
  positive = 1e-12 * 1.1 ** np.arange(774)
  return np.concatenate([-positive[::-1], [0], positive])


class _PatientFiles:
  """Opens the files that tensorboardX is to write with `PatientFile`: their paths begin with `_PATIENT`.

  `opened` is the file that was opened last.
  """

  opened: PatientFile

  def open(self, path: str) -> PatientFile:
    self.opened = PatientFile(_later_than_others(Path(path.removeprefix(f'{_PATIENT}:'))))
    return self.opened


def _later_than_others(file: Path) -> Path:
  """Returns a name whose time is later than those of all other event files, because TensorBoard reads them by time.

  The clock may have been set back since the others were written.
  """
  seconds = [int(m[1]) for other in file.parent.glob('*') if (m := _NAME.match(other.name))]
  ours = _NAME.match(file.name)
  if ours is None or int(ours[1]) > max(seconds, default=-1):
    return file
  return file.with_name(f'events.out.tfevents.{max(seconds) + 1:010}{file.name[ours.end() :]}')
