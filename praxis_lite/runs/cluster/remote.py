"""A run in an object store: its complete checkpoints, and its other files.

    <url>/checkpoints/<step>/...         the files of a checkpoint, as in the directory of the run
          checkpoints/<step>.complete    JSON, written last: size and SHA-256 of each of these files
          run.json, metrics.jsonl, summaries/...

So a plain copy of the folder is a run directory. A killed upload leaves no `.complete`, and the next upload replaces
its files. A fetched checkpoint is compared with these sizes and digests, and renamed when it is complete.

A run writes an evaluation first to metrics.jsonl and then to an event file. Event files in the store must be at least
as new as metrics.jsonl, so metrics.jsonl is read first and written last. Then a run that resumes from the store finds
no evaluation in metrics.jsonl that the event files lack.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from praxis_lite.checkpoints.best import BEST, BestCheckpoint
from praxis_lite.checkpoints.contents import ArrayRecord, add_checksum, parse_record, remove_checksum
from praxis_lite.checkpoints.failures import DamagedError
from praxis_lite.checkpoints.orbax.on_disk import record_file
from praxis_lite.checkpoints.retention import CHECKPOINTS, being_read, step_folder
from praxis_lite.checkpoints.seal import check_seal, check_seal_of
from praxis_lite.checkpoints.stored import check_same_run
from praxis_lite.common.errors import CheckpointError
from praxis_lite.common.figures import number_of
from praxis_lite.common.files import parse_json, read_plain, remove_all
from praxis_lite.common.parallel import call_in_parallel
from praxis_lite.runs.cluster.object_store import FileSum, ObjectStore, StoreError, sum_of_file
from praxis_lite.runs.records.lineage import LINEAGE

_COMPLETE, _METRICS = '.complete', 'metrics.jsonl'
# Entries of a run directory that are useful only on the machine that wrote them.
_OF_THE_MACHINE = ('stacks', 'profile', LINEAGE)


class RemoteCheckpoint:
  """A complete checkpoint in an object store: the part of `StoredCheckpoint` that needs no arrays.

  Attributes:
    url, folder: both are the URL of its folder.
    files: the size and SHA-256 of each file, by name.
    rollbacks: how many times the run had gone back to an earlier checkpoint before this one.
  """

  is_set_aside = False

  def __init__(self, store: ObjectStore, step: int, files: Mapping[str, FileSum], rollbacks: int):
    self.url = self.folder = f'{store.url}/{CHECKPOINTS}/{step}'
    self.step, self.files, self.rollbacks = step, files, rollbacks
    self._store = store

  @property
  def num_bytes(self) -> int:
    """The total size of the checkpoint's files, in bytes."""
    return sum(file.size for file in self.files.values())

  def about(self) -> dict[str, Any]:
    """Returns the checkpoint's record; see `StoredCheckpoint.about`."""
    records = {name: self._record(name) for name in ('about', 'inputs')}
    check_seal_of(self.url, self.step, records)
    return records['about']

  def variables(self) -> dict[str, ArrayRecord]:
    """Returns the true shape and the dtype of each array, by name."""
    variables: dict[str, ArrayRecord] = self.about()['variables']
    return variables

  def damage(self) -> dict[str, str]:
    """Reads all files of the checkpoint; returns a description of each damaged file, by name."""

    def difference_of(name: str) -> str:
      try:
        return _difference(self._store.sum(self._name(name)), self.files[name])
      except DamagedError:
        return 'is missing'

    damaged = {name: how for name, how in zip(self.files, call_in_parallel(difference_of, self.files)) if how}
    if not damaged:
      try:
        self.about()
      except DamagedError as error:
        damaged['seal'] = str(error)
    return damaged

  def is_that_in(self, folder: Path) -> bool:
    """Whether this is a copy of the local checkpoint in `folder`, and not of another save of the same step."""
    with contextlib.suppress(OSError):
      return self.files.get('about/metadata') == sum_of_file(record_file(folder, 'about'))
    return False

  def fetch(self, job_log_dir: Path) -> Path:
    """Copies the checkpoint to a run directory that has none of this step; returns its folder in that directory.

    Raises:
      DamagedError: a file has changed since it was uploaded.
      CheckpointError: the checkpoint cannot be read, or cannot be written to the disk.
    """
    target = step_folder(job_log_dir, self.step)
    partial = target.with_name(f'{self.step}.fetching')
    remove_all(partial)  # Removes what a killed process has left.

    def get(name: str) -> None:
      self._store.get(self._name(name), partial / name)
      if how := _difference(sum_of_file(partial / name), self.files[name]):
        raise DamagedError(f'{self.url} is damaged ({name} {how})')

    try:
      call_in_parallel(get, self.files)
      check_seal(partial, self.step, self.url)
      partial.rename(target)
    except OSError as error:
      raise CheckpointError(f'writing {target} failed: {error.strerror or error}') from None
    finally:
      remove_all(partial)
    return target

  def _record(self, item: str) -> dict[str, Any]:
    try:
      return parse_record(self._store.read(self._name(f'{item}/metadata')), item)
    except (ValueError, AttributeError) as error:
      raise error if isinstance(error, CheckpointError) else DamagedError(f'{self.url}: {error}') from None

  def _name(self, file: str) -> str:
    return f'{CHECKPOINTS}/{self.step}/{file}'


class RemoteRun:
  """A run in an object store. `between` is called before each file is uploaded; an error that it raises stops uploads.

  Attributes:
    incomplete: the steps that had files but no `.complete` when `checkpoints` was last called.
  """

  def __init__(self, store: ObjectStore, between: Callable[[], object] = lambda: None):
    self.url = store.url
    self._store = store
    self._between = between
    self.incomplete: set[int] = set()
    self._known: dict[int, RemoteCheckpoint] = {}
    self._copied: dict[str, tuple[int, int]] = {}  # The size and time of each file when it was last copied.

  def checkpoints(self) -> list[RemoteCheckpoint]:
    """Returns the complete checkpoints, in order."""
    names = self._store.names(CHECKPOINTS)
    steps = {int(name.removesuffix(_COMPLETE)) for name in names if name.removesuffix(_COMPLETE).isdecimal()}
    complete = {step for step in steps if f'{step}{_COMPLETE}' in names}
    self._known = {step: checkpoint for step, checkpoint in self._known.items() if step in complete}
    for step in complete - self._known.keys():
      data = self._store.read(f'{CHECKPOINTS}/{step}{_COMPLETE}')
      try:
        self._known[step] = RemoteCheckpoint(self._store, step, *_parse_complete(data, step))
      except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        continue  # In a file system, another process may be writing it now.
    self.incomplete = steps - self._known.keys()
    return [self._known[step] for step in sorted(self._known)]

  def upload(self, folder: Path, rollbacks: int) -> None:
    """Copies the checkpoint in a local folder, whose name is the step, to the store; locks the folder in the meantime.

    Raises:
      RemovedError: retention has removed the checkpoint.
      StoreError: the store does not accept the files.
    """
    step = int(folder.name)

    def put(path: Path) -> FileSum:
      self._between()
      self._store.put(path, f'{CHECKPOINTS}/{step}/{path.relative_to(folder).as_posix()}')
      return sum_of_file(path)

    with being_read(folder):
      self.remove(step)
      paths = sorted(path for path in folder.rglob('*') if path.is_file())
      files = dict(zip((path.relative_to(folder).as_posix() for path in paths), call_in_parallel(put, paths)))
    sizes = self._store.sizes(f'{CHECKPOINTS}/{step}')
    if sizes != {name: file.size for name, file in files.items()}:
      raise StoreError(f'{self.url}: the files of step {step} in the store are not those that were sent')
    record = {'step': step, 'rollbacks': rollbacks, 'files': {n: file._asdict() for n, file in files.items()}}
    self._between()
    self._store.write(f'{CHECKPOINTS}/{step}{_COMPLETE}', json.dumps(add_checksum(record), indent=1).encode())
    self._known[step] = RemoteCheckpoint(self._store, step, files, rollbacks)

  def remove(self, step: int) -> None:
    """Removes a checkpoint, or whatever exists of it."""
    self._known.pop(step, None)
    if f'{step}{_COMPLETE}' in self._store.names(CHECKPOINTS):
      self._store.remove(f'{CHECKPOINTS}/{step}{_COMPLETE}')  # A half-removed step must not look complete.
    if self._store.names(f'{CHECKPOINTS}/{step}'):
      self._store.remove(f'{CHECKPOINTS}/{step}')

  def upload_files(self, directory: Path) -> None:
    """Copies the files outside of checkpoints that have changed since the last call."""
    changed = {name: about for name, about in _files_to_copy(directory) if self._copied.get(name) != about}
    metrics = read_plain(directory / _METRICS) if _METRICS in changed else b''
    for name in sorted(changed, key=lambda name: (name == _METRICS, name)):
      self._between()
      try:
        data = metrics if name == _METRICS else read_plain(directory / name)
      except FileNotFoundError:
        continue
      self._store.write(name, data)
      self._copied[name] = changed[name]

  def fetch_files(self, directory: Path, *, overwrite: bool) -> None:
    """Copies the other files of a run to a local directory; without `overwrite`, only those that it lacks."""
    for name in filter(_is_copied, self._store.sizes()):
      path = directory / name
      if overwrite or not path.exists():
        partial = path.with_name(f'.{path.name}.fetching')
        self._store.get(name, partial)
        os.replace(partial, path)

  def read_file(self, name: str) -> bytes | None:
    """Returns the bytes of a file of the run, such as run.json; None if it does not exist."""
    try:
      return self._store.read(name)
    except DamagedError:
      return None

  def best_step(self) -> int | None:
    """Returns the step of the best checkpoint that the run has recorded; None if there is none."""
    data = self.read_file(BEST)
    best = data and BestCheckpoint.parse(data, self._known or [c.step for c in self.checkpoints()])
    return best.step if best else None


def remote_checkpoints(url: str, step: int | None = None) -> list[RemoteCheckpoint]:
  """Returns the complete checkpoints of a run in an object store, or only that of `step`.

  Raises:
    CheckpointError: no such checkpoint exists.
  """
  found = RemoteRun(ObjectStore(url)).checkpoints()
  wanted = [checkpoint for checkpoint in found if step in (None, checkpoint.step)]
  if not wanted:
    which = 'no complete checkpoint' if step is None else f'no complete checkpoint of step {step}'
    raise CheckpointError(f'there is {which} in {url}; there are {[checkpoint.step for checkpoint in found]}')
  return wanted


def remote_best_step(url: str) -> int | None:
  """Returns the step of the best checkpoint that a run in an object store has recorded; None if there is none."""
  return RemoteRun(ObjectStore(url)).best_step()


def copy_here(url: str, job_log_dir: Path, step: int | None = None) -> Path:
  """Copies a checkpoint of a run in an object store, and the other files of the run, to a directory.

  Existing files in the directory stay. `step` is None for the newest checkpoint. Returns the folder of the copy.

  Raises:
    CheckpointError: no such checkpoint exists; `job_log_dir` already has a checkpoint of the same step, or checkpoints
      of another model; or the checkpoint is damaged, or cannot be read or written.
  """
  run = RemoteRun(ObjectStore(url))
  checkpoint = remote_checkpoints(url, step)[-1]
  if step_folder(job_log_dir, checkpoint.step).exists():
    raise CheckpointError(f'there is a checkpoint of step {checkpoint.step} in {job_log_dir} already')
  check_same_run(checkpoint.variables(), job_log_dir)
  run.fetch_files(job_log_dir, overwrite=False)
  return checkpoint.fetch(job_log_dir)


def _parse_complete(data: bytes, step: int) -> tuple[dict[str, FileSum], int]:
  """Returns the files and the number of rollbacks in a `.complete`; may raise any parsing error if it is damaged."""
  record = remove_checksum(parse_json(data), 'the list of files')
  files = {name: FileSum(int(file['size']), str(file['sha256'])) for name, file in record['files'].items()}
  if record['step'] != step or not all(map(_is_inside, files)):
    raise ValueError('it is of another step, or names files elsewhere')
  return files, int(record['rollbacks'])


def _is_inside(name: str) -> bool:
  """Whether a file's name stays inside its directory; anyone may have written the list of files."""
  parts = PurePosixPath(name).parts
  return bool(parts) and name == '/'.join(parts) and '..' not in parts and '\\' not in name and name.isprintable()


def _files_to_copy(directory: Path) -> Iterator[tuple[str, tuple[int, int]]]:
  """Yields the name of each file outside of checkpoints, with its size and time.

  The folders of checkpoints are not entered: other threads may remove them at the same time.
  """
  for folder, folders, files in os.walk(directory):
    inside = Path(folder).relative_to(directory)
    folders[:] = [name for name in folders if _is_copied((inside / name).as_posix())]
    for name in filter(_is_copied, ((inside / file).as_posix() for file in files)):
      with contextlib.suppress(FileNotFoundError):
        about = (directory / name).lstat()
        if stat.S_ISREG(about.st_mode):
          yield name, (about.st_size, about.st_mtime_ns)


def _is_copied(name: str) -> bool:
  """Whether a file or folder is one of the files of a run that are copied besides its checkpoints."""
  parts = PurePosixPath(name).parts
  is_hidden = any(part.startswith('.') for part in parts)
  return _is_inside(name) and not is_hidden and parts[0] not in (CHECKPOINTS, *_OF_THE_MACHINE)


def _difference(found: FileSum, expected: FileSum) -> str:
  """Returns how a file differs from the uploaded one, in words; '' if it does not."""
  if found.size != expected.size:
    return f'has {number_of(found.size, "byte")} instead of {expected.size}'
  return '' if found == expected else 'has changed'
