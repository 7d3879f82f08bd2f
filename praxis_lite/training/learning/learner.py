"""Learner: how a gradient changes the variables, with one optimizer.

    gradient -> clipping, see `clipping.py`
             -> L2 -> optimizer -> decoupled weight decay -> new variables -> moving averages

`base_learner.py` has the code that all learners share, `multi_learner.py` a learner with several optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from praxis_lite.common.config import Config, Configurable, target, template
from praxis_lite.common.config.references import dotted_name
from praxis_lite.common.errors import ConfigError, check_choice, check_range
from praxis_lite.common.trees import NestedDict, Path, leaves, map_with_path
from praxis_lite.training.learning.base_learner import BaseLearner, BoundLearner, GivenGradients
from praxis_lite.training.learning.clipping import Clipping, NormHistory, unit_axes
from praxis_lite.training.learning.moments import MOMENTS, round_to_bfloat16
from praxis_lite.training.learning.optimizer import States, grouped_optimizer, is_regularized
from praxis_lite.training.learning.owners import Splits
from praxis_lite.training.learning.power_averages import check_widths, start_averages, update_averages
from praxis_lite.training.learning.schedule_free import average_point, check_schedule_free, is_schedule_free
from praxis_lite.training.learning.schedules import Constant, Schedule, check_schedule, to_schedule
from praxis_lite.training.learning.update_sizes import UPDATE_SIZES, has_growth, remark_of

_LIMITS = {
  'clip_gradient_value': 'value',
  'clip_gradient_single_norm_to_value': 'single_norm',
  'clip_gradient_unit_ratio': 'unit_ratio',
  'clip_gradient_z_score': 'z_score',
  'clip_gradient_norm_to_value': 'norm',
}
_DECAYS = ('l2_regularizer_weight', 'decoupled_weight_decay', 'independent_weight_decay')
# Names in the state of a learner, in addition to the groups of its optimizer.
_NORMS, _AVERAGES = 'gradient_norms', 'averages'


class Learner(BaseLearner, Configurable):
  """An optimizer, a learning rate schedule, and the other operations on gradients and variables in a step.

  Attributes:
    optimizer: config of an optax optimizer, as in `Config(optax.adamw, weight_decay=0.1)`, or of a function that
      returns an optax transformation. In this config and configs nested in it, the learner sets the learning rate, the
      mask for weight decay, and Muon's axes of matrices, unless the config has values for them.
    learning_rate: factor of the schedule.
    schedule: config of a schedule; or a function of the step, an int32 scalar, that returns a scalar; or the config of
      such a function.
    clip_gradient_norm_to_value: upper limit of the global gradient norm; 0 disables it.
    clip_gradient_single_norm_to_value: upper limit of the norm of each variable's gradient; 0 disables it.
    clip_gradient_value: upper limit of the absolute value of each gradient entry; 0 disables it.
    clip_gradient_unit_ratio: upper limit of the gradient norm of each unit, an output of a matrix, as a multiple of the
      norm of the unit's weights (adaptive gradient clipping); 0 disables it, 0.01 is usual.
    clip_gradient_z_score: a global gradient norm that is more than this many standard deviations above the mean of past
      steps is reduced (ZClip); 0 disables it, 2.5 is usual. The optimizer's state then has the mean and the variance.
    l2_regularizer_weight: a factor c; c * variable is added to the gradient of the variable. 0 disables it.
    decoupled_weight_decay: a factor c; each step also subtracts learning rate * c * variable. 0 disables it.
    independent_weight_decay: a factor c; each step also subtracts schedule * c * variable, where the schedule's factor
      is not multiplied by the learning rate (Wortsman et al., 2023). 0 disables it.
    bprop_variable_inclusion: regexes that match whole paths of the variables to train; empty trains all.
    bprop_variable_exclusion: regexes that match whole paths of variables that are not trained, and have no slots.
    ema_decay: decay of the moving averages of trained variables; at step t it is min(ema_decay, (1 + t) / (10 + t)). 0
      disables them. A schedule-free optimizer has its own average, which replaces them.
    power_averages: relative widths, as in (0.05, 0.1), of additional averages, whose weights are powers of the step
      (Karras et al., 2024). They are part of the optimizer's state; `load(power_average=...)` computes averages of any
      width from those in all checkpoints.
    num_microbatches: gradients are accumulated over this many parts of a batch.
    on_nonfinite: what to do in a step whose loss or gradient norm is not finite in float32. 'skip' changes nothing.
      'raise' changes nothing and ends the run. 'rollback' makes the run go back to its last checkpoint and leave out
      the batch. 'ignore' updates as in any other step.
    moments: the dtype in which the optimizer's moments are stored: 'float32', 'bfloat16' or 'int8'; see `moments.py`.
    round_stochastically: rounds new values of bfloat16 variables up or down at random, without bias, so that small
      updates are not lost; the random bits are a hash of the new value and the step. The optimizer then computes in
      float32.
    per_layer_statistics: whether the optimizer updates each layer of a stack of layers separately. With None, it does
      so only if that may make a difference.
    report_param_norm: adds the norm of the trained variables to the stats.
    report_noise_scale: adds the metrics `grad_noise/variance` and `grad_noise/signal`. The ratio of their means over
      many steps is the gradient noise scale, in rows, or in tokens for a language model. Needs several microbatches.
    update_size: how the size of the optimizer's updates depends on the model, for a model with `Mup`: 'normalized',
      'gradient', 'relative' or 'spectral', see `update_sizes.py`; 'auto' detects it.

  Variables that are marked to skip regularization have no decay of any kind, not even the optimizer's own.

  Raises:
    ConfigError: a value is out of range, or several kinds of decay are set.
  """

  _config_path = 'learner'

  optimizer: Config = template(optax.adamw)
  learning_rate: float = 1e-3
  schedule: Config | Schedule = template(Constant)
  clip_gradient_norm_to_value: float = 0.0
  clip_gradient_single_norm_to_value: float = 0.0
  clip_gradient_value: float = 0.0
  clip_gradient_unit_ratio: float = 0.0
  clip_gradient_z_score: float = 0.0
  l2_regularizer_weight: float = 0.0
  decoupled_weight_decay: float = 0.0
  independent_weight_decay: float = 0.0
  bprop_variable_inclusion: tuple[str, ...] | str = ()
  bprop_variable_exclusion: tuple[str, ...] | str = ()
  ema_decay: float = 0.0
  power_averages: tuple[float, ...] = ()
  num_microbatches: int = 1
  on_nonfinite: str = 'skip'
  moments: str = 'float32'
  round_stochastically: bool = False
  per_layer_statistics: bool | None = None
  report_param_norm: bool = False
  report_noise_scale: bool = False
  update_size: str = 'auto'

  def __post_init__(self) -> None:
    decays = [field for field in _DECAYS if getattr(self, field)]
    if len(decays) > 1:
      raise ConfigError(f'learner: {decays[0]} and {decays[1]} are both set; choose one')
    self._check_common_fields()
    check_choice('learner.moments', self.moments, MOMENTS)
    check_choice('learner.update_size', self.update_size, UPDATE_SIZES)
    if not isinstance(self.optimizer, Config):
      raise ConfigError(f'learner.optimizer: expected a Config, got {type(self.optimizer).__name__}')
    for field in ('learning_rate', *_DECAYS):
      if not 0 <= getattr(self, field) < math.inf:
        raise ConfigError(f'learner.{field}: expected a finite number of at least 0, got {getattr(self, field)}')
    if is_schedule_free(self.optimizer):
      decoupled = self.decoupled_weight_decay or self.independent_weight_decay
      check_schedule_free(self.optimizer, self.ema_decay, self.moments, decoupled)
    self._check_limits(*_LIMITS)
    check_range('learner.clip_gradient_z_score', self.clip_gradient_z_score, below=math.inf)
    check_widths(self.power_averages)
    check_range('learner.ema_decay', self.ema_decay, least=0, below=1)
    self._schedule = to_schedule(self.schedule, 'learner.schedule')

  @property
  def keeps_averages(self) -> bool:
    return self.ema_decay > 0 or is_schedule_free(self.optimizer)

  def describe(self) -> str:
    return f'{dotted_name(target(self.optimizer))}, learning rate {self.learning_rate:g}'

  def learning_rate_at(self, step: jax.Array | int) -> jax.Array:
    """Returns the learning rate of step `step`, counted from 0, a float32 scalar."""
    return jnp.asarray(self.learning_rate * self._schedule(step), jnp.float32)

  def schedule_at(self, step: jax.Array | int) -> jax.Array:
    """Returns the schedule's factor for step `step`, counted from 0, a float32 scalar."""
    return jnp.asarray(self._schedule(step), jnp.float32)

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
    self._clipping = Clipping(**{name: getattr(learner, field) for field, name in _LIMITS.items()})
    self._factors: dict[Path, float] = {}
    if has_growth(self._declared):
      self._factors = self._optimizer.update_factors(learner.update_size)

  def growth_remark(self, path: Path) -> str:
    return remark_of(leaves(self._declared)[path], self._factors.get(path, 1.0))

  def init(self, mdl_vars: NestedDict) -> States:
    variables = self.select_trained(mdl_vars)
    states = self._optimizer.init(self._to_update_dtype(variables), self._learner.learning_rate_at(0))
    if self._clipping.z_score:
      states[_NORMS] = NormHistory.start()
    if widths := self._learner.power_averages:
      states[_AVERAGES] = start_averages(variables, widths)
    return states

  def init_ema(self, mdl_vars: NestedDict) -> NestedDict | None:
    return jax.tree.map(jnp.copy, self.select_trained(mdl_vars)) if self._learner.keeps_averages else None

  def slot_axes(self) -> dict[Path, tuple[int | None, ...]]:
    return self._optimizer.slot_axes()

  def slot_specs(self, opt_states: States, splits: Splits) -> dict[Path, PartitionSpec]:
    return self._optimizer.slot_specs(opt_states, splits)

  def needs_whole(self, split_dims: Mapping[Path, tuple[int, ...]]) -> tuple[str, list[str]]:
    split = {path: dims for path, dims in split_dims.items() if path in self._trained}
    declared = leaves(self._declared)
    if self._clipping.unit_ratio and any({*dims} & {*unit_axes(declared[path])} for path, dims in split.items()):
      return 'learner.clip_gradient_unit_ratio', ['clipping by units']
    return 'learner.optimizer', self._optimizer.not_elementwise() if split else []

  def describe_exchanges(self, splits: Splits) -> list[str]:
    return self._optimizer.describe_exchanges(splits)

  def updates(self, given: GivenGradients, opt_states: States) -> tuple[NestedDict, States]:
    learner, rate = self._learner, self._learner.learning_rate_at(given.step)
    (loss,) = given.losses.values()
    history = cast(NormHistory | None, opt_states.get(_NORMS))
    gradients, variables = self._to_update_dtype(given.gradients), self._to_update_dtype(given.variables)
    gradients, history = self._clipping.clip(gradients, given.norm, variables, self._declared, given.sum_parts, history)
    if learner.l2_regularizer_weight:
      gradients = self._plus(gradients, learner.l2_regularizer_weight, variables)
    # The optimizer's updates may contain a weight decay, which the factors of the updates must not change. So it gets
    # variables that are divided by the factors.
    decayed = self._times_factors(variables, -1) if self._optimizer.decays else variables
    updates, states = self._optimizer.update(gradients, opt_states, decayed, rate, loss, given.splits)
    updates = self._times_factors(updates)
    if decay := learner.decoupled_weight_decay:
      updates = self._plus(updates, -rate * decay, variables)
    if decay := learner.independent_weight_decay:
      updates = self._plus(updates, -learner.schedule_at(given.step) * decay, variables)
    if history is not None:
      states[_NORMS] = history
    if _AVERAGES in opt_states:
      states[_AVERAGES] = opt_states[_AVERAGES]
    return updates, states

  def add_updates(self, variables: NestedDict, updates: NestedDict, step: jax.Array) -> NestedDict:
    if not self._learner.round_stochastically:
      return super().add_updates(variables, updates, step)
    return jax.tree.map(lambda v, u: _add_stochastically(v, u, step), variables, updates)

  def note_variables(self, states: States, variables: NestedDict, step: jax.Array) -> States:
    if _AVERAGES not in states:
      return states
    averages = cast(dict[str, NestedDict], states[_AVERAGES])
    return states | {_AVERAGES: update_averages(averages, variables, self._learner.power_averages, step)}

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

  def _to_update_dtype(self, tree: NestedDict) -> NestedDict:
    """Returns gradients or variables in the dtypes in which the optimizer computes."""
    if not self._learner.round_stochastically:
      return tree
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)

  def _times_factors(self, tree: NestedDict, power: int = 1) -> NestedDict:
    """Returns `tree` with each array multiplied by factor**power, where factor is the variable's update factor."""
    factors = self._factors
    if not factors:
      return tree
    return map_with_path(lambda p, x: x if factors[p] == 1 else x * jnp.asarray(factors[p] ** power, x.dtype), tree)

  def _plus(self, tree: NestedDict, factor: float | jax.Array, variables: NestedDict) -> NestedDict:
    """Returns `tree` with factor * variable added to each array whose variable may be regularized."""
    return jax.tree.map(lambda x, v, w: x + factor * v if is_regularized(w) else x, tree, variables, self._declared)


def _add_stochastically(variable: jax.Array, update: jax.Array, step: jax.Array) -> jax.Array:
  if variable.dtype != jnp.bfloat16:
    return (variable + update).astype(variable.dtype)
  return round_to_bfloat16(variable.astype(jnp.float32) + update.astype(jnp.float32), step)
