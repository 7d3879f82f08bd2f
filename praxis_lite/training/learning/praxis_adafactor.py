"""Adafactor with the second-moment decay of Adam, like Praxis's `ShardedAdafactor`.

optax's `adafactor` has the decay of the paper (Shazeer and Stern, 2018), 1 - t^-0.8, which goes to 1, so the second
moment hardly changes after many steps. Here, it decays like Adam's second moment with bias correction:

    decay of step t    b (1 - b^(t - 1)) / (1 - b^t)        t = 1, 2, ...;  b = decay_adam
    update             gradient / sqrt(second moment, of rows and columns if both are large)
                       -> RMS at most clipping_threshold -> learning rate -> RMS of the variable -> momentum
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def adafactor(
  learning_rate: jax.Array | float,
  decay_adam: float = 0.99,
  beta1: float = 0.0,
  min_dim_size_to_factor: int = 128,
  clipping_threshold: float | None = 1.0,
  multiply_by_parameter_scale: bool = True,
  epsilon1_grad_sq_reg: float = 1e-30,
  epsilon2_param_scale_reg: float = 1e-3,
  weight_decay: float = 0.0,
  mask: Callable[[Any], Any] | None = None,
) -> optax.GradientTransformation:
  """Returns Adafactor with Adam's decay. Arguments are named as in Praxis.

  Args:
    learning_rate: filled in by a learner.
    decay_adam: b above, at least 0 and less than 1.
    beta1: decay of the moving average of the updates; 0 disables this average and its slot.
    min_dim_size_to_factor: a variable with two dimensions of at least this size keeps second moments of rows and
      columns, instead of all entries.
    clipping_threshold: upper limit of the RMS of the update of each variable; None disables it.
    multiply_by_parameter_scale: multiplies the update by the RMS of the variable.
    epsilon1_grad_sq_reg: added to the squares of the gradient.
    epsilon2_param_scale_reg: lower limit of the RMS of the variable.
    weight_decay: each step also subtracts weight_decay * learning rate * variable from the variable.
    mask: the variables to which weight decay applies; filled in by a learner.
  """
  parts = [
    optax.scale_by_factored_rms(
      decay_rate=decay_adam,
      min_dim_size_to_factor=min_dim_size_to_factor,
      epsilon=epsilon1_grad_sq_reg,
      decay_rate_fn=_decay_of_adam,
    )
  ]
  if clipping_threshold is not None:
    parts.append(optax.clip_by_block_rms(clipping_threshold))
  parts.append(optax.scale_by_learning_rate(learning_rate, flip_sign=False))
  if multiply_by_parameter_scale:
    parts.append(optax.scale_by_param_block_rms(epsilon2_param_scale_reg))
  if beta1:
    parts.append(optax.ema(beta1, debias=False))
  if weight_decay:
    parts.append(optax.add_decayed_weights(weight_decay * learning_rate, mask))
  return optax.chain(*parts, optax.scale(-1.0))


def _decay_of_adam(step: jax.Array, decay: Any) -> jax.Array:
  """Returns the decay of the step with index `step`, counted from 0."""
  t = jnp.asarray(step, jnp.float32) + 1.0
  return decay * (1.0 - decay ** (t - 1.0)) / (1.0 - decay**t)
