"""What a run starts from: its configs, the inputs they describe, a directory, and the PRNG keys made from its seed."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.checkpoints.retention import CHECKPOINTS
from praxis_lite.common.config import REQUIRED, Config, config_values, target
from praxis_lite.common.config.editing import line_of_edit
from praxis_lite.common.config.fields_at_fault import name_config
from praxis_lite.common.config.values import fit
from praxis_lite.common.devices import start_devices
from praxis_lite.common.errors import ConfigError, DataError, UserError, prefix_errors
from praxis_lite.common.figures import number_of
from praxis_lite.common.files import kind_of_other, local_path
from praxis_lite.inputs import BaseInput
from praxis_lite.inputs.patient_thread import call_in_time
from praxis_lite.inputs.rewarded import RewardedInput
from praxis_lite.models.base import BaseModel


class RunKeys(NamedTuple):
  """PRNG keys, replicated over the mesh. Steps fold in the step number, so a resumed run draws the same numbers."""

  init: jax.Array
  train: jax.Array
  evaluate: jax.Array


def run_keys(seed: int, mesh: Mesh) -> RunKeys:
  """Returns the keys of a run."""
  check_seed(seed)
  # A program on the mesh makes the keys: with several processes, none can put an array on all devices by itself.
  keys: RunKeys = jax.jit(_split_key, static_argnums=0, out_shardings=NamedSharding(mesh, PartitionSpec()))(seed)
  return keys


def _split_key(seed: int) -> RunKeys:
  """A function of the module, so that JAX compiles it once for a seed and a mesh."""
  return split_key(jax.random.key(seed))


def split_key(key: jax.Array) -> RunKeys:
  """Returns the keys of a run with this key of a seed."""
  return RunKeys(*jax.random.split(key, 3))


def check_seed(seed: int) -> None:
  """Raises ConfigError unless a seed is an integer of 64 bits."""
  with prefix_errors('seed'):
    fit(seed, int, None)
  if not -(2**63) <= seed < 2**63:
    raise ConfigError(f'seed = {seed}: expected an integer of 64 bits')


def check_all_take_part(mesh: Mesh) -> None:
  """Raises ConfigError if a process of the run has no device in the mesh, because it could not take part in a step."""
  idle = sorted(set(range(jax.process_count())) - {device.process_index for device in mesh.devices.flat})
  if idle:
    raise ConfigError(
      f'task.ici_mesh_shape: the mesh {dict(mesh.shape)} has {mesh.size} of '
      f'{number_of(jax.device_count(), "device")}, and none on '
      f'host {", ".join(map(str, idle))}; make it larger, or start fewer processes than {jax.process_count()}'
    )


def is_due(step: int, interval: int | None) -> bool:
  """Whether an action with this interval is due after `step` steps; None means never."""
  return interval is not None and step > 0 and step % interval == 0


class Datasets(NamedTuple):
  """The inputs returned by the experiment's method `name`: `datasets()` or `decode_datasets()`."""

  name: str
  inputs: list[BaseInput]

  @property
  def evaluation(self) -> list[BaseInput]:
    """The inputs to evaluate on."""
    return [i for i in self.inputs if not i.is_training]

  def the_training_input(self) -> BaseInput:
    """Returns the only training input; raises ConfigError if there is none, or more than one."""
    training = [i for i in self.inputs if i.is_training]
    if len(training) != 1:
      raise ConfigError(
        f'{self.name}(): exactly one input must have is_training=True, and {len(training)} of {len(self.inputs)} have '
        'it; to train on several, mix them in a MixtureInput'
      )
    return training[0]

  def check(self, inputs: Sequence[BaseInput], model: BaseModel) -> None:
    """Reads a batch of each of `inputs` and lets the model check it; raises UserError if that fails."""
    for i, data in enumerate(self.inputs):
      if not any(data is wanted for wanted in inputs):
        continue
      with _name_fields_by_path(f'{self.name}[{i}]', data.label):
        try:
          batch = call_in_time(data.get_next, data.label)
        except StopIteration:
          raise DataError(f'{data.label}: it has no batch') from None
        data.reset()
        model.check_input(data, data.rows_in_memory() or batch)
        for training in self.inputs:
          if training.is_training and data is not training:
            training.check_beside(data)


def build_datasets(configs: Sequence[Config], name: str = 'datasets') -> Datasets:
  """Builds inputs that read this process's share of the data.

  Raises:
    ConfigError: two evaluation inputs have the same name, one of them has the name of the training input, or an input
      to decode is a `RewardedInput`.
  """
  start_devices()
  inputs: list[BaseInput] = []
  missing = [next((field for field, x in config_values(c).items() if x is REQUIRED), None) for c in configs]
  for i, config in enumerate(configs):
    if missing[i] is not None:
      every, kind = '*' if len(configs) > 1 and len(set(missing)) == 1 else i, target(config).__qualname__
      example, line = f"--set '{name}[{every}].{missing[i]}=...'", _line_of_config(config)
      if line:  # The user's code has made or edited this config.
        example = f'Config({kind}, {missing[i]}=...), or by {example} ({line})'
      raise ConfigError(
        f'{name}[{i}].{missing[i]}: a value is required but not set (a field of {kind}), as in {example}'
      )
    called = target(config).__qualname__, getattr(config, 'name', '')
    with _name_line_of_edit(f'{name}[{i}]', config), _name_fields_by_path(f'{name}[{i}]', *called):
      inputs.append(config.instantiate(num_hosts=jax.process_count(), host_index=jax.process_index()))
  for i, data in enumerate(inputs):
    if name == 'decode_datasets' and isinstance(data, RewardedInput):
      raise ConfigError(
        f'{name}[{i}]: a RewardedInput is for training and evaluation, and decoding has no rewards; put it into '
        'datasets(), with is_training=False, or decode its prompts with an input of texts'
      )
  labels = [i.label for i in inputs if not i.is_training]
  twice = [label for label in labels if labels.count(label) > 1]
  if twice:
    raise ConfigError(f'{name}(): {len(twice)} inputs are called {twice[0]!r}; set the name of each')
  named = {data.name: i for i, data in enumerate(inputs) if data.name and data.is_training}
  for i, data in enumerate(inputs):
    if data.name in named and not data.is_training:
      raise ConfigError(
        f'{name}[{named[data.name]}].name and {name}[{i}].name, of training and evaluation data, are both '
        f'{data.name!r}, so their metrics could not be told apart; set another, as in --set {name}[{i}].name=validation'
      )
  return Datasets(name, inputs)


def _line_of_config(config: Config) -> str:
  """Returns the first line of the user's code that has set a field of a config, such as 'mine.py:12'; '' if none."""
  return next((line for field in config_values(config) if (line := line_of_edit(config, str(field)))), '')


@contextlib.contextmanager
def _name_line_of_edit(path: str, config: Config) -> Iterator[None]:
  """Adds to an error about a field of an input's config the line of the user's code that has set it."""
  try:
    yield
  except UserError as error:
    name_config(error, config, path)
    raise


@contextlib.contextmanager
def _name_fields_by_path(path: str, *labels: str) -> Iterator[None]:
  """Prepends the path of an input's config to errors raised inside; to its fields, in place of one of `labels`."""
  try:
    yield
  except UserError as error:
    of_field = functools.reduce(lambda text, label: text.removeprefix(f'{label}.'), labels, str(error))
    error.args = (f'{path}: {error}' if of_field == str(error) else f'{path}.{of_field}',)
    raise


@contextlib.contextmanager
def job_directory(job_log_dir: str | os.PathLike[str]) -> Iterator[Path]:
  """Creates a directory if it does not exist, and tests that it is writable, before anything is compiled.

  If an error ends the block before anything was written, directories that were created are removed. Raises UserError if
  the directory cannot be created or is not writable.
  """
  path = local_path(job_log_dir).absolute()
  created: list[Path] = []
  try:
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
    with contextlib.suppress(OSError):  # A directory that is not empty stays.
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
  """Locks a directory for one training run: a second run would delete the checkpoints that the first one is writing.

  Raises UserError if another run is training there. The operating system releases the lock however the process ends. On
  a file system without locks, this does nothing.
  """
  if sys.platform == 'win32':  # Windows has no such locks, and the command line does not train there.
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


_WAITS = (0.01, 0.05)  # `is_held` may hold the lock for a moment.


def is_held(path: Path) -> bool:
  """Whether a process is training in a directory. Takes a shared lock to find out, and releases it immediately.

  False if that is unknown: on Windows, on file systems without locks, and in directories that cannot be read.
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
  """Tries to lock an open directory; returns True only if another process holds the lock."""
  import fcntl

  with contextlib.suppress(OSError):
    try:
      fcntl.flock(directory, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
      return True
  return False
