"""Files of a run directory: that appear complete or not at all, that wait for room on the disk; and what they say.

Where a file is expected, anyone may have put a named pipe, whose opening waits for ever, or a device without an end:
`open_plain`, by which files of runs and of data are read, refuses those.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from praxis_lite.common.errors import UserError

if TYPE_CHECKING:
  import numpy as np


def is_url(path: object) -> bool:
  """Whether a path is one of an object store, such as s3://bucket/run."""
  return isinstance(path, str | os.PathLike) and re.match(r'[A-Za-z][\w+.-]+:/', os.fspath(path)) is not None


def user_path(path: str | os.PathLike[str]) -> Path:
  """Returns a path that a user gave, with the home directory in place of `~` and without `..`.

  Where there is no such user, `~` stays; where `..` follows a symbolic link, it is read as the system does.
  """
  path = Path(os.path.expanduser(path))
  return Path(os.path.realpath(path)) if '..' in path.parts else path


def local_path(path: str | os.PathLike[str]) -> Path:
  """Returns the path of a run or of its checkpoints.

  Raises:
    UserError: it is one of an object store, or of a name by which checkpoints could not be written or found again.
  """
  if is_url(path):
    url = os.fspath(path)
    raise UserError(
      f'{url}: runs are in directories of a file system that all hosts see, and object stores have copies of them. To '
      f'train: --job_log_dir=runs/1 --set task.train.mirror={url}; to use what is there: praxis-lite checkpoints copy '
      f'{url} runs/1'
    )
  path = user_path(path)
  if reason := _reason_against(os.path.abspath(path)):
    raise UserError(f'{os.fspath(path)!r} cannot be the directory of a run: {reason}')
  return path


# Bytes of the longest path that is made below the directory of a run, and a reserve.
_BELOW_A_RUN = 256
# First parts of absolute paths that Orbax takes for those of an object store.
_OBJECT_STORES = ('gs', 's3', 'az', 'hf')


def _reason_against(path: str) -> str:
  """Returns why checkpoints cannot be in an absolute path, as the libraries that write them read it; '' if they can."""
  if '\0' in path:
    return 'it has a zero byte'
  try:
    path.encode()
  except UnicodeEncodeError:
    return 'its name is not UTF-8'
  if os.sep == '/' and '\\' in path:
    return 'TensorStore takes a backslash for a slash; choose a name without'
  first = path.split(os.sep)[1] if path.startswith('/') else ''
  if first in _OBJECT_STORES:
    return f'Orbax takes /{first} for an object store; make a symbolic link to it elsewhere, and name that'
  most = _longest_path() - _BELOW_A_RUN
  if len(path.encode()) > most:
    return f'it has {len(path.encode()):,} bytes, and the names of files below it need room: at most {most:,}'
  return ''


def _longest_path() -> int:
  try:
    return os.pathconf('/', 'PC_PATH_MAX')
  except (AttributeError, OSError, ValueError):  # Windows.
    return 4096


def parse_json(text: str | bytes) -> Any:
  """Returns what JSON of anyone says; raises ValueError if it is none, is not UTF-8, or is nested too deeply."""
  try:
    return json.loads(text)
  except RecursionError:
    raise ValueError('nested too deeply') from None


def plain_dtype(name: object) -> np.dtype:
  """Returns the dtype of numbers that anyone names, bfloat16 and the like too; raises ValueError if it is none."""
  import ml_dtypes  # noqa: F401  By which NumPy knows bfloat16.
  import numpy as np

  try:
    dtype = np.dtype(str(name))
  except (TypeError, ValueError, SyntaxError):  # The last where there is a comma: NumPy reads a list then.
    raise ValueError(f'{name!r} is no dtype') from None
  if dtype.hasobject:  # NumPy would take the bytes of a file for addresses.
    raise ValueError(f'{name!r} is no dtype of plain data')
  return dtype


def kind_of_other(path: str | os.PathLike[str]) -> str:
  """Returns what there is in place of a file, such as 'a named pipe'; '' for a file, and where there is nothing."""
  try:
    return _kind(os.stat(path).st_mode)
  except OSError:
    return ''


def _kind(mode: int) -> str:
  if stat.S_ISREG(mode):
    return ''
  kinds = {stat.S_IFDIR: 'a directory', stat.S_IFIFO: 'a named pipe', stat.S_IFSOCK: 'a socket'}
  return kinds.get(stat.S_IFMT(mode), 'a device')


def open_plain(path: str | os.PathLike[str]) -> io.BufferedReader:
  """Opens a file to read it; never waits.

  Raises:
    OSError: it cannot be opened, or is no file; `strerror` says what it is.
  """
  return open(path, 'rb', opener=_open_without_waiting)


def open_plain_to_write(path: str | os.PathLike[str], *, append: bool = False) -> io.FileIO:
  """Opens a file to write it, without a buffer; otherwise as `open_plain`."""
  return open(path, 'ab' if append else 'wb', buffering=0, opener=_open_without_waiting)


def _open_without_waiting(path: str, flags: int) -> int:
  # Without O_NONBLOCK, opening a named pipe waits for its other end.
  handle = os.open(path, flags | getattr(os, 'O_NONBLOCK', 0), 0o666)
  if kind := _kind(os.fstat(handle).st_mode):
    os.close(handle)
    raise OSError(errno.EINVAL, f'it is {kind}, not a file', path)
  return handle


def read_plain(path: str | os.PathLike[str]) -> bytes:
  """Returns the content of a file; raises OSError as `open_plain`."""
  with open_plain(path) as file:
    return file.read()


def check_plain_below(folder: str | os.PathLike[str]) -> None:
  """Checks that there is nothing but files and folders below a folder, for libraries that open what they find.

  Raises:
    OSError: there is something else, such as a named pipe, or it cannot be read; `strerror` says what.
  """
  waiting = [os.fspath(folder)]
  while waiting:
    with os.scandir(waiting.pop()) as entries:
      for entry in entries:
        if entry.is_dir():
          if not entry.is_symlink():
            waiting.append(entry.path)
        elif not entry.is_file() and (kind := kind_of_other(entry.path)):
          raise OSError(errno.EINVAL, f'it is {kind}, not a file', entry.path)


def remove_all(path: Path) -> None:
  """Removes a folder with all below it, or whatever else is there, as far as that is possible; never waits."""
  # Where it is no folder, `shutil.rmtree` opens it first: a named pipe would be waited for.
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path, ignore_errors=True)
  else:
    with contextlib.suppress(OSError):
      path.unlink()


def replace_file(path: Path, text: str) -> None:
  """Writes a file that appears complete or not at all."""
  handle, name = tempfile.mkstemp(dir=path.parent, prefix=f'.{path.name}-')
  try:
    with open(handle, 'w', encoding='utf-8') as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    os.chmod(name, 0o666 & ~_umask())
    os.replace(name, path)
  except BaseException:
    os.unlink(name)
    raise


class KnownFolder:
  """A folder, known by its device and inode: nothing makes it anew where it was, nor writes to another one there.

  What a run writes while it trains goes by way of it, except for what Orbax and JAX's profiler write.

  Args:
    path: of the folder.

  Raises:
    OSError: it is not there.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = Path(path)
    self._about = os.stat(path)

  def is_elsewhere(self) -> bool:
    """Whether it is not where it was; False too where its storage cannot be reached."""
    try:
      return not os.path.samestat(os.stat(self.path), self._about)
    except (FileNotFoundError, NotADirectoryError):
      return True
    except OSError:
      return False

  def subfolder(self, name: str) -> Path:
    """Returns a folder below it, made if it is not there; raises OSError if it cannot be made."""
    self._check()
    folder = self.path
    for part in Path(name).parts:  # Not `parents=True`: moved between two of these, it would be made anew.
      folder = folder / part
      folder.mkdir(exist_ok=True)
    return folder

  def replace_file(self, name: str, text: str) -> None:
    """Writes a file in it, as the function of this name; raises OSError if it cannot be written."""
    self._check()
    replace_file(self.path / name, text)

  def _check(self) -> None:
    if not os.path.samestat(os.stat(self.path), self._about):
      raise FileNotFoundError(errno.ENOENT, 'another directory is in its place', str(self.path))


class PatientFile:
  """A file to append to, which keeps in memory what the disk does not take, and writes it in order when it does.

  Attributes:
    error: why the last write failed; None if all is written.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self._file = open_plain_to_write(path, append=True)
    self._unwritten = bytearray()
    self.error: OSError | None = None

  def write(self, data: bytes) -> int:
    """Takes all of `data`, whether it can be written now or later."""
    self._unwritten += data
    self.flush()
    return len(data)

  def flush(self) -> None:
    """Writes what is not written yet, as far as that is possible."""
    self.error = None
    try:
      while self._unwritten:
        del self._unwritten[: self._file.write(self._unwritten)]
    except OSError as error:
      self.error = error

  def close(self) -> None:
    """Tries once more; what still cannot be written is lost."""
    self.flush()
    self._file.close()


def _umask() -> int:
  mask = os.umask(0o022)
  os.umask(mask)
  return mask
