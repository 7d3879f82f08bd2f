"""Event files for TensorBoard, written at once: what a killed run had reported is there, and no thread can die.

The files and summaries are those of tensorboardX. Its own writer hands them to a thread by way of a queue that waits by
the clock of the machine, which may be set back, and that ends with the first error of the disk.
"""

from __future__ import annotations

import functools
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from praxis_lite.files import PatientFile

if TYPE_CHECKING:
  from tensorboardX.proto.event_pb2 import Event

_MAX_IMAGES = 4
_NAME = re.compile(r'events\.out\.tfevents\.(\d{10})')
_PATIENT = 'praxis_lite_patient'  # What paths begin with that tensorboardX lets us open.


class EventFile:
  """A file of curves in a folder. What cannot be written yet is kept, and written with what comes next.

  Args:
    folder: is there.
    purge_step: TensorBoard hides the entries of earlier files from this step on.

  Raises:
    OSError: the file cannot be made.
  """

  def __init__(self, folder: Path, purge_step: int):
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.record_writer import register_writer_factory

    patient = _PatientFiles()
    register_writer_factory(_PATIENT, patient)
    logging.getLogger('tensorboardX').setLevel(logging.ERROR)  # It warns of each number that is not finite.
    # Names contain whole seconds: without a suffix, a run that resumes at once would write to the file before.
    self._file = EventsWriter(f'{_PATIENT}:{folder / "events"}', f'.{time.time_ns()}')
    self._on_disk = patient.opened
    self._write(Event(session_log=SessionLog(status=SessionLog.START)), purge_step)

  @property
  def error(self) -> OSError | None:
    """Why not all is written yet; None if it is."""
    return self._on_disk.error

  def add(self, step: int, name: str, kind: str, value: np.ndarray | float) -> None:
    """Writes a summary of a kind: 'scalar', 'histogram', 'image' ([..., H, W, C]) or 'text' (codes of its bytes)."""
    from tensorboardX import summary
    from tensorboardX.proto.event_pb2 import Event

    x = np.asarray(value)
    match kind:
      case 'scalar':
        made = summary.scalar(name, float(x))
      case 'histogram':
        made = summary.histogram(name, x.astype(np.float32).ravel(), _bins())
      case 'image':
        images = x.reshape((-1, *x.shape[-3:]))[:_MAX_IMAGES]
        made = summary.image(name, images.astype(np.float32), dataformats='NHWC')
      case 'text':
        made = summary.text(name, bytes(x.astype(np.uint8).ravel()).decode('utf-8', 'replace'))
      case _:
        return
    self._write(Event(summary=made), step)

  def close(self) -> None:
    """Tries once more to write what could not be written."""
    self._file.close()

  def _write(self, event: Event, step: int) -> None:
    event.step, event.wall_time = step, time.time()
    self._file.write_event(event)


@functools.cache
def _bins() -> np.ndarray:
  """Where bins of histograms begin: each is a tenth wider than the one nearer to zero, from 1e-12 to 1e20."""
  positive = 1e-12 * 1.1 ** np.arange(774)
  return np.concatenate([-positive[::-1], [0], positive])


class _PatientFiles:
  """How tensorboardX opens files whose path begins with `_PATIENT`; `opened` is the last one."""

  opened: PatientFile

  def open(self, path: str) -> PatientFile:
    self.opened = PatientFile(_later_than_others(Path(path.removeprefix(f'{_PATIENT}:'))))
    return self.opened


def _later_than_others(file: Path) -> Path:
  """Returns the name of an event file with a later second than the others: TensorBoard reads them in this order.

  The clock may have been set back since they were written.
  """
  seconds = [int(m[1]) for other in file.parent.glob('*') if (m := _NAME.match(other.name))]
  ours = _NAME.match(file.name)
  if ours is None or int(ours[1]) > max(seconds, default=-1):
    return file
  return file.with_name(f'events.out.tfevents.{max(seconds) + 1:010}{file.name[ours.end() :]}')
