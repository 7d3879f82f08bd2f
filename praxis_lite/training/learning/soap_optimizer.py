"""SOAP: for matrices, Adam in a basis of eigenvectors; for other variables, AdamW.

For a gradient g, [m, n], with the statistics L, [m, m], and R, [n, n], and their eigenvectors A and B:

    momentum    mu <- b1 mu + (1 - b1) g
    second      nu <- b2 nu + (1 - b2) (A^T g B)^2                        in the basis of eigenvectors
    direction   d = A [(A^T mu B / (1 - b1^t)) / (sqrt(nu / (1 - b2^t)) + eps)] B^T
    statistics  L <- b3 L + (1 - b3) g g^T,    R <- b3 R + (1 - b3) g^T g
    every `refresh_every` steps, sort the columns of A by the diagonal of A^T L A, and nu like them; then let A be the Q
    of the QR decomposition of L A; the same for B and R

(Vyas et al., 2024, algorithms 3 and 4.) As there, the first step only computes the first eigenvectors, so a gradient is
never rotated by its own eigenvectors. A side that is larger than `largest_side` keeps A = I.

The statistics of one gradient may have eigenvalues of zero. Their eigenvectors would depend on rounding, and therefore
on the mesh, so unit vectors, made orthogonal to the other eigenvectors, replace them.

`owners.py` says where whole matrices are computed on a mesh, and how the statistics are split.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

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


class SoapState(NamedTuple):
  """The number of updates; for each matrix the moments, in float32, and for each of its sides, statistics and bases.

  Statistics and bases are [..., m, m] for a side of size m, and `optax.MaskedNode` for a side that is too large.
  """

  num_updates: jax.Array
  mu: Any
  nu: Any
  statistics: PerSide
  bases: PerSide


def soap(
  learning_rate: jax.Array | float,
  b1: float = 0.95,
  b2: float = 0.95,
  b3: float = 0.95,
  eps: float = 1e-8,
  refresh_every: int = 10,
  largest_side: int = 10_000,
  weight_decay: float = 0.0,
  weight_decay_mask: Any = None,
  adam_b1: float = 0.9,
  adam_b2: float = 0.999,
  adam_weight_decay: float = 0.0,
  adam_weight_decay_mask: Any = None,
  placement: str = 'auto',
  matrices: DimsFunction | None = None,
) -> MatrixOptimizer:
  """Returns SOAP, which computes each split matrix whole, on one device.

  Args:
    learning_rate: filled in by a learner.
    b1, b2, b3: decays of the momentum, of the second moment, and of the statistics.
    eps: added to the root of the second moment; also Adam's epsilon.
    refresh_every: number of steps between computations of the eigenvectors.
    largest_side: the size of the largest side that has statistics.
    weight_decay, weight_decay_mask, adam_b1, adam_b2, adam_weight_decay, adam_weight_decay_mask, placement, matrices:
      see `muon`.

  Raises:
    ConfigError: a value is out of range.
  """
  decays = {'b1': b1, 'b2': b2, 'b3': b3, 'adam_b1': adam_b1, 'adam_b2': adam_b2}
  check_settings(decays, eps, {'refresh_every': refresh_every, 'largest_side': largest_side})

  def init(params: Any) -> SoapState:
    dims = dims_by_path(matrices, params)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    statistics = square_arrays(params, dims, largest_side, jnp.zeros)
    bases = square_arrays(params, dims, largest_side, lambda shape: jnp.broadcast_to(jnp.eye(shape[-1]), shape))
    return SoapState(jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.copy, zeros), statistics, bases)

  def change(batch: MatrixBatch, count: jax.Array) -> MatrixBatch:
    g, mu, nu = (batch.matrices[name] for name in ('g', 'mu', 'nu'))
    bases = PerSide(batch.rows.get('bases'), batch.columns.get('bases'))
    nu = jnp.where(count > 0, b2 * nu + (1 - b2) * jnp.square(_rotate(g, bases)), nu)
    steps = jnp.maximum(count, 1).astype(jnp.float32)
    direction = _rotate(mu / (1 - b1**steps), bases) / (jnp.sqrt(nu / (1 - b2**steps)) + eps)
    direction = jnp.where(count > 0, _rotate_back(direction, bases), 0.0)
    rows, columns = (update_statistics(kept, x, b3) for kept, x in ((batch.rows, g), (batch.columns, g.mT)))
    is_due = count % refresh_every == 0
    rows, columns, nu = jax.lax.cond(is_due, _refresh, lambda *kept: kept[:3], rows, columns, nu, count)
    return MatrixBatch({'direction': direction, 'nu': nu}, rows, columns)

  def update(
    updates: Any, state: SoapState, params: Any = None, *, splits: Splits | None = None, **_: Any
  ) -> tuple[Any, SoapState]:
    count = state.num_updates
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
    # The first step is not part of the averages, as in the paper.
    mu = jax.tree.map(lambda m, g: jnp.where(count > 0, b1 * m + (1 - b1) * g, m), state.mu, gradients)
    changed, squares = change_batches(
      lambda batch: change(batch, count),
      {'g': leaves_by_path(gradients), 'mu': leaves_by_path(mu), 'nu': leaves_by_path(state.nu)},
      {'statistics': sides_by_path(state.statistics), 'bases': sides_by_path(state.bases)},
      dims_by_path(matrices, updates),
      splits,
      placement,
      returns=('direction', 'nu'),
    )
    direction, nu = (map_with_path(lambda path, _, x=changed[name]: x[path], updates) for name in ('direction', 'nu'))
    sides = (put_sides(squares[name], getattr(state, name)) for name in ('statistics', 'bases'))
    return direction, SoapState(optax.safe_increment(count), mu, nu, *sides)

  return make_matrix_optimizer(
    optax.GradientTransformationExtraArgs(init, update),
    'soap',
    matrices,
    placement,
    MatrixTraffic(lambda m, n: soap_flops(m, n, refresh_every, largest_side), (3, 2), (2, 2), largest_side),
    learning_rate,
    weight_decay,
    weight_decay_mask,
    **{'b1': adam_b1, 'b2': adam_b2, 'eps': eps, 'weight_decay': adam_weight_decay, 'mask': adam_weight_decay_mask},
  )


def soap_flops(rows: int, columns: int, refresh_every: int, largest_side: int) -> float:
  """Returns the FLOPs per step of `soap` for one matrix.

  For each side of up to `largest_side`, the matrix is multiplied four times by a square matrix of that size, and there
  is a refresh every `refresh_every` steps.
  A refresh for a side of size m takes 2 m^3 FLOPs for a product [m, m], and 8/3 m^3 for a QR decomposition with its Q.
  """
  sides = [side for side in (rows, columns) if side <= largest_side]
  return sum(4 * 2 * rows * columns * side + (2 + 8 / 3) * side**3 / refresh_every for side in sides)


def _rotate(x: jax.Array, bases: PerSide) -> jax.Array:
  """Returns A^T x B, with the bases A of the inputs and B of the outputs; a basis of None stands for the identity."""
  x = x if bases.inputs is None else bases.inputs.mT @ x
  return x if bases.outputs is None else x @ bases.outputs


def _rotate_back(x: jax.Array, bases: PerSide) -> jax.Array:
  x = x if bases.inputs is None else bases.inputs @ x
  return x if bases.outputs is None else x @ bases.outputs.mT


def _refresh(
  rows: dict[str, jax.Array], columns: dict[str, jax.Array], nu: jax.Array, count: jax.Array
) -> tuple[dict[str, jax.Array], dict[str, jax.Array], jax.Array]:
  """Returns rows and columns with new bases, and the second moment `nu` reordered like the columns of the bases."""
  with jax.default_matmul_precision('float32'):
    new_rows, order = _new_basis(rows, count)
    nu = nu if order is None else jnp.take_along_axis(nu, order[:, :, None], axis=1)
    new_columns, order = _new_basis(columns, count)
    nu = nu if order is None else jnp.take_along_axis(nu, order[:, None, :], axis=2)
  return new_rows, new_columns, nu


def _new_basis(side: dict[str, jax.Array], count: jax.Array) -> tuple[dict[str, jax.Array], jax.Array | None]:
  """Returns a side with a new basis, [N, m, m], and the order of its columns, [N, m]. An empty side has no order."""
  if not side:
    return side, None
  statistics, basis = side['statistics'], side['bases']
  power = statistics @ basis
  order = jnp.argsort(-jnp.sum(basis * power, axis=1), axis=1)
  basis = jax.lax.cond(
    count == 0,
    lambda: _eigenvectors(statistics),
    lambda: jnp.linalg.qr(jnp.take_along_axis(power, order[:, None, :], axis=2))[0],
  )
  return {**side, 'bases': basis}, order


def _eigenvectors(statistics: jax.Array) -> jax.Array:
  """Returns orthonormal eigenvectors, [N, m, m], the largest eigenvalue first.

  Unit vectors, made orthogonal, replace eigenvectors of eigenvalues that are zero up to rounding.
  """
  values, vectors = (jnp.flip(x, axis=-1) for x in jnp.linalg.eigh(statistics))
  is_positive = values > 1e-5 * values[:, :1]
  column = jnp.arange(values.shape[1]) - jnp.sum(is_positive, axis=1, keepdims=True)
  units = jax.nn.one_hot(column, values.shape[1], axis=1, dtype=vectors.dtype)
  return jnp.linalg.qr(jnp.where(is_positive[:, None, :], vectors, units))[0]
