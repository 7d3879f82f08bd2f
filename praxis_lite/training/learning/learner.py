"""Learner: how a gradient changes the variables, with one optimizer.

    gradient -> clipping: by value, by each variable's norm, by the global norm
             -> L2 -> optimizer -> decoupled weight decay -> new variables -> moving averages

`base_learner.py` has what all learners share, `multi_learner.py` a learner with several optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from praxis_lite.common.config import Config, Configurable, target, template
from praxis_lite.common.config.references import dotted_name
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.common.trees import NestedDict, Path, leaves, map_with_path
from praxis_lite.training.learning.base_learner import (
  BaseLearner,
  BoundLearner,
  GivenGradients,
  SumParts,
  clip_to_norm,
  norm_of,
  squares_of,
  squares_of_layers,
)
from praxis_lite.training.learning.moments import MOMENTS
from praxis_lite.training.learning.optimizer import States, grouped_optimizer, is_regularized
from praxis_lite.training.learning.owners import Splits
from praxis_lite.training.learning.schedule_free import average_point, check_schedule_free, is_schedule_free
from praxis_lite.training.learning.schedules import Constant, Schedule, check_schedule, to_schedule
from praxis_lite.training.learning.update_sizes import UPDATE_SIZES, has_growth, remark_of


class Learner(BaseLearner, Configurable):
  """An optimizer, a learning rate schedule, and the other operations on gradients and variables in a step.

  Attributes:
    optimizer: config of an optax optimizer, as in `Config(optax.adamw, weight_decay=0.1)`, or of a function that
      returns an optax transformation. If it, or a config nested in it, has a learning rate, a weight decay mask, or
      Muon's axes of matrices that are not set, the learner fills them in.
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
      disables them. A schedule-free optimizer has an average of its own, which takes their place.
    num_microbatches: gradients are accumulated over this many parts of a batch.
    on_nonfinite: what to do in a step whose loss or gradient norm is not finite in float32. 'skip' changes nothing.
      'raise' changes nothing and ends the run. 'rollback' makes the run go back to its last checkpoint and leave out
      the batch. 'ignore' updates as in any other step.
    moments: the dtype in which the optimizer's moments are stored: 'float32', 'bfloat16' or 'int8'; see `moments.py`.
    per_layer_statistics: whether the optimizer updates each layer of a stack of layers separately. With None, it does
      so only if that may make a difference.
    report_param_norm: adds the norm of the trained variables to the stats.
    update_size: how large the updates of the optimizer are, for a model with `Mup`: 'normalized', 'gradient',
      'relative' or 'spectral', see `update_sizes.py`; 'auto' finds it out.

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
  update_size: str = 'auto'

  def __post_init__(self) -> None:
    if self.l2_regularizer_weight and self.decoupled_weight_decay:
      raise ConfigError('learner: l2_regularizer_weight and decoupled_weight_decay are both set; choose one')
    self._check_common_fields()
    check_choice('learner.moments', self.moments, MOMENTS)
    check_choice('learner.update_size', self.update_size, UPDATE_SIZES)
    if not isinstance(self.optimizer, Config):
      raise ConfigError(f'learner.optimizer: expected a Config, got {type(self.optimizer).__name__}')
    for field in ('learning_rate', 'l2_regularizer_weight', 'decoupled_weight_decay'):
      if not 0 <= getattr(self, field) < math.inf:
        raise ConfigError(f'learner.{field}: expected a finite number of at least 0, got {getattr(self, field)}')
    if is_schedule_free(self.optimizer):
      check_schedule_free(self.optimizer, self.ema_decay, self.moments, self.decoupled_weight_decay)
    self._check_limits('clip_gradient_norm_to_value', 'clip_gradient_single_norm_to_value', 'clip_gradient_value')
    if not 0 <= self.ema_decay < 1:
      raise ConfigError(f'learner.ema_decay: expected at least 0 and less than 1, got {self.ema_decay}')
    self._schedule = to_schedule(self.schedule, 'learner.schedule')

  @property
  def keeps_averages(self) -> bool:
    return self.ema_decay > 0 or is_schedule_free(self.optimizer)

  def describe(self) -> str:
    return f'{dotted_name(target(self.optimizer))}, learning rate {self.learning_rate:g}'

  def learning_rate_at(self, step: jax.Array | int) -> jax.Array:
    """Returns the learning rate of the step after `step` steps, a float32 scalar."""
    return jnp.asarray(self.learning_rate * self._schedule(step), jnp.float32)

  def _bind(self, weights: NestedDict) -> BoundLearner:
    if self._bound is None:
      check_schedule(self._schedule, 'learner.schedule')
    return _OneOptimizer(self, weights)


class _OneOptimizer(BoundLearner):
  """A `Learner` and the declarations of the variables that it trains."""

  def __init__(self, learner: Learner, weights: NestedDict):
    super().__init__(learner, weights)
    self._learner = learner
    self._optimizer = grouped_optimizer(
      learner.optimizer, self._declared, learner.per_layer_statistics, learner.moments
    )
    self._factors: dict[Path, float] = {}
    if has_growth(self._declared):
      self._factors = self._optimizer.update_factors(learner.update_size)

  def growth_remark(self, path: Path) -> str:
    return remark_of(leaves(self._declared)[path], self._factors.get(path, 1.0))

  def init(self, mdl_vars: NestedDict) -> States:
    return self._optimizer.init(self.select_trained(mdl_vars), self._learner.learning_rate_at(0))

  def init_ema(self, mdl_vars: NestedDict) -> NestedDict | None:
    return jax.tree.map(jnp.copy, self.select_trained(mdl_vars)) if self._learner.keeps_averages else None

  def slot_axes(self) -> dict[Path, tuple[int | None, ...]]:
    return self._optimizer.slot_axes()

  def slot_specs(self, opt_states: States, splits: Splits) -> dict[Path, PartitionSpec]:
    return self._optimizer.slot_specs(opt_states, splits)

  def needs_whole(self, split_dims: Mapping[Path, tuple[int, ...]]) -> tuple[str, list[str]]:
    is_split = not self._trained.isdisjoint(split_dims)
    return 'learner.optimizer', self._optimizer.not_elementwise() if is_split else []

  def describe_exchanges(self, splits: Splits) -> list[str]:
    return self._optimizer.describe_exchanges(splits)

  def updates(self, given: GivenGradients, opt_states: States) -> tuple[NestedDict, States]:
    learner, rate = self._learner, self._learner.learning_rate_at(given.step)
    (loss,) = given.losses.values()
    gradients = self._clip(given.gradients, given.squares, given.sum_parts)
    if learner.l2_regularizer_weight:
      gradients = self._plus(gradients, learner.l2_regularizer_weight, given.variables)
    # A decay that the optimizer adds to its updates should not get their factors.
    decayed = self._times_factors(given.variables, -1) if self._optimizer.decays else given.variables
    updates, states = self._optimizer.update(gradients, opt_states, decayed, rate, loss, given.splits)
    updates = self._times_factors(updates)
    if learner.decoupled_weight_decay:
      updates = self._plus(updates, -rate * learner.decoupled_weight_decay, given.variables)
    return updates, states

  def update_averages(
    self, averages: NestedDict | None, variables: NestedDict, step: jax.Array, states: States
  ) -> NestedDict | None:
    if averages is None:
      return None
    if not self._learner.ema_decay:
      return average_point(states, variables)
    new = 1.0 - jnp.minimum(self._learner.ema_decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda e, v: (e + new * (v - e)).astype(e.dtype), averages, variables)

  def _stats(self, step: jax.Array, squares: NestedDict) -> dict[str, jax.Array]:
    return {'learning_rate': self._learner.learning_rate_at(step)}

  def _clip(self, gradients: NestedDict, squares: NestedDict, sum_parts: SumParts) -> NestedDict:
    original, learner = gradients, self._learner
    if limit := learner.clip_gradient_value:
      gradients = jax.tree.map(lambda g: jnp.clip(g, -limit, limit), gradients)
    if single := learner.clip_gradient_single_norm_to_value:
      of_layers = squares_of_layers(gradients, self._declared, sum_parts)
      gradients = jax.tree.map(lambda g, s: clip_to_norm(g, jnp.sqrt(s), single), gradients, of_layers)
    if limit := learner.clip_gradient_norm_to_value:
      norm = norm_of(squares if gradients is original else squares_of(gradients, sum_parts))
      gradients = jax.tree.map(lambda g: clip_to_norm(g, norm, limit), gradients)
    return gradients

  def _times_factors(self, tree: NestedDict, power: int = 1) -> NestedDict:
    """Returns `tree` with each array times a power of the factor of its variable's update."""
    factors = self._factors
    if not factors:
      return tree
    return map_with_path(lambda p, x: x if factors[p] == 1 else x * jnp.asarray(factors[p] ** power, x.dtype), tree)

  def _plus(self, tree: NestedDict, factor: float | jax.Array, variables: NestedDict) -> NestedDict:
    """Returns `tree` + factor * variables, for the variables that may be regularized; others are unchanged."""
    return jax.tree.map(lambda x, v, w: x + factor * v if is_regularized(w) else x, tree, variables, self._declared)
