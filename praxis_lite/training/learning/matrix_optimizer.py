"""The base of matrix optimizers: they update matrices, leave other variables to AdamW, and report costs on a mesh.

`make_matrix_optimizer` makes an optimizer from a transformation that only handles matrices:

    matrices         transformation -> weight decay -> learning rate
    other variables  AdamW
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import optax
from jax.sharding import PartitionSpec

from praxis_lite.common.errors import ConfigError, check_choice, check_range
from praxis_lite.common.trees import Path, leaves_by_path, map_with_path
from praxis_lite.training.learning.owner_costs import MatrixExchange, MatrixTraffic, plan_exchanges
from praxis_lite.training.learning.owners import MatrixDims, PerSide, SplitMatrix, Splits, square_specs

# Tree of variables -> tree with the dimensions of each matrix, or None for other variables.
DimsFunction: TypeAlias = Callable[[Any], Any]

PLACEMENTS = ('auto', 'owner', 'split')


class MatrixOptimizer(optax.GradientTransformationExtraArgs):
  """An optax transformation whose `update` also takes `splits`, and which knows what its matrices cost on a mesh.

  `exchanges` returns the exchange of each group of matrices, and `square_specs` returns the specs of the square arrays
  of each variable, by path. Both functions take variables or the shapes of variables.
  """

  name: str  # For reports.
  exchanges: Callable[[object, Splits], list[MatrixExchange]]
  square_specs: Callable[[object, Splits], dict[Path, PartitionSpec]]


def make_matrix_optimizer(
  transformation: optax.GradientTransformationExtraArgs,
  name: str,
  matrices: DimsFunction | None,
  placement: str,
  traffic: MatrixTraffic,
  learning_rate: jax.Array | float,
  matrix_decay: float,
  matrix_decay_mask: Any,
  **adam: Any,
) -> MatrixOptimizer:
  """Returns an optimizer that updates matrices by a transformation, and all other variables by AdamW.

  Args:
    transformation: computes the direction in which matrices are changed, without a learning rate.
    name: the name of the optimizer in paths of its state.
    matrices, placement, learning_rate: see `muon`.
    traffic: what the transformation sends and computes for each matrix.
    matrix_decay, matrix_decay_mask: weight decay of the matrices, and its mask.
    **adam: other arguments of `optax.adamw`.

  Raises:
    ConfigError: `placement` is not one of `PLACEMENTS`.
  """
  check_choice('learner.optimizer.placement', placement, PLACEMENTS)

  find_matrices = functools.partial(dims_by_path, matrices)

  def labels(params: object) -> Any:
    dims = find_matrices(params)
    return map_with_path(lambda path, _: name if path in dims else 'adam', params)

  of_matrices = optax.chain(
    transformation,
    optax.add_decayed_weights(matrix_decay, matrix_decay_mask),
    optax.scale_by_learning_rate(learning_rate),
  )
  made = MatrixOptimizer(*optax.partition({name: of_matrices, 'adam': optax.adamw(learning_rate, **adam)}, labels))
  made.name = name
  made.exchanges = lambda params, splits: plan_exchanges(find_matrices(params), splits, placement, traffic)
  made.square_specs = lambda params, splits: square_specs(dims := find_matrices(params), splits, placement, dims)
  return made


def check_settings(decays: Mapping[str, float], eps: float, counts: Mapping[str, float]) -> None:
  """Raises ConfigError unless decays are in [0, 1), eps is finite and at least 0, and counts are integers above 0."""
  for name, decay in decays.items():
    check_range(f'learner.optimizer.{name}', decay, least=0, below=1)
  check_range('learner.optimizer.eps', eps, least=0, below=math.inf)
  for name, count in counts.items():
    check_range(f'learner.optimizer.{name}', count, least=1)
    if not isinstance(count, numbers.Integral):
      raise ConfigError(f'learner.optimizer.{name}: expected an integer of at least 1, got {count}')


def dims_by_path(matrices: DimsFunction | None, params: object) -> dict[Path, MatrixDims]:
  """Returns the dimensions of rows and columns of each matrix, by path; leaves out variables of size 0."""
  dims = (matrices or _rank_two_dims)(params)
  found = leaves_by_path(dims, is_leaf=lambda x: isinstance(x, optax.contrib.MuonDimensionNumbers))
  sizes = {path: x.size for path, x in leaves_by_path(params).items()}
  return {path: each for path, each in found.items() if each is not None and sizes.get(path)}


def square_arrays(
  params: object, dims: dict[Path, MatrixDims], largest: int, fill: Callable[[tuple[int, ...]], jax.Array]
) -> PerSide:
  """Returns a square array for each side of each matrix, or an `optax.MaskedNode` if the side is larger than `largest`.

  `dims` says, by path, which dimensions of a variable are the rows and the columns of its matrices. `fill` makes an
  array of a given shape [..., m, m].
  """

  def make(path: Path, x: jax.Array, side: int) -> Any:
    shape = SplitMatrix.make(x.shape, dims[path], ((),) * x.ndim).square_shapes()[side]
    return fill(shape) if shape[-1] <= largest else optax.MaskedNode()

  return PerSide(*(map_with_path(lambda path, x, side=side: make(path, x, side), params) for side in (0, 1)))


def sides_by_path(squares: PerSide) -> PerSide:
  """Returns the square arrays of both sides, each a dict by path; sides without an array are left out."""
  return PerSide(*map(leaves_by_path, squares))


def put_sides(squares: PerSide, into: PerSide) -> PerSide:
  """Returns the trees `into` with the arrays of `squares`, dicts by path; the inverse of `sides_by_path`."""
  return PerSide(*(map_with_path(lambda path, _, side=side: side[path], old) for side, old in zip(squares, into)))


def update_statistics(side: dict[str, jax.Array], x: jax.Array, decay: float) -> dict[str, jax.Array]:
  """Returns the square arrays of a side, [N, m, m], with updated 'statistics'; {} if `side` is {}.

  The statistics are moving averages of x x^T for gradients x, [N, m, n].
  """
  return side and {**side, 'statistics': decay * side['statistics'] + (1 - decay) * x @ x.mT}


def _rank_two_dims(params: Any) -> Any:
  return jax.tree.map(lambda x: optax.contrib.MuonDimensionNumbers((0,), (1,)) if x.ndim == 2 else None, params)
