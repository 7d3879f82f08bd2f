"""First train states, drawn by NumPy: a program that draws one takes as long to compile as a small model's train step."""

from __future__ import annotations

import jax
import numpy as np

from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.state import TrainState
from praxis_lite.weights import WeightHParams


def drawn_state(partitioned: PartitionedTask, seed: int = 0) -> TrainState[jax.Array]:
  """A state on the task's mesh, the same on any: random variables, and slots that start at zero, as Adam's do.

  Trained variables that start as constants are drawn around these, so that no gradient is that of a special case.
  """
  rng = np.random.default_rng(seed)

  def value(weight: WeightHParams) -> np.ndarray:
    assert weight.init is not None
    is_constant = weight.init.method == 'constant'
    drawn = (weight.init.scale if is_constant else 0.0) + 0.1 * rng.standard_normal(weight.full_shape)
    kept = is_constant and not weight.trainable
    return (np.full(weight.full_shape, weight.init.scale) if kept else drawn).astype(weight.as_struct().dtype)

  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), partitioned.unpadded_state_shapes)
  weights = partitioned.jax_task.model.abstract_init()
  variables = jax.tree.map(value, weights)
  averages = None if zeros.ema_vars is None else partitioned.jax_task.learner.bind(weights).trained(variables)
  return partitioned.padded(zeros.replace(mdl_vars=variables, ema_vars=averages))
