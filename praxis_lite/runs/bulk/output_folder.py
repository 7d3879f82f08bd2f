"""OutputFolder: a folder whose files appear complete or not at all, on disk or in an object store."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from praxis_lite.common.errors import DataError
from praxis_lite.common.files import is_url, read_plain, user_path

_HIDDEN = '.writing-'
_ATTEMPTS = 8  # How often writing a file is tried, because another process may remove its temporary file.


class OutputFolder(Protocol):
  """A folder of files."""

  def names(self) -> list[str]:
    """Returns the names of its files."""

  def read(self, name: str) -> bytes:
    """Returns the content of a file."""

  def write(self, name: str, data: bytes) -> None:
    """Writes a file, which survives a crash of the machine once this returns."""

  def create(self, name: str, data: bytes) -> None:
    """Writes a file, unless it exists. If two processes do so at once on a disk, only one of them writes it."""

  def clean(self, name: str) -> None:
    """Removes incomplete files that killed processes have left."""


class LocalFolder:
  """A folder on disk, which the first file creates if it does not exist."""

  def __init__(self, path: str):
    self._path = Path(os.path.abspath(user_path(path)))

  def names(self) -> list[str]:
    if not os.path.lexists(self._path):
      return []
    return [name for name in os.listdir(self._path) if not name.startswith('.')]

  def read(self, name: str) -> bytes:
    return read_plain(self._path / name)

  def write(self, name: str, data: bytes) -> None:
    self._write(name, data, os.replace)

  def create(self, name: str, data: bytes) -> None:
    def link(temporary: str, file: Path) -> None:
      with contextlib.suppress(FileExistsError):
        os.link(temporary, file)
      os.unlink(temporary)

    self._write(name, data, link)

  def _write(self, name: str, data: bytes, put: Callable[[str, Path], object]) -> None:
    self._path.mkdir(parents=True, exist_ok=True)
    for attempt in range(_ATTEMPTS):
      handle, temporary = tempfile.mkstemp(dir=self._path, prefix=f'{_HIDDEN}{name}-')
      try:
        with open(handle, 'wb') as file:
          file.write(data)
          file.flush()
          os.fsync(file.fileno())
          os.fchmod(file.fileno(), 0o644)
        put(temporary, self._path / name)
        break
      except FileNotFoundError:  # Another process is writing the same file, and has removed `temporary`.
        if attempt == _ATTEMPTS - 1:
          raise
      except BaseException:
        with contextlib.suppress(OSError):
          os.unlink(temporary)
        raise
    self._sync()

  def clean(self, name: str) -> None:
    for left in self._path.glob(f'{_HIDDEN}{name}-*'):
      left.unlink(missing_ok=True)

  def _sync(self) -> None:
    """Flushes the folder's list of names to the disk."""
    handle = os.open(self._path, os.O_RDONLY)
    try:
      os.fsync(handle)
    finally:
      os.close(handle)


class Store(Protocol):
  """The methods of an `ObjectStore` that a `StoredFolder` calls."""

  def sizes(self) -> dict[str, int]:
    """Returns the sizes of all objects by name."""

  def read(self, name: str) -> bytes:
    """Returns the bytes of an object."""

  def write(self, name: str, data: bytes) -> None:
    """Writes an object."""


class StoredFolder:
  """A folder in an object store, where an object appears when it is complete."""

  def __init__(self, store: Store):
    self._store = store

  def names(self) -> list[str]:
    return [name for name in self._store.sizes() if '/' not in name and not name.endswith('.part')]

  def read(self, name: str) -> bytes:
    return self._store.read(name)

  def write(self, name: str, data: bytes) -> None:
    self._store.write(name, data)

  def create(self, name: str, data: bytes) -> None:
    # Not all stores have conditional writes, so two processes that begin at the same moment may both write.
    if name not in self.names():
      self._store.write(name, data)

  def clean(self, name: str) -> None:
    """Does nothing: there are no incomplete objects."""


def check_not_input(output: str, files: list[str]) -> None:
  """Raises DataError if an input file is in the output folder."""
  folder = output.rstrip('/') if is_url(output) else os.path.abspath(user_path(output))
  if inside := next((file for file in files if os.path.dirname(file) == folder), None):
    raise DataError(f'--output={output} has a file of the input, {inside}; name another folder')
