"""A Sophia-like optimizer: Newton steps, clipped entry by entry (Liu et al., 2023).

    m = b1 m + (1 - b1) g
    h = b2 h + (1 - b2) batch_weight g^2       in every `refresh_every`-th step
    update = - learning rate clip(m / max(rho h, eps), -1, 1)

Sophia-G estimates the diagonal h of the curvature from gradients for labels that are drawn from the model. A step has
no such labels, so here g is the gradient of the step itself (the empirical Fisher information). optax's `sophia` uses
the estimate of the paper, but evaluates the loss again in each update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from praxis_lite.common.errors import check_range


class SophiaState(NamedTuple):
  """The state of `sophia`: the number of steps, int32, and m and h (see above) of all variables."""

  num_steps: jax.Array
  momentum: Any
  curvature: Any


def sophia(
  learning_rate: jax.Array | float,
  batch_weight: float,
  b1: float = 0.965,
  b2: float = 0.99,
  rho: float = 0.04,
  eps: float = 1e-15,
  refresh_every: int = 10,
  weight_decay: float = 0.1,
  mask: Callable[[Any], Any] | None = None,
) -> optax.GradientTransformation:
  """Returns a Sophia-like optimizer, which is elementwise.

  Args:
    learning_rate: filled in by a learner; the size of a clipped entry of an update.
    batch_weight: number of rows, or of tokens for a language model, over which the loss of a batch is averaged.
    b1, b2: decays of m and h.
    rho: smaller values clip more entries.
    eps: lower limit of rho h.
    refresh_every: number of steps between updates of h.
    weight_decay: each step also subtracts weight_decay * learning rate * variable from the variable.
    mask: the variables to which weight decay applies; filled in by a learner.

  Raises:
    ConfigError: a number is out of range.
  """
  for name, value in (('b1', b1), ('b2', b2)):
    check_range(f'learner.optimizer.{name}', value, least=0, below=1)
  for name, value in (('batch_weight', batch_weight), ('rho', rho), ('eps', eps)):
    check_range(f'learner.optimizer.{name}', value, above=0, below=math.inf)
  check_range('learner.optimizer.refresh_every', refresh_every, least=1)

  def init(params: Any) -> SophiaState:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return SophiaState(jnp.zeros((), jnp.int32), zeros, zeros)

  def update(gradients: Any, state: SophiaState, params: Any = None) -> tuple[Any, SophiaState]:
    is_due = state.num_steps % refresh_every == 0

    def refresh(h: jax.Array, g: jax.Array) -> jax.Array:
      return jnp.where(is_due, b2 * h + (1 - b2) * batch_weight * jnp.square(g), h)

    momentum = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.momentum, gradients)
    curvature = jax.tree.map(refresh, state.curvature, gradients)
    steps = jax.tree.map(lambda m, h: jnp.clip(m / jnp.maximum(rho * h, eps), -1, 1), momentum, curvature)
    return steps, SophiaState(optax.safe_increment(state.num_steps), momentum, curvature)

  parts = [optax.GradientTransformation(init, update)]
  if weight_decay:
    parts.append(optax.add_decayed_weights(weight_decay, mask))
  return optax.chain(*parts, optax.scale_by_learning_rate(learning_rate))
