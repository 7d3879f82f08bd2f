"""Schedule-free learning (Defazio et al., 2024): gradients are taken at y, and a trained model is x.

    z = z - rate * update(gradient at y)
    x = a weighted mean of all z
    y = b1 x + (1 - b1) z

The variables of a train state are y, and the optimizer's state contains z. A learner stores x in place of moving
averages, so evaluation, decoding, exports and other runs use x.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from optax import contrib

from praxis_lite.common.config import Config, config_values, nested_configs, target
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict, leaves_by_path, map_with_path
from praxis_lite.training.learning.optimizer import States

_FACTORIES = (contrib.schedule_free, contrib.schedule_free_adamw, contrib.schedule_free_sgd)


def is_schedule_free(optimizer: Config) -> bool:
  """Whether an optimizer, or one in its config, is schedule-free."""
  return any(target(nested) in _FACTORIES for nested in nested_configs(optimizer))


def check_schedule_free(optimizer: Config, ema_decay: float, moments: str, decoupled_weight_decay: float) -> None:
  """Raises ConfigError if fields of a learner conflict with the schedule-free optimizer in the learner."""
  if ema_decay:
    raise ConfigError(
      f'learner.ema_decay = {ema_decay}: a schedule-free optimizer has an average of its own, which evaluation uses; '
      'set it to 0'
    )
  if moments != 'float32':
    raise ConfigError(
      f"learner.moments = {moments!r}: a schedule-free optimizer keeps points, not moments; set it to 'float32'"
    )
  if decoupled_weight_decay:
    is_wrapper = any(target(nested) is contrib.schedule_free for nested in nested_configs(optimizer))
    raise ConfigError(
      f'learner.decoupled_weight_decay = {decoupled_weight_decay}: it decays only the points at which a schedule-free '
      'optimizer takes gradients; set learner.optimizer.'
      f'{"base_optimizer." if is_wrapper else ""}weight_decay, which also decays the points that it keeps'
    )
  if any(target(nested) in _FACTORIES and config_values(nested).get('b1') == 0 for nested in nested_configs(optimizer)):
    raise ConfigError('learner.optimizer.b1 = 0: the average cannot be computed from the variables; expected more')


def average_point(states: States, variables: NestedDict) -> NestedDict:
  """Returns x = (y - (1 - b1) z) / b1 for each variable y that has a z in the states; other variables are unchanged."""
  found: dict[Any, tuple[jax.Array, jax.Array]] = {}
  for state in jax.tree.leaves(states, is_leaf=_is_state):
    if _is_state(state):
      found |= {path: (jnp.asarray(state.b1), z) for path, z in leaves_by_path(state.z).items()}

  def point(path: Any, y: jax.Array) -> jax.Array:
    if path not in found:
      return jnp.asarray(y)
    b1, z = found[path]
    b1 = b1.reshape(b1.shape + (1,) * (z.ndim - b1.ndim))
    return ((y - (1 - b1) * z) / b1).astype(y.dtype)

  return map_with_path(point, variables)


def _is_state(value: object) -> bool:
  return isinstance(value, contrib.ScheduleFreeState)
