"""MARS (Yuan et al., 2024): an optimizer gets gradients whose variance is reduced by the change since the last step.

    c = g + gamma b1 / (1 - b1) (g - g of the step before)      in the first step, g
    c = c / max(|c|, 1)                                         for each variable

This is the approximate form, which needs one gradient per step. `Config(mars, Config(optax.adamw, b1=0.95, b2=0.99))`
is usual.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from praxis_lite.common.errors import check_range
from praxis_lite.training.learning.cautious_optimizer import inner_optimizer


class MarsState(NamedTuple):
  """The state of `mars`: number of steps, int32; gradients of the previous step; state of the wrapped optimizer."""

  num_steps: jax.Array
  last: Any
  inner: Any


def mars(
  optimizer: optax.GradientTransformation, gamma: float = 0.025, b1: float = 0.95, clip: bool = True
) -> optax.GradientTransformationExtraArgs:
  """Returns an optimizer that corrects gradients by the gradients of the previous step, see above.

  Args:
    optimizer: config of the optimizer that gets the corrected gradients.
    gamma: size of the correction.
    b1: decay of the optimizer's first moment.
    clip: whether to limit the norm of the corrected gradient of each variable to 1. With False, an elementwise
      optimizer stays elementwise.

  Raises:
    ConfigError: `optimizer` is not an optimizer, or a number is out of range.
  """
  check_range('learner.optimizer.b1', b1, least=0, below=1)
  check_range('learner.optimizer.gamma', gamma, least=0, below=math.inf)
  inner = inner_optimizer(optimizer, 'mars')

  def init(params: Any) -> MarsState:
    return MarsState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), inner.init(params))

  def update(gradients: Any, state: MarsState, params: Any = None, **extra: Any) -> tuple[Any, MarsState]:
    size = jnp.where(state.num_steps > 0, gamma * b1 / (1 - b1), 0.0)

    def correct(gradient: jax.Array, last: jax.Array) -> jax.Array:
      corrected = gradient + size.astype(gradient.dtype) * (gradient - last)
      norm = jnp.sqrt(jnp.sum(jnp.square(corrected.astype(jnp.float32))))
      return corrected / jnp.maximum(norm, 1.0).astype(gradient.dtype) if clip else corrected

    updates, of_inner = inner.update(jax.tree.map(correct, gradients, state.last), state.inner, params, **extra)
    last = jax.tree.map(lambda g, s: g.astype(s.dtype), gradients, state.last)
    return updates, MarsState(optax.safe_increment(state.num_steps), last, of_inner)

  return optax.GradientTransformationExtraArgs(init, update)
