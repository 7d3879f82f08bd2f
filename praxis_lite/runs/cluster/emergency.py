"""Emergency copies: the state of a run, written every few steps to a folder of each host, in addition to checkpoints.

    <directory>/praxis_lite-<user>/<run>/<lineage>/<step>.<process>     in each of the directories
    job_log_dir/emergency_copies.json                                   {"lineage": 2715493}

A copy has one file per process (`copy_file.py`), which is renamed when it is complete. Nothing is flushed to the disk:
a copy survives the end of the process, but may be lost or damaged if the machine fails.

Before a copy begins, all processes agree on whether the previous one is complete everywhere. Only then are older ones
removed. So one copy is always complete on all hosts, and a host has at most two.

With `peers`, each process also sends its part to other processes, which keep it in the first of their directories, and
gets a missing part from such a process: see `copies_on_peers.py`. The last copy that is on all peers is kept until a
newer copy is on all peers, so a host has at most three.

A copy belongs to a lineage. If a run goes back to an earlier checkpoint, or its job_log_dir is deleted, a new lineage
begins, and the copies of the old one are never read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from praxis_lite.checkpoints.contents import array_records
from praxis_lite.common.errors import UserError, first_line
from praxis_lite.common.files import KnownFolder, parse_json, read_plain, remove_all, user_path
from praxis_lite.common.processes import gather_texts, join_by_host
from praxis_lite.runs.cluster.copies_on_peers import CopiesOnPeers, join_peers
from praxis_lite.runs.cluster.copy_file import (
  NO_COPY,
  EmergencyCopy,
  Shards,
  encode_copy,
  files_in,
  local_parts,
  new_copy,
  num_bytes,
  shards_of,
)
from praxis_lite.runs.observer import StateToCopy
from praxis_lite.runs.records.lineage import LINEAGE
from praxis_lite.training.state import TrainState

_FIELD = 'task.train.emergency_copies'


class EmergencyCopies:
  """The emergency copies of a run. With several processes, each calls every method.

  Args:
    job_log_dir: the run's directory, which all processes share.
    directories: folders of this host, at least one.
    shapes, true_shapes: the padded shapes of the state, with shardings; and its shapes without padding.
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
    self._lineage = _lineage_in(self._lineage_file)
    self._folders = [home / str(self._lineage) for home in self._homes]
    self._start = gather_texts(secrets.token_hex(8))[0]  # Identifies this start of the run.
    for folder in self._folders:
      _make(folder, 2 * num_bytes(shapes))
      for other in folder.parent.iterdir():
        if other != folder:
          remove_all(other)
    self._job_log_dir = KnownFolder(job_log_dir)
    self._writing: threading.Thread | None = None
    # The step and the local error of the last copy, and the last reported error.
    self._step, self._error, self._told = 0, '', ''
    self._on_peers = 0  # The step of the last copy that is on all peers.
    self._peers: CopiesOnPeers | None = None
    self.costs = ''
    if peers and jax.process_count() > 1:
      joined = join_peers(self._folders[0], self._lineage, peers, failure_domain, num_bytes(shapes))
      self._peers, self.costs, in_folder = joined
      _check_room(self._folders[0], in_folder, 'copies and those of its peers')

  def newest(self, checkpoint: int) -> tuple[EmergencyCopy | None, str]:
    """Returns the newest copy that is complete in all processes, or None, and a text: why newer ones are not used.

    Considers only copies that are newer than `checkpoint`, the step of the newest checkpoint (0 if there is none). The
    text is '' if there are no newer copies. Removes all copies except the returned one.
    """
    copies: dict[int, EmergencyCopy] = {}
    unfit: list[str] = []
    files = [entry for folder in self._folders for entry in files_in(folder)]
    ours = [(step, file) for step, file in files if file.name == f'{step}.{self._process}']
    for step, file in sorted(ours, key=lambda entry: -entry[0]):
      if step <= checkpoint or step in copies:
        continue
      try:
        copy = EmergencyCopy(file)
        reason = f'{file} is a copy of step {copy.step}, and was renamed' if copy.step != step else ''
        reason = reason or self._reason_against(copy, checkpoint)
      except NO_COPY as error:
        reason = f'{file} is damaged ({first_line(error)})'
      if reason:
        unfit.append(reason)
      else:
        copies[step] = copy
    if self._peers is not None:
      unfit += self._peers.fetch_missing(copies, checkpoint, lambda copy: self._reason_against(copy, checkpoint))
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

  def write(self, snapshot: StateToCopy) -> str:
    """Copies the arrays to the host, then writes them in the background; the state may be donated when this returns.

    Returns a line to print about the previous copy, or '', as `settle` does.
    """
    said = self.settle()
    if self._process == 0 and not self._lineage_file.exists():
      with contextlib.suppress(OSError):  # If this fails, the next copy tries again. Restarts find copies by the file.
        self._job_log_dir.replace_file(LINEAGE, json.dumps({'lineage': self._lineage}) + '\n')
    record = {**self._about, **snapshot._asdict(), 'start': self._start}
    shards = shards_of(record.pop('state'))
    self._step, self._error = snapshot.step, 'it was not written'
    self._writing = threading.Thread(target=self._write, args=(record, shards), name='emergency_copy')
    self._writing.start()
    return said

  def settle(self) -> str:
    """Waits until all processes have written the last copy.

    If it is incomplete, removes it; otherwise, removes older ones, except the last copy that is on all peers. Returns a
    line to print if problems have begun, changed or ended; otherwise ''.
    """
    if self._writing is None:
      return ''
    self._wait()
    step, failed = self._step, join_by_host(gather_texts(self._error))
    unsent = '' if self._peers is None else join_by_host(gather_texts(self._peers.unsent))
    if not failed and not unsent:
      self._on_peers = step
    self._remove(lambda other: other == step if failed else other < step and other != self._on_peers)
    problem = unsent and f'the emergency copy is not on all peers: {unsent}; training goes on'
    if failed:
      problem = f'the emergency copy failed: {failed}; training goes on, and the previous copy is kept'
    before, self._told = self._told, problem
    return '' if problem == before else f'step {step}: {problem or "emergency copies are written again"}'

  def remove(self) -> None:
    """Removes all copies, once the last checkpoint of the run is complete."""
    self.settle()
    for home in self._homes:
      remove_all(home)

  def close(self) -> None:
    """Waits until this process has finished writing, then stops answering the other processes."""
    self._wait()
    if self._peers is not None:
      self._peers.close()
      self._peers = None

  def _wait(self) -> None:
    if self._writing is not None:
      self._writing.join()
      self._writing = None

  def _reason_against(self, copy: EmergencyCopy, checkpoint: int) -> str:
    """Returns why the run cannot be resumed from a complete copy; '' if it can."""
    if copy.record['checkpoint'] > checkpoint:
      return (
        f'the copy of step {copy.step} was made after the checkpoint of step {copy.record["checkpoint"]}, which is gone'
      )
    for what, ours in self._about.items():
      if (theirs := copy.record[what]) != ours:
        return f'the copy of step {copy.step} has other {what}' + ('' if what == 'variables' else f', {theirs}')
    for name, index in local_parts(self._shapes):
      if not copy.has(name, index):
        return f'the copy of step {copy.step} has other parts of {name}'
    return ''

  def rates(self) -> dict[int, float]:
    """Returns the bytes per second at which each peer has received its last part; {} without peers."""
    return {} if self._peers is None else dict(self._peers.rates)  # A copy, because another thread may change the dict.

  def _remove(self, is_unwanted: Callable[[int], bool]) -> None:
    """Removes the files of unwanted steps, even those of other processes, which may have run on this host before."""
    for folder in self._folders:
      for step, file in files_in(folder):
        if is_unwanted(step):
          with contextlib.suppress(OSError):
            file.unlink()

  def _write(self, record: dict[str, Any], shards: Shards) -> None:
    """Writes a copy to all directories, and sends it to the peers; sets `_error` if no directory could be written."""
    name, parts, errors = f'{record["step"]}.{self._process}', encode_copy(record, shards), []
    for folder in self._folders:
      try:
        with new_copy(folder / name) as file:
          file.writelines(parts)
      except OSError as error:
        errors.append(f'{folder}: {error.strerror or error}')
    self._error = '; '.join(errors) if len(errors) == len(self._folders) else ''
    if self._peers is not None:
      self._peers.send(name, parts)


def _lineage_in(file: Path) -> int:
  """Returns the lineage that process 0 reads from a file; a new one if the file has none."""
  lineage = secrets.randbits(31)
  if jax.process_index() == 0:
    with contextlib.suppress(*NO_COPY):
      lineage = int(parse_json(read_plain(file))['lineage']) % 2**31
  return int(multihost_utils.broadcast_one_to_all(np.int32(lineage)))


def _user_folder() -> str:
  return f'praxis_lite-{os.getuid() if hasattr(os, "getuid") else "user"}'


def _make(folder: Path, needed: int) -> None:
  """Creates the folder of a lineage, below a folder of this user.

  Raises:
    UserError: the folder cannot be used, or its disk is smaller than `needed` bytes.
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
  _check_room(folder, needed, 'two copies')


def _check_room(folder: Path, needed: int, what: str) -> None:
  """Raises UserError if the disk of a folder of a lineage is smaller than `needed` bytes, the size of `what`."""
  try:
    total = shutil.disk_usage(folder).total
  except OSError:
    return  # The next write to this folder fails and reports it.
  if total < needed:
    raise UserError(
      f'{_FIELD}.directories: {folder.parent.parent.parent} has {total / 1e9:.2g} GB on this host, and {what} take '
      f'{needed / 1e9:.2g} GB'
    )
