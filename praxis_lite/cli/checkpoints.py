"""`praxis-lite checkpoints`: lists, shows, compares, verifies and copies the checkpoints of runs."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from absl import flags

from praxis_lite.cli.command import Command
from praxis_lite.cli.command_flags import CommandFlags
from praxis_lite.common.errors import CheckpointError, UserError, check_choice
from praxis_lite.common.figures import format_axes
from praxis_lite.common.files import is_url, local_path

if TYPE_CHECKING:
  from praxis_lite.checkpoints.stored import StoredCheckpoint
  from praxis_lite.runs.cluster.remote import RemoteCheckpoint

_ACTIONS = ('list', 'show', 'diff', 'verify', 'copy')


def _run(values: flags.FlagValues) -> int:
  check_choice('ACTION', values.action, _ACTIONS)
  wanted = {'diff': (1, 2), 'copy': (2, 2), 'show': (1, 1)}.get(values.action, (1, len(values.dirs)))
  if not values.dirs or not wanted[0] <= len(values.dirs) <= wanted[1]:
    raise UserError(f'{values.action}: name {_USES[values.action]}')
  action = {'list': _list, 'show': _show, 'diff': _diff, 'verify': _verify, 'copy': _copy}[values.action]
  return action(values)


_USES = {
  'list': 'directories of runs, as in praxis-lite checkpoints list runs/1',
  'show': 'one run, as in praxis-lite checkpoints show runs/1 --step=100',
  'diff': 'two runs, or two steps of one, as in praxis-lite checkpoints diff runs/1 --step=100 --other_step=200',
  'verify': 'directories of runs, as in praxis-lite checkpoints verify runs/1',
  'copy': 'a run and a directory, as in praxis-lite checkpoints copy runs/1 runs/2 --nooptimizer',
}


def _found(directory: str, step: int | None) -> Sequence[StoredCheckpoint | RemoteCheckpoint]:
  """Returns the checkpoints of a run, from a disk or an object store; with `step`, only that one."""
  if is_url(directory):
    from praxis_lite.runs.cluster.remote import remote_checkpoints

    return remote_checkpoints(directory, step)
  from praxis_lite.checkpoints.stored import checkpoints_at

  return checkpoints_at(directory, step)


def _best_step(directory: str) -> int | None:
  if is_url(directory):
    from praxis_lite.runs.cluster.remote import remote_best_step

    return remote_best_step(directory)
  from praxis_lite.checkpoints.stored import best_step

  return best_step(directory)


def _newest(directory: str, step: int | None) -> StoredCheckpoint:
  """Returns the checkpoint of `step` on a disk; without `step`, the newest one that is not set aside."""
  from praxis_lite.checkpoints.stored import checkpoints_at

  found = checkpoints_at(directory, step)
  return next((c for c in reversed(found) if not c.is_set_aside), found[-1])


def _list(values: flags.FlagValues) -> int:
  from praxis_lite.checkpoints.failures import DamagedError
  from praxis_lite.checkpoints.retention import RemovedError

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
  from praxis_lite.checkpoints.retention import being_read

  return contextlib.nullcontext() if is_url(checkpoint.folder) else being_read(checkpoint.folder)


def _describe(checkpoint: StoredCheckpoint | RemoteCheckpoint, *, is_best: bool) -> tuple[str, str, str, str]:
  """Returns the age, size, mesh and state of a checkpoint, as texts."""
  from praxis_lite.checkpoints.failures import DamagedError
  from praxis_lite.common.figures import duration

  state = ['best'] if is_best else []
  age = mesh = '-'
  try:
    about = checkpoint.about()
    age = duration(time.time() - about['saved_at']) if 'saved_at' in about else '-'
    mesh = _mesh(about)
  except DamagedError:
    state.append('damaged')
  except CheckpointError:  # For example, this user may not read it.
    state.append('cannot be read')
  if checkpoint.is_set_aside:
    state = ['damaged, kept aside']
  return age, _size(checkpoint.num_bytes), mesh, ', '.join(state)


def _show(values: flags.FlagValues) -> int:
  directory = values.dirs[0]
  checkpoint = _found(directory, values.step)[-1] if is_url(directory) else _newest(directory, values.step)
  about = checkpoint.about()
  versions = ', '.join(f'{name} {about[name]}' for name in ('praxis_lite', 'jax') if name in about)
  saved_at = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(about['saved_at'])) if 'saved_at' in about else '-'
  print(f'{checkpoint.folder}: {_size(checkpoint.num_bytes)}, saved {saved_at}, mesh {_mesh(about)}, {versions}')
  _print_columns([(name, r['dtype'], str(tuple(r['shape']))) for name, r in checkpoint.variables().items()])
  return 0


def _diff(values: flags.FlagValues) -> int:
  first = _newest(values.dirs[0], values.step)
  second = _newest(values.dirs[-1], values.other_step if values.other_step is not None else values.step)
  if first.folder == second.folder:
    raise UserError(f'diff: both are {first.folder}; {_USES["diff"]}')
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


def _verify(values: flags.FlagValues) -> int:
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


def _copy(values: flags.FlagValues) -> int:
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
  """Raises CheckpointError if a directory has the record of a run of another model, even without a checkpoint."""
  from praxis_lite.checkpoints.stored import check_same_arrays
  from praxis_lite.common.trees import leaves_by_path, path_name
  from praxis_lite.runs.records.record import has_record, read_record

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
  from praxis_lite.instruments.explain.explanation import align_columns

  for line in align_columns(rows):
    print(line)


def _flags() -> CommandFlags:
  values = CommandFlags()
  values.add_text('action', 'What to do: list, show, diff, verify or copy.', 'verify', 'list')
  where = 'Directory of a run, or of one of its checkpoints, or the URL of a copy.'
  values.add_texts('dirs', where, 'runs/1')
  values.add_integer('step', 'Step of the checkpoint; by default all for list and verify, the newest for others.', 100)
  values.add_integer('other_step', 'For diff: step of the second checkpoint.', 200)
  values.add_switch('optimizer', "For copy: copy the optimizer's state too.", default=True)
  return values


COMMAND = Command(
  'checkpoints',
  'list, compare, verify and copy checkpoints',
  'list the checkpoints of runs: age, size, mesh, and which is the best or damaged; show the arrays of one checkpoint; '
  'diff two by the largest difference of each array; verify all checksums, with exit code 1 if anything is damaged; '
  'copy one to another run directory. All of these except diff also take the URL of a copy in an object store, such '
  'as s3://bucket/runs/1.',
  'praxis-lite checkpoints verify runs/1',
  _flags(),
  _run,
  bare='action',
  bare_rest='dirs',
  usage='ACTION DIRECTORY ... [--flags]',
)
