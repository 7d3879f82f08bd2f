"""The part of a step that all learners share: which variables are trained, and what happens if a step is not finite.

    gradient -> [the learner: updates and new slots] -> new variables -> moving averages

A step whose loss or gradient is not finite changes neither variables nor slots nor averages.
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
# Tree of sums over shards of variables -> tree of sums over the whole variables.
SumParts = Callable[[NestedDict], NestedDict]


class LearnerUpdate(NamedTuple):
  """The result of `Learner.update`.

  Attributes:
    mdl_vars: all variables, the trained ones updated.
    opt_states: new optimizer state.
    ema_vars: new moving averages; None if they are disabled.
    stats: float32 scalars: learning_rate, or learning_rate/<name> for each of several learners; grad_norm, the norm of
      the whole gradient before clipping; skipped, 0 or 1, unless on_nonfinite is 'ignore'; and param_norm if
      report_param_norm is set.
    finite: whether loss and gradient were finite; None if on_nonfinite is 'ignore'.
  """

  mdl_vars: NestedDict
  opt_states: States
  ema_vars: NestedDict | None
  stats: dict[str, jax.Array]
  finite: jax.Array | None


class BaseLearner:
  """The interface of learners for tasks and runs. Subclasses are `Configurable`, and declare these fields."""

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
    """Whether the learner keeps moving averages of some variables."""
    raise NotImplementedError

  @property
  def rate_field(self) -> str:
    """The path of the learning rate in the learner's config, for messages that advise to change it."""
    return 'learning_rate'

  def describe(self) -> str:
    """Returns a short text with the optimizers and their learning rates, for summaries."""
    raise NotImplementedError

  def bind(self, weights: NestedDict) -> BoundLearner:
    """Returns this learner for the variables of a model, declared by `weights`, the result of its `abstract_init()`.

    Raises ConfigError if a regex is not valid or matches no variable, if there is no variable to train, or if a
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
  """The arguments of a step's updates, except the state of the optimizer; see `BoundLearner.update`."""

  gradients: NestedDict  # Gradients of the trained variables.
  squares: NestedDict  # The squared norm of each gradient, a scalar.
  norm: jax.Array  # The norm of all gradients together.
  losses: Mapping[str, jax.Array]  # The losses by name; see `BoundLearner.paths_by_loss`.
  variables: NestedDict
  step: jax.Array
  sum_parts: SumParts
  splits: Splits | None

  def select(self, part: Callable[[NestedDict], NestedDict]) -> GivenGradients:
    """Returns the arguments for some of the variables; `part` selects these variables from a tree."""
    squares, variables = part(self.squares), part(self.variables)
    return self._replace(gradients=part(self.gradients), squares=squares, norm=norm_of(squares), variables=variables)


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
    """Returns, for each loss by its name in the metrics, the paths of the variables that are trained to reduce it."""
    return {'loss': self._trained}

  def remark(self, path: Path) -> str:
    """Returns a text for reports about how the variable at `path` is trained; '' if nothing about it is special."""
    return ''

  def growth_remark(self, path: Path) -> str:
    """Returns a text about what `Mup` changes for the trained variable at `path`, and why; '' if it changes nothing."""
    return ''

  # ---------------------------------------------------------------- state

  def init(self, mdl_vars: NestedDict) -> States:
    """Returns the initial optimizer state, with slots only for the trained variables."""
    raise NotImplementedError

  def init_ema(self, mdl_vars: NestedDict) -> NestedDict | None:
    """Returns the initial moving averages, copies of the trained variables; None if they are disabled."""
    raise NotImplementedError

  def slot_axes(self) -> dict[Path, tuple[int | None, ...]]:
    """Returns, by the path of each slot, which axis of its variable each dimension of the slot runs along.

    A value has an entry for each dimension of the slot: an axis of the variable's array, or None if the dimension does
    not run along exactly one axis.
    """
    raise NotImplementedError

  def slot_specs(self, opt_states: States, splits: Splits) -> dict[Path, PartitionSpec]:
    """Returns the specs, by path, of slots that the optimizer places itself; other slots follow their variables."""
    return {}

  def needs_whole(self, split_dims: Mapping[Path, tuple[int, ...]]) -> tuple[str, list[str]]:
    """Returns the path of a field of the learner, and the names of functions in it that may need whole variables.

    On shards of the variables, the updates of these functions may differ.
    """
    raise NotImplementedError

  def describe_exchanges(self, splits: Splits) -> list[str]:
    """Returns sentences for reports about what devices compute for other devices in an update; [] if nothing."""
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
      loss: the loss, or the losses of `paths_by_loss` by name, equal on all devices. If a loss that counts in the step
        is not finite, the step is not applied.
      mdl_vars: all variables.
      opt_states, ema_vars: state from `init`, `init_ema` or an earlier update.
      step: number of steps taken before this one.
      sum_parts: turns sums over shards into sums over whole variables; the identity if each device has whole variables.
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
      given = GivenGradients(gradients, squares, grad_norm, losses, variables, step, sum_parts, splits)
      updates, states = self.updates(given, opt_states)
      new_variables = self.add_updates(variables, updates, step)
      states = self.note_variables(states, new_variables, step)
      return new_variables, states, self.update_averages(ema_vars, new_variables, step, states)

    kept = (variables, opt_states, ema_vars)
    new_variables, new_states, ema_vars = change() if finite is None else change_if(finite, change, kept)
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
    """Returns the sums of variables and updates, in the dtypes of the variables."""
    return optax.apply_updates(variables, updates)

  def note_variables(self, states: States, variables: NestedDict, step: jax.Array) -> States:
    """Returns the optimizer's state after a step, given the new values of the trained variables."""
    return states

  def update_averages(
    self, averages: NestedDict | None, variables: NestedDict, step: jax.Array, states: States
  ) -> NestedDict | None:
    """Returns the averages after a step, given the new trained variables and optimizer state; None if disabled."""
    raise NotImplementedError

  def norms(self, gradients: NestedDict, sum_parts: SumParts) -> NestedDict:
    """Returns the norm of each gradient, in float32: a scalar, or [layers, 1, ...] for a stack of layers."""
    return jax.tree.map(jnp.sqrt, squares_of_layers(gradients, self._declared, sum_parts))

  def _prepare(self, gradients: NestedDict, step: jax.Array) -> NestedDict:
    """Returns the gradients times the factors of their rules; zeros for rules that do not train in the step."""
    return gradients

  def _losses_that_count(self, losses: Mapping[str, jax.Array], step: jax.Array) -> Mapping[str, jax.Array]:
    """Returns the losses, with zeros for losses that no rule reduces in the step."""
    return losses

  def _stats(self, step: jax.Array, squares: NestedDict) -> dict[str, jax.Array]:
    """Returns float32 scalars to report, such as learning rates."""
    raise NotImplementedError


def matching_paths(
  where: str, patterns: Iterable[str] | str, declared: Mapping[Path, WeightHParams], what: str = 'variable'
) -> set[Path]:
  """Returns the paths of declared variables whose whole path matches one of the regexes.

  Raises ConfigError if a regex is not valid, or matches no path. The message begins with `where`, the path of the
  field, and calls the variables `what`.
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
  """Returns `changed()` if `condition`, otherwise `kept`. Both have the same structure; `kept` is donated.

  On a GPU, `where` chooses each element in the same pass that updates the array; with `cond`, XLA would copy every
  result, and move twice the bytes of all variables and slots. On other platforms, XLA updates arrays in place in a
  `cond`, so this uses `cond`; `where` would need a separate pass over each array, and a copy of the old one.
  """
  if platform() == 'gpu':
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old), changed(), kept)
  return jax.lax.cond(condition, changed, lambda: kept)


# ---------------------------------------------------------------- norms


def squares_of(tree: NestedDict, sum_parts: SumParts) -> NestedDict:
  """Returns the squared norm of each array, a float32 scalar."""
  return sum_parts(jax.tree.map(lambda x: jnp.sum(jnp.square(x.astype(jnp.float32))), tree))


def norm_of(squares: NestedDict) -> jax.Array:
  """Returns the global norm of the arrays of a tree, given their squared norms."""
  return jnp.sqrt(sum(jax.tree.leaves(squares), jnp.zeros((), jnp.float32)))


def squares_of_layers(gradients: NestedDict, weights: NestedDict, sum_parts: SumParts) -> NestedDict:
  """Returns the squared norm of each gradient: a scalar, or, for a stack, one for each layer, [layers, 1, ...]."""

  def square(gradient: jax.Array, weight: WeightHParams) -> jax.Array:
    axes = tuple(range(len(weight.repeat_prefix), gradient.ndim))
    return jnp.sum(jnp.square(gradient.astype(jnp.float32)), axis=axes, keepdims=True)

  return sum_parts(jax.tree.map(square, gradients, weights))


def clip_to_norm(gradients: T, norm: jax.Array, limit: float | jax.Array) -> T:
  """Returns the arrays of a tree whose norm is `norm`, scaled down to the norm `limit` > 0 if `norm` is larger."""
  scale = limit / jnp.maximum(norm, limit)
  return jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
