"""Learner: what a gradient does to the variables.

    gradient -> clipping: by value, by each variable's norm, by the global norm
             -> L2 -> optimizer -> decoupled weight decay -> new variables -> moving averages

A step whose loss or gradient is not finite leaves variables, slots and averages as they were.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from praxis_lite.config import Config, Configurable, template
from praxis_lite.errors import ConfigError, did_you_mean
from praxis_lite.learning.optimizer import GroupedOptimizer, States, is_regularized
from praxis_lite.learning.schedules import Constant
from praxis_lite.trees import NestedDict, Path, leaves, merge, path_name, select
from praxis_lite.weights import WeightHParams

# Tree of sums over parts of variables -> tree of sums over the whole variables.
SumParts = Callable[[NestedDict], NestedDict]

T = TypeVar('T')

_ON_NONFINITE = ('skip', 'raise', 'ignore')


class LearnerUpdate(NamedTuple):
  """What a learner makes of a gradient.

  Attributes:
    mdl_vars: all variables, the trained ones updated.
    opt_states: new optimizer state.
    ema_vars: new moving averages, or None.
    stats: float32 scalars: learning_rate, grad_norm (of the whole gradient, before clipping), skipped (0 or 1) unless
      steps that are not finite are ignored, and param_norm if it is asked for.
    finite: whether the step counts; None where it always does.
  """

  mdl_vars: NestedDict
  opt_states: States
  ema_vars: NestedDict | None
  stats: dict[str, jax.Array]
  finite: jax.Array | None


class Learner(Configurable):
  """Optimizer, schedule and all that is done to gradients.

  Attributes:
    optimizer: config of an optax optimizer, as in `Config(optax.adamw, weight_decay=0.1)`, or of a function that
      returns an optax transformation. Learning rate and weight decay mask are filled in where it, or a config nested
      in it, takes them and they are not set.
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
      none.
    num_microbatches: gradients are accumulated over so many parts of each batch.
    on_nonfinite: 'skip' leaves all as it was after a step whose loss or gradient norm is not finite in float32; 'raise'
      does too and ends the run; 'ignore' does not look.
    per_layer_statistics: whether the optimizer updates each layer of a repeated one by itself. None: unless it is known
      to make no difference.
    report_param_norm: adds the norm of the trained variables to the stats.

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
  per_layer_statistics: bool | None = None
  report_param_norm: bool = False

  def __post_init__(self) -> None:
    if self.l2_regularizer_weight and self.decoupled_weight_decay:
      raise ConfigError('learner: l2_regularizer_weight and decoupled_weight_decay are both set; choose one')
    if self.on_nonfinite not in _ON_NONFINITE:
      close = did_you_mean(str(self.on_nonfinite), _ON_NONFINITE)
      raise ConfigError(
        f"learner.on_nonfinite: expected 'skip', 'raise' or 'ignore', got {self.on_nonfinite!r}.{close}"
      )
    for field in ('optimizer', 'schedule'):
      if not isinstance(getattr(self, field), Config):
        raise ConfigError(f'learner.{field}: expected a Config, got {type(getattr(self, field)).__name__}')
    for field in ('clip_gradient_norm_to_value', 'clip_gradient_single_norm_to_value', 'clip_gradient_value'):
      if not getattr(self, field) >= 0:
        raise ConfigError(f'learner.{field}: expected a limit above 0, or 0 for none, got {getattr(self, field)}')
    if not 0 <= self.ema_decay < 1:
      raise ConfigError(f'learner.ema_decay: expected at least 0 and less than 1, got {self.ema_decay}')
    if self.num_microbatches < 1:
      raise ConfigError(f'learner.num_microbatches: expected at least 1, got {self.num_microbatches}')
    self._schedule = self.schedule.instantiate()
    self._bound: tuple[NestedDict, BoundLearner] | None = None

  def bind(self, weights: NestedDict) -> BoundLearner:
    """Returns the learner of a model's variables.

    Args:
      weights: their declarations, `model.abstract_init()`.

    Raises:
      ConfigError: a regex is not valid, or matches no variable, or no variable is left to train.
    """
    if self._bound is None or self._bound[0] != weights:  # What it finds out about the optimizer is found out once.
      self._bound = weights, BoundLearner(self, weights)
    return self._bound[1]

  def learning_rate_at(self, step: jax.Array | int) -> jax.Array:
    """Returns the learning rate of the step after `step` steps, a float32 scalar."""
    return jnp.asarray(self.learning_rate * self._schedule(step), jnp.float32)


class BoundLearner:
  """A learner and the declarations of the variables that it trains.

  Attributes:
    num_microbatches: as of the learner.
  """

  def __init__(self, learner: Learner, weights: NestedDict):
    self._learner = learner
    self.num_microbatches = learner.num_microbatches
    declared = leaves(weights)
    included = self._matching(declared, 'bprop_variable_inclusion')
    excluded = self._matching(declared, 'bprop_variable_exclusion')
    self._trained = {
      path
      for path, weight in declared.items()
      if weight.trainable and (path in included or not learner.bprop_variable_inclusion) and path not in excluded
    }
    if not self._trained and any(weight.trainable for weight in declared.values()):
      raise ConfigError('learner: bprop_variable_inclusion and bprop_variable_exclusion leave no variable to train')
    self._declared = self.trained(weights)
    self._optimizer = GroupedOptimizer(learner.optimizer, self._declared, learner.per_layer_statistics)

  # ---------------------------------------------------------------- which variables

  def split(self, tree: NestedDict) -> tuple[NestedDict, NestedDict]:
    """Returns the part of `tree`, a nested dict with the structure of the model's variables, that is trained, and the
    rest."""
    return self.trained(tree), select(tree, lambda path: path not in self._trained)

  def trained(self, tree: NestedDict) -> NestedDict:
    """Returns the part of `tree` that is trained."""
    return select(tree, self._trained.__contains__)

  def is_trained(self, path: Path) -> bool:
    """Whether the variable at `path` is trained."""
    return path in self._trained

  def _matching(self, declared: dict[Path, WeightHParams], field: str) -> set[Path]:
    matching: set[Path] = set()
    patterns = getattr(self._learner, field)
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
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

  def init(self, mdl_vars: NestedDict) -> States:
    """Returns the first optimizer state: slots for the trained variables only."""
    return self._optimizer.init(self.trained(mdl_vars), self._learner.learning_rate_at(0))

  def init_ema(self, mdl_vars: NestedDict) -> NestedDict | None:
    """Returns the first moving averages, copies of the trained variables; None where none are kept."""
    return jax.tree.map(jnp.copy, self.trained(mdl_vars)) if self._learner.ema_decay else None

  def slot_axes(self) -> dict[Path, tuple[int | None, ...]]:
    """Returns, by the path of a slot in the optimizer state, which axis of its variable each dimension of it runs
    along, None for none. Slots of which this is not known are left out."""
    return self._optimizer.slot_axes()

  def not_elementwise(self) -> list[str]:
    """Returns the names of what the optimizer is built from that may need whole variables, not parts of them."""
    return self._optimizer.not_elementwise()

  # ---------------------------------------------------------------- the update

  def update(
    self,
    gradients: NestedDict,
    loss: jax.Array,
    mdl_vars: NestedDict,
    opt_states: States,
    ema_vars: NestedDict | None,
    step: jax.Array,
    sum_parts: SumParts = lambda sums: sums,
  ) -> LearnerUpdate:
    """Applies a gradient.

    Args:
      gradients: of the trained variables, a part of the variable tree.
      loss: the loss, which must be finite for the step to count; the same on all devices.
      mdl_vars: all variables.
      opt_states, ema_vars: state from `init`, `init_ema` or an earlier update.
      step: number of steps taken before this one.
      sum_parts: adds up sums over parts of variables, where variables and gradients are one device's parts.

    Raises:
      ConfigError: the optimizer cannot be what its config says, or needs what a step does not have.
    """
    learner, variables = self._learner, self.trained(mdl_vars)
    grad_norm = _global_norm(gradients, sum_parts)
    rate = learner.learning_rate_at(step)
    finite = None if learner.on_nonfinite == 'ignore' else jnp.isfinite(loss) & jnp.isfinite(grad_norm)

    def changed() -> tuple[NestedDict, States, NestedDict | None]:
      prepared = self._regularized(self._clipped(gradients, grad_norm, sum_parts), variables)
      updates, new_states = self._optimizer.update(prepared, opt_states, variables, rate, loss)
      new_variables = optax.apply_updates(variables, self._decayed(updates, variables, rate))
      return new_variables, new_states, self._averaged(ema_vars, new_variables, step)

    new_variables, new_states, ema_vars = _if_finite(finite, changed, (variables, opt_states, ema_vars))
    stats = {'learning_rate': rate, 'grad_norm': grad_norm}
    if finite is not None:
      stats['skipped'] = 1.0 - finite.astype(jnp.float32)
    if learner.report_param_norm:
      stats['param_norm'] = _global_norm(new_variables, sum_parts)
    return LearnerUpdate(merge(mdl_vars, new_variables), new_states, ema_vars, stats, finite)

  def _clipped(self, gradients: NestedDict, norm: jax.Array, sum_parts: SumParts) -> NestedDict:
    original = gradients
    if self._learner.clip_gradient_value:
      gradients = jax.tree.map(
        lambda g: jnp.clip(g, -self._learner.clip_gradient_value, self._learner.clip_gradient_value), gradients
      )
    if self._learner.clip_gradient_single_norm_to_value:
      squares = sum_parts(jax.tree.map(_square_of_each_layer, gradients, self._declared))
      gradients = jax.tree.map(self._clip_single_norm, gradients, squares)
    if self._learner.clip_gradient_norm_to_value:
      norm = norm if gradients is original else _global_norm(gradients, sum_parts)
      limit = self._learner.clip_gradient_norm_to_value
      gradients = jax.tree.map(lambda g: g * (limit / jnp.maximum(norm, limit)).astype(g.dtype), gradients)
    return gradients

  def _regularized(self, gradients: NestedDict, variables: NestedDict) -> NestedDict:
    if not self._learner.l2_regularizer_weight:
      return gradients
    return jax.tree.map(
      lambda g, v, w: g + self._learner.l2_regularizer_weight * v if is_regularized(w) else g,
      gradients,
      variables,
      self._declared,
    )

  def _clip_single_norm(self, gradient: jax.Array, square: jax.Array) -> jax.Array:
    norm = jnp.sqrt(square)
    limit = self._learner.clip_gradient_single_norm_to_value
    return gradient * (limit / jnp.maximum(norm, limit)).astype(gradient.dtype)

  def _decayed(self, updates: NestedDict, variables: NestedDict, rate: jax.Array) -> NestedDict:
    if not self._learner.decoupled_weight_decay:
      return updates
    factor = rate * self._learner.decoupled_weight_decay
    return jax.tree.map(lambda u, v, w: u - factor * v if is_regularized(w) else u, updates, variables, self._declared)

  def _averaged(self, averages: NestedDict | None, variables: NestedDict, step: jax.Array) -> NestedDict | None:
    if averages is None:
      return None
    new = 1.0 - jnp.minimum(self._learner.ema_decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda e, v: (e + new * (v - e)).astype(e.dtype), averages, variables)


def _if_finite(finite: jax.Array | None, changed: Callable[[], T], kept: T) -> T:
  """Returns what `changed()` does, or `kept` if the step is not finite.

  A branch lets XLA update donated arrays in place. Choosing between old and new element by element would read the old
  slots once more after the new ones are written, and so copy each of them.
  """
  if finite is None:
    return changed()
  return jax.lax.cond(finite, changed, lambda: kept)


def _square_of_each_layer(gradient: jax.Array, weight: WeightHParams) -> jax.Array:
  """The squared norm of a gradient, or of each layer's, where a variable holds a stack of them: [layers, 1, ...]."""
  axes = tuple(range(len(weight.repeat_prefix), gradient.ndim))
  return jnp.sum(jnp.square(gradient.astype(jnp.float32)), axis=axes, keepdims=True)


def _global_norm(tree: NestedDict, sum_parts: SumParts) -> jax.Array:
  """The norm of all arrays of a tree as one vector, in float32 whatever their dtype."""
  squares = sum_parts(jax.tree.map(lambda x: jnp.sum(jnp.square(x.astype(jnp.float32))), tree))
  return jnp.sqrt(sum(jax.tree.leaves(squares), jnp.zeros((), jnp.float32)))
