"""Finds the files of an input from a file, a directory, a pattern, or a list of those."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.common.files import FETCH_LFS, is_lfs_pointer, is_url, kind_of_other, read_plain
from praxis_lite.common.foreign_text import remove_secrets
from praxis_lite.inputs.fetched_files import fetch_files
from praxis_lite.inputs.rows import resolve_source

Paths = str | os.PathLike | Sequence[str | os.PathLike]


def find_files(
  path: object, where: str, in_directory: Callable[[str], list[str] | None] = lambda directory: None
) -> list[str]:
  """Returns the files that `path` names, sorted, each once.

  Args:
    path: a file, a directory, a glob pattern, a list of those, or a function (or the `Config` of one) that returns
      them. Hidden files in a directory are left out. In a pattern, `**` matches any number of directories. Files at a
      URL, such as s3://bucket/data/*.tfrecord, are first copied to this host; see `fetched_files`.
    where: name of the path in error messages.
    in_directory: returns the files to take from a directory; None takes all.

  Raises:
    ConfigError: `path` has another type, or a URL cannot be opened.
    DataError: a path does not exist, no file is found, or a path is a special file, such as a named pipe, or only a Git
      LFS pointer.
  """
  path = resolve_source(path)
  paths = [path] if isinstance(path, (str, os.PathLike)) else path
  if not isinstance(paths, Iterable) or not all(isinstance(entry, (str, os.PathLike)) for entry in paths):
    raise ConfigError(f'{where}: expected a path, or a list of paths, got {path!r}')
  found: set[str] = set()
  for entry in paths:
    named = os.path.expanduser(os.fspath(entry))
    files = _files_at(named, where, in_directory) if is_url(named) else _files_of(named, where, in_directory)
    if other := next((file for file in files if kind_of_other(file)), None):
      raise DataError(f'{where}: {other} is {kind_of_other(other)}, not a file')
    if pointer := next(filter(is_lfs_pointer, files), None):
      raise DataError(f'{where}: {pointer} {FETCH_LFS}')
    found.update(files)
  if not found:
    raise DataError(f'{where}: no files, since the list of paths is empty')
  return sorted(found)


def _files_at(url: str, where: str, in_directory: Callable[[str], list[str] | None]) -> list[str]:
  fetched = fetch_files(url, where)
  chosen = in_directory(str(fetched.folder)) if fetched.is_folder else None
  # Files that the store no longer has may still be in the folder.
  files = fetched.files if chosen is None else sorted({*chosen} & {*fetched.files})
  if not files:
    raise DataError(f'{where}: there are no files of data at {remove_secrets(url)}')
  return files


def _files_of(path: str, where: str, in_directory: Callable[[str], list[str] | None]) -> list[str]:
  if os.path.isdir(path):
    files, missing = in_directory(path), f'there are no files in the directory {path}'
    if files is None:
      files = list(walk(path, lambda name: name.startswith('.')))
  elif os.path.exists(path):
    return [path]
  elif glob.has_magic(path):
    files = [f for f in glob.glob(path, recursive=True) if os.path.exists(f) and not os.path.isdir(f)]
    missing = f'no file matches {path}'
  else:
    files, missing = [], f'there is no file or directory {path or repr(path)}'
  if not files:
    raise DataError(f'{where}: {missing}')
  return files


def read_file(file: str, where: str) -> bytes:
  """Returns the content of a file; raises DataError if it cannot be read."""
  try:
    return read_plain(file)
  except OSError as e:
    raise DataError(f'{where}: cannot read {file}: {e.strerror}') from None


def check_utf8(data: bytes, file: str, where: str) -> None:
  """Raises DataError unless the content of `file` is UTF-8."""
  try:
    data.decode()
  except UnicodeDecodeError as e:
    raise DataError(f'{where}: {file} is not UTF-8 text: byte {e.start} is 0x{data[e.start]:02x}') from None


def walk(root: str, left_out: Callable[[str], bool]) -> Iterator[str]:
  """Yields the files below `root`; leaves out files and directories if `left_out` returns True for their names."""
  for directory, subdirectories, names in os.walk(root):
    subdirectories[:] = [d for d in subdirectories if not left_out(d)]
    yield from (os.path.join(directory, name) for name in names if not left_out(name))
