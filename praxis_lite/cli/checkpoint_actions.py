"""The actions of `praxis-lite checkpoints`: each takes the flags, and returns the exit code."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from absl import flags

from praxis_lite.checkpoints import stored
from praxis_lite.checkpoints.failures import DamagedError
from praxis_lite.checkpoints.retention import RemovedError, being_read
from praxis_lite.checkpoints.stored import StoredCheckpoint, check_same_arrays
from praxis_lite.common.errors import CheckpointError, UserError
from praxis_lite.common.figures import duration, format_axes
from praxis_lite.common.files import is_url, local_path
from praxis_lite.common.trees import leaves_by_path, path_name
from praxis_lite.instruments.explain.explanation import align_columns
from praxis_lite.runs.records.record import has_record, read_record

if TYPE_CHECKING:
  from praxis_lite.runs.cluster.remote import RemoteCheckpoint


def _found(directory: str, step: int | None) -> Sequence[StoredCheckpoint | RemoteCheckpoint]:
  """Returns the checkpoints of a run, from a disk or an object store; with `step`, only that one."""
  if is_url(directory):
    from praxis_lite.runs.cluster.remote import remote_checkpoints

    return remote_checkpoints(directory, step)
  return stored.checkpoints_at(directory, step)


def _best_step(directory: str) -> int | None:
  if is_url(directory):
    from praxis_lite.runs.cluster.remote import remote_best_step

    return remote_best_step(directory)
  return stored.best_step(directory)


def _newest(directory: str, step: int | None) -> StoredCheckpoint:
  """Returns the checkpoint of `step` on a disk; without `step`, the newest one that is not set aside."""
  found = stored.checkpoints_at(directory, step)
  return next((c for c in reversed(found) if not c.is_set_aside), found[-1])


def list_checkpoints(values: flags.FlagValues) -> int:
  rows = [('step', 'age', 'size', 'mesh', 'state')]
  for directory in values.dirs:
    best = _best_step(directory)
    for checkpoint in _found(directory, values.step):
      name = str(checkpoint.folder) if len(values.dirs) > 1 else PurePath(checkpoint.folder).name
      try:
        with _kept(checkpoint):
          rows.append((name, *_describe(checkpoint, is_best=checkpoint.step == best)))
      except RemovedError:  # A training run may remove it at any time.
        continue
      except DamagedError:  # A damaged checkpoint cannot be opened.
        rows.append((name, '-', '-', '-', 'damaged'))
  _print_columns(rows)
  return 0


def _kept(checkpoint: StoredCheckpoint | RemoteCheckpoint) -> contextlib.AbstractContextManager[None]:
  """Protects a checkpoint on a disk from removal while it is read. Raises RemovedError if it is already gone."""
  return contextlib.nullcontext() if is_url(checkpoint.folder) else being_read(checkpoint.folder)


def _describe(checkpoint: StoredCheckpoint | RemoteCheckpoint, *, is_best: bool) -> tuple[str, str, str, str]:
  """Returns the age, size, mesh and state of a checkpoint, as texts."""
  state = ['best'] if is_best else []
  age = mesh = '-'
  try:
    about = checkpoint.about()
    age = duration(time.time() - about['saved_at']) if 'saved_at' in about else '-'
    mesh = _mesh(about)
  except DamagedError:
    state.append('damaged')
  except CheckpointError:  # For example, the user lacks the permission to read it.
    state.append('cannot be read')
  if checkpoint.is_set_aside:
    state = ['damaged, kept aside']
  return age, _size(checkpoint.num_bytes), mesh, ', '.join(state)


def show_checkpoint(values: flags.FlagValues) -> int:
  directory = values.dirs[0]
  checkpoint = _found(directory, values.step)[-1] if is_url(directory) else _newest(directory, values.step)
  about = checkpoint.about()
  versions = ', '.join(f'{name} {about[name]}' for name in ('praxis_lite', 'jax') if name in about)
  saved_at = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(about['saved_at'])) if 'saved_at' in about else '-'
  print(f'{checkpoint.folder}: {_size(checkpoint.num_bytes)}, saved {saved_at}, mesh {_mesh(about)}, {versions}')
  _print_columns([(name, r['dtype'], str(tuple(r['shape']))) for name, r in checkpoint.variables().items()])
  return 0


def compare_checkpoints(values: flags.FlagValues) -> int:
  first = _newest(values.dirs[0], values.step)
  second = _newest(values.dirs[-1], values.other_step if values.other_step is not None else values.step)
  if first.folder == second.folder:
    raise UserError(f'diff: both are {first.folder}; name another run, or a step by --other_step=200')
  ours, theirs = first.variables(), second.variables()
  rows = []
  for name in sorted(ours.keys() | theirs.keys()):
    if name not in ours or name not in theirs:
      rows.append((name, f'only in {(first if name in ours else second).folder}', ''))
    elif ours[name]['shape'] != theirs[name]['shape']:
      rows.append((name, f'{tuple(ours[name]["shape"])} and {tuple(theirs[name]["shape"])}', ''))
  same = 0
  for difference in first.differences(second):
    if difference.largest == 0:
      same += 1
    else:
      rows.append((difference.name, f'{difference.largest:.3g}', f'{difference.relative:.3g}'))
  print(f'{first.folder} and {second.folder}: {same} arrays are the same, {len(rows)} differ')
  if rows:
    _print_columns([('array', 'largest difference', 'relative'), *rows])
  return 0


def verify_checkpoints(values: flags.FlagValues) -> int:
  is_whole = True
  for checkpoint in [c for directory in values.dirs for c in _found(directory, values.step)]:
    damage = checkpoint.damage()
    is_whole = is_whole and (not damage or checkpoint.is_set_aside)
    aside = ' (kept aside)' if checkpoint.is_set_aside else ''
    print(f'{checkpoint.folder}: {"damaged" if damage else "whole"}{aside}')
    for name, what in damage.items():
      print(f'  {name}: {what}')
    sys.stdout.flush()
  return 0 if is_whole else 1


def copy_checkpoint(values: flags.FlagValues) -> int:
  source, target = values.dirs
  if is_url(source):
    from praxis_lite.runs.cluster.remote import copy_here

    if not values.optimizer:
      raise UserError(
        'copy --nooptimizer: first copy the checkpoint to a directory, then that copy without the optimizer'
      )
    _check_recorded_model(_found(source, values.step)[-1], local_path(target))
    print(f'copied to {copy_here(source, local_path(target), values.step)}')
    return 0
  checkpoint = _newest(source, values.step)
  _check_recorded_model(checkpoint, local_path(target))
  print(f'copied to {checkpoint.copy(local_path(target), optimizer=values.optimizer)}')
  return 0


def _check_recorded_model(checkpoint: StoredCheckpoint | RemoteCheckpoint, target: Path) -> None:
  """Raises CheckpointError if `target` has the record of a run with another model; it need not have a checkpoint."""
  if not has_record(target):
    return
  try:
    declared = leaves_by_path(read_record(target).config.task.instantiate().model.abstract_init())
    saved = {name: r for name, r in checkpoint.variables().items() if name.startswith('mdl_vars.')}
  except UserError:  # The model needs code that is missing or not trusted, or the checkpoint is damaged.
    return
  names = {f'mdl_vars.{path_name(path)}': list(weight.full_shape) for path, weight in declared.items()}
  wanted = {n: {'shape': shape, 'dtype': saved.get(n, {}).get('dtype', 'float32')} for n, shape in names.items()}
  check_same_arrays(saved, wanted, target, optimizer=False)


def _mesh(about: dict[str, object]) -> str:
  mesh = about.get('mesh')
  return format_axes(mesh) if isinstance(mesh, dict) else '-'


def _size(num_bytes: int) -> str:
  for unit, size in (('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
    if num_bytes >= size:
      return f'{num_bytes / size:.3g} {unit}'
  return f'{num_bytes} B'


def _print_columns(rows: Sequence[Sequence[str]]) -> None:
  for line in align_columns(rows):
    print(line)
