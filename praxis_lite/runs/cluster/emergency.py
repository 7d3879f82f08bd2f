"""Emergency copies: the state of a run, written every few steps to a folder of each host, in addition to checkpoints.

    <directory>/praxis_lite-<user>/<run>/<lineage>/<step>.<process>     in each of the directories
    job_log_dir/emergency_copies.json                                   {"lineage": 2715493}

A copy has one file per process: a line of JSON with a checksum, and the bytes of the process's shards, each with a
checksum too. The file is renamed when it is complete. Nothing is flushed to the disk: a copy survives the end of the
process, but may be lost or damaged if the machine fails. The checksums detect the damage.

Before a copy begins, all processes agree on whether the previous one is complete everywhere. Only then are older ones
removed. So one copy is always complete on all hosts, and a host has at most two.

With `peers`, each process also sends its part to other processes, which keep it in the first of their directories.
After a restart, a process without its part gets it from a peer: see `peers.py`. The last copy that is on all peers is
kept until a newer one is, so a host has at most three.

A copy belongs to a lineage. If a run goes back to an earlier checkpoint, or its job_log_dir is deleted, a new lineage
begins, and the copies of the old one are never read.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import secrets
import shutil
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from praxis_lite.checkpoints.contents import (
  add_checksum,
  array_records,
  remove_checksum,
  stored_shape,
  to_leaf,
  to_stored,
)
from praxis_lite.common.errors import CheckpointError, UserError, first_line
from praxis_lite.common.figures import format_bytes, number_of
from praxis_lite.common.files import KnownFolder, open_plain, parse_json, plain_dtype, read_plain, remove_all, user_path
from praxis_lite.common.processes import gather_texts, join_by_host
from praxis_lite.common.trees import leaves_by_path, map_with_path, path_name
from praxis_lite.runs.cluster.peers import INCOMPLETE, PeerError, Peers, failure_domains, folders_of_all, receivers_of
from praxis_lite.runs.records.lineage import LINEAGE
from praxis_lite.training.state import TrainState

IndexRanges = tuple[tuple[int, int], ...]  # (start, stop) in each dimension of a global array.

# How many bytes a process may take to list the parts that it holds.
_MOST_HELD = 2000
_UNSENT = 'the emergency copy is not on all peers: '
_FIELD = 'task.train.emergency_copies'
# The errors that reading a damaged or forged file may raise.
_NO_COPY = (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError)


class _Shard(NamedTuple):
  """A part of an array in the file of a copy; `at` is its offset in the file."""

  name: str
  bounds: IndexRanges
  dtype: np.dtype
  at: int
  checksum: int

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in self.bounds)

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize

  def read(self, file: io.BufferedReader) -> np.ndarray:
    """Returns the values; raises ValueError if they have changed since they were written."""
    if not 0 <= self.nbytes <= os.fstat(file.fileno()).st_size - self.at:
      raise ValueError(f'{self.name} is incomplete')
    data = np.empty(self.nbytes, np.uint8)
    file.seek(self.at)
    if file.readinto(data.data) != self.nbytes or zlib.crc32(data.data) != self.checksum:
      raise ValueError(f'{self.name} has changed')
    return data.view(self.dtype).reshape(self.shape)


class EmergencyCopy:
  """This process's part of a copy, verified.

  Args:
    file: the path of its file.

  Attributes:
    step: the step of the state.
    input_state: the state of the training input after the batch of this step.
    progress: as in `Checkpointer.save`.
    metrics: lines of metrics up to this step that could not be written to the disk.
    record: the other entries of its line of JSON: 'mesh', 'processes', 'variables', 'checkpoint'.
    save: a digest that is the same for all parts of one copy, in all processes. Another start of the run has another.

  Raises:
    OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError: the file has changed since it was written.
  """

  def __init__(self, file: Path):
    self._file = file
    self._shards: dict[tuple[str, IndexRanges], _Shard] = {}
    with open_plain(file) as opened:
      self.record = remove_checksum(parse_json(opened.readline()), 'its record')
      self.step: int = self.record['step']
      self.input_state: dict[str, Any] | None = self.record['input_state']
      self.progress: dict[str, Any] | None = self.record.get('progress')
      self.metrics: list[dict[str, Any]] = list(self.record['metrics'])
      self.save = _save_of(self.record)
      at = opened.tell()
      for name, bounds, dtype, checksum in self.record['shards']:
        shard = _Shard(name, tuple((start, stop) for start, stop in bounds), plain_dtype(dtype), at, checksum)
        self._shards[shard.name, shard.bounds] = shard
        shard.read(opened)
        at += shard.nbytes

  def has(self, name: str, index: IndexRanges) -> bool:
    """Whether the file contains the part of an array at `index`."""
    return (name, index) in self._shards

  def restore(self, shapes: TrainState) -> TrainState:
    """Returns the state; the padded `shapes` and their shardings must be those of the copied state.

    Raises:
      CheckpointError: the file has changed since it was verified.
    """

    def restore_array(path: tuple[str, ...], shape: jax.ShapeDtypeStruct) -> jax.Array:
      data, name = stored_shape(shape), path_name(path)
      part = lambda index: self._shards[name, _bounds(index, data.shape)].read(opened)  # noqa: E731
      return to_leaf(shape, jax.make_array_from_callback(data.shape, data.sharding, part))

    try:
      with open_plain(self._file) as opened:
        return map_with_path(restore_array, shapes)
    except (OSError, ValueError) as error:
      raise CheckpointError(f'{self._file}: {first_line(error)}') from error


class EmergencyCopies:
  """The emergency copies of a run. With several processes, each calls every method.

  Args:
    job_log_dir: the run's directory, which all processes share.
    directories: folders of this host. If there are none, no copies are made, and the methods do nothing.
    shapes: padded shapes of the state, with shardings.
    true_shapes: the shapes without padding.
    peers, failure_domain: see `EmergencyCopiesParams`.

  Attributes:
    costs: a line about the network and memory that copies on peers take; '' without them.

  Raises:
    UserError: there are not enough failure domains for the peers; or one of the folders cannot be used, or is too
      small for two copies.
  """

  def __init__(
    self,
    job_log_dir: str | os.PathLike[str],
    directories: Sequence[str],
    shapes: TrainState,
    true_shapes: TrainState,
    *,
    peers: int = 0,
    failure_domain: int = 1,
  ):
    job_log_dir = Path(job_log_dir).absolute()
    self._shapes = shapes
    self._process = jax.process_index()
    self._about = {
      'mesh': dict(shapes.step.sharding.mesh.shape),
      'processes': jax.process_count(),
      'variables': array_records(true_shapes),
    }
    run = hashlib.blake2b(str(job_log_dir).encode(), digest_size=6).hexdigest()
    self._homes = [user_path(directory) / _user_folder() / run for directory in directories]
    self._lineage_file = job_log_dir / LINEAGE
    self._lineage = _lineage_in(self._lineage_file) if directories else 0
    self._folders = [home / str(self._lineage) for home in self._homes]
    self._start = gather_texts(secrets.token_hex(8))[0] if directories else ''  # An id of this start of the run.
    for folder in self._folders:
      _make(folder, 2 * _num_bytes(shapes))
      for other in folder.parent.iterdir():
        if other != folder:
          remove_all(other)
    self._job_log_dir = KnownFolder(job_log_dir) if directories else None
    self._writing: threading.Thread | None = None
    self._step, self._error, self._told = 0, '', ''  # The last copy: its step, its error here, the reported error.
    self._unsent = ''  # Why the last copy is not on a peer.
    self._on_peers = 0  # The step of the last copy that is on all peers.
    self._peers: Peers | None = None
    self._receivers: list[int] = []
    self.costs = ''
    if peers and directories and jax.process_count() > 1:
      self._find_peers(peers, failure_domain, _num_bytes(shapes))

  def newest(self, checkpoint: int) -> tuple[EmergencyCopy | None, str]:
    """Returns the newest copy that is complete in all processes, and why newer ones are not used, or ''.

    Considers only copies that are newer than the newest checkpoint, of step `checkpoint` (0 for no checkpoint). All
    other copies are removed.
    """
    copies: dict[int, EmergencyCopy] = {}
    unfit: list[str] = []
    files = [entry for folder in self._folders for entry in _files(folder)]
    ours = [(step, file) for step, file in files if file.name == f'{step}.{self._process}']
    for step, file in sorted(ours, key=lambda entry: -entry[0]):
      if step <= checkpoint or step in copies:
        continue
      try:
        copy = EmergencyCopy(file)
        reason = f'{file} is a copy of step {copy.step}, and was renamed' if copy.step != step else ''
        reason = reason or self._reason_against(copy, checkpoint)
      except _NO_COPY as error:
        reason = f'{file} is damaged ({first_line(error)})'
      if reason:
        unfit.append(reason)
      else:
        copies[step] = copy
    if not self._folders:
      return None, ''
    if self._peers is not None:
      unfit += self._fetch_missing(self._peers, checkpoint, copies)
    told = gather_texts(' '.join(f'{step}:{copy.save}' for step, copy in copies.items()))
    whole = [{int(step): save for step, _, save in (word.partition(':') for word in of.split())} for of in told]
    newest = max((step for of in whole for step in of), default=0)
    # The parts of different processes form one copy if they have the same step and come from the same save.
    step = max((step for step in whole[0] if all(of.get(step) == whole[0][step] for of in whole)), default=0)
    why = gather_texts('; '.join(dict.fromkeys(unfit)))
    if newest > step:
      missing = f'no copy of step {newest}'
      why = [reason or (missing if newest not in of else '') for reason, of in zip(why, whole)]
      if not any(why):
        why[0] = f'the parts of step {newest} on the hosts come from different copies'
    self._remove(lambda other: other != step)
    self._on_peers = step
    return copies.get(step), f'emergency copies that are not used: {join_by_host(why)}' if any(why) else ''

  def write(
    self,
    step: int,
    state: TrainState,
    input_state: dict[str, Any] | None,
    checkpoint: int,
    metrics: Sequence[dict[str, Any]] = (),
    progress: dict[str, Any] | None = None,
  ) -> str:
    """Copies the arrays to the host, then writes them in the background; the state may be donated when this returns.

    Args:
      step, state: the padded state on the mesh, and its step.
      input_state: `get_state()` of the training input after the batch of this step.
      checkpoint: step of the newest checkpoint; 0 if there is none.
      metrics: lines of metrics that could not be written to the disk.
      progress: as in `Checkpointer.save`.

    Returns:
      A line to print if the previous copy failed, or is the first to succeed after a failure; otherwise ''.
    """
    if not self._folders:
      return ''
    said = self.settle()
    if self._process == 0 and self._job_log_dir is not None and not self._lineage_file.exists():
      with contextlib.suppress(OSError):  # Restarts need this file to find copies; the next copy retries.
        self._job_log_dir.replace_file(LINEAGE, json.dumps({'lineage': self._lineage}) + '\n')
    of_run: dict[str, Any] = {
      'step': step,
      'checkpoint': checkpoint,
      'input_state': input_state,
      'metrics': list(metrics),
    }
    of_run |= {'progress': progress, 'start': self._start}
    self._step, self._error = step, 'it was not written'
    arguments = {**self._about, **of_run}, _shards_of(state)
    self._writing = threading.Thread(target=self._write, args=arguments, name='emergency_copy')
    self._writing.start()
    return said

  def settle(self) -> str:
    """Waits until all processes have written the last copy; then removes older copies, or an incomplete last one.

    Returns a line to print, or ''.
    """
    if self._writing is None:
      return ''
    self._wait()
    step, failed = self._step, join_by_host(gather_texts(self._error))
    unsent = self._why_unsent()
    if not failed and not unsent:
      self._on_peers = step
    self._remove(lambda other: other == step if failed else other < step and other != self._on_peers)
    failed = failed or unsent
    before, self._told = self._told, failed
    if failed == before:
      return ''
    if not failed:
      return f'step {step}: emergency copies are written again'
    if failed.startswith(_UNSENT):
      return f'step {step}: {failed}; training goes on'
    return f'step {step}: the emergency copy failed: {failed}; training goes on, and the previous copy is kept'

  def remove(self) -> None:
    """Removes all copies, once the last checkpoint of the run is complete."""
    self.settle()
    for home in self._homes:
      remove_all(home)

  def close(self) -> None:
    """Waits until this process has finished writing, and sends and receives nothing more."""
    self._wait()
    if self._peers is not None:
      self._peers.close()
      self._peers = None

  def _wait(self) -> None:
    if self._writing is not None:
      self._writing.join()
      self._writing = None

  # ---- copies on other hosts

  def _find_peers(self, peers: int, failure_domain: int, num_bytes: int) -> None:
    count = jax.process_count()
    folders = folders_of_all(self._folders[0])
    own = folders[self._process]
    if len(set(folders)) == 1:
      self.costs = 'emergency copies: all processes have the same folder, so none sends its part to another'
      return
    domains = failure_domains(folders, failure_domain)
    if len(set(domains)) <= peers:
      raise UserError(
        f'{_FIELD}.peers = {peers} needs {peers + 1} failure domains, and {number_of(count, "process")} in domains of '
        f'{failure_domain} have {len(set(domains))}; processes that share a folder are in one domain'
      )
    receivers = receivers_of(domains, peers)
    self._peers = Peers(self._folders[0], self._lineage)
    self._receivers = receivers[self._process]
    received = Counter(peer for of_one in receivers for peer in of_one)
    # A copy that is on all peers, one that is not, and one that is written; other folders of this host have two.
    kept = {process: 3 * (1 + received[process]) for process in range(count)}
    total = sum(kept[process] for process in range(count) if folders[process] == own) * num_bytes
    _check_room(self._folders[0], total, 'copies and those of its peers')
    to, most = ', '.join(map(str, self._receivers)), max(kept.values())
    self.costs = (
      f'emergency copies: process {self._process} sends its part of the state, {format_bytes(num_bytes)}, to '
      f'{"process" if peers == 1 else "processes"} {to} at each copy; a process keeps up to {most} such parts, '
      f'{format_bytes(most * num_bytes)}'
    )

  def _why_unsent(self) -> str:
    if self._peers is None:
      return ''
    unsent = join_by_host(gather_texts(self._unsent))
    return f'{_UNSENT}{unsent}' if unsent else ''

  def _fetch_missing(self, peers: Peers, checkpoint: int, copies: dict[int, EmergencyCopy]) -> list[str]:
    """Gets this process's part of the newest copy whose parts all exist on some host; returns what did not work.

    Parts that are whole are chosen one by one: each from this host, or else from any host that has it.
    """
    held = {(step, self._process): copy.save for step, copy in copies.items()}
    for step, file in _files(self._folders[0]):
      process = file.name.partition('.')[2]
      if process.isdecimal() and int(process) != self._process and step > checkpoint:
        with contextlib.suppress(*_NO_COPY):
          held[step, int(process)] = _save_in(file)
    told = gather_texts(_list_of(held), _MOST_HELD)
    holders: dict[tuple[int, str, int], list[int]] = {}  # Of each part, by its step, save and process.
    for holder, of in enumerate(told):
      for word in of.split():
        name, _, save = word.partition(':')
        of_step, _, process = name.partition('.')
        holders.setdefault((int(of_step), save, int(process)), []).append(holder)
    complete = {(step, save) for step, save, _ in holders}
    whole = range(jax.process_count())
    complete = {(step, save) for step, save in complete if all((step, save, process) in holders for process in whole)}
    problems = []
    for step, save in sorted(complete, reverse=True):
      problem = ''
      if step not in copies or copies[step].save != save:
        problem = self._fetch(peers, step, save, holders[step, save, self._process], copies, checkpoint)
        problems += [problem] if problem else []
      if not any(gather_texts(problem)):
        break
    return problems

  def _fetch(
    self,
    peers: Peers,
    step: int,
    save: str,
    holders: Sequence[int],
    copies: dict[int, EmergencyCopy],
    checkpoint: int,
  ) -> str:
    """Gets this process's part of a copy from the first holder that gives it; returns why there is none, or ''."""
    name = f'{step}.{self._process}'
    problem = ''
    for holder in sorted(holders, key=lambda other: (other - self._process) % jax.process_count()):
      file = self._folders[0] / name
      try:
        peers.get(holder, name, file)
        copy = EmergencyCopy(file)
        problem = self._reason_against(copy, checkpoint)
        if (copy.step, copy.save) != (step, save):
          problem = f'process {holder} has given a part of another copy than the one of step {step}'
        if not problem:
          copies[step] = copy
          return ''
      except (PeerError, *_NO_COPY) as error:
        problem = f'the part of step {step} on process {holder} cannot be used: {first_line(error)}'
    return problem

  def _reason_against(self, copy: EmergencyCopy, checkpoint: int) -> str:
    """Returns why the run cannot be resumed from a complete copy; '' if it can."""
    if copy.record['checkpoint'] > checkpoint:
      return (
        f'the copy of step {copy.step} was made after the checkpoint of step {copy.record["checkpoint"]}, which is gone'
      )
    for what, ours in self._about.items():
      if (theirs := copy.record[what]) != ours:
        return f'the copy of step {copy.step} has other {what}' + ('' if what == 'variables' else f', {theirs}')
    for name, index in _local_parts(self._shapes):
      if not copy.has(name, index):
        return f'the copy of step {copy.step} has other parts of {name}'
    return ''

  def _remove(self, is_unwanted: Callable[[int], bool]) -> None:
    """Removes the files of some steps, including those of other processes, which may have run on this host before."""
    for folder in self._folders:
      for step, file in _files(folder):
        if is_unwanted(step):
          with contextlib.suppress(OSError):
            file.unlink()

  def _write(self, record: dict[str, Any], shards: Sequence[tuple[str, IndexRanges, np.ndarray]]) -> None:
    """Writes a copy to all directories; at least one write must succeed."""
    described = [[name, index, str(data.dtype), zlib.crc32(_bytes(data))] for name, index, data in shards]
    header = json.dumps(add_checksum({**record, 'shards': described})).encode() + b'\n'
    errors = []
    for folder in self._folders:
      complete = folder / f'{record["step"]}.{self._process}'
      incomplete = complete.with_name(complete.name + INCOMPLETE)
      try:
        with open(incomplete, 'wb') as file:
          file.write(header)
          for _, _, data in shards:
            file.write(_bytes(data))
        incomplete.rename(complete)
      except OSError as error:
        errors.append(f'{folder}: {error.strerror or error}')
        with contextlib.suppress(OSError):
          incomplete.unlink()
    self._error = '; '.join(errors) if len(errors) == len(self._folders) else ''
    unsent = []
    peers = self._peers
    for peer in self._receivers:
      assert peers is not None
      try:
        peers.put(peer, f'{record["step"]}.{self._process}', [header, *(_bytes(data) for _, _, data in shards)])
      except PeerError as failure:
        unsent.append(first_line(failure))
    self._unsent = '; '.join(unsent)


def _lineage_in(file: Path) -> int:
  """Returns the lineage that process 0 reads from a file; a new one if the file has none."""
  lineage = secrets.randbits(31)
  if jax.process_index() == 0:
    with contextlib.suppress(*_NO_COPY):
      lineage = int(parse_json(read_plain(file))['lineage']) % 2**31
  return int(multihost_utils.broadcast_one_to_all(np.int32(lineage)))


def _save_of(record: dict[str, Any]) -> str:
  """Returns the digest of a save: two starts of a run may write other values at the same step and position."""
  content = [record['step'], record['input_state'], record.get('start', '')]
  return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=4).hexdigest()


def _save_in(file: Path) -> str:
  """Returns the digest of the save in the file of a copy, by its first line; the rest is not read."""
  with open_plain(file) as opened:
    record = remove_checksum(parse_json(opened.readline()), 'its record')
  return _save_of(record)


def _list_of(held: dict[tuple[int, int], str]) -> str:
  """Returns parts by their step and process as text: the newest, as many as fit into `_MOST_HELD` bytes."""
  text = ''
  for (step, process), save in sorted(held.items(), key=lambda part: -part[0][0]):
    longer = f'{text} {step}.{process}:{save}'
    if len(longer) > _MOST_HELD:
      break
    text = longer
  return text


def _user_folder() -> str:
  return f'praxis_lite-{os.getuid() if hasattr(os, "getuid") else "user"}'


def _make(folder: Path, num_bytes: int) -> None:
  """Creates the folder of a lineage, below a folder of this user.

  Raises:
    UserError: the folder cannot be used, or its disk is smaller than `num_bytes`.
  """
  of_user = folder.parent.parent
  try:
    of_user.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, 'getuid') and (of_user.is_symlink() or of_user.stat().st_uid != os.getuid()):
      raise OSError(f'{of_user} is of another user')
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    reason = error.strerror or error
    raise UserError(f'{_FIELD}.directories: {of_user.parent} cannot be used on this host: {reason}') from None
  _check_room(folder, num_bytes, 'two copies')


def _check_room(folder: Path, num_bytes: int, what: str) -> None:
  """Raises UserError if the disk of a folder of a lineage is smaller than `num_bytes`, which `what` takes."""
  try:
    total = shutil.disk_usage(folder).total
  except OSError:
    return  # A later write says so.
  if total < num_bytes:
    raise UserError(
      f'{_FIELD}.directories: {folder.parent.parent.parent} has {total / 1e9:.2g} GB on this host, and {what} take '
      f'{num_bytes / 1e9:.2g} GB'
    )


def _files(folder: Path) -> Iterator[tuple[int, Path]]:
  """Yields (step, file) of all copies in a folder, including incomplete ones."""
  for file in folder.glob('*.*'):
    if (step := file.name.partition('.')[0]).isdecimal():
      yield int(step), file


def _local_parts(shapes: TrainState) -> Iterator[tuple[str, IndexRanges]]:
  """Yields (name, index) of each part of the state that this process holds; replicas are yielded once."""
  for path, shape in leaves_by_path(shapes).items():
    data = stored_shape(shape)
    indices = data.sharding.addressable_devices_indices_map(data.shape).values()
    yield from dict.fromkeys((path_name(path), _bounds(index, data.shape)) for index in indices)


def _num_bytes(shapes: TrainState) -> int:
  sizes = {path_name(path): stored_shape(shape).dtype.itemsize for path, shape in leaves_by_path(shapes).items()}
  return sum(sizes[name] * math.prod(stop - start for start, stop in index) for name, index in _local_parts(shapes))


def _shards_of(state: TrainState) -> list[tuple[str, IndexRanges, np.ndarray]]:
  """Returns copies of the parts of the arrays that this process holds, one for all replicas of a part."""
  shards: dict[tuple[str, IndexRanges], jax.Array] = {}
  for path, leaf in leaves_by_path(state).items():
    array = to_stored(leaf)
    for shard in array.addressable_shards:
      shards.setdefault((path_name(path), _bounds(shard.index, array.shape)), shard.data)
  for data in shards.values():
    data.copy_to_host_async()
  return [(name, index, np.array(np.asarray(data), copy=True)) for (name, index), data in shards.items()]


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> IndexRanges:
  return tuple(part.indices(size)[:2] for part, size in zip(index, shape))


def _bytes(data: np.ndarray) -> memoryview:
  return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
