"""The directory of a run while it trains: this process holds it, and notices if it is moved or deleted.

A directory is identified by its device and inode, and is kept open. So a directory that was moved can be found. A
directory that was deleted can be told apart from one whose disk is unmounted for a while; in the latter case, training
goes on.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from praxis_lite.common.errors import UserError
from praxis_lite.common.processes import gather_texts

_DELETED = ' (deleted)'  # Linux appends this to the path of an open directory that was deleted.
_RESCUED = '.rescued'
# The longest message, in bytes, about a lost directory: three paths, and some words.
_PATH_BYTES = 16_384


def gather_paths(text: str) -> list[str]:
  """Returns the texts of all processes, like `gather_texts`, with room for long paths."""
  return gather_texts(text, _PATH_BYTES)


class LostDirectoryError(UserError):
  """While a run trained, its directory was deleted, moved to `moved_to`, or replaced by another directory."""

  def __init__(self, message: str, moved_to: Path | None):
    super().__init__(message)
    self.moved_to = moved_to


class HeldDirectory:
  """An existing directory; notices if it is moved or deleted. A context manager.

  If an OSError ends the block and the directory was lost, a LostDirectoryError is raised instead. If the OSError is
  about a file in the directory, a UserError is raised.
  """

  def __init__(self, path: Path):
    self.path = path
    self._handle: int | None = None

  def __enter__(self) -> Self:
    if sys.platform != 'win32':  # Windows can neither open a directory nor move one with open files.
      self._handle = os.open(self.path, os.O_RDONLY)
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
    is_os_error = any(isinstance(e, OSError) for e in (error, error and error.__cause__))
    lost = self.why_lost() if is_os_error and not isinstance(error, LostDirectoryError) else None
    if self._handle is not None:
      os.close(self._handle)
    if lost is not None:  # The OSError was raised because the directory is lost.
      raise lost from error
    if isinstance(error, OSError) and (file := self._file_of(error)) is not None:
      raise UserError(f'{file}: {error.strerror or error}') from error

  def _file_of(self, error: OSError) -> Path | None:
    """Returns the file that an error is about, if it is in the directory; otherwise None."""
    for name in (error.filename2, error.filename):  # `filename2` is the target of a rename.
      if isinstance(name, str | bytes) and self.path in Path(os.fsdecode(name)).parents:
        return Path(os.fsdecode(name))
    return None

  def check(self) -> None:
    """Raises LostDirectoryError if the directory is no longer at its path. All processes must call this together."""
    lost = self.why_lost()
    if not any(gather_texts('' if lost is None else 'lost')):
      return
    of_all = gather_paths('' if lost is None else f'{lost.moved_to or ""}\n{lost}')
    moved_to, _, message = next(filter(None, of_all)).partition('\n')
    raise lost or LostDirectoryError(message, Path(moved_to) if moved_to else None)

  def why_lost(self) -> LostDirectoryError | None:
    """Returns the error for a directory that was moved or deleted; None if it was not, or if that is unknown."""
    if self._handle is None:
      return None
    try:
      if os.path.samestat(os.stat(self.path), os.fstat(self._handle)):
        return None
      instead = ', and another one is in its place'
    except (FileNotFoundError, NotADirectoryError):
      instead = ''
    except OSError:  # The storage cannot be reached.
      return None
    moved_to, is_deleted = self._find_again(self._handle)
    if moved_to is not None:
      return LostDirectoryError(f'job_log_dir {self.path} was moved to {moved_to} while it trained{instead}', moved_to)
    if is_deleted:
      return LostDirectoryError(f'job_log_dir {self.path} was deleted while it trained{instead}', None)
    return None  # The disk of the directory is unmounted, so nothing is lost.

  def _find_again(self, handle: int) -> tuple[Path | None, bool]:
    """Returns the current path of an open directory (None if unknown), and whether it was deleted."""
    for name_of in (_name_on_linux, _name_on_mac):
      try:
        name = name_of(handle)
        if os.path.samestat(os.stat(name), os.fstat(handle)):
          return Path(name), False
      except (OSError, ValueError, ImportError, AttributeError):
        continue
    try:
      is_deleted = os.fstat(handle).st_nlink == 0 or _name_on_linux(handle).endswith(_DELETED)
    except OSError as error:
      is_deleted = error.errno == errno.ESTALE  # Network file systems report a deletion this way.
    return None, is_deleted


def _name_on_linux(handle: int) -> str:
  return os.readlink(f'/proc/self/fd/{handle}')


def _name_on_mac(handle: int) -> str:
  import fcntl

  return os.fsdecode(fcntl.fcntl(handle, fcntl.F_GETPATH, bytes(1024)).rstrip(b'\0'))  # type: ignore[attr-defined,unused-ignore]


def rescue_directory(lost: LostDirectoryError, path: Path, make: Callable[[Path], object]) -> Path:
  """Returns where to save a run whose directory was lost: its new path, or a new directory that `make` creates."""
  if lost.moved_to is not None:
    return lost.moved_to
  rescued, count = path.with_name(path.name + _RESCUED), 1
  while rescued.exists():
    count += 1
    rescued = path.with_name(f'{path.name}{_RESCUED}.{count}')
  make(rescued)
  return rescued
