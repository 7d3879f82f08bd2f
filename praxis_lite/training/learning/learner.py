"""Learner: how a gradient changes the variables.

    gradient -> clipping: by value, by each variable's norm, by the global norm
             -> L2 -> optimizer -> decoupled weight decay -> new variables -> moving averages

If its loss or gradient is not finite, a step changes neither variables nor slots nor averages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from praxis_lite.common.config import Config, Configurable, template
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.common.trees import NestedDict, Path, leaves, merge, path_name, select, suggest_pattern
from praxis_lite.sharding.mesh import platform
from praxis_lite.sharding.weights import WeightHParams, is_dtype
from praxis_lite.training.learning.moments import MOMENTS
from praxis_lite.training.learning.optimizer import States, grouped_optimizer, is_regularized
from praxis_lite.training.learning.schedules import Constant, Schedule, check_schedule, to_schedule

T = TypeVar('T')
# Tree of sums over parts of variables -> tree of sums over the whole variables.
SumParts = Callable[[NestedDict], NestedDict]


class LearnerUpdate(NamedTuple):
  """The result of `Learner.update`.

  Attributes:
    mdl_vars: all variables, the trained ones updated.
    opt_states: new optimizer state.
    ema_vars: new moving averages; None if they are disabled.
    stats: float32 scalars: learning_rate, grad_norm (of the whole gradient, before clipping), skipped (0 or 1; absent
      if on_nonfinite is 'ignore'), and param_norm if report_param_norm is set.
    finite: whether loss and gradient were finite; None if on_nonfinite is 'ignore'.
  """

  mdl_vars: NestedDict
  opt_states: States
  ema_vars: NestedDict | None
  stats: dict[str, jax.Array]
  finite: jax.Array | None


class Learner(Configurable):
  """An optimizer, a learning rate schedule, and the other operations on gradients and variables in a step.

  Attributes:
    optimizer: config of an optax optimizer, as in `Config(optax.adamw, weight_decay=0.1)`, or of a function that
      returns an optax transformation. If it, or a config nested in it, has a learning rate or a weight decay mask that
      is not set, the learner fills it in.
    learning_rate: factor of the schedule.
    schedule: config of a schedule; or a function of the step, an int32 scalar, that returns a scalar; or its config.
    clip_gradient_norm_to_value: upper limit of the global gradient norm; 0 disables it.
    clip_gradient_single_norm_to_value: upper limit of the norm of each variable's gradient; 0 disables it.
    clip_gradient_value: upper limit of the absolute value of each gradient entry; 0 disables it.
    l2_regularizer_weight: adds this times the variable to its gradient; 0 disables it.
    decoupled_weight_decay: subtracts learning rate times this times the variable from the variable; 0 disables it.
    bprop_variable_inclusion: regexes that match whole variable paths; only these are trained. Empty trains all.
    bprop_variable_exclusion: regexes that match whole variable paths; these are not trained, and have no slots.
    ema_decay: decay of the moving averages of trained variables; at step t it is min(ema_decay, (1 + t) / (10 + t)). 0
      disables them.
    num_microbatches: gradients are accumulated over this many parts of a batch.
    on_nonfinite: what to do in a step whose loss or gradient norm is not finite in float32. 'skip' changes nothing.
      'raise' changes nothing and ends the run. 'rollback' makes the run go back to its last checkpoint and leave out
      the batch. 'ignore' updates as in any other step.
    moments: the dtype in which the optimizer's moments are stored: 'float32', 'bfloat16' or 'int8'; see `moments.py`.
    per_layer_statistics: whether the optimizer updates each layer of a stack of layers separately. With None, it does
      so only if that may make a difference.
    report_param_norm: adds the norm of the trained variables to the stats.

  Neither kind of decay, nor the optimizer's own, applies to variables that are marked to skip regularization.

  Raises:
    ConfigError: a value is out of range, or both kinds of decay are set.
  """

  _config_path = 'learner'

  optimizer: Config = template(optax.adamw)
  learning_rate: float = 1e-3
  schedule: Config | Schedule = template(Constant)
  clip_gradient_norm_to_value: float = 0.0
  clip_gradient_single_norm_to_value: float = 0.0
  clip_gradient_value: float = 0.0
  l2_regularizer_weight: float = 0.0
  decoupled_weight_decay: float = 0.0
  bprop_variable_inclusion: tuple[str, ...] | str = ()
  bprop_variable_exclusion: tuple[str, ...] | str = ()
  ema_decay: float = 0.0
  num_microbatches: int = 1
  on_nonfinite: str = 'skip'
  moments: str = 'float32'
  per_layer_statistics: bool | None = None
  report_param_norm: bool = False

  def __post_init__(self) -> None:
    if self.l2_regularizer_weight and self.decoupled_weight_decay:
      raise ConfigError('learner: l2_regularizer_weight and decoupled_weight_decay are both set; choose one')
    check_choice('learner.on_nonfinite', self.on_nonfinite, ('skip', 'raise', 'rollback', 'ignore'))
    check_choice('learner.moments', self.moments, MOMENTS)
    if not isinstance(self.optimizer, Config):
      raise ConfigError(f'learner.optimizer: expected a Config, got {type(self.optimizer).__name__}')
    for field in ('learning_rate', 'l2_regularizer_weight', 'decoupled_weight_decay'):
      if not 0 <= getattr(self, field) < math.inf:
        raise ConfigError(f'learner.{field}: expected a finite number of at least 0, got {getattr(self, field)}')
    for field in ('clip_gradient_norm_to_value', 'clip_gradient_single_norm_to_value', 'clip_gradient_value'):
      if not getattr(self, field) >= 0:
        raise ConfigError(f'learner.{field}: expected a limit above 0, or 0 for none, got {getattr(self, field)}')
    if not 0 <= self.ema_decay < 1:
      raise ConfigError(f'learner.ema_decay: expected at least 0 and less than 1, got {self.ema_decay}')
    if self.num_microbatches < 1:
      raise ConfigError(f'learner.num_microbatches: expected at least 1, got {self.num_microbatches}')
    self._schedule = to_schedule(self.schedule, 'learner.schedule')
    self._bound: tuple[NestedDict, BoundLearner] | None = None

  def bind(self, weights: NestedDict) -> BoundLearner:
    """Returns this learner for the variables of a model, declared by `weights`, its `abstract_init()`.

    Raises ConfigError if a regex is not valid or matches no variable, if no variable is left to train, or if the
    schedule does not return a scalar.
    """
    if self._bound is None:
      check_schedule(self._schedule, 'learner.schedule')
    if self._bound is None or self._bound[0] != weights:  # A bound learner caches facts about its optimizer.
      self._bound = weights, BoundLearner(self, weights)
    return self._bound[1]

  def learning_rate_at(self, step: jax.Array | int) -> jax.Array:
    """Returns the learning rate of the step after `step` steps, a float32 scalar."""
    return jnp.asarray(self.learning_rate * self._schedule(step), jnp.float32)


class BoundLearner:
  """A learner and the declarations of the variables that it trains."""

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
    for path in self._trained:
      if not is_dtype(declared[path].dtype, jnp.floating):
        raise ConfigError(
          f'{path_name(path)} is {jnp.dtype(declared[path].dtype)}, which no optimizer can train; declare it with '
          'create_variable(..., trainable=False)'
        )
    self._declared = self.select_trained(weights)
    self._optimizer = grouped_optimizer(
      learner.optimizer, self._declared, learner.per_layer_statistics, learner.moments
    )

  # ---------------------------------------------------------------- which variables

  def split(self, tree: NestedDict) -> tuple[NestedDict, NestedDict]:
    """Splits `tree`, a nested dict like the model's variables, into the trained part and the rest."""
    return self.select_trained(tree), select(tree, lambda path: path not in self._trained)

  def select_trained(self, tree: NestedDict) -> NestedDict:
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
        close = suggest_pattern(pattern, map(path_name, declared))
        raise ConfigError(f'learner.{field}: {pattern!r} matches no variable.{close}')
      matching |= matched
    return matching

  # ---------------------------------------------------------------- state

  def init(self, mdl_vars: NestedDict) -> States:
    """Returns the initial optimizer state: slots only for the trained variables."""
    return self._optimizer.init(self.select_trained(mdl_vars), self._learner.learning_rate_at(0))

  def init_ema(self, mdl_vars: NestedDict) -> NestedDict | None:
    """Returns the initial moving averages, copies of the trained variables; None if they are disabled."""
    return jax.tree.map(jnp.copy, self.select_trained(mdl_vars)) if self._learner.ema_decay else None

  def slot_axes(self) -> dict[Path, tuple[int | None, ...]]:
    """Returns, for each slot by path, the axis of its variable that each of the slot's dimensions runs along.

    The axis is None for a dimension that runs along no single axis.
    """
    return self._optimizer.slot_axes()

  def not_elementwise(self) -> list[str]:
    """Returns the names of the functions in the optimizer's config that may treat a part of a variable differently."""
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
      gradients: the gradients of the trained variables, a part of the variable tree.
      loss: the loss; if it is not finite, the step is not applied. It is the same on all devices.
      mdl_vars: all variables.
      opt_states, ema_vars: state from `init`, `init_ema` or an earlier update.
      step: number of steps taken before this one.
      sum_parts: sums over devices, if each device has only a part of some variables.

    Raises:
      ConfigError: the optimizer cannot be built from its config, or needs an argument that training steps do not have.
    """
    learner, variables = self._learner, self.select_trained(mdl_vars)
    grad_norm = _global_norm(gradients, sum_parts)
    rate = learner.learning_rate_at(step)
    finite = None if learner.on_nonfinite == 'ignore' else jnp.isfinite(loss) & jnp.isfinite(grad_norm)

    def change() -> tuple[NestedDict, States, NestedDict | None]:
      prepared = self._clip(gradients, grad_norm, sum_parts)
      if learner.l2_regularizer_weight:
        prepared = self._plus(prepared, learner.l2_regularizer_weight, variables)
      updates, new_states = self._optimizer.update(prepared, opt_states, variables, rate, loss)
      if learner.decoupled_weight_decay:
        updates = self._plus(updates, -rate * learner.decoupled_weight_decay, variables)
      new_variables = optax.apply_updates(variables, updates)
      return new_variables, new_states, self._update_averages(ema_vars, new_variables, step)

    if finite is None:
      new_variables, new_states, ema_vars = change()
    else:
      new_variables, new_states, ema_vars = _if_finite(finite, change, (variables, opt_states, ema_vars))
    stats = {'learning_rate': rate, 'grad_norm': grad_norm}
    if finite is not None:
      stats['skipped'] = 1.0 - finite.astype(jnp.float32)
    if learner.report_param_norm:
      stats['param_norm'] = _global_norm(new_variables, sum_parts)
    return LearnerUpdate(merge(mdl_vars, new_variables), new_states, ema_vars, stats, finite)

  def norms(self, gradients: NestedDict, sum_parts: SumParts) -> NestedDict:
    """Returns the norm of each gradient, in float32: a scalar, or [layers, 1, ...] for a stack of layers."""
    squares = sum_parts(jax.tree.map(_square_of_each_layer, gradients, self._declared))
    return jax.tree.map(jnp.sqrt, squares)

  def _clip(self, gradients: NestedDict, norm: jax.Array, sum_parts: SumParts) -> NestedDict:
    original, learner = gradients, self._learner
    if limit := learner.clip_gradient_value:
      gradients = jax.tree.map(lambda g: jnp.clip(g, -limit, limit), gradients)
    if learner.clip_gradient_single_norm_to_value:
      squares = sum_parts(jax.tree.map(_square_of_each_layer, gradients, self._declared))
      gradients = jax.tree.map(
        lambda g, s: _clip(g, jnp.sqrt(s), learner.clip_gradient_single_norm_to_value), gradients, squares
      )
    if learner.clip_gradient_norm_to_value:
      norm = norm if gradients is original else _global_norm(gradients, sum_parts)
      gradients = jax.tree.map(lambda g: _clip(g, norm, learner.clip_gradient_norm_to_value), gradients)
    return gradients

  def _plus(self, tree: NestedDict, factor: float | jax.Array, variables: NestedDict) -> NestedDict:
    """Returns `tree` + factor * variables, for the variables that may be regularized; others are unchanged."""
    return jax.tree.map(lambda x, v, w: x + factor * v if is_regularized(w) else x, tree, variables, self._declared)

  def _update_averages(self, averages: NestedDict | None, variables: NestedDict, step: jax.Array) -> NestedDict | None:
    if averages is None:
      return None
    new = 1.0 - jnp.minimum(self._learner.ema_decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda e, v: (e + new * (v - e)).astype(e.dtype), averages, variables)


def _if_finite(finite: jax.Array, changed: Callable[[], T], kept: T) -> T:
  """Returns `changed()` if `finite`, else `kept`, which has the same structure and consists of donated arrays.

  On a GPU, `where` chooses each element in the same pass that updates the array; with a branch, XLA would copy every
  result: twice the bytes of all variables and slots. Elsewhere a branch is used, which XLA updates in place; `where`
  would need a separate pass over each array, and a copy of the old one.
  """
  if platform() == 'gpu':
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), changed(), kept)
  return jax.lax.cond(finite, changed, lambda: kept)


def _clip(gradient: jax.Array, norm: jax.Array, limit: float) -> jax.Array:
  return gradient * (limit / jnp.maximum(norm, limit)).astype(gradient.dtype)


def _square_of_each_layer(gradient: jax.Array, weight: WeightHParams) -> jax.Array:
  """Returns the squared norm of a gradient; for a stack of layers, one per layer: [layers, 1, ...]."""
  axes = tuple(range(len(weight.repeat_prefix), gradient.ndim))
  return jnp.sum(jnp.square(gradient.astype(jnp.float32)), axis=axes, keepdims=True)


def _global_norm(tree: NestedDict, sum_parts: SumParts) -> jax.Array:
  """Returns the norm of all arrays of a tree as one vector, in float32 whatever their dtype."""
  squares = sum_parts(jax.tree.map(lambda x: jnp.sum(jnp.square(x.astype(jnp.float32))), tree))
  return jnp.sqrt(sum(jax.tree.leaves(squares), jnp.zeros((), jnp.float32)))
