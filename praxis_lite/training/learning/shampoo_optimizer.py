"""Shampoo: gradients times roots of their statistics, each matrix whole on its owner; AdamW for other variables.

For a gradient g, [m, n], with the statistics L, [m, m], and R, [n, n]:

    statistics  L <- b3 L + (1 - b3) g g^T,    R <- b3 R + (1 - b3) g^T g
    roots       A = (L / (1 - b3^t) + ridge I)^p, and B from R in the same way,  p = -1 / (2 sides);
                in the first step and every `refresh_every` steps
    momentum    mu <- b1 mu + (1 - b1) g,  d = mu / (1 - b1^t)
    direction   A d B, times |a| / |A d B| by grafting

`ridge` is a fraction of the largest eigenvalue. `sides` is 2, or 1 if the other side is larger than `largest_side`. The
direction of Adam is a. See Gupta et al., 2018; Anil et al., 2021; Shi et al., 2023. `owners.py` says where whole
matrices are computed on a mesh, and how the statistics are split.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from praxis_lite.common.errors import check_choice, check_range
from praxis_lite.common.trees import leaves_by_path, map_with_path
from praxis_lite.training.learning.matrix_optimizer import (
  DimsFunction,
  MatrixOptimizer,
  check_settings,
  dims_by_path,
  make_matrix_optimizer,
  put_sides,
  sides_by_path,
  square_arrays,
  update_statistics,
)
from praxis_lite.training.learning.owner_costs import MatrixTraffic
from praxis_lite.training.learning.owners import MatrixBatch, PerSide, Splits, change_batches

GRAFTS = ('adam', 'sgd', 'none')


class ShampooState(NamedTuple):
  """The number of updates; the moments of each matrix, in float32; and statistics and roots of each side of a matrix.

  Statistics and roots are [..., m, m] for a side of size m, and `optax.MaskedNode` for a side that is too large. `nu`
  is the second moment of Adam, or None if grafting does not need it.
  """

  num_updates: jax.Array
  mu: Any
  nu: Any
  statistics: PerSide
  roots: PerSide


def shampoo(
  learning_rate: jax.Array | float,
  b1: float = 0.9,
  b2: float = 0.999,
  b3: float = 0.999,
  eps: float = 1e-8,
  ridge: float = 1e-6,
  refresh_every: int = 10,
  largest_side: int = 8192,
  graft: str = 'adam',
  weight_decay: float = 0.0,
  weight_decay_mask: Any = None,
  adam_b1: float = 0.9,
  adam_b2: float = 0.999,
  adam_weight_decay: float = 0.0,
  adam_weight_decay_mask: Any = None,
  placement: str = 'auto',
  matrices: DimsFunction | None = None,
) -> MatrixOptimizer:
  """Returns Shampoo, which computes each split matrix whole, on one device.

  Args:
    learning_rate: filled in by a learner.
    b1, b2, b3: decays of the momentum, of Adam's second moment in grafting, and of the statistics.
    eps: added to the root of Adam's second moment.
    ridge: this fraction of the largest eigenvalue is added to all eigenvalues.
    refresh_every: number of steps between computations of the roots.
    largest_side: the size of the largest side that has statistics.
    graft: the norm to which each matrix of the update is scaled: 'adam', the norm of Adam's update; 'sgd', the norm of
      the momentum; 'none', its own norm.
    weight_decay, weight_decay_mask, adam_b1, adam_b2, adam_weight_decay, adam_weight_decay_mask, placement, matrices:
      see `muon`.

  Raises:
    ConfigError: a value is out of range.
  """
  check_choice('learner.optimizer.graft', graft, GRAFTS)
  decays = {'b1': b1, 'b2': b2, 'b3': b3, 'adam_b1': adam_b1, 'adam_b2': adam_b2}
  check_settings(decays, eps, {'refresh_every': refresh_every, 'largest_side': largest_side})
  check_range('learner.optimizer.ridge', ridge, above=0, below=math.inf)

  def init(params: Any) -> ShampooState:
    dims = dims_by_path(matrices, params)
    mu = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    statistics = square_arrays(params, dims, largest_side, jnp.zeros)
    nu = jax.tree.map(jnp.copy, mu) if graft == 'adam' else None
    return ShampooState(jnp.zeros((), jnp.int32), mu, nu, statistics, jax.tree.map(jnp.copy, statistics))

  def change(batch: MatrixBatch, count: jax.Array) -> MatrixBatch:
    g, d = batch.matrices['g'], batch.matrices['momentum']
    num_sides = bool(batch.rows) + bool(batch.columns)
    rows, columns = (
      _refresh(update_statistics(kept, x, b3), count, b3, ridge, num_sides, refresh_every)
      for kept, x in ((batch.rows, g), (batch.columns, g.mT))
    )
    direction = rows['roots'] @ d if rows else d
    direction = direction @ columns['roots'] if columns else direction
    if graft != 'none':
      like = batch.matrices.get('adam', d)
      own = jnp.linalg.norm(direction, axis=(1, 2), keepdims=True)
      direction *= jnp.linalg.norm(like, axis=(1, 2), keepdims=True) / jnp.where(own > 0, own, 1.0)
    return MatrixBatch({'direction': direction}, rows, columns)

  def update(
    updates: Any, state: ShampooState, params: Any = None, *, splits: Splits | None = None, **_: Any
  ) -> tuple[Any, ShampooState]:
    count = state.num_updates
    steps = (count + 1).astype(jnp.float32)
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
    mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, gradients)
    momentum, nu = jax.tree.map(lambda m: m / (1 - b1**steps), mu), None
    given = {'g': leaves_by_path(gradients), 'momentum': leaves_by_path(momentum)}
    if graft == 'adam':
      nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), state.nu, gradients)
      adam = jax.tree.map(lambda d, v: d / (jnp.sqrt(v / (1 - b2**steps)) + eps), momentum, nu)
      given['adam'] = leaves_by_path(adam)
    changed, squares = change_batches(
      lambda batch: change(batch, count),
      given,
      {'statistics': sides_by_path(state.statistics), 'roots': sides_by_path(state.roots)},
      dims_by_path(matrices, updates),
      splits,
      placement,
      returns=('direction',),
    )
    direction = map_with_path(lambda path, _: changed['direction'][path], updates)
    sides = (put_sides(squares[name], getattr(state, name)) for name in ('statistics', 'roots'))
    return direction, ShampooState(optax.safe_increment(count), mu, nu, *sides)

  return make_matrix_optimizer(
    optax.GradientTransformationExtraArgs(init, update),
    'shampoo',
    matrices,
    placement,
    MatrixTraffic(
      lambda m, n: shampoo_flops(m, n, refresh_every, largest_side), (2 + (graft == 'adam'), 1), (2, 2), largest_side
    ),
    learning_rate,
    weight_decay,
    weight_decay_mask,
    **{'b1': adam_b1, 'b2': adam_b2, 'eps': eps, 'weight_decay': adam_weight_decay, 'mask': adam_weight_decay_mask},
  )


def shampoo_flops(rows: int, columns: int, refresh_every: int, largest_side: int) -> float:
  """Returns the FLOPs per step of `shampoo` for one matrix.

  Each side takes two products in each step, and a root every few steps.

  The root for a side of size m takes an eigendecomposition, about 9 m^3 FLOPs, and a product [m, m].
  """
  sides = [side for side in (rows, columns) if side <= largest_side]
  return sum(2 * 2 * rows * columns * side + 11 * side**3 / refresh_every for side in sides)


def _refresh(
  side: dict[str, jax.Array], count: jax.Array, decay: float, ridge: float, num_sides: int, refresh_every: int
) -> dict[str, jax.Array]:
  """Returns a side with roots, [N, m, m], recomputed from the statistics every `refresh_every` steps; {} stays {}."""

  def roots(statistics: jax.Array) -> jax.Array:
    values, vectors = jnp.linalg.eigh(statistics / (1 - decay ** (count + 1).astype(jnp.float32)))
    largest = values[:, -1:]
    values = jnp.maximum(values, 0.0) + ridge * largest
    powers = jnp.where(largest > 0, values, 1.0) ** (-1 / (2 * num_sides))
    return (vectors * powers[:, None, :]) @ vectors.mT

  if not side:
    return side
  with jax.default_matmul_precision('float32'):
    new = jax.lax.cond(count % refresh_every == 0, roots, lambda _: side['roots'], side['statistics'])
  return {**side, 'roots': new}
