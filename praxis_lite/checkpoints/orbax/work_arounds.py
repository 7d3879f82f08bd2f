"""Changes to Orbax, made once when it is imported. The package's docstring says when each can be removed."""

from __future__ import annotations

import asyncio
import errno
import functools
import glob
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from praxis_lite.common.errors import CheckpointError
from praxis_lite.common.files import kind_of_other

# Most seconds until a folder that one host has created is visible to others, as on a network file system.
_TO_BE_SEEN = 10.0


@functools.cache
def load_orbax() -> ModuleType:
  """Imports Orbax, which takes a second, and applies all work-arounds; returns `orbax.checkpoint`."""
  import orbax.checkpoint

  _silence_repeated_errors()
  _let_the_process_end()
  _find_folders_of_any_name()
  _make_folders_of_metadata()
  _read_only_regular_files()
  _write_checksums()
  return orbax.checkpoint


def _silence_repeated_errors() -> None:
  """Keeps Orbax's log off the console: its failures are also raised as exceptions.

  On a full disk it logs the same error from each of its threads, a thousand lines of tracebacks. Its event loop also
  reports every read and write that finishes or is discarded after the first failure.
  """
  folder = os.path.join(os.sep, 'orbax', 'checkpoint', '')
  logging.getLogger('absl').addFilter(lambda record: folder not in record.pathname)
  # A message of asyncio about an unretrieved error of Orbax has one of these in its traceback or in the error's text.
  theirs = (folder, 'tensorstore')
  logging.getLogger('asyncio').addFilter(lambda record: not any(name in _text(record) for name in theirs))
  report = sys.unraisablehook

  def report_others(unraisable: sys.UnraisableHookArgs) -> None:
    error = unraisable.exc_value
    is_late = repr(error) == "RuntimeError('Event loop is closed')"
    is_thrown_away = isinstance(getattr(error, '__cause__', None), GeneratorExit)
    if not (is_late or is_thrown_away):
      report(unraisable)

  sys.unraisablehook = report_others


def _let_the_process_end() -> None:
  """Makes the threads of a save daemons, so that a process whose save has failed can end.

  If a save fails before its folder exists, these threads wait ten minutes for the folder. `Checkpointer.close` waits
  for all other saves.
  """
  from orbax.checkpoint._src.futures import future

  if waiting := getattr(future, '_SignalingThread', None):
    waiting.daemon = True


def _find_folders_of_any_name() -> None:
  """Makes the `glob` of Orbax's paths find the contents of a folder even if its name has special characters.

  Orbax joins the folder and the pattern into one pattern. If the folder's name has brackets, the folder is not found,
  and what the processes have written is never merged: the save is lost without an error. If it has other special
  characters, a different folder may match.
  """
  from etils import epath

  path_class = type(epath.Path(os.sep))
  theirs = path_class.glob

  def glob_literally(folder: Any, pattern: str) -> Iterator[Any]:
    name = os.fspath(folder)
    if not glob.has_magic(name):
      return iter(theirs(folder, pattern))
    return (path_class(path) for path in glob.glob(os.path.join(glob.escape(name), pattern)))

  path_class.glob = glob_literally


def _make_folders_of_metadata() -> None:
  """Lets each process create the folder for array metadata, in the folder of the checkpoint, which exists.

  In Orbax only the first process creates it, and the others wait for it for up to ten minutes, even if the run has been
  moved in the meantime.
  """
  import jax
  from orbax.checkpoint._src.metadata import array_metadata_store

  async def make(store: object, folder: os.PathLike[str]) -> None:
    await asyncio.to_thread(_make_below, Path(folder), 0.0 if jax.process_index() == 0 else _TO_BE_SEEN)

  if hasattr(array_metadata_store.Store, '_maybe_create_base_dir'):
    array_metadata_store.Store._maybe_create_base_dir = make


def _read_only_regular_files() -> None:
  """Makes Orbax's paths refuse to read anything but a regular file: a read from a named pipe would never return.

  Orbax reads the timestamps of all checkpoints as soon as it gets the path of their folder.
  """
  from etils import epath

  path_class = type(epath.Path(os.sep))
  theirs = path_class.read_text

  def read(path: Any, encoding: str | None = None) -> str:
    if kind := kind_of_other(path):
      raise OSError(errno.EINVAL, f'it is {kind}, not a file', os.fspath(path))
    return str(theirs(path, encoding))

  path_class.read_text = read


def _make_below(folder: Path, seconds: float) -> None:
  """Waits up to `seconds` for the parent of a folder, then creates the folder; raises OSError if that fails."""
  end = time.monotonic() + seconds
  while True:
    try:
      return folder.mkdir(exist_ok=True)
    except FileNotFoundError:
      if time.monotonic() >= end:
        raise
      time.sleep(0.05)


def check_folder_is_found(folder: str) -> None:
  """Raises CheckpointError if Orbax could not find what it writes into `folder`, which exists."""
  from etils import epath

  above, name = os.path.split(folder)
  if glob.has_magic(above) and [os.fspath(path) for path in epath.Path(above).glob(name)] != [folder]:
    raise CheckpointError(
      f'checkpoints in {above} could not be restored: this version of Orbax takes the name for a pattern; choose one '
      'without * ? [ ]'
    )


def _text(record: logging.LogRecord) -> str:
  """Returns the message of a log record, with the files in the traceback of its exception."""
  error = record.exc_info[1] if record.exc_info else None
  return record.getMessage() + (''.join(traceback.format_exception(error)) if error else '')


_CRC = {'name': 'crc32c'}


def _write_checksums() -> None:
  """Adds checksums to the chunks of all arrays that Orbax writes."""
  from orbax.checkpoint._src.serialization import tensorstore_utils

  plain = tensorstore_utils.ArrayWriteSpec.json.fget
  tensorstore_utils.ArrayWriteSpec.json = property(lambda spec: add_chunk_checksums(plain(spec)))


def add_chunk_checksums(spec: dict[str, Any]) -> dict[str, Any]:
  """Returns the TensorStore spec of an array to write, with a checksum of each chunk; only specs of Zarr 3 change.

  Every reader of the format verifies the checksums of the chunks that it reads. Compressed chunks use Zstandard's own
  checksum, an XXH64 of the values, which takes a quarter of the time of a CRC-32C of the file; other chunks get a
  CRC-32C. Orbax has an option for neither. Orbax also makes each chunk a shard with an index of one entry; this removes
  the index.
  """
  if spec['driver'] == 'cast':
    return {**spec, 'base': add_chunk_checksums(spec['base'])}
  if spec['driver'] != 'zarr3':
    return spec
  (sharding,) = spec['metadata']['codecs']
  *codecs, last = sharding['configuration']['codecs']
  is_compressed = last['name'] == 'zstd'
  verified = [{'name': 'zstd', 'configuration': {'level': 1, 'checksum': True}}] if is_compressed else [last, _CRC]
  return {**spec, 'metadata': {**spec['metadata'], 'codecs': [*codecs, *verified]}}
