"""Cautious optimizers (Liang et al., 2024): entries of an update that do not point against the gradient become 0.

    agrees = update * gradient < 0             updates are added to variables
    update = update * agrees / max(mean of agrees over the variable, 1e-3)

A weight decay inside the optimizer would be masked too; use the learner's `decoupled_weight_decay`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from praxis_lite.common.errors import ConfigError


def cautious(optimizer: optax.GradientTransformation, rescale: bool = True) -> optax.GradientTransformationExtraArgs:
  """Returns an optimizer that masks entries of updates which do not point against the gradient.

  Args:
    optimizer: config of the optimizer to mask, as in `Config(cautious, Config(optax.adam))`.
    rescale: whether to divide the update of a variable by the fraction of its entries that remain. With False, an
      elementwise optimizer stays elementwise.

  Raises:
    ConfigError: `optimizer` is not an optimizer.
  """
  inner = inner_optimizer(optimizer, 'cautious')

  def mask(update: jax.Array, gradient: jax.Array) -> jax.Array:
    agrees = update * gradient < 0
    if not rescale:
      return jnp.where(agrees, update, 0)
    share = jnp.mean(agrees.astype(jnp.float32))
    return jnp.where(agrees, update / jnp.maximum(share, 1e-3).astype(update.dtype), 0)

  def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    updates, state = inner.update(gradients, state, params, **extra)
    return jax.tree.map(mask, updates, gradients), state

  return optax.GradientTransformationExtraArgs(inner.init, update)


def inner_optimizer(optimizer: object, name: str) -> optax.GradientTransformationExtraArgs:
  """Returns `optimizer`, which the optimizer `name` wraps; raises ConfigError if `optimizer` is not an optimizer."""
  if isinstance(optimizer, optax.GradientTransformation):
    return optax.with_extra_args_support(optimizer)
  got = getattr(optimizer, '__qualname__', None) or repr(optimizer)
  raise ConfigError(
    f'learner.optimizer.optimizer: expected a config of it, as in Config({name}, Config(optax.adam)), got {got}'
  )
