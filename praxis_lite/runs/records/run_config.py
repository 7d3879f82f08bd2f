"""Sets up a run: locks and checks its directory, and makes the PRNG keys from its seed."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.checkpoints.retention import CHECKPOINTS
from praxis_lite.common.config.values import fit
from praxis_lite.common.errors import ConfigError, UserError, prefix_errors
from praxis_lite.common.figures import number_of
from praxis_lite.common.files import kind_of_other, local_path
from praxis_lite.runs.records.record import has_record


class RunKeys(NamedTuple):
  """PRNG keys, replicated over the mesh. Steps fold in the step number, so a resumed run draws the same numbers."""

  init: jax.Array
  train: jax.Array
  evaluate: jax.Array


def run_keys(seed: int, mesh: Mesh) -> RunKeys:
  check_seed(seed)
  # A program on the mesh makes the keys, because with several processes, none can put an array on all devices by
  # itself.
  return jax.jit(_split_key, static_argnums=0, out_shardings=NamedSharding(mesh, PartitionSpec()))(seed)


def _split_key(seed: int) -> RunKeys:
  """Makes the keys; a module-level function, so that JAX compiles it only once for a seed and a mesh."""
  return split_key(jax.random.key(seed))


def split_key(key: jax.Array) -> RunKeys:
  """Returns the keys of a run, given the key that was made from the run's seed."""
  return RunKeys(*jax.random.split(key, 3))


def check_seed(seed: int) -> None:
  """Raises ConfigError unless a seed is a 64-bit integer."""
  with prefix_errors('seed'):
    fit(seed, int, None)
  if not -(2**63) <= seed < 2**63:
    raise ConfigError(f'seed = {seed}: expected an integer of 64 bits')


def check_count(where: str, value: Any, least: int = 1, kind: Any = int) -> None:
  """Raises ConfigError if the value of the setting `where` is no number, or less than `least`.

  With `kind=int | None`, the value may be None.
  """
  with prefix_errors(where):
    fit(value, kind, None)
  if value is not None and value < least:
    raise ConfigError(f'{where} = {value}; expected at least {least}{", or None" if kind is not int else ""}')


def check_all_take_part(mesh: Mesh) -> None:
  """Raises ConfigError if a process of the run has no device in the mesh, and so could not take part in a step."""
  if idle := sorted({*range(jax.process_count())} - {device.process_index for device in mesh.devices.flat}):
    raise ConfigError(
      f'task.ici_mesh_shape: the mesh {dict(mesh.shape)} has {mesh.size} of {number_of(jax.device_count(), "device")}, '
      f'and none on host {", ".join(map(str, idle))}; make it larger, or start fewer processes than '
      f'{jax.process_count()}'
    )


def is_due(step: int, interval: int | None) -> bool:
  """Whether an action with this interval is due after `step` steps; None means never."""
  return interval is not None and step > 0 and step % interval == 0


def is_logged(step: int, interval: int, total: int) -> bool:
  """Whether the metrics of a step are written: at `log_interval_steps`, and after the first and the last step."""
  return step % interval == 0 or step in (1, total)


@contextlib.contextmanager
def job_directory(job_log_dir: str | os.PathLike[str]) -> Iterator[Path]:
  """Creates a directory if it does not exist, and tests that it is writable, before anything is compiled.

  If an error ends the block before anything was written, removes the directories that it created. Raises UserError if
  the directory cannot be created, is not writable, or is new and inside the checkpoints of another run.
  """
  path = local_path(job_log_dir).absolute()
  created: list[Path] = []
  try:
    for folder in () if (path / CHECKPOINTS).exists() else (path, *path.parents):
      if folder.name == CHECKPOINTS and has_record(folder.parent):
        where = 'is' if folder == path else 'is in'
        raise UserError(f'job_log_dir {path} {where} the checkpoints of the run {folder.parent}; name another one')
    created = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
      pass
  except OSError as error:
    nearest = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    reason = f'{nearest} is a file' if nearest.is_file() else error.strerror or str(error)
    raise UserError(f'job_log_dir {path} is not writable: {reason}') from None
  _check_checkpoints(path / CHECKPOINTS)
  try:
    yield path
  except BaseException:
    with contextlib.suppress(OSError):  # A directory that is not empty is kept.
      for folder in created:
        folder.rmdir()
    raise


def _check_checkpoints(folder: Path) -> None:
  """Raises UserError if checkpoints cannot be saved in a folder, which may not exist yet."""
  try:
    with tempfile.TemporaryFile(dir=folder):
      pass
  except FileNotFoundError:
    if os.path.lexists(folder):
      raise UserError(f'{folder} is a symbolic link to nothing; remove it, or create its target') from None
  except OSError as error:
    what = 'a file' if folder.is_file() else kind_of_other(folder)
    reason = error.strerror or str(error) if what in ('', 'a directory') else f'{what} is in its place'
    raise UserError(f'checkpoints cannot be saved in {folder}: {reason}') from None


@contextlib.contextmanager
def held_for_training(path: Path) -> Iterator[None]:
  """Locks a directory for one training run, because a second one would delete checkpoints that the first is writing.

  Raises UserError if another run is training there. The operating system releases the lock however the process ends. On
  a file system without locks, this does nothing.
  """
  if sys.platform == 'win32':  # Windows has no such locks; the command line does not train on it.
    yield
    return
  directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
  try:
    waits = iter(_WAITS)
    while _is_locked_by_others(directory, exclusive=True):
      seconds = next(waits, None)
      if seconds is None:
        raise UserError(
          f'another run is training in job_log_dir {path}; wait for it to end or stop it, or choose another directory'
        )
      time.sleep(seconds)
    yield
  finally:
    os.close(directory)


_WAITS = (0.01, 0.05)  # Seconds between tries to lock: `is_held` may hold the lock for a moment.


def is_held(path: Path) -> bool:
  """Whether a process is training in a directory. Takes a shared lock to find out, and releases it immediately.

  Returns False if this is unknown: on Windows, on file systems without locks, and for unreadable directories.
  """
  if sys.platform == 'win32':
    return False
  try:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
  except OSError:
    return False
  try:
    return _is_locked_by_others(directory, exclusive=False)
  finally:
    os.close(directory)


def _is_locked_by_others(directory: int, *, exclusive: bool) -> bool:
  """Tries to lock an open directory; returns True only if another process holds a lock."""
  import fcntl

  with contextlib.suppress(OSError):
    try:
      fcntl.flock(directory, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
      return True
  return False
