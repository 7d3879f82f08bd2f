"""Which checkpoints of a run are kept, and how the others are removed: never while being read, and never partially.

Readers share a lock on the folder of a step. Before a step is removed, its folder is locked exclusively and renamed, so
a kill during the removal leaves nothing that looks like a checkpoint. The system releases the locks of a process when
it ends. A removal holds its lock only for a moment. If another program holds an exclusive lock, readers wait, print a
line after a while, and finally raise an error. On a file system without locks, a reader that finds the newest step
removed reads the step that is the newest then.
"""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from praxis_lite.checkpoints.failures import unreadable
from praxis_lite.checkpoints.orbax.on_disk import INCOMPLETE
from praxis_lite.common.errors import CheckpointError
from praxis_lite.common.files import remove_all

_REMOVED = '.removed'
_DAMAGED = '.damaged'
# Seconds to wait for a lock before printing a line, and before giving up.
_QUIET, _PATIENCE = 2.0, 60.0
_POLL = 0.05
# Seconds until a line says that a removal takes long, and how many folders are removed at once.
_LONG, _AT_ONCE = 30.0, 8
# The folder in a run directory that contains a folder for each step.
CHECKPOINTS = 'checkpoints'


class RemovedError(CheckpointError):
  """A checkpoint was removed before it was read."""


def step_folder(job_log_dir: str | os.PathLike[str], step: int) -> Path:
  """Returns the path of a step's checkpoint in a run directory."""
  return Path(job_log_dir, CHECKPOINTS, str(step))


def steps_in(directory: str | os.PathLike[str]) -> list[int]:
  """Returns the steps of the complete checkpoints in a folder, in order; [] if the folder cannot be read.

  This reads only the names of the folders in it.
  """
  try:
    return sorted(int(entry.name) for entry in os.scandir(directory) if entry.name.isdecimal())
  except OSError:
    return []


def steps_to_remove(
  steps: Sequence[int], *, max_to_keep: int | None, keep_interval_steps: int | None, kept: Collection[int] = ()
) -> list[int]:
  """Returns the steps that can be removed.

  Args:
    steps: all existing steps, in order.
    max_to_keep: how many of the newest are kept; None keeps all.
    keep_interval_steps: steps that are multiples of this are kept; None disables it.
    kept: further steps to keep.
  """
  if max_to_keep is None:
    return []
  on_interval = {step for step in steps if keep_interval_steps is not None and step % keep_interval_steps == 0}
  return [step for step in steps[:-max_to_keep] if step not in on_interval and step not in kept]


@contextlib.contextmanager
def being_read(folder: str | os.PathLike[str]) -> Iterator[None]:
  """Keeps the folder of a step from being removed.

  Raises:
    RemovedError: the folder does not exist any more.
    CheckpointError: another process holds an exclusive lock for too long, or the folder cannot be opened.
  """
  try:
    with contextlib.ExitStack() as to_release:
      try:
        to_release.enter_context(_hold_lock(folder, shared=True))
      except FileNotFoundError:
        raise
      except OSError as error:  # For example, `folder` is a symbolic link to itself.
        raise unreadable(folder, error) from error
      yield
  except FileNotFoundError:
    raise RemovedError(f'{folder} was removed before it was read') from None


class Retention:
  """Removes the steps in a folder that need not be kept, in the background, by the rule of `steps_to_remove`."""

  def __init__(self, directory: str, *, max_to_keep: int | None, keep_interval_steps: int | None):
    self._directory = Path(directory)
    self._rule = {'max_to_keep': max_to_keep, 'keep_interval_steps': keep_interval_steps}
    self._lock = threading.Lock()
    self._thread: threading.Thread | None = None
    # The steps to remove after the current removal; None if there are none.
    self._next: Sequence[int] | None = None

  def start(self, kept: Collection[int]) -> None:
    """Starts to remove the steps that need not be kept, except `kept`, and finishes removals of earlier processes.

    Does not wait. If another removal is running, this one begins after it.
    """
    self._begin(steps_to_remove(steps_in(self._directory), **self._rule, kept=kept))

  def start_with_incomplete(self) -> None:
    """Starts to remove the remains of saves that were killed or failed. Call it only while nothing is being saved.

    A failed save may still be writing. Its folder is renamed first, so that further writes do not recreate files.
    """
    for folder in self._directory.glob(f'*{INCOMPLETE}*'):
      if not folder.name.endswith(_REMOVED):
        with contextlib.suppress(OSError):  # Another process has renamed the folder, or it cannot be removed now.
          take_away(folder)
    self._begin(None)

  def _begin(self, steps: Sequence[int] | None) -> None:
    """Starts the thread if it does not run.

    It removes `steps` next, in place of the queued steps; None keeps the queue.
    """
    with self._lock:
      self._next = steps if steps is not None else self._next or ()
      if self._thread is None:
        self._thread = threading.Thread(target=self._run, name='retention')
        self._thread.start()

  def wait(self) -> None:
    """Waits until the removal is finished; prints a line if that takes long."""
    with self._lock:
      thread = self._thread
    if thread is not None:
      thread.join(_LONG)
      if thread.is_alive():
        print(f'waiting until old checkpoints in {self._directory} are removed', file=sys.stderr, flush=True)
      thread.join()

  def _run(self) -> None:
    while True:
      with self._lock:
        steps, self._next = self._next, None
        if steps is None:
          self._thread = None
          return
      self._remove(steps)

  def _remove(self, steps: Sequence[int]) -> None:
    for step in steps:
      folder = self._directory / str(step)
      # If the step is being read, or cannot be removed now, the next call tries again.
      with contextlib.suppress(OSError), _hold_lock(folder, shared=False):
        take_away(folder)
    _remove_folders(self._directory.glob(f'*{_REMOVED}'))


def _remove_folders(folders: Iterable[Path]) -> None:
  """Removes folders in parallel: on some file systems, removing several at once takes as long as removing one."""
  waiting = collections.deque(folders)

  def remove() -> None:
    with contextlib.suppress(IndexError):
      while True:
        remove_all(waiting.popleft())

  helpers = [threading.Thread(target=remove) for _ in range(min(_AT_ONCE, len(waiting)) - 1)]
  # At interpreter exit no thread can start. Then the current thread removes all checkpoints.
  with contextlib.suppress(RuntimeError):
    for helper in helpers:
      helper.start()
  remove()
  for helper in helpers:
    if helper.ident is not None:
      helper.join()


def take_away(folder: Path) -> Path:
  """Renames the folder of a step that will be removed, so that it no longer looks like a step; returns the new path."""
  return folder.rename(folder.with_name(f'{folder.name}.{uuid.uuid4().hex[:8]}{_REMOVED}'))


def set_aside(folder: Path) -> Path:
  """Renames the folder of a damaged step, so that it no longer looks like a checkpoint; returns the new path."""
  aside = folder.with_name(f'{folder.name}{_DAMAGED}')
  count = 1
  while aside.exists():
    count += 1
    aside = folder.with_name(f'{folder.name}{_DAMAGED}.{count}')
  return folder.rename(aside)


def is_set_aside(folder: Path) -> bool:
  """Whether a folder is a damaged step that was set aside."""
  step, _, rest = folder.name.partition('.')
  return step.isdecimal() and f'.{rest}'.startswith(_DAMAGED)


@contextlib.contextmanager
def _hold_lock(folder: str | os.PathLike[str], *, shared: bool) -> Iterator[None]:
  """Locks a folder.

  Raises:
    FileNotFoundError: the folder does not exist.
    BlockingIOError: the folder cannot be locked exclusively now.
    CheckpointError: waiting for a shared lock took too long.
  """
  if sys.platform == 'win32':  # Windows has no such locks.
    yield
    return
  import fcntl

  handle = os.open(folder, os.O_RDONLY | os.O_NONBLOCK)  # Non-blocking, in case the path is now a named pipe.
  try:
    try:
      if shared:
        _wait_for_shared_lock(handle, folder)
      else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise
    except OSError:
      pass  # The file system has no locks.
    if not os.path.samestat(os.fstat(handle), os.stat(folder)):  # The folder was replaced before it was locked.
      raise FileNotFoundError(folder)
    yield
  finally:
    os.close(handle)


def _wait_for_shared_lock(handle: int, folder: str | os.PathLike[str]) -> None:
  """Locks an open folder together with other readers; raises OSError if the file system has no locks.

  Raises CheckpointError if another process keeps it locked exclusively.
  """
  import fcntl

  start, is_told = time.monotonic(), False
  while True:
    try:
      fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
      return
    except BlockingIOError:
      waited = time.monotonic() - start
    holder = lock_holder(os.fstat(handle)) or 'another process'
    if waited > _PATIENCE:
      raise CheckpointError(
        f'{folder} has been locked by {holder} for more than {_PATIENCE:g} s: end that process, which is not one of '
        'praxis_lite, or read another checkpoint'
      )
    if waited > _QUIET and not is_told:
      is_told = True
      print(f'{folder} is locked by {holder}; waiting {_PATIENCE:g} s for it', file=sys.stderr, flush=True)
    time.sleep(_POLL)


def lock_holder(about: os.stat_result) -> str:
  """Returns the process of this machine that has locked a file, given its `os.stat`; '' if the system does not say."""
  wanted = f'{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}'
  with contextlib.suppress(OSError, ValueError):
    for line in Path('/proc/locks').read_text().splitlines():
      # 1: FLOCK  ADVISORY  WRITE 4711 fe:01:2097154 0 EOF; waiting entries have -> after the number.
      fields = line.split()
      if len(fields) > 5 and fields[1] == 'FLOCK' and fields[3] == 'WRITE' and fields[5] == wanted:
        pid = int(fields[4])
        name = Path(f'/proc/{pid}/comm').read_text().strip() if pid > 0 else ''
        return f'process {pid} ({name})' if name else ''
  return ''
