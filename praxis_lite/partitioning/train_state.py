"""The state of a training run: one tree of arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class TrainState:
  """What a train step reads and returns.

  Attributes:
    step: int32 scalar, the number of steps taken, skipped ones included.
    mdl_vars: the model's variables, a nested dict with the paths of the layer tree.
    opt_states: the state of the learner's optimizer; it has entries for trained variables only.
    ema_vars: exponential moving averages of the trained variables, or None where the learner keeps none.
  """

  step: Any
  mdl_vars: Any
  opt_states: Any
  ema_vars: Any = None

  def replace(self, **changes: Any) -> TrainState:
    """Returns a copy with some attributes changed."""
    return dataclasses.replace(self, **changes)


jax.tree_util.register_dataclass(TrainState, data_fields=['step', 'mdl_vars', 'opt_states', 'ema_vars'], meta_fields=[])
