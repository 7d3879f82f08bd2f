"""Copies files of a training input from an object store to this host, before they are read.

    s3://bucket/data/*.arrayrecord  ->  <cache>/inputs/<digest of s3://bucket/data>/part-0.arrayrecord
                                                                                   .part-0.arrayrecord.stamp

A copy stays, and is used again until the object changes. The processes of a host share the copies: one of them fetches,
and the others wait for it. A file appears under its name once it is complete.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import glob
import hashlib
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from praxis_lite.common.errors import DataError, error_summary
from praxis_lite.common.figures import format_bytes, number_of
from praxis_lite.common.file_systems import open_file_system, store_errors
from praxis_lite.common.files import cache_folder
from praxis_lite.common.foreign_text import remove_secrets
from praxis_lite.common.parallel import call_in_parallel
from praxis_lite.common.processes import note_progress

if TYPE_CHECKING:
  from fsspec import AbstractFileSystem
  from fsspec.callbacks import Callback

_ATTEMPTS = 5
_FIRST_PAUSE_S = 1.0  # Before the second attempt; it doubles with each further one.
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # Another attempt would not help.
_POLL_S = 0.2
# Fields of stores that change when an object is written.
_VERSIONS = ('ETag', 'etag', 'generation', 'mtime', 'LastModified', 'last_modified', 'updated', 'created')


class FetchedFiles(NamedTuple):
  """The local copies of the files that a URL names."""

  folder: Path  # The copy of the folder that the files share.
  files: list[str]
  is_folder: bool  # Whether the URL names that folder, and not a file in it or a pattern.


class _Object(NamedTuple):
  path: str  # In the store.
  name: str  # Relative to the folder that the files share.
  size: int
  stamp: str  # Changes when the object does.


def fetch_files(url: str, where: str) -> FetchedFiles:
  """Copies the files that a URL names to the cache of this host, unless the cache has them already.

  Args:
    url: a file, a folder or a glob pattern in an object store. Hidden files in a folder are left out.
    where: the config field that has the URL, for errors.

  Raises:
    ConfigError: the URL cannot be opened; see `open_file_system`.
    DataError: there are no such files, they cannot be read after several attempts, or the disk has no room for them.
  """
  fs, path = open_file_system(url, where)
  shown = remove_secrets(url)
  with store_errors(f'{where}: {shown} cannot be listed'):
    fs.invalidate_cache()
    root, found, is_folder = _list_objects(fs, path.rstrip('/'))
  if not found:
    raise DataError(f'{where}: there are no files at {shown}')
  digest = hashlib.blake2b(fs.unstrip_protocol(root).encode(), digest_size=8).hexdigest()
  folder = cache_folder() / 'inputs' / digest
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one_fetches(folder):
      missing = [each for each in found if not _is_here(each, folder)]
      if missing:
        _fetch_all(fs, missing, folder, where, shown)
  except OSError as error:
    raise DataError(f'{where}: {shown} cannot be copied to {folder}: {error.strerror or error}') from None
  return FetchedFiles(folder, [str(folder / each.name) for each in found], is_folder)


def _list_objects(fs: AbstractFileSystem, path: str) -> tuple[str, list[_Object], bool]:
  """Returns the folder that the files share, the files sorted by name, and whether `path` is that folder."""
  is_folder = False
  if glob.has_magic(path):
    parts = path.split('/')
    root = '/'.join(parts[: next(i for i, part in enumerate(parts) if glob.has_magic(part))])
    about = fs.glob(path, detail=True)
  elif is_folder := fs.isdir(path):
    root, about = path, fs.find(path, detail=True)
  else:
    root = path.rpartition('/')[0]
    about = {path: fs.info(path)} if fs.exists(path) else {}
  names = {file: file.removeprefix(root).lstrip('/') for file, each in about.items() if each['type'] == 'file'}
  shown = {file: name for file, name in names.items() if not is_folder or not _is_hidden(name)}
  found = [_to_object(fs, file, name, about[file]) for file, name in shown.items()]
  return root, sorted(found, key=lambda each: each.name), is_folder


def _to_object(fs: AbstractFileSystem, file: str, name: str, about: Mapping[str, Any]) -> _Object:
  if '..' in name.split('/'):
    raise OSError(f'{fs.unstrip_protocol(file)} has a name that leaves its folder')
  if about.get('size') is None:  # Web servers list only names.
    about = fs.info(file)
  if about.get('size') is None:
    raise OSError(f'the store does not tell the size of {fs.unstrip_protocol(file)}')
  # A listing and a question about one object have different other fields, so `ukey` differs between them.
  version = next((about[field] for field in _VERSIONS if about.get(field)), None) or fs.ukey(file)
  stamp = str(version.timestamp() if isinstance(version, datetime.datetime) else version).strip('"')
  return _Object(file, name, int(about['size']), stamp)


def _is_hidden(name: str) -> bool:
  return any(part.startswith('.') for part in name.split('/'))


def _fetch_all(fs: AbstractFileSystem, missing: list[_Object], folder: Path, where: str, shown: str) -> None:
  size, free = sum(each.size for each in missing), shutil.disk_usage(folder).free
  if size > free:
    raise DataError(
      f'{where}: {shown} has {format_bytes(size)} that are not on this host, and {folder} has room for '
      f'{format_bytes(free)}; name another folder for the cache in XDG_CACHE_HOME'
    )
  what = f'{number_of(len(missing), "file")}, {format_bytes(size)}, from {shown}'
  print(f'fetching {what} to {folder}', file=sys.stderr, flush=True)
  call_in_parallel(lambda each: _fetch(fs, each, folder, where), missing)


def _fetch(fs: AbstractFileSystem, each: _Object, folder: Path, where: str) -> None:
  """Copies one file, in several attempts; raises OSError if the disk is full or cannot be written."""
  target, problem = folder / each.name, ''
  target.parent.mkdir(parents=True, exist_ok=True)
  partial = target.with_name(f'.{target.name}.{secrets.token_hex(4)}.fetching')
  url = remove_secrets(fs.unstrip_protocol(each.path))
  for attempt in range(_ATTEMPTS):
    if attempt:
      time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
    try:
      fs.get_file(each.path, str(partial), callback=_noting(each.name))
      if (size := partial.stat().st_size) == each.size:
        _stamp_file(target).unlink(missing_ok=True)  # The file that it describes is replaced now.
        os.replace(partial, target)
        _stamp_file(target).write_text(_stamp(each))
        note_progress(f'fetched {each.name}')
        return
      problem = f'{number_of(size, "byte")} arrived instead of {each.size:,}'
    except Exception as error:
      if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
        raise
      problem = remove_secrets(error_summary(error))
    finally:
      partial.unlink(missing_ok=True)
  raise DataError(f'{where}: {url} cannot be read, in {_ATTEMPTS} attempts: {problem}')


def _noting(name: str) -> Callback:
  """Returns what notes each part of a file that arrives, since a large file may take longer than watchdogs wait."""
  from fsspec.callbacks import Callback

  class Noting(Callback):
    def relative_update(self, inc: int = 1) -> None:
      note_progress(f'fetching {name}')

  return Noting()


def _is_here(each: _Object, folder: Path) -> bool:
  """Whether the cache has a copy of an object as it is now."""
  target = folder / each.name
  try:
    return target.stat().st_size == each.size and _stamp_file(target).read_text() == _stamp(each)
  except (OSError, ValueError):
    return False


def _stamp(each: _Object) -> str:
  return f'{each.size} {each.stamp}\n'


def _stamp_file(target: Path) -> Path:
  return target.with_name(f'.{target.name}.stamp')


@contextlib.contextmanager
def _only_one_fetches(folder: Path) -> Iterator[None]:
  """Waits until no other process holds the lock of the folder, and holds it; a killed process releases it."""
  import fcntl

  with open(folder / '.lock', 'w') as lock:
    while True:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      except BlockingIOError:  # Another process fetches; each of its attempts ends.
        note_progress(f'waiting for another process, which fetches files to {folder}')
        time.sleep(_POLL_S)
    yield
