"""A checkpoint on disk: reads its record, finds damage, compares it with another one, and copies it.

Arrays are read in parts, without a mesh. Orbax is imported only to write a copy without the optimizer's state.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.checkpoints.base import BASE, arrays_in, base_of, check_base
from praxis_lite.checkpoints.best import BEST, BestRecord
from praxis_lite.checkpoints.checkpointer import Checkpointer, saved_steps
from praxis_lite.checkpoints.contents import (
  ArrayRecord,
  OtherModelError,
  add_checksum,
  check_same_model,
  read_checkpoint_record,
)
from praxis_lite.checkpoints.failures import DamagedError
from praxis_lite.checkpoints.orbax.on_disk import record_file
from praxis_lite.checkpoints.retention import CHECKPOINTS, being_read, is_set_aside, step_folder, steps_in
from praxis_lite.checkpoints.seal import check_records, check_seal
from praxis_lite.checkpoints.streamed import StreamedArray, boxes, whole_box
from praxis_lite.common.errors import CheckpointError
from praxis_lite.common.files import local_path, remove_all
from praxis_lite.common.trees import nest, to_path
from praxis_lite.training.state import TrainState

# Files and folders of a run directory that a copy needs to be a run itself.
_OF_RUN = ('run.json', 'config.txt', 'vocabulary.json', 'hugging_face')


class StoredCheckpoint:
  """The checkpoint in `folder`: `job_log_dir/checkpoints/<step>`, or the new name of a damaged checkpoint."""

  def __init__(self, folder: Path):
    self.folder = folder

  @property
  def step(self) -> int:
    return int(self.folder.name.partition('.')[0])

  @property
  def is_set_aside(self) -> bool:
    """Whether a run has found this checkpoint damaged, and renamed its folder."""
    return is_set_aside(self.folder)

  @property
  def num_bytes(self) -> int:
    """The total size of the checkpoint's files, in bytes."""
    return sum(path.stat().st_size for path in self.folder.rglob('*') if path.is_file())

  def about(self) -> dict[str, Any]:
    """Returns the checkpoint's record: `variables` (true shape and dtype by name), `mesh`, versions, `saved_at`.

    Raises:
      DamagedError: the record is damaged, or belongs to another checkpoint.
    """
    check_records(self.folder, self.step)
    return read_checkpoint_record(self.folder, 'about')

  def variables(self) -> dict[str, ArrayRecord]:
    """Returns the true shape and the dtype of each array, by name."""
    variables: dict[str, ArrayRecord] = self.about()['variables']
    return variables

  def damage(self) -> dict[str, str]:
    """Reads the whole checkpoint; returns descriptions of its damaged parts, by name; empty without damage."""
    damaged: dict[str, str] = {}
    with contextlib.ExitStack() as to_release:
      try:
        to_release.enter_context(being_read(self.folder))
      except DamagedError as error:
        return {'folder': str(error)}
      for item in ('about', 'inputs'):
        with _collect(damaged, item):
          read_checkpoint_record(self.folder, item)
      if 'about' in damaged:
        return damaged
      about = read_checkpoint_record(self.folder, 'about')
      base = base_of(self.folder, about)
      if base is not None:
        with _collect(damaged, BASE):
          check_base(base, self.folder, about['variables'])
      for name in about['variables']:
        if base is not None and name in base.names:
          continue
        with _collect(damaged, name):
          array = self._array(name)
          for box in boxes(whole_box(array.shape), array.part_shape(array.shape)):
            array.read(box)
      if not damaged:
        with _collect(damaged, 'seal'):
          check_seal(self.folder, self.step)
    return damaged

  def _array(self, name: str) -> StreamedArray:
    """Returns an array as it is stored, with padding; PRNG keys as the integers that represent them."""
    return arrays_in(self.folder, read_checkpoint_record(self.folder, 'about'), {name: None})[name]

  def differences(self, other: StoredCheckpoint) -> Iterator[ArrayDifference]:
    """Yields the difference of each array that both checkpoints have with the same true shape."""
    theirs = other.variables()
    with being_read(self.folder), being_read(other.folder):
      for name, record in self.variables().items():
        if name in theirs and theirs[name]['shape'] == record['shape']:
          is_key = record['dtype'].startswith('key<')
          shape = self._array(name).shape if is_key else tuple(record['shape'])
          yield _difference(name, shape, self._array(name), other._array(name))

  def copy(self, job_log_dir: Path, *, optimizer: bool = True) -> Path:
    """Copies the checkpoint, and the record of its run, to another run directory; returns the folder of the copy.

    Args:
      job_log_dir: the other directory, which is created if it does not exist.
      optimizer: False leaves out the optimizer's state and the position in the input. The copy is then like an imported
        checkpoint: a run in that directory starts at step 0 with these variables.

    Raises:
      CheckpointError: the directory has a checkpoint of this step or of another model, this checkpoint is damaged, or
        writing fails.
    """
    target = step_folder(job_log_dir, self.step)
    if target.exists():
      raise CheckpointError(f'there is a checkpoint of step {self.step} in {job_log_dir} already')
    if damaged := self.damage():
      raise CheckpointError(f'{self.folder} is damaged ({", ".join(damaged)}), and is not copied')
    check_same_run(self.variables(), job_log_dir, optimizer=optimizer)
    try:
      target.parent.mkdir(parents=True, exist_ok=True)
      if optimizer:
        partial = target.with_name(f'{self.step}.copying')
        remove_all(partial)  # The remains of an earlier call that was killed.
        with being_read(self.folder):
          shutil.copytree(self.folder, partial)
          self._name_base_from(partial, target)
        partial.rename(target)
      else:
        self._copy_variables(job_log_dir)
      for name in _OF_RUN:
        source = self.folder.parent.parent / name
        if source.exists() and not (job_log_dir / name).exists():
          (shutil.copytree if source.is_dir() else shutil.copy)(source, job_log_dir / name)
    except OSError as error:
      raise CheckpointError(f'writing {target} failed: {error.strerror or error}') from None
    return target

  def _name_base_from(self, copy: Path, target: Path) -> None:
    """Writes the path of the base into the record of a copied checkpoint, which will be moved to `target`.

    The path is relative to `target`.
    """
    about = read_checkpoint_record(copy, 'about')
    base = base_of(self.folder, about)
    if base is not None:
      content = add_checksum({**about, BASE: base.to_record(str(target))})
      record_file(copy, 'about').write_text(json.dumps(content), encoding='utf-8')

  def _copy_variables(self, job_log_dir: Path) -> None:
    records = {name: r for name, r in self.variables().items() if not name.startswith('opt_states.')}
    with being_read(self.folder), contextlib.closing(Checkpointer(job_log_dir)) as checkpointer:
      arrays = arrays_in(self.folder, self.about(), {name: r['shape'] for name, r in records.items()})
      structs = {name: jax.ShapeDtypeStruct(r['shape'], jnp.dtype(r['dtype'])) for name, r in records.items()}
      checkpointer.save(self.step, _state(arrays), _state(structs), None)


def check_same_run(variables: Mapping[str, ArrayRecord], job_log_dir: Path, *, optimizer: bool = True) -> None:
  """Raises CheckpointError if a directory has checkpoints of another model than that of the arrays to copy.

  `variables` are the arrays to copy. The directory need not exist. Without `optimizer`, the optimizer state may differ.
  """
  for step in reversed(saved_steps(job_log_dir)):
    with contextlib.suppress(DamagedError):
      check_same_arrays(variables, StoredCheckpoint(step_folder(job_log_dir, step)).variables(), job_log_dir, optimizer)
      return


def check_same_arrays(
  copied: Mapping[str, ArrayRecord], wanted: Mapping[str, ArrayRecord], job_log_dir: Path, optimizer: bool
) -> None:
  """Raises CheckpointError if the arrays to copy differ from `wanted`, the arrays of the run that gets the copy."""
  ours, theirs = (
    {name: record for name, record in of.items() if optimizer or not name.startswith('opt_states.')}
    for of in (copied, wanted)
  )
  try:
    check_same_model(ours, theirs, 'the checkpoint to copy')
  except OtherModelError as error:
    remedy = 'name another directory' + (', or copy with --nooptimizer' if error.only_learner and optimizer else '')
    raise CheckpointError(f'{job_log_dir} has another run: {error.difference}; {remedy}') from None


class ArrayDifference(NamedTuple):
  """The difference of an array in two checkpoints.

  Attributes:
    largest: the largest absolute difference of an element; NaN if an element is finite in only one checkpoint.
    relative: `largest`, divided by the largest absolute value in the first checkpoint.
  """

  name: str
  largest: float
  relative: float


def best_step(job_log_dir: str | os.PathLike[str]) -> int | None:
  """Returns the step of the best checkpoint that a run has recorded; None if it has recorded none that still exists."""
  best = BestRecord(Path(job_log_dir, BEST), saved_steps(job_log_dir)).value
  return None if best is None else best.step


def checkpoints_at(path: str | os.PathLike[str], step: int | None = None) -> list[StoredCheckpoint]:
  """Returns all checkpoints of a run in order, even damaged ones, whose folders were renamed; or the one in a folder.

  Args:
    path: a run directory, or the folder of one step in its `checkpoints`.
    step: return only the checkpoint of this step; None returns all.

  Raises:
    CheckpointError: no such checkpoint exists.
  """
  path = local_path(path)
  if path.parent.name == CHECKPOINTS and path.is_dir():
    return [StoredCheckpoint(path)]
  directory = path / CHECKPOINTS
  folders = [directory / str(s) for s in steps_in(directory) if step in (None, s)]
  if step is None and directory.is_dir():
    folders = sorted([*folders, *filter(is_set_aside, directory.iterdir())], key=lambda f: StoredCheckpoint(f).step)
  if not folders:
    if not path.exists():
      raise CheckpointError(f'there is no directory {path}')
    of_step = f' of step {step}' if step is not None else ''
    others = f'; there are {steps}' if (steps := steps_in(directory)) else ''
    raise CheckpointError(f'there is no checkpoint{of_step} in {directory}{others}')
  return [StoredCheckpoint(folder) for folder in folders]


def _difference(name: str, shape: tuple[int, ...], ours: StreamedArray, theirs: StreamedArray) -> ArrayDifference:
  largest = scale = 0.0
  for box in boxes(whole_box(shape), ours.part_shape(shape)):
    # NumPy has no arithmetic for bfloat16 and similar types; differences of unsigned integers would wrap.
    a, b = (np.asarray(array.read(box)).astype(np.float64) for array in (ours, theirs))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid='ignore'):
      apart = np.where(same, 0.0, np.abs(a - b))
    here = float(apart.max(initial=0.0)) if np.isfinite(apart).all() else np.nan
    largest = max(largest, here, key=lambda x: (np.isnan(x), x))
    scale = max(scale, float(np.abs(a[np.isfinite(a)]).max(initial=0.0)))
  return ArrayDifference(name, largest, largest / scale if scale else largest)


def _state(leaves: dict[str, Any]) -> TrainState:
  """Returns the train state, without the optimizer's state, from leaves by name."""
  tree = nest({to_path(name): leaf for name, leaf in leaves.items()})
  return TrainState(tree['step'], tree['mdl_vars'], None, tree.get('ema_vars'))


@contextlib.contextmanager
def _collect(damaged: dict[str, str], name: str) -> Iterator[None]:
  try:
    yield
  except CheckpointError as error:
    damaged[name] = str(error).partition('(')[2].rpartition(')')[0] or str(error)
