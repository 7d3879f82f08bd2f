"""Which variables a model is evaluated with, and getting them from a checkpoint without the optimizer."""

from __future__ import annotations

from typing import Any

import jax

from praxis_lite.runtime.checkpoints import Checkpointer
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.state import TrainState
from praxis_lite.trees import merge


def eval_variables(state: TrainState, *, use_ema: bool) -> Any:
  """Returns the model's variables, those with a moving average replaced by it if `use_ema`."""
  return merge(state.mdl_vars, state.ema_vars) if use_ema and state.ema_vars is not None else state.mdl_vars


def restore_variables(
  checkpointer: Checkpointer, partitioned: PartitionedTask, *, use_ema: bool = True, step: int | None = None
) -> tuple[Any, jax.Array]:
  """Restores what evaluation and decoding need.

  Args:
    checkpointer: the checkpoints of the run.
    partitioned: the task on the mesh to restore onto, which need not be the one it was trained on.
    use_ema: take the moving averages where the learner keeps them.
    step: which checkpoint; None is the newest.

  Returns:
    The model's variables, padded, and the step, both on the mesh.

  Raises:
    CheckpointError: there is no checkpoint, or it is of another model.
  """
  shapes = partitioned.state_shapes
  wanted = shapes.replace(opt_states=None, ema_vars=shapes.ema_vars if use_ema else None)
  state = checkpointer.restore(wanted, partitioned.unpadded_state_shapes, step=step)
  return eval_variables(state, use_ema=use_ema), state.step
