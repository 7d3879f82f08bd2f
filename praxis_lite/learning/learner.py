"""Learner: what a gradient does to the variables.

    gradient -> L2 -> clipping -> optimizer -> decoupled weight decay -> new variables -> moving averages

A step whose loss or gradient is not finite leaves variables, slots and averages as they were.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from praxis_lite.call import path_name
from praxis_lite.config import Config, Configurable, template
from praxis_lite.errors import ConfigError, did_you_mean
from praxis_lite.learning.optimizer import GroupedOptimizer
from praxis_lite.learning.schedules import Constant
from praxis_lite.learning.subtrees import leaves, merge, select
from praxis_lite.weights import WeightHParams, WeightHParamsCollection


class LearnerUpdate(NamedTuple):
  """What a learner makes of a gradient.

  Attributes:
    mdl_vars: all variables, the trained ones updated.
    opt_states: new optimizer state.
    ema_vars: new moving averages, or None.
    stats: float32 scalars: learning_rate, grad_norm (of the whole gradient, before clipping), and skipped (0 or 1)
      unless steps that are not finite are ignored.
    finite: whether the step counts; None where it always does.
  """

  mdl_vars: Any
  opt_states: Any
  ema_vars: Any
  stats: dict[str, jax.Array]
  finite: jax.Array | None


class Learner(Configurable):
  """Optimizer, schedule and all that is done to gradients.

  Attributes:
    optimizer: config of an optax optimizer, as in `Config(optax.adamw, weight_decay=0.1)`. Learning rate and weight
      decay mask are filled in where it takes them and they are not set.
    learning_rate: multiplied with the schedule.
    schedule: config of a schedule: a function of the step.
    clip_gradient_norm_to_value: the gradient is scaled down to this global norm; 0 does not.
    clip_gradient_single_norm_to_value: each variable's gradient is scaled down to this norm; 0 does not.
    clip_gradient_value: each element is clipped to +- this; 0 does not.
    l2_regularizer_weight: adds this times the variable to its gradient.
    decoupled_weight_decay: takes learning rate times this times the variable off it.
    bprop_variable_inclusion: regexes of variable paths, matched whole; only these are trained. Empty: all.
    bprop_variable_exclusion: regexes of variable paths, matched whole; these are not trained, and have no slots.
    ema_decay: of moving averages of the trained variables; at step t it is min(ema_decay, (1 + t) / (10 + t)). 0 keeps
    none. num_microbatches: gradients are accumulated over so many parts of each batch.
    on_nonfinite: 'skip' leaves all as it was after a step that is not finite; 'raise' does too and ends the run;
      'ignore' does not look.

  Variables marked to skip regularization are spared both kinds of decay, and the optimizer's own.

  Raises:
    ConfigError: values that cannot be, or both kinds of decay.
  """

  optimizer: Config = template(optax.adamw)
  learning_rate: float = 1e-3
  schedule: Config = template(Constant)
  clip_gradient_norm_to_value: float = 0.0
  clip_gradient_single_norm_to_value: float = 0.0
  clip_gradient_value: float = 0.0
  l2_regularizer_weight: float = 0.0
  decoupled_weight_decay: float = 0.0
  bprop_variable_inclusion: tuple[str, ...] = ()
  bprop_variable_exclusion: tuple[str, ...] = ()
  ema_decay: float = 0.0
  num_microbatches: int = 1
  on_nonfinite: str = 'skip'

  def __post_init__(self) -> None:
    if self.l2_regularizer_weight and self.decoupled_weight_decay:
      raise ConfigError('learner: l2_regularizer_weight and decoupled_weight_decay are both set; choose one')
    if self.on_nonfinite not in ('skip', 'raise', 'ignore'):
      raise ConfigError(f"learner.on_nonfinite: expected 'skip', 'raise' or 'ignore', got {self.on_nonfinite!r}")
    if not 0 <= self.ema_decay < 1:
      raise ConfigError(f'learner.ema_decay: expected at least 0 and less than 1, got {self.ema_decay}')
    if self.num_microbatches < 1:
      raise ConfigError(f'learner.num_microbatches: expected at least 1, got {self.num_microbatches}')
    self._schedule = self.schedule.instantiate()

  # ---------------------------------------------------------------- which variables

  def split(self, tree: Any, weights: Any) -> tuple[Any, Any]:
    """Returns the part of `tree` that is trained, and the rest.

    Args:
      tree: a nested dict with the structure of the model's variables.
      weights: their declarations.

    Raises:
      ConfigError: a regex is not valid, or matches no variable.
    """
    declared = leaves(weights)
    included = self._matching(declared, 'bprop_variable_inclusion')
    excluded = self._matching(declared, 'bprop_variable_exclusion')

    def is_trained(path: tuple[str, ...]) -> bool:
      wanted = path in included or not self.bprop_variable_inclusion
      return declared[path].trainable and wanted and path not in excluded

    return select(tree, is_trained), select(tree, lambda path: not is_trained(path))

  def trained(self, tree: Any, weights: Any) -> Any:
    """Returns the part of `tree` that is trained; see `split`."""
    return self.split(tree, weights)[0]

  def _matching(self, declared: dict[tuple[str, ...], WeightHParams], field: str) -> set[tuple[str, ...]]:
    matching: set[tuple[str, ...]] = set()
    for pattern in getattr(self, field):
      try:
        matched = {path for path in declared if re.fullmatch(pattern, path_name(path))}
      except re.error as error:
        raise ConfigError(f'learner.{field}: {pattern!r} is not a regular expression: {error}') from None
      if not matched:
        names = [path_name(path) for path in declared]
        raise ConfigError(f'learner.{field}: {pattern!r} matches no variable.{did_you_mean(pattern, names)}')
      matching |= matched
    return matching

  # ---------------------------------------------------------------- state

  def init(self, mdl_vars: Any, weights: Any) -> Any:
    """Returns the first optimizer state: slots for the trained variables only."""
    return GroupedOptimizer(self.optimizer, self.trained(weights, weights)).init(self.trained(mdl_vars, weights))

  def init_ema(self, mdl_vars: Any, weights: Any) -> Any:
    """Returns the first moving averages, copies of the trained variables; None where none are kept."""
    return jax.tree.map(jnp.copy, self.trained(mdl_vars, weights)) if self.ema_decay else None

  def learning_rate_at(self, step: jax.Array | int) -> jax.Array:
    """Returns the learning rate of the step after `step` steps, a float32 scalar."""
    return jnp.asarray(self.learning_rate * self._schedule(step), jnp.float32)

  # ---------------------------------------------------------------- the update

  def update(
    self, gradients: Any, loss: jax.Array, mdl_vars: Any, opt_states: Any, ema_vars: Any, step: jax.Array, weights: Any
  ) -> LearnerUpdate:
    """Applies a gradient.

    Args:
      gradients: of the trained variables, a part of the variable tree.
      loss: the loss, which must be finite for the step to count.
      mdl_vars: all variables.
      opt_states, ema_vars: state from `init`, `init_ema` or an earlier update.
      step: number of steps taken before this one.
      weights: declarations of all variables.
    """
    declared = self.trained(weights, weights)
    variables = self.trained(mdl_vars, weights)
    grad_norm = optax.global_norm(gradients)
    rate = self.learning_rate_at(step)
    finite = None if self.on_nonfinite == 'ignore' else jnp.isfinite(loss) & jnp.isfinite(grad_norm)

    updates, new_states = GroupedOptimizer(self.optimizer, declared).update(
      self._prepared(gradients, grad_norm, variables, declared), opt_states, variables, rate
    )
    if self.decoupled_weight_decay:
      updates = jax.tree.map(
        lambda u, v, w: u - rate * self.decoupled_weight_decay * v if _is_regularized(w) else u,
        updates,
        variables,
        declared,
      )
    new_variables = self._keep_if_not(finite, optax.apply_updates(variables, updates), variables)
    new_states = self._keep_if_not(finite, new_states, opt_states)
    if ema_vars is not None:
      decay = jnp.minimum(self.ema_decay, (1.0 + step) / (10.0 + step))
      averaged = jax.tree.map(lambda e, v: (e + (1 - decay) * (v - e)).astype(e.dtype), ema_vars, new_variables)
      ema_vars = self._keep_if_not(finite, averaged, ema_vars)
    stats = {'learning_rate': rate, 'grad_norm': grad_norm}
    if finite is not None:
      stats['skipped'] = 1.0 - finite.astype(jnp.float32)
    return LearnerUpdate(merge(mdl_vars, new_variables), new_states, ema_vars, stats, finite)

  def _prepared(self, gradients: Any, grad_norm: jax.Array, variables: Any, declared: Any) -> Any:
    original = gradients
    if self.l2_regularizer_weight:
      gradients = jax.tree.map(
        lambda g, v, w: g + self.l2_regularizer_weight * v if _is_regularized(w) else g, gradients, variables, declared
      )
    if self.clip_gradient_value:
      gradients = jax.tree.map(lambda g: jnp.clip(g, -self.clip_gradient_value, self.clip_gradient_value), gradients)
    if self.clip_gradient_single_norm_to_value:
      gradients = jax.tree.map(self._clip_single_norm, gradients, declared)
    if self.clip_gradient_norm_to_value:
      norm = grad_norm if gradients is original else optax.global_norm(gradients)
      limit = self.clip_gradient_norm_to_value
      gradients = jax.tree.map(lambda g: g * (limit / jnp.maximum(norm, limit)).astype(g.dtype), gradients)
    return gradients

  def _clip_single_norm(self, gradient: jax.Array, weight: WeightHParams) -> jax.Array:
    """Clips the norm of each layer's gradient, where a variable holds a stack of them."""
    axes = tuple(range(len(weight.repeat_prefix), gradient.ndim))
    norm = jnp.sqrt(jnp.sum(jnp.square(gradient.astype(jnp.float32)), axis=axes, keepdims=True))
    limit = self.clip_gradient_single_norm_to_value
    return gradient * (limit / jnp.maximum(norm, limit)).astype(gradient.dtype)

  @staticmethod
  def _keep_if_not(finite: jax.Array | None, new: Any, old: Any) -> Any:
    return new if finite is None else jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)


def _is_regularized(weight: WeightHParams) -> bool:
  return WeightHParamsCollection.SKIP_REGULARIZATION not in weight.collections
