"""Files of a run directory: atomic writes, writes that wait for disk space, and safe reads.

Where a file is expected, anyone may have put a named pipe, whose opening blocks forever, or a device with endless data.
Files of runs and of data are therefore read with `open_plain`, which refuses them.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shlex
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from praxis_lite.common.errors import UserError

if TYPE_CHECKING:
  import numpy as np


def is_url(path: object) -> bool:
  """Whether a path is a URL in an object store, such as s3://bucket/run."""
  return isinstance(path, str | os.PathLike) and re.match(r'[A-Za-z][\w+.-]+:/', os.fspath(path)) is not None


def user_path(path: str | os.PathLike[str]) -> Path:
  """Returns a path that a user gave, with `~` replaced by the home directory, and without `..`.

  In `~name/...`, `~name` stays if no user has this name. A `..` after a symbolic link is resolved as the system does.
  """
  path = Path(os.path.expanduser(path))
  return Path(os.path.realpath(path)) if '..' in path.parts else path


def cache_folder() -> Path:
  """Returns the folder for what can be computed again: `praxis_lite` in `$XDG_CACHE_HOME` or `~/.cache`."""
  return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'praxis_lite'


def local_path(path: str | os.PathLike[str]) -> Path:
  """Returns the path of a run or of its checkpoints.

  Raises:
    UserError: it is in an object store, or has a name under which checkpoints could not be written or found again.
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


# Bytes of the longest path that is created below the directory of a run, plus a reserve.
_BELOW_A_RUN = 256
# First parts of absolute paths that Orbax mistakes for paths of an object store.
_OBJECT_STORES = ('gs', 's3', 'az', 'hf')


def _reason_against(path: str) -> str:
  """Returns why the libraries for checkpoints cannot use an absolute path; '' if they can."""
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


def unless_empty(file: str | os.PathLike[str], wrong: str) -> str:
  """Returns 'is empty' if a file has no bytes, otherwise `wrong`, which says what is wrong with it."""
  with contextlib.suppress(OSError):
    return 'is empty' if os.path.getsize(file) == 0 else wrong
  return wrong


def parse_json(text: str | bytes) -> Any:
  """Returns parsed JSON that anyone may have written; raises ValueError if it is invalid, not UTF-8, or too nested."""
  try:
    return json.loads(text)
  except RecursionError:
    raise ValueError('nested too deeply') from None


def parse_json_line(line: str | bytes) -> Any:
  """Returns what `parse_json` returns, for one line of a file; errors name the character, but no line number."""
  try:
    return parse_json(line.strip())
  except json.JSONDecodeError as error:
    raise ValueError(f'{error.msg[:1].lower()}{error.msg[1:]} at character {error.pos + 1}') from None


def plain_dtype(name: object) -> np.dtype:
  """Returns a numeric dtype by name, including bfloat16 and similar ones; raises ValueError if there is none."""
  import ml_dtypes  # noqa: F401  Registers bfloat16 and similar dtypes with NumPy.
  import numpy as np

  try:
    dtype = np.dtype(str(name))
  except (TypeError, ValueError, SyntaxError):  # SyntaxError: NumPy parses names with a comma as a list.
    raise ValueError(f'{name!r} is not a dtype') from None
  if dtype.hasobject:  # NumPy would take the bytes of a file for addresses.
    raise ValueError(f'{name!r} is not a dtype of plain data')
  return dtype


def kind_of_other(path: str | os.PathLike[str]) -> str:
  """Returns what is at the path if it is no file, such as 'a named pipe'; '' if a file, or nothing, is at the path."""
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
  """Opens a file to read it; never blocks.

  Raises:
    OSError: it cannot be opened, or is not a file; `strerror` says what it is.
  """
  return open(path, 'rb', opener=_open_without_waiting)


def open_plain_to_write(path: str | os.PathLike[str], *, append: bool = False) -> io.FileIO:
  """Opens a file to write it, without a buffer; never blocks, and raises the errors of `open_plain`."""
  return open(path, 'ab' if append else 'wb', buffering=0, opener=_open_without_waiting)


def _open_without_waiting(path: str, flags: int) -> int:
  # Without O_NONBLOCK, opening a named pipe waits for its other end.
  handle = os.open(path, flags | getattr(os, 'O_NONBLOCK', 0), 0o666)
  if kind := _kind(os.fstat(handle).st_mode):
    os.close(handle)
    raise OSError(errno.EINVAL, f'it is {kind}, not a file', path)
  return handle


def read_plain(path: str | os.PathLike[str]) -> bytes:
  """Returns the content of a file; raises OSError if `open_plain` does, or if reading fails."""
  with open_plain(path) as file:
    return file.read()


def check_plain_below(folder: str | os.PathLike[str]) -> None:
  """Checks that a folder contains only files and folders, for libraries that open whatever they find.

  Raises:
    OSError: it contains something else, such as a named pipe, or cannot be read; `strerror` says what.
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


_POINTER = b'version https://git-lfs.github.com/spec/'


def is_lfs_pointer(path: str | os.PathLike[str]) -> bool:
  """Whether a file is the short text that stands for a large file in a git repository that was cloned without LFS."""
  try:
    if os.path.getsize(path) > 1024:
      return False
    with open_plain(path) as file:
      return file.read(len(_POINTER)) == _POINTER
  except OSError:
    return False


FETCH_LFS = 'is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository, or download the file'


def remove_all(path: Path) -> None:
  """Removes a folder with all its contents, or whatever else is at the path, as far as possible; never blocks."""
  # `shutil.rmtree` would first open what is not a folder, and block on a named pipe.
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path, ignore_errors=True)
  else:
    with contextlib.suppress(OSError):
      path.unlink()


def replace_file(path: Path, text: str) -> None:
  """Writes a file atomically: it appears complete or not at all."""
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


_REMEDIES = {
  errno.EISDIR: 'it is a directory; name a file',
  errno.ENOTDIR: 'a part of this path is a file, not a directory',
  errno.ENOSPC: 'free some space, or name a directory on another disk',
  errno.EDQUOT: 'free some space, or name a directory on another disk',
  errno.EROFS: 'name a directory on another disk',
  errno.EMFILE: 'allow more open files, as with `ulimit -n 65536`',
}


def file_error(error: OSError) -> UserError | None:
  """Returns an error that says which file an OSError is about, what is wrong, and what to do.

  Returns None if the OSError is not about a file.
  """
  named = [os.fsdecode(f) for f in (error.filename2, error.filename) if isinstance(f, str | bytes | os.PathLike)]
  file = named[0] if named else ''
  if not file and error.errno not in (errno.ENOSPC, errno.EDQUOT):  # The error of a failed write names no file.
    return None
  remedy = _REMEDIES.get(error.errno or 0, '')
  if isinstance(error, PermissionError):
    remedy = forbidden_by(file)
  parts = [f'{file}: {error.strerror or error}' if file else f'{error.strerror}', *filter(None, [remedy])]
  return UserError('; '.join(parts))


def forbidden_by(file: str | os.PathLike[str]) -> str:
  """Returns which permissions to change, for a file that this user may not read or write."""
  path = Path(file)
  closed = next((f for f in reversed(path.absolute().parents) if os.path.exists(f) and not os.access(f, os.X_OK)), path)
  return f'ask its owner for access, or change its permissions (`ls -ld {shlex.quote(os.fspath(closed))}` shows them)'


class KnownFolder:
  """A folder that is identified by its device and inode, so that a folder created later at its path is not used.

  While a run trains, it writes everything through this class, except what Orbax and JAX's profiler write. OSError is
  raised if the folder does not exist.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = Path(path)
    self._about = os.stat(path)

  def is_elsewhere(self) -> bool:
    """Whether the folder is no longer at its path; False also if its storage cannot be reached."""
    try:
      return not os.path.samestat(os.stat(self.path), self._about)
    except (FileNotFoundError, NotADirectoryError):
      return True
    except OSError:
      return False

  def subfolder(self, name: str) -> Path:
    """Returns a folder below this one, which is created if it does not exist; raises OSError if that fails."""
    self._check()
    folder = self.path
    for part in Path(name).parts:  # Without `parents=True`, which would recreate this folder if it is being moved.
      folder = folder / part
      folder.mkdir(exist_ok=True)
    return folder

  def replace_file(self, name: str, text: str) -> None:
    """Writes the file `name` in the folder atomically; raises OSError if it cannot be written."""
    self._check()
    replace_file(self.path / name, text)

  def _check(self) -> None:
    if not os.path.samestat(os.stat(self.path), self._about):
      raise FileNotFoundError(errno.ENOENT, 'another directory is in its place', str(self.path))


class PatientFile:
  """A file to append to. Data that the disk does not accept stays in memory, and is written in order once it does.

  Attributes:
    error: why the last write failed; None if everything is written.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self._file = open_plain_to_write(path, append=True)
    self._unwritten = bytearray()
    self.error: OSError | None = None

  def write(self, data: bytes) -> int:
    """Accepts all of `data`, and writes it now or later."""
    self._unwritten += data
    self.flush()
    return len(data)

  def flush(self) -> None:
    """Writes pending data, as far as that is possible."""
    self.error = None
    try:
      while self._unwritten:
        del self._unwritten[: self._file.write(self._unwritten)]
    except OSError as error:
      self.error = error

  def close(self) -> None:
    """Tries once more to write pending data, then closes the file; data that still cannot be written is lost."""
    self.flush()
    self._file.close()


def _umask() -> int:
  mask = os.umask(0o022)
  os.umask(mask)
  return mask
