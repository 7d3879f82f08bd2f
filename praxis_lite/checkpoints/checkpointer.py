"""Checkpoints: the train state and the position in the input, stored so that any other mesh can read them.

    job_log_dir/checkpoints/<step>/state      arrays, as stored on the mesh that saved them
                                   inputs     JSON, the state of the training input after the same step
                                   about      JSON, the true shape and dtype of each array, version, mesh

Each of the three has a seal, which shows that they come from one save and from this step: see `seal.py`.

Arrays are stored under their names, 'mdl_vars.lm.w' or 'opt_states.0.mu.lm.w', as nested dicts, so a reader needs no
class of an optimizer library. They are stored with the padding of the mesh that saved them: zeros at the end. A
restore compares the true shapes, and cuts or extends the padding to what its mesh needs.

    job_log_dir/best.json                     the best one by a metric: {"step", "metric", "mode", "value"}

Orbax writes checkpoints in the background, into folders that are renamed when they are complete. So the unfinished save
of a killed run is never mistaken for a checkpoint, and the next run removes it.

Everything that is restored is verified: each chunk of an array has a checksum, and so do the index of the arrays and
the JSON files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax

from praxis_lite.checkpoints.base import BASE, Base, arrays_in, base_of, check_base
from praxis_lite.checkpoints.best import BEST, BestCheckpoint, BestRecord
from praxis_lite.checkpoints.contents import (
  add_checksum,
  array_records,
  check_same_model,
  read_checkpoint_record,
  stored_shape,
  to_leaf,
  to_stored,
)
from praxis_lite.checkpoints.failures import DamagedError, PartedError, unreadable
from praxis_lite.checkpoints.orbax.on_disk import STATE
from praxis_lite.checkpoints.orbax.save_barrier import make_save_barrier
from praxis_lite.checkpoints.orbax.store import OrbaxStore
from praxis_lite.checkpoints.regrouping import Regrouping
from praxis_lite.checkpoints.retention import CHECKPOINTS, RemovedError, Retention, being_read, set_aside, steps_in
from praxis_lite.checkpoints.seal import SEAL, check_records, check_seal, new_seal, seal_array
from praxis_lite.common.devices import start_devices
from praxis_lite.common.errors import CheckpointError, ConfigError, error_summary
from praxis_lite.common.files import check_plain_below, local_path
from praxis_lite.common.processes import gather_texts, join_by_host
from praxis_lite.common.trees import NestedDict, leaves_by_path, map_with_path, merge, nest, node_at, path_name, to_path
from praxis_lite.common.versions import package_version
from praxis_lite.sharding.layout import StateLayout
from praxis_lite.training.state import TrainState

# Bytes that must be free on the disk before a save begins.
_LEAST_ROOM = 1 << 14
# What a process sends to the others if the checkpoint to read has been removed.
_GONE = 'gone'

Step = int | Literal['best'] | None
"""The step of a checkpoint; None means the newest."""

OnDamage = Literal['previous', 'fail']
"""What to do if the newest checkpoint is damaged: use the previous one, or raise an error."""

T = TypeVar('T')


class Checkpointer:
  """The checkpoints of a run.

  With several processes, each calls every method, and all share one file system.

  Args:
    job_log_dir: the run's directory.
    max_to_keep: how many of the newest checkpoints are kept; None keeps all.
    keep_interval_steps: checkpoints at multiples of this step are never deleted; None disables it.
    read_only: never saves or deletes anything, for reading while another process trains.
    on_damage: if the newest checkpoint is damaged, 'previous' reads the one before it and, unless `read_only`, renames
      the folder of the damaged one; 'fail' raises an error.

  Attributes:
    base: a checkpoint of another run; the checkpoints saved here leave out the arrays in `base.names`. None saves all
      arrays. It may be set at any time.
    notes: a line for each damaged checkpoint that was skipped.

  Raises:
    ConfigError: a number is not positive.
  """

  def __init__(
    self,
    job_log_dir: str | os.PathLike[str],
    *,
    max_to_keep: int | None = None,
    keep_interval_steps: int | None = None,
    read_only: bool = False,
    on_damage: OnDamage = 'fail',
  ):
    for name, value in (('max_to_keep', max_to_keep), ('keep_interval_steps', keep_interval_steps)):
      if value is not None and value < 1:
        raise ConfigError(f'task.train.{name} = {value}: must be at least 1, or None')
    self.directory = os.path.join(os.path.abspath(local_path(job_log_dir)), CHECKPOINTS)
    self.notes: list[str] = []
    self.base: Base | None = None
    self._read_only, self._on_damage = read_only, on_damage
    self._damaged: set[int] = set()
    self._retention = Retention(self.directory, max_to_keep=max_to_keep, keep_interval_steps=keep_interval_steps)
    start_devices()
    self._barrier = make_save_barrier()
    self._to_close = contextlib.ExitStack()
    self._store = self._open_store()
    self._is_broken = False
    self._being_saved: list[int] = []
    self._best = BestRecord(Path(self.directory).parent / BEST, self.steps())

  def _open_store(self) -> OrbaxStore:
    self._remove_incomplete()
    return OrbaxStore(self.directory, read_only=self._read_only, barrier=self._barrier)

  def save(
    self,
    step: int,
    state: TrainState,
    true_shapes: TrainState,
    input_state: dict[str, Any] | None,
    progress: dict[str, Any] | None = None,
  ) -> bool:
    """Copies the arrays to the host, then saves in the background; the state may be donated when this returns.

    The parts of a `StreamedArray` in the state are read while they are written.

    Returns False if a checkpoint of this step exists already. After an error the next save starts afresh, and the
    checkpoints that were complete stay. A save that fails while it is written fails in all processes.

    Args:
      step: the step of the state.
      state: the state, with padding, on the mesh.
      true_shapes: the shapes and dtypes of the state without padding.
      input_state: `get_state()` of the training input after the batch of this step.
      progress: everything else that is needed to resume the run, as JSON values.

    Raises:
      CheckpointError: this save or the previous one failed.
      PartedError: this save could not begin in this one of several processes; all of them must stop.
    """
    self.wait_until_complete()
    with self._saving():
      if self._is_broken:
        self._remove_incomplete()
        self._retention.wait()  # The disk may have no room for both the old checkpoints and the new one.
      if failed := join_by_host(gather_texts(self._reason_against_files())):
        raise CheckpointError(failed)
      if self._is_broken:
        self._mend()
    if self._store.has_step(step):
      return False
    seal, base = new_seal(step), self.base
    stored = leaves_by_path(jax.tree.map(to_stored, state))
    if base is not None:
      stored = {path: x for path, x in stored.items() if path_name(path) not in base.names}
    arrays = {**nest(stored), SEAL: seal_array(seal)}
    of_base = {} if base is None else {BASE: base.to_record(self.folder(step))}
    records = {
      'inputs': add_checksum({'input_state': input_state, SEAL: seal}),
      'about': add_checksum({**_about(state, true_shapes), **of_base, 'progress': progress, SEAL: seal}),
    }
    with self._saving(PartedError if jax.process_count() > 1 else CheckpointError):
      self._being_saved.append(step)
      return self._store.save(step, arrays, records)

  def wait(self) -> None:
    """Waits until all saves are on disk and old checkpoints are removed; raises CheckpointError if saving failed."""
    self.wait_until_complete()
    self._retention.wait()

  def newly_complete(self) -> list[tuple[int, Path]]:
    """Returns (step, folder) of each checkpoint that has become complete since the last call; [] during a save.

    Raises CheckpointError if saving failed.
    """
    if not self._being_saved or self._store.is_saving():
      return []
    self.wait_until_complete()
    folders = [(step, Path(self.directory, str(step))) for step in self._being_saved]
    self._being_saved = []
    return [(step, folder) for step, folder in folders if folder.exists()]

  def wait_until_complete(self) -> None:
    """Waits until all saves are on disk, and starts to remove old steps; raises CheckpointError if saving failed."""
    if not self._is_broken:
      with self._saving():
        self._store.wait()
    with contextlib.suppress(OSError):  # The checkpoint is kept anyway, and the next save writes the file again.
      self._best.write()
    if self._being_saved and not self._read_only and jax.process_index() == 0:
      self._retention.start(self.kept_steps())

  def best(self) -> BestCheckpoint | None:
    """Returns the checkpoint that this or an earlier process last gave to `keep_best`; None if it no longer exists."""
    return self._best.value

  def keep_best(self, best: BestCheckpoint | None) -> None:
    """Keeps the best checkpoint from being removed; its save must have begun. None keeps no best one."""
    self._best.value = best
    if best is None or not self._store.is_saving():
      self._best.write()

  def kept_steps(self) -> set[int]:
    """Returns the steps that are never deleted because `keep_best` or `best.json` names their checkpoints."""
    return self._best.kept_steps()

  def close(self) -> None:
    """Waits like `wait`, then ends all threads."""
    try:
      self.wait()
    finally:
      self._to_close.close()
      self._store.close()

  def latest_step(self) -> int | None:
    """Returns the step of the newest complete checkpoint, or None if there is none."""
    return max(self.steps(), default=None)

  def steps(self) -> list[int]:
    """Returns the steps of all complete checkpoints, in order, except damaged ones."""
    return [step for step in steps_in(self.directory) if step not in self._damaged]

  def existing_step(self, step: Step = None, remedy: str = 'train first, with the same --job_log_dir') -> int:
    """Returns the step that `step` names: a number, 'best', or None for the newest; raises CheckpointError if missing.

    If the run has no checkpoints, the error gives `remedy` as advice.
    """
    steps = self.steps()
    if not steps:
      raise CheckpointError(f'there is no checkpoint in {self.directory}; {remedy}')
    if step == 'best':
      if self._best.value is None:
        file = Path(self.directory).parent / BEST
        untrained = 'the run was trained without task.train.best_metric'
        why = f'{file} is damaged, or names a step that is not there' if file.exists() else untrained
        raise CheckpointError(
          f'none of the checkpoints in {self.directory} is recorded as the best: {why}; name a step, or leave it out '
          'to use the newest'
        )
      return self._best.value.step
    if isinstance(step, str):
      raise CheckpointError(f"step = {step!r}: expected a number, 'best', or None for the newest; there are {steps}")
    if step is not None and step not in steps:
      raise CheckpointError(f'there is no checkpoint of step {step} in {self.directory}; there are {steps}')
    return steps[-1] if step is None else step

  def restore(
    self, shapes: TrainState, true_shapes: TrainState, *, step: Step = None, weights: NestedDict | None = None
  ) -> TrainState:
    """Restores a state onto a mesh, which may differ from the one it was saved on.

    Args:
      shapes: padded `jax.ShapeDtypeStruct`s with shardings. Fields that are None are not read: evaluation needs no
        `opt_states`.
      true_shapes: the shapes without padding; fields that are None in `shapes` are ignored.
      step: step of the checkpoint, or 'best'; None restores the newest.
      weights: declarations of the model's variables. They are needed to restore stacks of layers that the checkpoint
        groups differently, such as those of a pipeline with another `circular_repeat`. One such stack at a time is
        then in memory twice.

    Raises:
      CheckpointError: there is no such checkpoint, or it cannot be read.
      DamagedError: the checkpoint is damaged, and no other is read: `step` is not None, `on_damage` is 'fail', or the
        run has no other.
      OtherModelError: the checkpoint belongs to another model.
    """
    names = [f.name for f in dataclasses.fields(TrainState) if getattr(shapes, f.name) is None]
    true_shapes = true_shapes.replace(**dict.fromkeys(names))
    wanted = array_records(true_shapes)

    def restore_step(step: int) -> NestedDict:
      regrouping = Regrouping(self._read_json(step, 'about')['variables'], wanted, weights or {})
      check_same_model(regrouping.records, wanted, self.folder(step))
      check_records(Path(self.folder(step)), step)
      read = self.restore_arrays(regrouping.to_read(shapes), step=step)
      return regrouping.regroup(read, shapes, true_shapes)

    arrays = self._read_whole_step(restore_step, step)
    return map_with_path(lambda path, _: node_at(arrays, path), shapes)

  def restore_arrays(self, shapes: NestedDict, *, step: Step = None) -> NestedDict:
    """Restores some arrays by their names, with the shapes, dtypes and shardings of `shapes`.

    `shapes` are nested dicts of `jax.ShapeDtypeStruct`s of the same ranks as the arrays in the checkpoint. The arrays
    are cut or extended by zeros to these shapes. Otherwise this works like `restore`, but does not compare shapes.
    """
    step = self.existing_step(step)
    data_shapes = jax.tree.map(stored_shape, shapes)
    arrays = self._read_arrays(step, data_shapes)
    for path, wanted in leaves_by_path(data_shapes).items():  # Checks names and dtypes, which no checksum covers.
      found = node_at(arrays, path)
      if not isinstance(found, jax.Array) or (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        raise unreadable(self.folder(step), ValueError(f'its entry for {path_name(path)} is not valid'))
    check_seal(Path(self.folder(step)), step)
    return map_with_path(lambda path, shape: to_leaf(shape, node_at(arrays, path)), shapes)

  def streamed_variables(self, shapes: NestedDict, *, use_ema: bool, step: Step = None) -> NestedDict:
    """Returns the model's variables as arrays in the stored dtypes, whose parts are read when needed.

    Args:
      shapes: the true shapes of all variables.
      use_ema: take the moving averages of the variables that have one.
      step: as for `restore`, which also lists the errors. The checkpoint is not removed before this object is closed.
    """
    step = self.existing_step(step)
    where = self.folder(step)
    self._to_close.enter_context(being_read(where))
    about = self.about(step)
    saved = about['variables']
    check_same_model(saved, array_records({'mdl_vars': shapes}), where)
    names = {path: f'mdl_vars.{path_name(path)}' for path in leaves_by_path(shapes)}
    if use_ema:
      names = {path: ema if (ema := f'ema_vars.{path_name(path)}') in saved else name for path, name in names.items()}
    arrays = arrays_in(Path(where), about, {name: saved[name]['shape'] for name in names.values()})
    check_seal(Path(where), step)
    return map_with_path(lambda path, _: arrays[names[path]], shapes)

  def has_only_variables(self, step: int | None = None) -> bool:
    """Whether a checkpoint was saved without the state of an optimizer, like imported ones."""
    return bool(self.about(step).get('variables_alone'))

  def input_state(self, step: Step = None) -> dict[str, Any] | None:
    """Returns the state of the training input saved with a checkpoint; None if `save` got None."""
    return self._read_json(step, 'inputs')['input_state']

  def about(self, step: Step = None) -> dict[str, Any]:
    """Returns what is recorded about a checkpoint: `variables` (true shape and dtype by name), `mesh`, versions."""

    def read_about(step: int) -> dict[str, Any]:
      check_records(Path(self.folder(step)), step)
      return self._read_json(step, 'about')

    return self._read_whole_step(read_about, step)

  def progress(self, step: Step = None) -> dict[str, Any] | None:
    """Returns the `progress` given to `save`; None for imported checkpoints and those of earlier versions."""
    return self._read_json(step, 'about').get('progress')

  def folder(self, step: int) -> str:
    """Returns the path of the checkpoint of a step."""
    return os.path.join(self.directory, str(step))

  def _read_whole_step(self, read: Callable[[int], T], step: Step) -> T:
    """Returns `read` of a step. If the newest step is damaged, `on_damage` decides whether to read the previous one.

    With several processes, each calls this. If one of them finds damage, all treat the checkpoint as damaged.
    """
    if self._being_saved:  # The last save of this process is the newest checkpoint.
      self.wait_until_complete()
    while True:
      number, error, said = self.existing_step(step), None, ''
      try:
        with being_read(self.folder(number)):
          out = read(number)
      except (DamagedError, RemovedError) as caught:
        # The training process may have removed the step before this one locked it, or the file system has no locks.
        is_gone = step is None and number not in steps_in(self.directory)
        error, said = caught, _GONE if is_gone else str(caught).partition('; ')[0]
      of_all = gather_texts(said)
      damage = join_by_host(of_all)
      if not damage:
        return out
      if _GONE in of_all:
        continue
      error = error or DamagedError(damage)
      if step is not None or self._on_damage == 'fail' or self.steps() == [number]:
        raise error
      self._leave_out(number, damage)

  def _leave_out(self, step: int, damage: str) -> None:
    """Leaves a damaged step out of `steps`; unless this is read-only, the first process renames its folder."""
    aside = ''
    if not self._read_only:
      if jax.process_index() == 0:
        aside = f', and is kept in {set_aside(Path(self.folder(step)))}'
      gather_texts('')  # Waits until the first process has renamed the folder.
      self._store.reload()
    else:
      self._damaged.add(step)
    self.notes.append(f'{damage}{aside}; the checkpoint of step {self.latest_step()} is used instead')

  def _read_json(self, step: Step, item: str) -> dict[str, Any]:
    return read_checkpoint_record(Path(self.folder(self.existing_step(step))), item)

  def base_of(self, step: Step = None) -> Base | None:
    """Returns the checkpoint of another run that has the arrays missing in a step; None if the step has all arrays."""
    step = self.existing_step(step)
    return base_of(Path(self.folder(step)), self._read_json(step, 'about'))

  def _read_arrays(self, step: int, shapes: NestedDict) -> Any:
    base = self.base_of(step)
    if base is None:
      return self._read_own_arrays(step, shapes)
    own = leaves_by_path(shapes)
    left_out = {path: (there, own.pop(path)) for path in list(own) if (there := base.names.get(path_name(path)))}
    found = leaves_by_path(self._read_own_arrays(step, nest(own))) if own else {}
    if left_out:
      variables = self._read_json(step, 'about')['variables']
      check_base(base, Path(self.folder(step)), variables)
      with being_read(base.folder), contextlib.closing(Checkpointer(base.job_log_dir, read_only=True)) as other:
        while left_out:  # Several arrays may have one name in the base: a pass reads each name once.
          path_of_name = {name: path for path, (name, _) in left_out.items()}
          wanted = {path: left_out.pop(path) for path in path_of_name.values()}
          # Cast to the dtypes of this checkpoint first, as if it had stored the arrays itself.
          structs = {name: _cast(x, variables[path_name(path)]['dtype']) for path, (name, x) in wanted.items()}
          read = other._read_arrays(base.step, nest({to_path(name): x for name, x in structs.items()}))
          found |= {path: node_at(read, to_path(name)).astype(x.dtype) for path, (name, x) in wanted.items()}
    return nest(found)

  def _read_own_arrays(self, step: int, shapes: NestedDict) -> Any:
    try:
      check_plain_below(os.path.join(self.folder(step), STATE))
      return self._store.read_arrays(step, shapes)
    except Exception as error:
      raise unreadable(self.folder(step), error) from error

  def _reason_against_files(self) -> str:
    """Returns why this process cannot create files; '' if it can.

    If Orbax met this error itself, some of its threads would wait for others until a timeout of minutes.
    """
    try:
      with contextlib.suppress(FileExistsError):
        os.mkdir(self.directory)  # Without parents: the run's directory exists, unless its disk is gone.
      with tempfile.TemporaryFile(dir=self.directory) as file:
        file.write(bytes(_LEAST_ROOM))
      return ''
    except OSError as error:
      return error_summary(error)

  def _remove_incomplete(self) -> None:
    """Starts to remove the remains of saves that failed or were killed."""
    if not self._read_only and jax.process_index() == 0:
      self._retention.start_with_incomplete()

  def _mend(self) -> None:
    """Opens another store, because Orbax cannot go on after an error."""
    with contextlib.suppress(Exception):
      self._store.close()
    self._store = self._open_store()
    self._retention.wait()  # Waits for removals, because the next save may need the space.
    self._is_broken = False

  @contextlib.contextmanager
  def _saving(self, raised: type[CheckpointError] = CheckpointError) -> Iterator[None]:
    try:
      yield
    except Exception as error:
      self._being_saved = []
      self._best.take_back()
      if jax.process_count() == 1:
        with contextlib.suppress(Exception):
          self._mend()  # Now reading works. Background work may still fail, so the next save mends again.
      self._is_broken = True
      why = str(error) if isinstance(error, CheckpointError) else error_summary(error)
      raise raised(f'saving a checkpoint in {self.directory} failed: {why}') from error


def _cast(shape: jax.ShapeDtypeStruct, dtype: str) -> jax.ShapeDtypeStruct:
  return shape if dtype.startswith('key<') else jax.ShapeDtypeStruct(shape.shape, dtype, sharding=shape.sharding)


def saved_steps(job_log_dir: str | os.PathLike[str]) -> list[int]:
  """Returns the steps of the complete checkpoints of a run, in order. Reads only the names of their folders."""
  return steps_in(Path(job_log_dir, CHECKPOINTS))


def _about(state: TrainState, true_shapes: TrainState) -> dict[str, Any]:
  mesh = getattr(getattr(state.step, 'sharding', None), 'mesh', None)  # None if the state is not on a mesh.
  return {
    'praxis_lite': package_version(),
    'jax': jax.__version__,
    'saved_at': round(time.time(), 3),
    'mesh': dict(mesh.shape) if mesh is not None else None,
    'variables': array_records(true_shapes),
    'variables_alone': state.opt_states is None,
  }


def eval_variables(state: TrainState, *, use_ema: bool) -> NestedDict:
  """Returns the model's variables; with `use_ema`, the moving average of each variable that has one."""
  return merge(state.mdl_vars, state.ema_vars) if use_ema and state.ema_vars is not None else state.mdl_vars


def restore_variables(
  checkpointer: Checkpointer,
  layout: StateLayout,
  *,
  use_ema: bool = True,
  step: Step = None,
  weights: NestedDict | None = None,
) -> tuple[NestedDict, jax.Array]:
  """Restores what evaluation and decoding need, on the mesh: the model's variables, padded, and the step.

  Args:
    layout: the layout of the task's state on the mesh to restore onto; the state may have been saved on another mesh.
    use_ema: use the moving averages if the learner keeps them.
    step: step of the checkpoint, or 'best'; None restores the newest.
    weights: as in `Checkpointer.restore`.

  Raises:
    CheckpointError: there is no checkpoint, or it belongs to another model.
  """
  shapes = layout.padded_shapes
  wanted = shapes.replace(opt_states=None, ema_vars=shapes.ema_vars if use_ema else None)
  state = checkpointer.restore(wanted, layout.unpadded_shapes, step=step, weights=weights)
  return eval_variables(state, use_ema=use_ema), state.step
