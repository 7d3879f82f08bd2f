"""Cautious optimizers (Liang et al., 2024): an update whose sign the gradient of the step does not confirm is left out.

    agrees = update * gradient < 0             an update is added to its variable
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
  """Returns an optimizer without those updates whose sign the gradient does not confirm.

  Args:
    optimizer: a config of it, as in `Config(cautious, Config(optax.adam))`.
    rescale: makes up for what is left out, by the fraction of each variable that is. Without it, an elementwise
      optimizer stays elementwise.

  Raises:
    ConfigError: `optimizer` is no optimizer.
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
  """Returns what the optimizer `name` wraps; raises ConfigError if that is no optimizer."""
  if isinstance(optimizer, optax.GradientTransformation):
    return optax.with_extra_args_support(optimizer)
  got = getattr(optimizer, '__qualname__', None) or repr(optimizer)
  raise ConfigError(
    f'learner.optimizer.optimizer: expected a config of it, as in Config({name}, Config(optax.adam)), got {got}'
  )
