"""The axes of a weight that are the rows and the columns of a matrix, for matrix optimizers such as Muon.

The declaration of a weight says which axes are inputs and outputs. All other axes, and those of a stack of layers,
index separate matrices:

    query    [D, N, H]      inputs (0,),    outputs (1, 2)       one matrix [D, N H]
    out      [N, H, D]      inputs (0, 1),  outputs (2,)         one matrix [N H, D]
    experts  [E, D, F]      inputs (1,),    outputs (2,)         E matrices [D, F]
    linear   [D, F]         not declared                         one matrix [D, F]

A weight that declares nothing is not a matrix if it skips regularization, like norms and biases, or has another rank,
like convolution filters. Embedding tables [V, D] are not matrices either, because they are looked up and not
multiplied; they declare inputs (1,) and outputs (0,).
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import optax

from praxis_lite.common.config import Config
from praxis_lite.common.trees import NestedDict, Path
from praxis_lite.sharding.weights import WeightHParams, WeightHParamsCollection

# The name of an optimizer's argument for the axes of matrices, if the optimizer handles stacks of layers itself.
STACKED_MATRICES = 'matrices'
# All names that this argument has in optimizers; the first is the name in optax.
MATRIX_ARGUMENTS = ('muon_weight_dimension_numbers', STACKED_MATRICES)


def takes_matrices(config: Config) -> bool:
  """Whether the factory in a config has an argument for the axes of matrices."""
  return not config.__signature_info__.parameters.keys().isdisjoint(MATRIX_ARGUMENTS)


def matrix_dims(
  weights: Mapping[Path, WeightHParams], params: NestedDict
) -> optax.contrib.MuonDimensionNumbers | NestedDict:
  """Returns a tree like `params` with the axes of each matrix; None for a variable that is not a matrix.

  `params` are some of the variables, whole stacks or single layers; the path of a single layer may end with an index.
  """

  def dims(path: jax.tree_util.KeyPath, x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
    weight = weights[tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))]
    axes = _matrix_axes(weight)
    if axes is None:
      return None
    stack = x.ndim - len(weight.shape)
    rows, columns = (tuple(axis + stack for axis in each) for each in axes)
    return optax.contrib.MuonDimensionNumbers(rows, columns)

  return jax.tree_util.tree_map_with_path(dims, params)


def _matrix_axes(weight: WeightHParams) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
  rank = len(weight.shape)
  if weight.fan_in_axes is None or weight.fan_out_axes is None:
    is_bias = WeightHParamsCollection.SKIP_REGULARIZATION in weight.collections
    return ((0,), (1,)) if rank == 2 and not is_bias else None
  rows, columns = (tuple(axis % rank for axis in axes) for axes in (weight.fan_in_axes, weight.fan_out_axes))
  is_table = (rows, columns) == ((1,), (0,))
  return None if is_table or not rows or not columns or {*rows} & {*columns} else (rows, columns)
