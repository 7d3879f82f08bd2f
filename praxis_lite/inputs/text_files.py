"""Finding and reading text files, and splitting them into training and held-out text.

A split is decided by a hash of a file's relative path, or by position in the file. Neither depends on the machine, nor
on the order of the files.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

from praxis_lite.config import Config
from praxis_lite.errors import ConfigError, DataError, did_you_mean

SPLITS = ('train', 'validation', 'test')


def find_files(path: Any, where: str) -> list[str]:
  """Returns the files that `path` stands for, sorted, each once.

  Args:
    path: a file, a directory (all files below it, but hidden ones), a glob pattern (`**` is any number of
      directories), a sequence of those, or a function, or `Config` of one, that returns one of those.
    where: what to call the path in an error.

  Raises:
    ConfigError: `path` is none of these.
    DataError: a path does not exist, or no file is found.
  """
  if isinstance(path, Config):
    path = path.instantiate()
  elif callable(path):
    path = path()
  paths = [path] if isinstance(path, (str, os.PathLike)) else path
  if not isinstance(paths, Iterable) or not all(isinstance(entry, (str, os.PathLike)) for entry in paths):
    raise ConfigError(f'{where}: expected a path, or a list of paths, got {path!r}')
  found: set[str] = set()
  for entry in paths:
    found.update(_files_of(os.path.expanduser(os.fspath(entry)), where))
  if not found:
    raise DataError(f'{where}: no files, since the list of paths is empty')
  return sorted(found)


def read_file(path: str, where: str) -> bytes:
  """Returns the bytes of a file.

  Raises:
    DataError: it cannot be read.
  """
  try:
    with open(path, 'rb') as f:
      return f.read()
  except OSError as e:
    raise DataError(f'{where}: cannot read {path}: {e.strerror}') from None


def check_split(split: str, where: str) -> None:
  """Raises `ConfigError` unless `split` is one of SPLITS."""
  if split not in SPLITS:
    raise ConfigError(f'{where}: {split!r} is none of {", ".join(SPLITS)}.{did_you_mean(str(split), SPLITS)}')


def split_of_name(name: str, heldout_fraction: float) -> str:
  """Returns the split that a file of this relative path belongs to.

  Validation and test get `heldout_fraction` of all names each, training gets the rest.
  """
  u = stable_hash(name) / 2**64
  if u < heldout_fraction:
    return 'test'
  return 'validation' if u < 2 * heldout_fraction else 'train'


def stable_hash(name: str) -> int:
  """Returns a 64-bit hash of a relative path, the same on every machine."""
  digest = hashlib.sha256(name.replace(os.sep, '/').encode('utf-8', 'surrogateescape')).digest()
  return int.from_bytes(digest[:8], 'big')


def split_of_content(data: bytes, split: str, heldout_fraction: float) -> bytes:
  """Returns the part of a file that belongs to a split: training first, then validation, then test.

  Parts end at the ends of lines, or, where a line is as long as a held-out part, between characters.
  """
  first = _cut(data, 1 - 2 * heldout_fraction, heldout_fraction)
  second = max(first, _cut(data, 1 - heldout_fraction, heldout_fraction))
  return {'train': data[:first], 'validation': data[first:second], 'test': data[second:]}[split]


def relative_names(files: Sequence[str]) -> list[str]:
  """Returns the paths of files relative to the directory they all are in."""
  root = os.path.commonpath([os.path.dirname(os.path.abspath(f)) for f in files])
  return [os.path.relpath(os.path.abspath(f), root) for f in files]


def _files_of(path: str, where: str) -> list[str]:
  if os.path.isdir(path):
    files = []
    for root, dirs, names in os.walk(path):
      dirs[:] = sorted(d for d in dirs if not d.startswith('.'))
      files += [os.path.join(root, n) for n in names if not n.startswith('.')]
    if not files:
      raise DataError(f'{where}: there are no files in the directory {path}')
    return files
  if os.path.exists(path):
    return [path]
  if glob.has_magic(path):
    files = [f for f in glob.glob(path, recursive=True) if os.path.isfile(f)]
    if not files:
      raise DataError(f'{where}: no file matches {path}')
    return files
  raise DataError(f'{where}: there is no file or directory {path or repr(path)}')


def _cut(data: bytes, fraction: float, reach: float) -> int:
  """Where to cut at about `fraction` of `data`: after the last line end before it, not further back than `reach`."""
  at = round(len(data) * fraction)
  newline = data.rfind(b'\n', max(0, at - round(len(data) * reach)), at)
  if newline >= 0:
    return newline + 1
  while 0 < at < len(data) and data[at] & 0xC0 == 0x80:  # within a UTF-8 character
    at -= 1
  return at
