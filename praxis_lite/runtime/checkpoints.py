"""Checkpoints: the train state, the position in the input, and what is needed to read them on any other mesh.

    job_log_dir/checkpoints/<step>/state      arrays, as stored on the mesh that saved them
                                   inputs     JSON, the state of the training input after the same step
                                   about      JSON, the true shape and dtype of each array, version, mesh

Arrays are stored with the padding of their mesh. Their true shapes are stored beside them, and are what a restore
compares; the padding, zeros at the end, is cut or extended to what the restoring mesh needs.

Orbax writes them: in the background, into a folder that is renamed when it is complete. What a killed run leaves
behind is never taken for a checkpoint, and is cleaned up by the next.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.errors import CheckpointError, ConfigError
from praxis_lite.runtime.quiet_orbax import quiet_orbax
from praxis_lite.runtime.state_names import check_same_model, from_nested_dict, records_of, to_nested_dict
from praxis_lite.training.state import TrainState

_FORMAT = 1
_DIRECTORY = 'checkpoints'


class Checkpointer:
  """The checkpoints of a run.

  With several processes, each calls every method, and all see one file system.

  Args:
    job_log_dir: the run's directory.
    max_to_keep: how many of the newest checkpoints are kept; None keeps all.
    keep_interval_steps: checkpoints of multiples of it are kept for good; None keeps none.
    read_only: saves nothing and cleans nothing up, for reading while another process trains.

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
  ):
    for name, value in (('max_to_keep', max_to_keep), ('keep_interval_steps', keep_interval_steps)):
      if value is not None and value < 1:
        raise ConfigError(f'task.train.{name} = {value}: must be at least 1, or None')
    import orbax.checkpoint as ocp

    quiet_orbax()
    self.directory = os.path.join(os.path.abspath(job_log_dir), _DIRECTORY)
    policies = ocp.checkpoint_managers
    keep: list[Any] = [policies.LatestN(max_to_keep)]
    if keep_interval_steps is not None:
      keep.append(policies.EveryNSteps(keep_interval_steps))
    options = ocp.CheckpointManagerOptions(
      preservation_policy=policies.AnyPreservationPolicy(keep),
      cleanup_tmp_directories=not read_only,
      create=not read_only,
      read_only=read_only,
      save_root_metadata=False,
    )
    self._manager = ocp.CheckpointManager(self.directory, options=options)

  # ---------------------------------------------------------------- saving

  def save(self, step: int, state: TrainState, true_shapes: TrainState, input_state: dict[str, Any] | None) -> bool:
    """Saves in the background, once the arrays are on the host; the state may be donated after that.

    Args:
      step: `state.step`.
      state: the state on the mesh, padded.
      true_shapes: its shapes and dtypes without padding.
      input_state: `get_state()` of the training input after the batch of this step.

    Returns:
      False if there is a checkpoint of this step already.

    Raises:
      CheckpointError: this save, or the one before, failed.
    """
    import orbax.checkpoint as ocp

    if step in self._manager.all_steps():
      return False
    arrays = jax.tree.map(_as_data, state)
    items = ocp.args.Composite(
      state=ocp.args.PyTreeSave(to_nested_dict(arrays)),
      inputs=ocp.args.JsonSave({'input_state': input_state}),
      about=ocp.args.JsonSave(_about(state, true_shapes)),
    )
    try:
      # force: which steps are saved is the caller's decision.
      return bool(self._manager.save(step, args=items, force=True))
    except Exception as error:
      raise self._failed_to_save(error) from error

  def wait(self) -> None:
    """Waits until what was saved is on disk.

    Raises:
      CheckpointError: saving failed.
    """
    try:
      self._manager.wait_until_finished()
    except Exception as error:
      raise self._failed_to_save(error) from error

  def close(self) -> None:
    """Waits as `wait` does, and releases all threads."""
    try:
      self.wait()
    finally:
      self._manager.close()

  # ---------------------------------------------------------------- restoring

  def latest_step(self) -> int | None:
    """Returns the step of the newest complete checkpoint, or None if there is none."""
    return self._manager.latest_step()

  def all_steps(self) -> list[int]:
    """Returns the steps of all complete checkpoints, in order."""
    return sorted(self._manager.all_steps())

  def existing_step(self, step: int | None = None) -> int:
    """Returns `step`, or the newest one for None.

    Raises:
      CheckpointError: there is no checkpoint, or none of this step.
    """
    steps = self.all_steps()
    if not steps:
      raise CheckpointError(f'there is no checkpoint in {self.directory}; train first, with the same --job_log_dir')
    if step is not None and step not in steps:
      raise CheckpointError(f'there is no checkpoint of step {step} in {self.directory}; there are {steps}')
    return steps[-1] if step is None else step

  def restore(self, shapes: TrainState, true_shapes: TrainState, *, step: int | None = None) -> TrainState:
    """Restores a state onto a mesh, whatever mesh it was saved on.

    Args:
      shapes: padded `jax.ShapeDtypeStruct`s with shardings. Fields that are None are not read: evaluation does without
        `opt_states`.
      true_shapes: the shapes without padding; of fields that are None in `shapes`, nothing is read.
      step: which checkpoint; None is the newest.

    Raises:
      CheckpointError: there is no such checkpoint, it is of another model, or it cannot be read.
    """
    import orbax.checkpoint as ocp

    step = self.existing_step(step)
    where = os.path.join(self.directory, str(step))
    names = [f.name for f in dataclasses.fields(TrainState) if getattr(shapes, f.name) is None]
    true_shapes = true_shapes.replace(**dict.fromkeys(names))
    check_same_model(self.about(step)['variables'], records_of(true_shapes), where)
    data_shapes = to_nested_dict(jax.tree.map(_data_shape, shapes))
    restore_args = jax.tree.map(
      lambda x: ocp.ArrayRestoreArgs(global_shape=x.shape, dtype=x.dtype, sharding=x.sharding, strict=False),
      data_shapes,
    )
    args = ocp.args.PyTreeRestore(item=data_shapes, restore_args=restore_args, partial_restore=True)
    arrays = self._read(step, 'state', args)
    return jax.tree.map(_from_data, shapes, from_nested_dict(shapes, arrays))

  def input_state(self, step: int | None = None) -> dict[str, Any] | None:
    """Returns the state of the training input saved with a checkpoint."""
    import orbax.checkpoint as ocp

    return self._read(self.existing_step(step), 'inputs', ocp.args.JsonRestore())['input_state']

  def about(self, step: int | None = None) -> dict[str, Any]:
    """Returns what is recorded of a checkpoint: `variables` (true shape and dtype by name), `mesh`, `praxis_lite`."""
    import orbax.checkpoint as ocp

    return self._read(self.existing_step(step), 'about', ocp.args.JsonRestore())

  def _read(self, step: int, item: str, args: Any) -> Any:
    import orbax.checkpoint as ocp

    try:
      return self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
    except Exception as error:
      where = os.path.join(self.directory, str(step))
      raise CheckpointError(
        f'{where} cannot be read ({_first_line(error)}); remove this folder to go back to the checkpoint before'
      ) from error

  def _failed_to_save(self, error: Exception) -> CheckpointError:
    return CheckpointError(f'saving a checkpoint in {self.directory} failed: {_first_line(error)}')


def _about(state: TrainState, true_shapes: TrainState) -> dict[str, Any]:
  from importlib import metadata

  mesh = getattr(jax.tree.leaves(state)[0].sharding, 'mesh', None)
  return {
    'format': _FORMAT,
    'praxis_lite': metadata.version('praxis_lite'),
    'jax': jax.__version__,
    'saved_at': round(time.time(), 3),
    'mesh': dict(mesh.shape) if mesh is not None else None,
    'variables': records_of(true_shapes),
  }


def _first_line(error: Exception) -> str:
  lines = str(error).strip().splitlines()
  if not lines:
    return type(error).__name__
  # TensorStore appends how it was asked, thousands of characters in JSON.
  said = re.split(r' \[tensorstore_spec|\. See full TensorStore', lines[0])[0]
  return f'{type(error).__name__}: {said}'


# PRNG keys, which some optimizers hold, are stored as the integers they are made of.


def _is_key(x: Any) -> bool:
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _as_data(x: jax.Array) -> jax.Array:
  return jax.random.key_data(x) if _is_key(x) else x


def _data_shape(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  if not _is_key(x):
    return x
  data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype))
  return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)


def _from_data(shape: jax.ShapeDtypeStruct, x: jax.Array) -> jax.Array:
  if not _is_key(shape):
    return x
  impls: list[Any] = []
  jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), shape)
  return jax.random.wrap_key_data(x, impl=impls[0])
