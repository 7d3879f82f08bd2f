"""Heartbeats: each process of a run rewrites a small file every few seconds, which says what the process is doing.

    job_log_dir/heartbeats/<process>.json

A thread writes the file, even while the devices compute, a program compiles or storage stalls. The file appears
complete or not at all. If writing fails, the run goes on. `praxis-lite status` reads the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from praxis_lite.common.files import KnownFolder, parse_json, read_plain, replace_file
from praxis_lite.common.foreign_text import printable

SECONDS = 5.0
_NEWER = ('speed',)  # Fields that files of earlier versions lack.
_DIRECTORY = 'heartbeats'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heartbeat:
  """The last report of one process of a run.

  Attributes:
    time, started: when the heartbeat was written, and when the process began, in seconds since 1970.
    rate: recent steps per second; 0 if unknown.
    doing, doing_for: the activity, see `goodput.py`, and its seconds so far.
    saved_step, saved: the step of the last complete checkpoint, and when it was saved; None if there is none.
    memory: peaks of memory in bytes, by name.
    speed: 'median' and 'p90', in seconds, of recent steps; 'waited', the share of their time in which the process
      waited for input; with several processes also 'product', the seconds of a test product, see `host_speeds.py`; with
      peers also 'sent_rate', the bytes per second of its slowest transfer in the last emergency copy, and 'sent_to',
      the process that received this transfer.
    ended: how the process ended, such as 'done'; '' until it ends. 'no step taken' means that the run had already taken
      all steps of this process's config, but not all steps of its record.
  """

  process: int = 0
  processes: int = 1
  pid: int = 0
  host: str = ''
  time: float = 0.0
  started: float = 0.0
  step: int = 0
  total_steps: int = 0
  rate: float = 0.0
  doing: str = 'starting'
  doing_for: float = 0.0
  saved_step: int | None = None
  saved: float | None = None
  goodput: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  memory: Mapping[str, float] = dataclasses.field(default_factory=dict)
  speed: Mapping[str, float] = dataclasses.field(default_factory=dict)
  ended: str = ''


class HeartbeatFile:
  """Writes the heartbeat of this process from a thread, which calls `current` for its content."""

  def __init__(self, directory: Path, process: int, current: Callable[[], Heartbeat]):
    self._directory, self._name = KnownFolder(directory), f'{process}.json'
    self._current = current
    self._stop = threading.Event()
    self._thread: threading.Thread | None = None
    self._before: str | None = None  # The content of the file before the first write; None if there was no file.

  def start(self) -> None:
    """Starts writing, unless it has started already."""
    if self._thread is None:
      with contextlib.suppress(OSError, ValueError):
        self._before = read_plain(self._directory.path / _DIRECTORY / self._name).decode()
      self._thread = threading.Thread(target=self._beat, name='heartbeat', daemon=True)
      self._thread.start()

  def stop(self) -> None:
    """Writes the heartbeat one last time; does nothing if it was never started."""
    if self._stop_thread():
      self._write()

  def withdraw(self) -> None:
    """Stops, and leaves the file as it was before `start`; does nothing if it was never started."""
    if self._stop_thread():
      with contextlib.suppress(OSError):
        folder = self._directory.subfolder(_DIRECTORY)
        if self._before is None:
          (folder / self._name).unlink(missing_ok=True)
        else:
          replace_file(folder / self._name, self._before)

  def _stop_thread(self) -> bool:
    """Stops the thread; returns whether a thread was running and has ended."""
    if self._thread is None:
      return False
    self._stop.set()
    self._thread.join(timeout=SECONDS)  # Storage may stall.
    return not self._thread.is_alive()

  def _beat(self) -> None:
    self._write()
    while not self._stop.wait(SECONDS):
      self._write()

  def _write(self) -> None:
    with contextlib.suppress(OSError):
      folder = self._directory.subfolder(_DIRECTORY)
      replace_file(folder / self._name, json.dumps(dataclasses.asdict(self._current())) + '\n')


def read_heartbeats(directory: str | os.PathLike[str]) -> list[Heartbeat]:
  """Returns the last heartbeats of a run's processes, in the order of their indices; damaged files are skipped.

  Files that an earlier launch with more processes has left are ignored.
  """
  found = [beat for path in Path(directory, _DIRECTORY).glob('*.json') if (beat := _read(path)) is not None]
  found.sort(key=lambda beat: beat.process)
  return [beat for beat in found if beat.process < found[0].processes]


def _read(path: Path) -> Heartbeat | None:
  try:
    data = parse_json(read_plain(path))
    given = {f.name: data[f.name] for f in dataclasses.fields(Heartbeat) if f.name in data or f.name not in _NEWER}
  except (OSError, ValueError, TypeError, KeyError):
    return None
  defaults = Heartbeat()
  for name, value in given.items():
    default = getattr(defaults, name)
    expected = {type(None): (int, float, type(None)), float: (int, float)}.get(type(default), type(default))
    if not isinstance(value, expected) or isinstance(value, bool):
      return None
    if isinstance(value, str):
      given[name] = printable(value, one_line=True)
  return Heartbeat(**given)


# -------------------------------------------------------------------- whether the process lives


def life(beat: Heartbeat, *, is_held: bool, now: float | None = None) -> str:
  """Returns 'alive', 'silent' (the process exists, but gives no sign of life), 'ended' or 'dead'.

  Args:
    is_held: whether a process of this host is training in the run's directory.
    now: seconds since 1970, for tests.
  """
  age = max((time.time() if now is None else now) - beat.time, 0.0)
  if beat.ended:
    return 'ended'
  if is_held or (beat.host == socket.gethostname() and beat.process and _exists(beat.pid)):
    return 'alive' if age < _SILENT else 'silent'
  if beat.host == socket.gethostname() and not _exists(beat.pid):
    return 'dead'
  return 'alive' if age < _SILENT else 'dead'


# After this many seconds without a new heartbeat, a process counts as silent; network storage may show a file late.
_SILENT = 12 * SECONDS


def _exists(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except PermissionError:
    return True
  except (ProcessLookupError, OverflowError):
    return False
  return pid > 0
