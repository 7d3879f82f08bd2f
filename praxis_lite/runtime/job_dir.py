"""The directory of a run, where everything it writes goes, one run at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from praxis_lite.errors import UserError


@contextlib.contextmanager
def job_directory(job_log_dir: str | os.PathLike[str]) -> Iterator[Path]:
  """Creates the directory if need be, and writes to it: better now than after an hour of compiling and training.

  If an error ends the block before anything was written, what was created is removed again.

  Raises:
    UserError: it cannot be created, or nothing can be written there.
  """
  path = Path(job_log_dir).expanduser().absolute()
  created: list[Path] = []
  try:
    created = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
      pass
  except OSError as error:
    raise UserError(f'job_log_dir {path} is not writable: {_reason(path, error)}') from None
  try:
    yield path
  except BaseException:
    with contextlib.suppress(OSError):  # It is not empty.
      for folder in created:
        folder.rmdir()
    raise


@contextlib.contextmanager
def held_for_training(path: Path) -> Iterator[None]:
  """Holds a directory for one training run at a time: a second would take half-written checkpoints for left-overs.

  The system lets go of it however the process ends. Where the file system knows no locks, nothing is held.

  Raises:
    UserError: another run is training there.
  """
  directory = os.open(path, os.O_RDONLY)
  try:
    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    os.close(directory)
    raise UserError(
      f'another run is training in job_log_dir {path}; wait for it to end or stop it, or choose another directory'
    ) from None
  except OSError:
    pass  # A file system without locks.
  try:
    yield
  finally:
    os.close(directory)


def _reason(path: Path, error: OSError) -> str:
  """What is in the way: the first folder that is none, or what the system says."""
  for folder in (path, *path.parents):
    if folder.is_dir():
      break
    if folder.exists():
      return f'{folder} is a file'
  return error.strerror or str(error)
