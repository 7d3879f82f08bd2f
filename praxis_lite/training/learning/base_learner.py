"""What all learners do in a step: which variables they train, and what happens if a step is not finite.

    gradient -> [the learner: updates and new slots] -> new variables -> moving averages

If its loss or gradient is not finite, a step changes neither variables nor slots nor averages.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from praxis_lite.common.errors import ConfigError, check_choice, check_range
from praxis_lite.common.trees import NestedDict, Path, leaves, merge, path_name, select, suggest_pattern
from praxis_lite.sharding.mesh import platform
from praxis_lite.sharding.weights import WeightHParams, is_dtype
from praxis_lite.training.learning.optimizer import States
from praxis_lite.training.learning.owners import Splits

T = TypeVar('T')
# Tree of sums over parts of variables -> tree of sums over the whole variables.
SumParts = Callable[[NestedDict], NestedDict]


class LearnerUpdate(NamedTuple):
  """The result of `Learner.update`.

  Attributes:
    mdl_vars: all variables, the trained ones updated.
    opt_states: new optimizer state.
    ema_vars: new moving averages; None if they are disabled.
    stats: float32 scalars: learning_rate, or learning_rate/<name> of each of several learners; grad_norm, of the whole
      gradient before clipping; skipped, 0 or 1, absent if on_nonfinite is 'ignore'; and param_norm if report_param_norm
      is set.
    finite: whether loss and gradient were finite; None if on_nonfinite is 'ignore'.
  """

  mdl_vars: NestedDict
  opt_states: States
  ema_vars: NestedDict | None
  stats: dict[str, jax.Array]
  finite: jax.Array | None


class BaseLearner:
  """What a task and its run need to know of a learner. Subclasses are `Configurable`, and declare these fields."""

  clip_gradient_norm_to_value: float
  bprop_variable_inclusion: tuple[str, ...] | str
  bprop_variable_exclusion: tuple[str, ...] | str
  num_microbatches: int
  on_nonfinite: str
  report_param_norm: bool
  report_noise_scale: bool
  _bound: tuple[NestedDict, BoundLearner] | None = None

  @property
  def keeps_averages(self) -> bool:
    """Whether there are moving averages of some variables."""
    raise NotImplementedError

  @property
  def rate_field(self) -> str:
    """The path of the learning rate in the learner's config, for advice."""
    return 'learning_rate'

  def describe(self) -> str:
    """Returns the optimizers and their learning rates in a few words, for summaries."""
    raise NotImplementedError

  def bind(self, weights: NestedDict) -> BoundLearner:
    """Returns this learner for the variables of a model, declared by `weights`, its `abstract_init()`.

    Raises ConfigError if a regex is not valid or matches no variable, if no variable is left to train, or if a
    schedule does not return a scalar.
    """
    if self._bound is None or self._bound[0] != weights:  # A bound learner caches facts about its optimizer.
      self._bound = weights, self._bind(weights)
    return self._bound[1]

  def _bind(self, weights: NestedDict) -> BoundLearner:
    raise NotImplementedError

  def _check_common_fields(self) -> None:
    check_choice('learner.on_nonfinite', self.on_nonfinite, ('skip', 'raise', 'rollback', 'ignore'))
    check_range('learner.num_microbatches', self.num_microbatches, least=1)
    if self.report_noise_scale and self.num_microbatches == 1:
      raise ConfigError(
        'learner.report_noise_scale: it compares the gradients of microbatches; set learner.num_microbatches, '
        'to at least 2'
      )

  def _check_limits(self, *fields: str) -> None:
    for field in fields:
      if not getattr(self, field) >= 0:
        raise ConfigError(f'learner.{field}: expected a limit above 0, or 0 for none, got {getattr(self, field)}')


class GivenGradients(NamedTuple):
  """The gradients of a step, and what else its updates depend on, besides the state of the optimizer.

  Attributes:
    gradients, variables: of the trained variables.
    squares: the squared norm of each gradient, a scalar.
    losses: the loss of each variable's rule, by name; see `BoundLearner.paths_by_loss`.
    step, sum_parts, splits: as for `BoundLearner.update`.
  """

  gradients: NestedDict
  squares: NestedDict
  losses: Mapping[str, jax.Array]
  variables: NestedDict
  step: jax.Array
  sum_parts: SumParts
  splits: Splits | None

  def select(self, part: Callable[[NestedDict], NestedDict]) -> GivenGradients:
    """Returns the same for a part of the variables."""
    return self._replace(gradients=part(self.gradients), squares=part(self.squares), variables=part(self.variables))


class BoundLearner:
  """A learner and the declarations of the variables that it trains."""

  def __init__(self, learner: BaseLearner, weights: NestedDict):
    self._common = learner
    self.num_microbatches = learner.num_microbatches
    declared = leaves(weights)
    included = matching_paths('learner.bprop_variable_inclusion', learner.bprop_variable_inclusion, declared)
    excluded = matching_paths('learner.bprop_variable_exclusion', learner.bprop_variable_exclusion, declared)
    self._trained = {
      path
      for path, weight in declared.items()
      if weight.trainable and (path in included or not learner.bprop_variable_inclusion) and path not in excluded
    }
    if included and not any(declared[path].trainable for path in included):
      raise ConfigError(
        f'learner.bprop_variable_inclusion: it names only variables that cannot be trained, such as '
        f'{path_name(min(included))}'
      )
    if not self._trained and any(weight.trainable for weight in declared.values()):
      raise ConfigError('learner: bprop_variable_inclusion and bprop_variable_exclusion leave no variable to train')
    for path in self._trained:
      if not is_dtype(declared[path].dtype, jnp.floating):
        raise ConfigError(
          f'{path_name(path)} is {jnp.dtype(declared[path].dtype)}, which no optimizer can train; declare it with '
          'create_variable(..., trainable=False)'
        )
    self._declared = self.select_trained(weights)

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

  def paths_by_loss(self) -> dict[str, set[Path]]:
    """Returns the trained variables that each metric of the model is reduced by."""
    return {'loss': self._trained}

  def remark(self, path: Path) -> str:
    """Returns how the trained variable at `path` is trained, for reports; '' if there is nothing to say."""
    del path
    return ''

  def growth_remark(self, path: Path) -> str:
    """Returns what a model with `Mup` changes for the trained variable at `path`, and why; '' if it changes nothing."""
    del path
    return ''

  # ---------------------------------------------------------------- state

  def init(self, mdl_vars: NestedDict) -> States:
    """Returns the initial optimizer state: slots only for the trained variables."""
    raise NotImplementedError

  def init_ema(self, mdl_vars: NestedDict) -> NestedDict | None:
    """Returns the initial moving averages, copies of the trained variables; None if they are disabled."""
    raise NotImplementedError

  def slot_axes(self) -> dict[Path, tuple[int | None, ...]]:
    """Returns, for each slot by path, the axis of its variable that each of the slot's dimensions runs along.

    The axis is None for a dimension that runs along no single axis.
    """
    raise NotImplementedError

  def slot_specs(self, opt_states: States, splits: Splits) -> dict[Path, PartitionSpec]:
    """Returns how the slots are split that the optimizer places itself, by path; others follow their variables.

    Args:
      opt_states: shapes of the optimizer's state.
      splits: how a mesh splits the variables.
    """
    del opt_states, splits
    return {}

  def needs_whole(self, split_dims: Mapping[Path, tuple[int, ...]]) -> tuple[str, list[str]]:
    """Returns what may treat a part of a variable differently from the whole: a field's path, and names of functions.

    Args:
      split_dims: the dimensions that are split, of each variable that has any.
    """
    raise NotImplementedError

  def describe_exchanges(self, splits: Splits) -> list[str]:
    """Returns what devices compute for each other in an update on a mesh, in sentences for reports."""
    del splits
    return []

  # ---------------------------------------------------------------- the update

  def update(
    self,
    gradients: NestedDict,
    loss: jax.Array | Mapping[str, jax.Array],
    mdl_vars: NestedDict,
    opt_states: States,
    ema_vars: NestedDict | None,
    step: jax.Array,
    sum_parts: SumParts = lambda sums: sums,
    splits: Splits | None = None,
  ) -> LearnerUpdate:
    """Applies a gradient.

    Args:
      gradients: the gradients of the trained variables, a part of the variable tree.
      loss: the loss, or each of `paths_by_loss` by name; if one that counts in the step is not finite, the step is not
        applied. It is the same on all devices.
      mdl_vars: all variables.
      opt_states, ema_vars: state from `init`, `init_ema` or an earlier update.
      step: number of steps taken before this one.
      sum_parts: sums over devices, if each device has only a part of some variables.
      splits: how a mesh splits the variables; None if there is no mesh.

    Raises:
      ConfigError: the optimizer cannot be built from its config, or needs an argument that training steps do not have.
    """
    learner, variables = self._common, self.select_trained(mdl_vars)
    losses = loss if isinstance(loss, Mapping) else dict.fromkeys(self.paths_by_loss(), loss)
    gradients = self._prepare(gradients, step)
    squares = squares_of(gradients, sum_parts)
    grad_norm = norm_of(squares)
    finite = None
    if learner.on_nonfinite != 'ignore':
      finite = jnp.isfinite(total_loss(self._losses_that_count(losses, step))) & jnp.isfinite(grad_norm)

    def change() -> tuple[NestedDict, States, NestedDict | None]:
      given = GivenGradients(gradients, squares, losses, variables, step, sum_parts, splits)
      updates, states = self.updates(given, opt_states)
      new_variables = self.add_updates(variables, updates, step)
      states = self.note_variables(states, new_variables, step)
      return new_variables, states, self.update_averages(ema_vars, new_variables, step, states)

    if finite is None:
      new_variables, new_states, ema_vars = change()
    else:
      new_variables, new_states, ema_vars = change_if(finite, change, (variables, opt_states, ema_vars))
    stats = self._stats(step, squares) | {'grad_norm': grad_norm}
    if finite is not None:
      stats['skipped'] = 1.0 - finite.astype(jnp.float32)
    if learner.report_param_norm:
      stats['param_norm'] = norm_of(squares_of(new_variables, sum_parts))
    return LearnerUpdate(merge(mdl_vars, new_variables), new_states, ema_vars, stats, finite)

  def updates(self, given: GivenGradients, opt_states: States) -> tuple[NestedDict, States]:
    """Returns (updates to add to the trained variables, new optimizer state)."""
    raise NotImplementedError

  def add_updates(self, variables: NestedDict, updates: NestedDict, step: jax.Array) -> NestedDict:
    """Returns variables plus updates, in the dtypes of the variables."""
    del step
    return optax.apply_updates(variables, updates)

  def note_variables(self, states: States, variables: NestedDict, step: jax.Array) -> States:
    """Returns the optimizer's state of a step that gave these values to the trained variables."""
    del variables, step
    return states

  def update_averages(
    self, averages: NestedDict | None, variables: NestedDict, step: jax.Array, states: States
  ) -> NestedDict | None:
    """Returns the averages after a step that gave these values to the trained variables and the optimizer's state."""
    raise NotImplementedError

  def norms(self, gradients: NestedDict, sum_parts: SumParts) -> NestedDict:
    """Returns the norm of each gradient, in float32: a scalar, or [layers, 1, ...] for a stack of layers."""
    return jax.tree.map(jnp.sqrt, squares_of_layers(gradients, self._declared, sum_parts))

  def _prepare(self, gradients: NestedDict, step: jax.Array) -> NestedDict:
    """Returns the gradients that count in the step."""
    del step
    return gradients

  def _losses_that_count(self, losses: Mapping[str, jax.Array], step: jax.Array) -> Mapping[str, jax.Array]:
    """Returns the losses, with zeros for those that are not reduced in the step."""
    del step
    return losses

  def _stats(self, step: jax.Array, squares: NestedDict) -> dict[str, jax.Array]:
    """Returns float32 scalars to report: learning rates, and what else the learner knows."""
    raise NotImplementedError


def matching_paths(
  where: str, patterns: Iterable[str] | str, declared: Mapping[Path, WeightHParams], what: str = 'variable'
) -> set[Path]:
  """Returns the paths of the declared variables that one of the regexes matches as a whole.

  Raises:
    ConfigError: a regex is not valid, or matches none. `where` is the path of the field, and `what` says what the
      declared variables are, for the message.
  """
  matching: set[Path] = set()
  for pattern in (patterns,) if isinstance(patterns, str) else patterns:
    try:
      matched = {path for path in declared if re.fullmatch(pattern, path_name(path))}
    except re.error as error:
      raise ConfigError(f'{where}: {pattern!r} is not a regular expression: {error}') from None
    if not matched:
      close = suggest_pattern(pattern, map(path_name, declared))
      raise ConfigError(f'{where}: {pattern!r} matches no {what}.{close}')
    matching |= matched
  return matching


def total_loss(losses: jax.Array | Mapping[str, jax.Array]) -> jax.Array:
  """Returns the sum of all losses."""
  return functools.reduce(jnp.add, losses.values()) if isinstance(losses, Mapping) else losses


def change_if(condition: jax.Array, changed: Callable[[], T], kept: T) -> T:
  """Returns `changed()` if `condition`, else `kept`, which has the same structure and consists of donated arrays.

  On a GPU, `where` chooses each element in the same pass that updates the array; with a branch, XLA would copy every
  result: twice the bytes of all variables and slots. Elsewhere a branch is used, which XLA updates in place; `where`
  would need a separate pass over each array, and a copy of the old one.
  """
  if platform() == 'gpu':
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old), changed(), kept)
  return jax.lax.cond(condition, changed, lambda: kept)


# ---------------------------------------------------------------- norms


def squares_of(tree: NestedDict, sum_parts: SumParts) -> NestedDict:
  """Returns the squared norm of each array, a float32 scalar."""
  return sum_parts(jax.tree.map(lambda x: jnp.sum(jnp.square(x.astype(jnp.float32))), tree))


def norm_of(squares: NestedDict) -> jax.Array:
  """Returns the norm of all arrays of a tree as one vector, from their squared norms."""
  return jnp.sqrt(sum(jax.tree.leaves(squares), jnp.zeros((), jnp.float32)))


def squares_of_layers(gradients: NestedDict, weights: NestedDict, sum_parts: SumParts) -> NestedDict:
  """Returns the squared norm of each gradient; for a stack of layers, one per layer: [layers, 1, ...]."""

  def square(gradient: jax.Array, weight: WeightHParams) -> jax.Array:
    axes = tuple(range(len(weight.repeat_prefix), gradient.ndim))
    return jnp.sum(jnp.square(gradient.astype(jnp.float32)), axis=axes, keepdims=True)

  return sum_parts(jax.tree.map(square, gradients, weights))


def clip_to_norm(gradient: jax.Array, norm: jax.Array, limit: float | jax.Array) -> jax.Array:
  """Returns the gradient, made smaller if `norm` is above the limit, which is positive."""
  return gradient * (limit / jnp.maximum(norm, limit)).astype(gradient.dtype)
