"""Muon: orthogonalized updates of matrices, each computed whole on one device, its owner; AdamW for other variables.

    momentum    mu <- beta mu + (1 - beta) g                    split like the variable
    direction   d = beta mu / (1 - beta^(t + 1)) + (1 - beta) g / (1 - beta^t)         (Nesterov)
    orthogonal  X_0 = d / |d|;  X_(i + 1) = a X_i + (b A + c A A) X_i,  A = X_i X_i^T  Newton-Schulz, on the owner
    update      - learning rate (X sqrt(max(1, columns / rows)) + weight decay times variable)

(Jordan et al., 2024; Liu et al., 2025.) The results equal those of `optax.contrib.muon`, up to rounding. There, the
compiler computes products of matrices that a mesh splits, with communication for each product; see `owners.py`. Stacks
of layers are updated together, each layer as a separate matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves_by_path, map_with_path
from praxis_lite.training.learning.matrix_optimizer import (
  DimsFunction,
  MatrixOptimizer,
  check_settings,
  dims_by_path,
  make_matrix_optimizer,
)
from praxis_lite.training.learning.owner_costs import MatrixTraffic
from praxis_lite.training.learning.owners import MatrixDims, Splits, change_matrices, dims_of_side


class MuonState(NamedTuple):
  """The number of updates, and the momentum of each matrix."""

  num_updates: jax.Array
  mu: Any


def muon(
  learning_rate: jax.Array | float,
  ns_coeffs: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
  ns_steps: int = 5,
  beta: float = 0.95,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
  weight_decay_mask: Any = None,
  nesterov: bool = True,
  consistent_rms: float | None = None,
  adam_b1: float = 0.9,
  adam_b2: float = 0.999,
  adam_weight_decay: float = 0.0,
  adam_weight_decay_mask: Any = None,
  placement: str = 'auto',
  matrices: DimsFunction | None = None,
) -> MatrixOptimizer:
  """Returns Muon, which computes each split matrix whole, on one device. Arguments are named as in optax.

  Args:
    learning_rate: filled in by a learner.
    ns_coeffs, ns_steps: a, b and c above, and the number of iterations.
    beta: decay of the momentum.
    eps: added to the norm of the direction; also Adam's epsilon.
    weight_decay, weight_decay_mask: for matrices. A learner fills in this mask and the one of AdamW.
    nesterov: whether the direction is the momentum after one more step.
    consistent_rms: if given, updates are multiplied by consistent_rms * sqrt(max(rows, columns)), instead of
      sqrt(max(1, columns / rows)); 0.2 makes them as large as AdamW's.
    adam_b1, adam_b2, adam_weight_decay, adam_weight_decay_mask: arguments of AdamW, for variables that are not
      matrices.
    placement: where a matrix is computed. 'owner' sends each matrix to one device. 'split' does not move it, and lets
      the compiler communicate. 'auto' sends matrices that the mesh splits, and also others if they are so large that
      computing them on every device would take longer.
    matrices: which dimensions of a variable are the rows and columns of a matrix; filled in by a learner. None takes
      each variable of rank 2 as a matrix.

  Raises:
    ConfigError: a value is out of range.
  """
  check_settings({'beta': beta, 'adam_b1': adam_b1, 'adam_b2': adam_b2}, eps, {'ns_steps': ns_steps})
  if len(ns_coeffs) != 3:
    raise ConfigError(f'learner.optimizer.ns_coeffs: expected 3 numbers, got {ns_coeffs}')

  def orthogonalize(x: jax.Array) -> jax.Array:
    return newton_schulz(x, ns_coeffs, ns_steps, eps)

  def scale(x: jax.Array, dims: MatrixDims, shape: Sequence[int]) -> jax.Array:
    rows, columns = (math.prod(shape[d] for d in dims_of_side(side)) for side in dims)
    factor = max(1.0, columns / rows) if consistent_rms is None else max(rows, columns) * consistent_rms**2
    return x * jnp.asarray(math.sqrt(factor), x.dtype)

  def init(params: Any) -> MuonState:
    return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

  def update(
    updates: Any, state: MuonState, params: Any = None, *, splits: Splits | None = None, **_: Any
  ) -> tuple[Any, MuonState]:
    count = state.num_updates + 1
    mu = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state.mu, updates)
    if nesterov:
      now, then = (1 - beta ** (count + i).astype(jnp.float32) for i in (0, 1))
      direction = jax.tree.map(lambda m, g: beta * m / then + (1 - beta) * g / now, mu, updates)
    else:
      direction = jax.tree.map(lambda m: m / (1 - beta ** count.astype(jnp.float32)), mu)
    arrays, dims = leaves_by_path(direction), dims_by_path(matrices, direction)
    changed = change_matrices(orthogonalize, arrays, dims, splits, placement)
    shapes = {path: x.shape for path, x in arrays.items()} if splits is None else splits.shapes
    scaled = map_with_path(lambda path, _: scale(changed[path], dims[path], shapes[path]), direction)
    return scaled, MuonState(count, mu)

  return make_matrix_optimizer(
    optax.GradientTransformationExtraArgs(init, update),
    'muon',
    matrices,
    placement,
    MatrixTraffic(lambda rows, columns: newton_schulz_flops(rows, columns, ns_steps)),
    learning_rate,
    weight_decay,
    weight_decay_mask,
    **{'b1': adam_b1, 'b2': adam_b2, 'eps': eps, 'weight_decay': adam_weight_decay, 'mask': adam_weight_decay_mask},
    nesterov=nesterov,
  )


def newton_schulz(x: jax.Array, coeffs: Sequence[float], steps: int, eps: float) -> jax.Array:
  """Returns matrices with the singular vectors of `x`, [N, m, n], m <= n, and singular values near 1."""
  a, b, c = coeffs
  x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + eps)
  for _ in range(steps):
    square = x @ x.mT
    x = a * x + (b * square + c * square @ square) @ x
  return x


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
  """Returns the FLOPs of the products of `newton_schulz` for one matrix: steps * (4 m^2 n + 2 m^3)."""
  m, n = sorted((rows, columns))
  return steps * (4 * m * m * n + 2 * m**3)
