"""The part of Orbax that checkpoints need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from praxis_lite.checkpoints.orbax.on_disk import STATE
from praxis_lite.checkpoints.orbax.save_barrier import SaveBarrier
from praxis_lite.checkpoints.orbax.work_arounds import check_folder_is_found, load_orbax
from praxis_lite.common.trees import NestedDict


class OrbaxStore:
  """The steps in a folder: saved in the background, each in a folder of its own, and read onto a mesh.

  With several processes, each calls every method. Orbax cannot go on after a save that failed: close the store then,
  and open another one.

  Args:
    directory: has a folder for each step; if `read_only`, it is not created, and nothing is saved.
    barrier: how the processes wait for each other during a save; None for one process.

  Raises:
    CheckpointError: Orbax could not find again what it saves in `directory`, because of special characters in its path.
  """

  def __init__(self, directory: str, *, read_only: bool, barrier: SaveBarrier | None):
    self._ocp = ocp = load_orbax()
    from praxis_lite.checkpoints.orbax.handlers import make_handlers

    options = ocp.CheckpointManagerOptions(
      create=not read_only,
      read_only=read_only,
      save_root_metadata=False,
      async_options=ocp.options.AsyncOptions(barrier_sync_fn=barrier),
    )
    self._barrier = barrier
    self._manager = ocp.CheckpointManager(directory, options=options, handler_registry=make_handlers())
    if not read_only:
      check_folder_is_found(directory)

  def has_step(self, step: int) -> bool:
    """Whether a step has been saved, or is being saved by this process."""
    return step in self._manager.all_steps()

  def save(self, step: int, arrays: NestedDict, records: Mapping[str, Mapping[str, Any]]) -> bool:
    """Copies arrays to the host, and writes them and JSON records in the background; returns whether a save began."""
    args = self._ocp.args
    items = {name: args.JsonSave(dict(record)) for name, record in records.items()}
    if self._barrier is not None:
      self._barrier.begin()
    # `force`, because the caller decides which steps to save.
    return bool(self._manager.save(step, args=args.Composite(**{STATE: args.PyTreeSave(arrays)}, **items), force=True))

  def is_saving(self) -> bool:
    """Whether a save is still being written."""
    return bool(self._manager.is_saving_in_progress())

  def wait(self) -> None:
    """Waits until all saves are complete; raises any error of their threads."""
    self._manager.wait_until_finished()

  def read_arrays(self, step: int, shapes: NestedDict) -> Any:
    """Returns arrays of a step by name; raises whatever error reading them raises.

    Arrays are cut or extended by zeros to `shapes`, `jax.ShapeDtypeStruct`s with shardings by name, and cast to their
    dtypes. Arrays without an entry are not read.
    """
    ocp = self._ocp
    restore_args = jax.tree.map(
      lambda x: ocp.ArrayRestoreArgs(global_shape=x.shape, dtype=x.dtype, sharding=x.sharding, strict=False), shapes
    )
    args = ocp.args.PyTreeRestore(item=shapes, restore_args=restore_args, partial_restore=True)
    out = self._manager.restore(step, args=ocp.args.Composite(**{STATE: args}))[STATE]
    if isinstance(out, Exception):  # `handlers.StateHandler` returns errors.
      raise out
    return out

  def reload(self) -> None:
    """Reads the folder again, to notice steps that other processes have saved, renamed or removed."""
    self._manager.reload()

  def close(self) -> None:
    """Waits like `wait`, then ends all threads."""
    self._manager.close()
