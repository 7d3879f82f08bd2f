"""Variables and first train states drawn by NumPy: a program that draws them compiles for as long as a small step."""

from __future__ import annotations

import jax
import numpy as np

from praxis_lite.common.trees import NestedDict, Path, map_with_path
from praxis_lite.sharding.weights import JointInit, WeightHParams
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.state import TrainState


def drawn_variables(weights: NestedDict, seed: int = 0) -> NestedDict:
  """Values of declared variables, around zero or the constant that they start as; other constants stay as they are."""
  rng = np.random.default_rng(seed)

  def value(path: Path, weight: WeightHParams) -> np.ndarray:
    assert weight.init is not None
    if isinstance(weight.init, JointInit) and weight.as_struct().dtype.itemsize == 1:  # A weight in few bits.
      dtype = np.iinfo(weight.as_struct().dtype)
      low, high = (112, 118) if path[-1].endswith('_quantized_scale') else (dtype.min, dtype.max)
      drawn = np.random.default_rng(seed + 1).integers(low, high, weight.full_shape, dtype.dtype)
      return np.where(drawn == 127, 126, drawn).astype(dtype.dtype)  # 127 is NaN in e4m3.
    if isinstance(weight.init, JointInit):
      kind = path[-1].partition('_quantized_')[2]
      if kind == 'input_range':
        return np.full(weight.full_shape, 1.5, weight.as_struct().dtype)
      size = {'scale': 0.01, 'tensor_scale': 1e-4}.get(kind, 0.1)
      return np.asarray(size * rng.standard_normal(weight.full_shape), weight.as_struct().dtype)
    start = weight.init.scale if weight.init.method == 'constant' else 0.0
    drawn = start + 0.1 * rng.standard_normal(weight.full_shape)
    kept = weight.init.method == 'constant' and not weight.trainable
    return np.asarray(np.full(weight.full_shape, start) if kept else drawn, weight.as_struct().dtype)

  return map_with_path(value, weights)


def drawn_state(partitioned: PartitionedTask, seed: int = 0) -> TrainState[jax.Array]:
  """A state on the mesh of a task, the same on any: random variables, and slots of zeros, with which Adam starts."""
  weights = partitioned.jax_task.model.abstract_init()
  variables = drawn_variables(weights, seed)
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), partitioned.unpadded_state_shapes)
  averages = None if zeros.ema_vars is None else partitioned.jax_task.learner.bind(weights).select_trained(variables)
  return partitioned.pad(zeros.replace(mdl_vars=variables, ema_vars=averages))
