"""Reads and writes the objects below a URL of an object store, through fsspec.

All URL schemes of fsspec work; `s3://` and `gs://` need the packages s3fs and gcsfs. Objects appear complete or not at
all. Any error that such a package raises becomes a StoreError with a message of one line.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from praxis_lite.checkpoints.failures import DamagedError
from praxis_lite.common.errors import CheckpointError, ConfigError, error_summary
from praxis_lite.common.file_systems import open_file_system
from praxis_lite.common.foreign_text import remove_secrets

_BLOCK = 1 << 23
_READING = 'reading '


class StoreError(CheckpointError):
  """An object store cannot be reached, or refuses a request."""


class FileSum(NamedTuple):
  """Identifies the content of a file: its size in bytes, and its SHA-256 as `sha256sum` prints it."""

  size: int
  sha256: str


def sum_of_file(path: Path) -> FileSum:
  """Returns the size and SHA-256 of a local file."""
  with open(path, 'rb') as file:
    return _sum_of(file)


def _sum_of(file: IO[bytes]) -> FileSum:
  digest, size = hashlib.sha256(), 0
  while block := file.read(_BLOCK):
    digest.update(block)
    size += len(block)
  return FileSum(size, digest.hexdigest())


class ObjectStore:
  """The objects below a URL.

  Args:
    url: a URL such as 's3://bucket/runs/1'.
    where: the config field that has the URL, for errors; '' if it comes from elsewhere.

  Attributes:
    url: the URL, without a trailing slash, and without a password.

  Raises:
    ConfigError: the URL is not valid, its scheme is unknown, or the package for it is not installed.
  """

  def __init__(self, url: str, where: str = ''):
    shown = remove_secrets(url) if isinstance(url, str) else url
    named = f'{where} = {shown!r}' if where else shown
    scheme, is_url, rest = url.partition('://') if isinstance(url, str) else ('', '', '')
    if not is_url or not rest.strip('/'):
      raise ConfigError(f'{named}: expected the URL of a folder in an object store, such as s3://bucket/runs/1')
    self.url = shown.rstrip('/')
    self._is_local = scheme in ('file', 'local')
    self._fs, root = open_file_system(url.rstrip('/'), where, **({'auto_mkdir': True} if self._is_local else {}))
    self._root = root.rstrip('/')
    if glob.has_magic(self._root):
      raise ConfigError(f'{named}: object stores take * ? [ ] for patterns; choose a URL without them')

  def check_writable(self) -> None:
    """Writes an object and removes it again; raises StoreError if the store refuses."""
    name = f'.test-{uuid.uuid4().hex[:8]}'
    self.write(name, b'')
    self.remove(name)

  def names(self, folder: str) -> list[str]:
    """Returns the names of the objects and folders directly in a folder, without the folder's own name."""
    with self._one_line_errors(f'listing {folder}'):
      self._fs.invalidate_cache()
      with contextlib.suppress(FileNotFoundError):
        return [str(path).rstrip('/').rpartition('/')[2] for path in self._fs.ls(self._path(folder), detail=False)]
    return []

  def sizes(self, folder: str = '') -> dict[str, int]:
    """Returns the sizes of all objects below a folder, by their names relative to it."""
    root = self._path(folder) + '/'
    found: dict[str, int] = {}
    with self._one_line_errors(f'listing {folder or self.url}'):
      self._fs.invalidate_cache()
      with contextlib.suppress(FileNotFoundError):
        found = {path: entry['size'] for path, entry in self._fs.find(root, detail=True).items()}
    return {path[len(root) :]: size for path, size in found.items() if path.startswith(root) and path != root}

  def read(self, name: str) -> bytes:
    """Returns the bytes of an object; raises DamagedError if it does not exist."""
    with self._one_line_errors(f'{_READING}{name}'):
      return bytes(self._fs.cat_file(self._path(name)))

  def sum(self, name: str) -> FileSum:
    """Reads an object and returns its size and SHA-256; raises DamagedError if it does not exist."""
    with self._one_line_errors(f'{_READING}{name}'), self._fs.open(self._path(name), 'rb', block_size=_BLOCK) as file:
      return _sum_of(file)

  def get(self, name: str, path: Path) -> None:
    """Copies an object to a local file; raises DamagedError if it does not exist."""
    with self._one_line_errors(f'{_READING}{name}'):
      path.parent.mkdir(parents=True, exist_ok=True)
      self._fs.get_file(self._path(name), str(path))

  def write(self, name: str, data: bytes) -> None:
    with self._one_line_errors(f'writing {name}'):
      path = self._path(name)
      written = f'{path}.part' if self._is_local else path
      self._fs.pipe_file(written, data)
      if self._is_local:
        os.replace(written, path)

  def put(self, path: Path, name: str) -> None:
    """Copies a local file, which must not change, to an object. In a file system, readers may see it half written."""
    with self._one_line_errors(f'writing {name}'):
      self._fs.put_file(str(path), self._path(name))

  def remove(self, name: str) -> None:
    """Removes an object, or all objects below a folder, if any exist."""
    with self._one_line_errors(f'removing {name}'), contextlib.suppress(FileNotFoundError):
      self._fs.invalidate_cache()
      self._fs.rm(self._path(name), recursive=True)

  def _path(self, name: str) -> str:
    return f'{self._root}/{name}' if name else self._root

  @contextlib.contextmanager
  def _one_line_errors(self, what: str) -> Iterator[None]:
    """Turns any error of a package into a StoreError with a message of one line."""
    try:
      yield
    except Exception as error:
      is_missing = isinstance(error, FileNotFoundError) and what.startswith(_READING)
      raised = DamagedError if is_missing else StoreError
      raise raised(f'{self.url}: {what} failed: {remove_secrets(error_summary(error))}') from error
