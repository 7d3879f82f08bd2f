"""What optimizers of matrices share: which variables they update, AdamW for the others, and what they cost on a mesh.

`make_matrix_optimizer` completes a transformation that updates matrices only:

    matrices         transformation -> weight decay -> learning rate
    other variables  AdamW
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import optax
from jax.sharding import PartitionSpec

from praxis_lite.common.errors import check_choice
from praxis_lite.common.trees import Path, leaves_by_path, map_with_path
from praxis_lite.training.learning.owner_costs import MatrixExchange, Traffic, plan_exchanges
from praxis_lite.training.learning.owners import MatrixDims, Sides, SplitMatrix, Splits, square_specs

# Tree of variables -> the same tree, with the dimensions of each matrix, or None.
DimsFunction: TypeAlias = Callable[[Any], Any]

PLACEMENTS = ('auto', 'owner', 'split')


class MatrixOptimizer(optax.GradientTransformationExtraArgs):
  """A transformation whose `update` takes `splits`, and that knows what its matrices cost on a mesh.

  Attributes:
    name: for reports.
    exchanges: a function of the variables, or their shapes, and of their `Splits`.
    square_specs: a function of the same; returns how the square arrays of each variable are split, by path.
  """

  name: str
  exchanges: Callable[[object, Splits], list[MatrixExchange]]
  square_specs: Callable[[object, Splits], dict[Path, PartitionSpec]]


def make_matrix_optimizer(
  transformation: optax.GradientTransformationExtraArgs,
  name: str,
  matrices: DimsFunction | None,
  placement: str,
  traffic: Traffic,
  learning_rate: jax.Array | float,
  weight_decay: float,
  weight_decay_mask: Any,
  adam: optax.GradientTransformation,
) -> MatrixOptimizer:
  """Returns an optimizer that updates matrices by a transformation, and all other variables by `adam`.

  Args:
    transformation: the direction in which matrices are changed, without a learning rate.
    name: of the optimizer, in paths of its state.
    matrices: which dimensions of a variable are the rows and columns of a matrix. None takes each variable of rank 2.
    placement: where a matrix is computed; see `muon`.
    traffic: what the transformation sends and computes for each matrix.
    learning_rate, weight_decay, weight_decay_mask: of the matrices.
    adam: of the other variables, with its learning rate.

  Raises:
    ConfigError: `placement` is not one of `PLACEMENTS`.
  """
  check_choice('learner.optimizer.placement', placement, PLACEMENTS)

  def find_matrices(params: object) -> dict[Path, MatrixDims]:
    return {path: dims for path, dims in dims_by_path(matrices, params).items() if dims is not None}

  def labels(params: object) -> Any:
    dims = find_matrices(params)
    return map_with_path(lambda path, _: name if path in dims else 'adam', params)

  of_matrices = optax.chain(
    transformation,
    optax.add_decayed_weights(weight_decay, weight_decay_mask),
    optax.scale_by_learning_rate(learning_rate),
  )
  made = MatrixOptimizer(*optax.partition({name: of_matrices, 'adam': adam}, labels))
  made.name = name
  made.exchanges = lambda params, splits: plan_exchanges(find_matrices(params), splits, placement, traffic)
  made.square_specs = lambda params, splits: square_specs(dims := find_matrices(params), splits, placement, dims)
  return made


def dims_by_path(matrices: DimsFunction | None, params: object) -> dict[Path, MatrixDims]:
  """Returns which dimensions of each variable are the rows and columns of a matrix; None if it is no matrix."""
  dims = (matrices or _rank_two_dims)(params)
  return leaves_by_path(dims, is_leaf=lambda x: isinstance(x, optax.contrib.MuonDimensionNumbers))


def square_arrays(
  params: object, dims: dict[Path, MatrixDims], largest: int, fill: Callable[[tuple[int, ...]], jax.Array]
) -> Sides:
  """Returns a square array for each side of each matrix, up to a size; without one, `optax.MaskedNode`.

  Args:
    params: the variables.
    dims: of each matrix by path.
    largest: sides that are larger have none.
    fill: (shape [..., m, m]) -> the array.
  """

  def make(path: Path, x: jax.Array, side: int) -> Any:
    shape = SplitMatrix.make(x.shape, dims[path], ((),) * x.ndim).square_shapes()[side]
    return fill(shape) if shape[-1] <= largest else optax.MaskedNode()

  return Sides(*(map_with_path(lambda path, x, side=side: make(path, x, side), params) for side in (0, 1)))


def sides_by_path(squares: Sides) -> Sides:
  """Returns the square arrays of each side by path; absent for a side that has none."""
  return Sides(*map(leaves_by_path, squares))


def put_sides(squares: Sides, into: Sides) -> Sides:
  """The inverse of `sides_by_path`: `into` with other arrays."""
  return Sides(*(map_with_path(lambda path, _, side=side: side[path], old) for side, old in zip(squares, into)))


def _rank_two_dims(params: Any) -> Any:
  return jax.tree.map(lambda x: optax.contrib.MuonDimensionNumbers((0,), (1,)) if x.ndim == 2 else None, params)
