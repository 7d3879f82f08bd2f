"""Checkpoints: the train state and the position in the input, stored so that any other mesh can read them.

    job_log_dir/checkpoints/<step>/state      arrays, as stored on the mesh that saved them
                                   inputs     JSON, the state of the training input after the same step
                                   about      JSON, the true shape and dtype of each array, version, mesh

A seal in each of the three says that they are of one save, and of this step: `seal.py`.

Arrays are stored under their names, 'mdl_vars.lm.w' or 'opt_states.0.mu.lm.w', as nested dicts, so that reading them
needs no class of an optimizer library. They have the padding of the mesh that saved them, zeros at the end; a
restore compares the true shapes, and cuts or extends the padding to what its mesh needs.

    job_log_dir/best.json                     the best one by a metric: {"step", "metric", "mode", "value"}

Orbax writes them in the background, into a folder that is renamed when it is complete. So what a killed run leaves
behind is never taken for a checkpoint, and the next run removes it.

Whatever is restored is verified: each chunk of an array has a checksum, and so have the index of the arrays and the
JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import jax

from praxis_lite.checkpoints.best import BEST, BestCheckpoint, BestRecord
from praxis_lite.checkpoints.contents import (
  as_data,
  check_same_model,
  data_shape,
  from_data,
  read_record,
  records_of,
  sealed,
  to_nested_dict,
)
from praxis_lite.checkpoints.failures import DamagedError, PartedError, first_line, unreadable
from praxis_lite.checkpoints.orbax import check_folder_is_found, orbax_checkpoint
from praxis_lite.checkpoints.regrouping import Regrouping
from praxis_lite.checkpoints.retention import CHECKPOINTS, RemovedError, Retention, being_read, set_aside, steps_in
from praxis_lite.checkpoints.save_barrier import SaveBarrier
from praxis_lite.checkpoints.seal import SEAL, check_records, check_seal, new_seal, seal_array
from praxis_lite.checkpoints.streamed import stored_arrays
from praxis_lite.errors import CheckpointError, ConfigError
from praxis_lite.files import check_plain_below, local_path
from praxis_lite.hosts.processes import gather_texts, join_by_host
from praxis_lite.jax_internals import unless_unknown
from praxis_lite.jax_internals.processes import service_client
from praxis_lite.partitioning.layout import StateLayout
from praxis_lite.training.state import TrainState
from praxis_lite.trees import NestedDict, leaves_by_path, lookup, map_with_path, merge, path_name

if TYPE_CHECKING:
  import orbax.checkpoint as ocp

# Bytes that a disk must have room for before a save begins.
_LEAST_ROOM = 1 << 14
# What processes tell each other of a checkpoint that is not there any more.
_GONE = 'gone'

# The step of a checkpoint; None is the newest.
Step = int | Literal['best'] | None

# What happens where the newest checkpoint is damaged: the one before is used, or an error is raised.
OnDamage = Literal['previous', 'fail']

T = TypeVar('T')


class Checkpointer:
  """The checkpoints of a run.

  With several processes, each calls every method, and all see one file system.

  Args:
    job_log_dir: the run's directory.
    max_to_keep: how many of the newest checkpoints are kept; None keeps all.
    keep_interval_steps: checkpoints at multiples of this step are never deleted; None disables it.
    read_only: never saves or deletes anything, for reading while another process trains.
    on_damage: 'previous': where the newest checkpoint is damaged, the one before is read, and the folder of the damaged
      one is renamed, unless this is `read_only`. 'fail': an error is raised.

  Attributes:
    notes: a line for each checkpoint that was found damaged, and not used.

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
    self._read_only = read_only
    self._on_damage = on_damage
    self._damaged: set[int] = set()
    self._retention = Retention(self.directory, max_to_keep=max_to_keep, keep_interval_steps=keep_interval_steps)
    self._barrier = _barrier()
    self._to_close = contextlib.ExitStack()
    self._manager = self._opened()
    self._is_broken = False
    self._being_saved: list[int] = []
    self._best = BestRecord(Path(self.directory).parent / BEST, self.all_steps())

  def _opened(self) -> ocp.CheckpointManager:
    ocp = orbax_checkpoint()
    from praxis_lite.checkpoints.streamed_writes import pytree_handlers

    self._remove_incomplete()
    options = ocp.CheckpointManagerOptions(
      create=not self._read_only,
      read_only=self._read_only,
      save_root_metadata=False,
      async_options=ocp.options.AsyncOptions(barrier_sync_fn=self._barrier),
    )
    manager = ocp.CheckpointManager(self.directory, options=options, handler_registry=pytree_handlers())
    if not self._read_only:
      check_folder_is_found(self.directory)
    return manager

  def save(
    self,
    step: int,
    state: TrainState,
    true_shapes: TrainState,
    input_state: dict[str, Any] | None,
    progress: dict[str, Any] | None = None,
  ) -> bool:
    """Copies the arrays to the host, and then saves in the background; the state may be donated when this returns.

    Where the state has a `StreamedArray`, its parts are read while they are written.

    Returns False if there is a checkpoint of this step already. After an error the next save begins anew; what was
    complete before stays. A save that fails in one process fails in all.

    Args:
      step, state, true_shapes: the padded state on the mesh, its step, and its shapes and dtypes without padding.
      input_state: `get_state()` of the training input after the batch of this step.
      progress: what else decides how the run goes on, for JSON.

    Raises:
      CheckpointError: this save, or the one before, failed.
      PartedError: this save failed in this process alone.
    """
    ocp = orbax_checkpoint()
    self.wait_until_complete()
    with self._saving():
      if self._is_broken:
        self._remove_incomplete()
        self._retention.wait()  # There may be no room beside it.
      if failed := join_by_host(gather_texts(self._reason_against_files())):
        raise CheckpointError(failed)
      if self._is_broken:
        self._mend()
    if step in self._manager.all_steps():
      return False
    seal = new_seal(step)
    arrays = {**to_nested_dict(jax.tree.map(as_data, state)), SEAL: seal_array(seal)}
    items = ocp.args.Composite(
      state=ocp.args.PyTreeSave(arrays),
      inputs=ocp.args.JsonSave(sealed({'input_state': input_state, SEAL: seal})),
      about=ocp.args.JsonSave(sealed({**_about(state, true_shapes), 'progress': progress, SEAL: seal})),
    )
    with self._saving(PartedError if jax.process_count() > 1 else CheckpointError):
      self._being_saved.append(step)
      if self._barrier is not None:
        self._barrier.begin()
      return bool(self._manager.save(step, args=items, force=True))  # force: the caller decides which steps are saved.

  def wait(self) -> None:
    """Waits until all saves are on disk, and others removed; raises CheckpointError if saving failed."""
    self.wait_until_complete()
    self._retention.wait()

  def newly_complete(self) -> list[tuple[int, Path]]:
    """Returns (step, folder) of each checkpoint that has become complete since the last call; does not wait.

    Raises:
      CheckpointError: saving failed.
    """
    if not self._being_saved or self._manager.is_saving_in_progress():
      return []
    self.wait_until_complete()
    folders = [(step, Path(self.directory, str(step))) for step in self._being_saved]
    self._being_saved = []
    return [(step, folder) for step, folder in folders if folder.exists()]

  def wait_until_complete(self) -> None:
    """Waits until all saves are on disk, and begins to remove others; raises CheckpointError if saving failed."""
    if not self._is_broken:
      with self._saving():
        self._manager.wait_until_finished()
    with contextlib.suppress(OSError):  # It is kept all the same, and recorded after the next save.
      self._best.write()
    if self._being_saved and not self._read_only and jax.process_index() == 0:
      self._retention.start(self.kept_steps())

  def best(self) -> BestCheckpoint | None:
    """Returns what `keep_best` was called with last, by an earlier process too; None if there is no such checkpoint."""
    return self._best.value

  def keep_best(self, best: BestCheckpoint | None) -> None:
    """Keeps a checkpoint, of which a save has begun, until another one is better. None keeps none any more."""
    self._best.value = best
    if best is None or not self._manager.is_saving_in_progress():
      self._best.write()

  def kept_steps(self) -> set[int]:
    """Returns the steps of checkpoints that are never deleted because they are the best."""
    return self._best.kept_steps()

  def close(self) -> None:
    """Waits as `wait` does, and ends all threads."""
    try:
      self.wait()
    finally:
      self._to_close.close()
      self._manager.close()

  def latest_step(self) -> int | None:
    """Returns the step of the newest complete checkpoint, or None if there is none."""
    return max(self.all_steps(), default=None)

  def all_steps(self) -> list[int]:
    """Returns the steps of all complete checkpoints, in order, but for those that were found damaged."""
    return [step for step in steps_in(self.directory) if step not in self._damaged]

  def existing_step(self, step: Step = None, remedy: str = 'train first, with the same --job_log_dir') -> int:
    """Returns the number of a step, by default the newest; raises CheckpointError if there is no such checkpoint.

    `remedy` is what the error says where there is none at all.
    """
    steps = self.all_steps()
    if not steps:
      raise CheckpointError(f'there is no checkpoint in {self.directory}; {remedy}')
    if step == 'best':
      if self._best.value is None:
        raise CheckpointError(
          f'none of the checkpoints in {self.directory} is recorded as the best: the run was trained without '
          'task.train.best_metric; name a step, or none for the newest'
        )
      return self._best.value.step
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
      weights: declarations of the model's variables. With them, stacks of layers that the checkpoint groups otherwise,
        as a pipeline of another `circular_repeat` does, are restored too; one at a time is then in memory twice.

    Raises:
      CheckpointError: there is no such checkpoint, or it cannot be read.
      DamagedError: it is damaged, and named by `step`, or the only one, or `on_damage` is 'fail'.
      OtherModelError: it is of another model.
    """
    names = [f.name for f in dataclasses.fields(TrainState) if getattr(shapes, f.name) is None]
    true_shapes = true_shapes.replace(**dict.fromkeys(names))
    wanted = records_of(true_shapes)

    def restored(step: int) -> NestedDict:
      regrouping = Regrouping(self._read_json(step, 'about')['variables'], wanted, weights or {})
      check_same_model(regrouping.records, wanted, self.folder(step))
      check_records(Path(self.folder(step)), step)
      read = self.restore_arrays(regrouping.to_read(shapes), step=step)
      return regrouping.regrouped(read, shapes, true_shapes)

    arrays = self._of_whole_step(restored, step)
    return map_with_path(lambda path, _: lookup(arrays, path), shapes)

  def restore_arrays(self, shapes: NestedDict, *, step: Step = None) -> NestedDict:
    """Restores some arrays by their names, cut or extended by zeros to `shapes`, in their dtypes and shardings.

    `shapes` are nested dicts of `jax.ShapeDtypeStruct`s of the same ranks as those in the checkpoint; otherwise as
    `restore`, but shapes are not compared.
    """
    ocp, step = orbax_checkpoint(), self.existing_step(step)
    data_shapes = jax.tree.map(data_shape, shapes)
    restore_args = jax.tree.map(
      lambda x: ocp.ArrayRestoreArgs(global_shape=x.shape, dtype=x.dtype, sharding=x.sharding, strict=False),
      data_shapes,
    )
    args = ocp.args.PyTreeRestore(item=data_shapes, restore_args=restore_args, partial_restore=True)
    arrays = self._read_arrays(step, args)
    for path, wanted in leaves_by_path(data_shapes).items():  # The names and types of arrays have no checksum.
      found = lookup(arrays, path)
      if not isinstance(found, jax.Array) or (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        raise unreadable(self.folder(step), ValueError(f'what it says of {path_name(path)} is wrong'))
    check_seal(Path(self.folder(step)), step)
    return map_with_path(lambda path, shape: from_data(shape, lookup(arrays, path)), shapes)

  def streamed_variables(self, shapes: NestedDict, *, use_ema: bool, step: Step = None) -> NestedDict:
    """Returns the model's variables as arrays that are read in parts when they are needed, in the dtypes of the file.

    Args:
      shapes: the true shapes of all of them.
      use_ema: take the moving averages where there are some.
      step: as for `restore`. It is not removed before this is closed.

    Raises:
      CheckpointError: there is no such checkpoint, it is of another model, or it cannot be read.
    """
    step = self.existing_step(step)
    where = self.folder(step)
    self._to_close.enter_context(being_read(where))
    saved = self.about(step)['variables']
    check_same_model(saved, records_of({'mdl_vars': shapes}), where)
    names = {path: f'mdl_vars.{path_name(path)}' for path in leaves_by_path(shapes)}
    if use_ema:
      names = {path: ema if (ema := f'ema_vars.{path_name(path)}') in saved else name for path, name in names.items()}
    arrays = stored_arrays(os.path.join(where, 'state'), {name: saved[name]['shape'] for name in names.values()})
    check_seal(Path(where), step)
    return map_with_path(lambda path, _: arrays[names[path]], shapes)

  def has_variables_alone(self, step: int | None = None) -> bool:
    """Whether a checkpoint was saved without the state of an optimizer, as imported ones are."""
    return bool(self.about(step).get('variables_alone'))

  def input_state(self, step: Step = None) -> dict[str, Any] | None:
    """Returns the state of the training input saved with a checkpoint."""
    return self._read_json(step, 'inputs')['input_state']

  def about(self, step: Step = None) -> dict[str, Any]:
    """Returns what is recorded about a checkpoint: `variables` (true shape and dtype by name), `mesh`, versions."""

    def of_one_save(step: int) -> dict[str, Any]:
      check_records(Path(self.folder(step)), step)
      return self._read_json(step, 'about')

    return self._of_whole_step(of_one_save, step)

  def progress(self, step: Step = None) -> dict[str, Any] | None:
    """Returns what `save` was given as such; None of checkpoints of earlier versions, and of imported ones."""
    return self._read_json(step, 'about').get('progress')

  def folder(self, step: int) -> str:
    """Returns where the checkpoint of a step is."""
    return os.path.join(self.directory, str(step))

  def _of_whole_step(self, read: Callable[[int], T], step: Step) -> T:
    """Returns what is read of a step; where that is the newest one and damaged, of the one before, by `on_damage`.

    With several processes, each calls this, and what one of them finds damaged is damaged for all.
    """
    if self._being_saved:  # By this process: what it saved last is the newest.
      self.wait_until_complete()
    while True:
      number, error, said = self.existing_step(step), None, ''
      try:
        with being_read(self.folder(number)):
          out = read(number)
      except (DamagedError, RemovedError) as caught:
        # Who trains may have removed it before it was locked, or where there are no locks.
        is_gone = step is None and number not in steps_in(self.directory)
        error, said = caught, _GONE if is_gone else str(caught).partition('; ')[0]
      of_all = gather_texts(said)
      damage = join_by_host(of_all)
      if not damage:
        return out
      if _GONE in of_all:
        continue
      error = error or DamagedError(damage)
      if step is not None or self._on_damage == 'fail' or self.all_steps() == [number]:
        raise error
      self._leave_out(number, damage)

  def _leave_out(self, step: int, damage: str) -> None:
    """Leaves a damaged step out of `all_steps`; of those that may write, the first process renames its folder."""
    aside = ''
    if not self._read_only:
      if jax.process_index() == 0:
        aside = f', and is kept in {set_aside(Path(self.folder(step)))}'
      gather_texts('')  # Waits for the first process.
      self._manager.reload()
    else:
      self._damaged.add(step)
    self.notes.append(f'{damage}{aside}; the checkpoint before is used, of step {self.latest_step()}')

  def _read_json(self, step: Step, item: str) -> dict[str, Any]:
    return read_record(Path(self.folder(self.existing_step(step))), item)

  def _read_arrays(self, step: int, args: ocp.args.PyTreeRestore) -> Any:
    try:
      check_plain_below(os.path.join(self.folder(step), 'state'))
      out = self._manager.restore(step, args=orbax_checkpoint().args.Composite(state=args))['state']
      if isinstance(out, Exception):
        raise out
      return out
    except Exception as error:
      raise unreadable(self.folder(step), error) from error

  def _reason_against_files(self) -> str:
    """Returns why this process cannot make files; '' if it can.

    Where Orbax finds that, some of its threads wait for others, and end after minutes.
    """
    try:
      with contextlib.suppress(FileExistsError):
        os.mkdir(self.directory)  # And not the directory of the run, which is there unless its disk went away.
      with tempfile.TemporaryFile(dir=self.directory) as file:
        file.write(bytes(_LEAST_ROOM))
      return ''
    except OSError as error:
      return first_line(error)

  def _remove_incomplete(self) -> None:
    """Begins to remove what is left of saves that have failed, or been killed."""
    if not self._read_only and jax.process_index() == 0:
      self._retention.start_with_incomplete()

  def _mend(self) -> None:
    """Replaces Orbax's manager, which does not go on after an error."""
    with contextlib.suppress(Exception):
      self._manager.close()
    self._manager = self._opened()
    self._retention.wait()  # The next save may need the room.
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
          self._mend()  # To read; what it does to the folder in the background may fail, so the next save mends again.
      self._is_broken = True
      why = str(error) if isinstance(error, CheckpointError) else first_line(error)
      raise raised(f'saving a checkpoint in {self.directory} failed: {why}') from error


def saved_steps(job_log_dir: str | os.PathLike[str]) -> list[int]:
  """Returns the steps of the complete checkpoints of a run, in order, from the names of their folders alone."""
  return steps_in(Path(job_log_dir, CHECKPOINTS))


def _barrier() -> SaveBarrier | None:
  """Returns how processes wait for each other; None if this one is alone."""
  if jax.process_count() == 1:
    return None
  client = unless_unknown('a save that fails on one host is not noticed by others', service_client, None)
  return None if client is None else SaveBarrier(client)


def _about(state: TrainState, true_shapes: TrainState) -> dict[str, Any]:
  sharding = getattr(state.step, 'sharding', None)  # None: not from a mesh.
  mesh = getattr(sharding, 'mesh', None)
  return {
    'praxis_lite': metadata.version('praxis_lite'),
    'jax': jax.__version__,
    'saved_at': round(time.time(), 3),
    'mesh': dict(mesh.shape) if mesh is not None else None,
    'variables': records_of(true_shapes),
    'variables_alone': state.opt_states is None,
  }


def eval_variables(state: TrainState, *, use_ema: bool) -> NestedDict:
  """Returns the model's variables; with `use_ema`, those that have a moving average are replaced by it."""
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
    layout: that of the task's state on the mesh to restore onto, which need not be the one it was trained on.
    use_ema: use the moving averages if the learner keeps them.
    step: step of the checkpoint, or 'best'; None restores the newest.
    weights: as of `Checkpointer.restore`.

  Raises:
    CheckpointError: there is no checkpoint, or it is of another model.
  """
  shapes = layout.padded_shapes
  wanted = shapes.replace(opt_states=None, ema_vars=shapes.ema_vars if use_ema else None)
  state = checkpointer.restore(wanted, layout.unpadded_shapes, step=step, weights=weights)
  return eval_variables(state, use_ema=use_ema), state.step
