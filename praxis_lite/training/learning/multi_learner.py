r"""MultiLearner: several learners, each for the variables of its rule.

    rules = (
      Config(LearnerRule, name='encoder', regex=r'encoder\..*', learner=..., train_from_step=1000),
      Config(LearnerRule, name='head', learner=...),                           # no regex: all others
    )

    gradient -> gradient factors of the rules -> clipping of the global norm -> learner of each rule -> update factors

    opt_states = {'encoder': {'all': state}, 'head': {'all': state}}

Each rule may have its own loss, a metric of the model: see `LearnerRule.loss`. Gradients of all losses are taken at the
same values of the variables, so both parts of an adversarial model are updated simultaneously.

A rule that does not train in a step adds nothing to the norm of the gradient, and keeps its slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from praxis_lite.common.config import REQUIRED, Config, Configurable, config_values, target
from praxis_lite.common.errors import prefix_errors
from praxis_lite.common.trees import NestedDict, Path, map_with_path, merge, select
from praxis_lite.training.learning.base_learner import (
  BaseLearner,
  BoundLearner,
  GivenGradients,
  change_if,
  clip_to_norm,
  norm_of,
)
from praxis_lite.training.learning.learner_rule import LearnerRule, assign_variables, build_rules
from praxis_lite.training.learning.optimizer import States
from praxis_lite.training.learning.owners import Splits
from praxis_lite.training.learning.schedule_free import is_schedule_free

P = ParamSpec('P')
T = TypeVar('T')


class MultiLearner(BaseLearner, Configurable):
  """Several learners, each for a part of the variables; Praxis calls it `MultiOptimizerLearner`.

  Attributes:
    rules: configs of `LearnerRule`s. Each trained variable belongs to exactly one rule.
    clip_gradient_norm_to_value: upper limit of the norm of the gradients of all rules together; 0 disables it. After
      that, the same field of a rule's learner limits the norm of the rule's gradients.
    bprop_variable_inclusion, bprop_variable_exclusion, num_microbatches, report_param_norm, report_noise_scale: see
      `Learner`.
    on_nonfinite: see `Learner`; gradients of rules that do not train in the step do not count.

  For each rule, the stats have `grad_norm/<name>` and `learning_rate/<name>`. The latter is multiplied by the rule's
  `update_factor`, and is 0 if the rule does not train in the step.

  Raises:
    ConfigError: a value is out of range, or a rule or its learner cannot be built.
  """

  _config_path = 'learner'

  rules: tuple[Config, ...] = REQUIRED
  clip_gradient_norm_to_value: float = 0.0
  bprop_variable_inclusion: tuple[str, ...] | str = ()
  bprop_variable_exclusion: tuple[str, ...] | str = ()
  num_microbatches: int = 1
  on_nonfinite: str = 'skip'
  report_param_norm: bool = False
  report_noise_scale: bool = False

  def __post_init__(self) -> None:
    self._check_common_fields()
    self._check_limits('clip_gradient_norm_to_value')
    self._rules = build_rules(self.rules)

  @property
  def keeps_averages(self) -> bool:
    return any(rule.built_learner.keeps_averages for rule in self._rules)

  @property
  def rate_field(self) -> str:
    return 'rules[*].learner.learning_rate'

  def describe(self) -> str:
    return '; '.join(f'{rule.name}: {rule.built_learner.describe()}' for rule in self._rules)

  def _bind(self, weights: NestedDict) -> BoundLearner:
    return _SeveralOptimizers(self, self._rules, weights)


def nested_learners(config: Config) -> dict[str, Config]:
  """Returns the config of each `Learner` in the config of a learner, by path.

  The path is 'rules[0].learner' and so on in a `MultiLearner`, and '' for the config of a `Learner` itself.
  """
  if not _is_multi(config):
    return {'': config}
  found = {i: config_values(rule).get('learner') for i, rule in enumerate(nested_rules(config))}
  return {f'rules[{i}].learner': learner for i, learner in found.items() if isinstance(learner, Config)}


def has_averages(config: Config) -> bool:
  """Whether the learner of a config keeps moving averages of variables; see `BaseLearner.keeps_averages`."""
  return any(learner.ema_decay or is_schedule_free(learner.optimizer) for learner in nested_learners(config).values())


def nested_rules(config: Config) -> list[Config]:
  """Returns the configs of the rules of a `MultiLearner`, given its config; [] for other learners."""
  rules = config.rules if _is_multi(config) else ()
  return [rule for rule in rules if isinstance(rule, Config)] if isinstance(rules, list | tuple) else []


def _is_multi(config: Config) -> bool:
  kind = target(config)
  return isinstance(kind, type) and issubclass(kind, MultiLearner)


class _SeveralOptimizers(BoundLearner):
  """A `MultiLearner` and the declarations of the variables that it trains."""

  def __init__(self, learner: MultiLearner, rules: list[LearnerRule], weights: NestedDict):
    super().__init__(learner, weights)
    self._limit = learner.clip_gradient_norm_to_value
    self._owners = assign_variables(rules, self._declared)

    def owned_by(index: int) -> NestedDict:
      return select(self._declared, lambda path: self._owners[path] == index)

    self._parts = [_Part(i, rule, owned_by(i), weights) for i, rule in enumerate(rules)]

  def paths_by_loss(self) -> dict[str, set[Path]]:
    paths: dict[str, set[Path]] = {}
    for path, index in self._owners.items():
      paths.setdefault(self._parts[index].rule.loss, set()).add(path)
    return paths

  def remark(self, path: Path) -> str:
    return self._parts[self._owners[path]].rule.describe()

  def growth_remark(self, path: Path) -> str:
    return self._parts[self._owners[path]].learner.growth_remark(path)

  def init(self, mdl_vars: NestedDict) -> States:
    return {part.name: part.call(part.learner.init, mdl_vars) for part in self._parts}

  def init_ema(self, mdl_vars: NestedDict) -> NestedDict | None:
    return _merge_averages(part.learner.init_ema(mdl_vars) for part in self._parts)

  def slot_axes(self) -> dict[Path, tuple[int | None, ...]]:
    found = {part.name: part.call(part.learner.slot_axes) for part in self._parts}
    return {(name, *path): axes for name, own in found.items() for path, axes in own.items()}

  def slot_specs(self, opt_states: States, splits: Splits) -> dict[Path, PartitionSpec]:
    states: dict[str, Any] = opt_states
    found = {part.name: part.call(part.learner.slot_specs, states[part.name], splits) for part in self._parts}
    return {(name, *path): spec for name, own in found.items() for path, spec in own.items()}

  def needs_whole(self, split_dims: Mapping[Path, tuple[int, ...]]) -> tuple[str, list[str]]:
    found = [part.needs_whole(split_dims) for part in self._parts]
    return next(((where, names) for where, names in found if names), ('learner.rules', []))

  def describe_exchanges(self, splits: Splits) -> list[str]:
    return [sentence for part in self._parts for sentence in part.learner.describe_exchanges(splits)]

  def updates(self, given: GivenGradients, opt_states: States) -> tuple[NestedDict, States]:
    if limit := self._limit:
      given = given._replace(
        gradients=clip_to_norm(given.gradients, given.norm, limit),
        squares=clip_to_norm(given.squares, given.norm**2, limit**2),
        norm=jnp.minimum(given.norm, limit),
      )
    updates, states = list[NestedDict](), States()
    for part in self._parts:
      own = given.select(part.learner.select_trained)._replace(losses={part.rule.loss: given.losses[part.rule.loss]})
      changes, states[part.name] = part.updates(own, opt_states[part.name])
      updates.append(changes)
    return merge(*updates), states

  def add_updates(self, variables: NestedDict, updates: NestedDict, step: jax.Array) -> NestedDict:
    selected = ((part.learner, part.learner.select_trained) for part in self._parts)
    return merge(*(learner.add_updates(of(variables), of(updates), step) for learner, of in selected))

  def note_variables(self, states: States, variables: NestedDict, step: jax.Array) -> States:
    learners: dict[str, tuple[BoundLearner, Any]] = {p.name: (p.learner, states[p.name]) for p in self._parts}
    return {
      name: each.note_variables(own, each.select_trained(variables), step) for name, (each, own) in learners.items()
    }

  def update_averages(
    self, averages: NestedDict | None, variables: NestedDict, step: jax.Array, states: States
  ) -> NestedDict | None:
    if averages is None:
      return None
    learners: list[tuple[BoundLearner, Any]] = [(part.learner, states[part.name]) for part in self._parts]
    return _merge_averages(
      each.update_averages(each.select_trained(averages) or None, each.select_trained(variables), step, own)
      for each, own in learners
    )

  def _prepare(self, gradients: NestedDict, step: jax.Array) -> NestedDict:
    return merge(*(part.prepare(part.learner.select_trained(gradients), step) for part in self._parts))

  def _losses_that_count(self, losses: Mapping[str, jax.Array], step: jax.Array) -> Mapping[str, jax.Array]:
    counted = {name: jnp.zeros_like(loss) for name, loss in losses.items()}
    for part in self._parts:
      name, trains = part.rule.loss, part.rule.is_training(step)
      counted[name] = losses[name] if trains is None else jnp.where(trains, losses[name], counted[name])
    return counted

  def _stats(self, step: jax.Array, squares: NestedDict) -> dict[str, jax.Array]:
    return {name: value for part in self._parts for name, value in part.stats(step, squares).items()}


class _Part:
  """A rule and the declarations of its variables."""

  def __init__(self, index: int, rule: LearnerRule, trained: NestedDict, weights: NestedDict):
    self.rule, self.name = rule, rule.name
    self._where = f'learner.rules[{index}]'
    self.learner = self.call(rule.built_learner.bind, trained)
    with prefix_errors(self._where, 'layer_decay'):
      self._factors = rule.factors(trained, weights)

  def call(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a method of the rule's learner; errors of the method then begin with the path of the rule's config."""
    with prefix_errors(self._where, 'learner'):
      return method(*args, **kwargs)

  def needs_whole(self, split_dims: Mapping[Path, tuple[int, ...]]) -> tuple[str, list[str]]:
    where, names = self.call(self.learner.needs_whole, split_dims)
    # A stack whose layers have different factors must not be split along its layers.
    split = ((np.shape(factor), dim) for path, factor in self._factors.items() for dim in split_dims.get(path, ()))
    if not names and any(shape and shape[dim] > 1 for shape, dim in split):
      where, names = 'layer_decay', ['LayerDecay']
    return f'{self._where}.{where}', names

  def prepare(self, gradients: NestedDict, step: jax.Array) -> NestedDict:
    """Returns the gradients times the rule's factor; zeros in a step in which the rule does not train."""
    if (factor := self.rule.gradient_factor) != 1:
      gradients = jax.tree.map(lambda g: g * jnp.asarray(factor, g.dtype), gradients)
    trains = self.rule.is_training(step)
    if trains is None:
      return gradients
    return jax.tree.map(lambda g: jnp.where(trains, g, jnp.zeros_like(g)), gradients)

  def updates(self, given: GivenGradients, opt_states: Any) -> tuple[NestedDict, States]:
    """Returns (updates, new state) for the variables of the rule; see `BoundLearner.updates`."""

    def change() -> tuple[NestedDict, States]:
      updates, states = self.call(self.learner.updates, given, opt_states)
      return map_with_path(self._scale, updates), states

    def change_in_dtype() -> tuple[NestedDict, States]:
      updates, states = change()
      return jax.tree.map(lambda u, v: u.astype(v.dtype), updates, given.variables), states

    trains = self.rule.is_training(given.step)
    if trains is None:
      return change()
    return change_if(trains, change_in_dtype, (jax.tree.map(jnp.zeros_like, given.variables), opt_states))

  def stats(self, step: jax.Array, squares: NestedDict) -> dict[str, jax.Array]:
    rate, trains = self.rule.built_learner.learning_rate_at(step) * self.rule.update_factor, self.rule.is_training(step)
    return {
      f'learning_rate/{self.name}': rate if trains is None else jnp.where(trains, rate, 0.0),
      f'grad_norm/{self.name}': norm_of(self.learner.select_trained(squares)),
    }

  def _scale(self, path: Path, update: jax.Array) -> jax.Array:
    factor = self._factors[path]
    return update * jnp.asarray(factor, update.dtype) if np.ndim(factor) or factor != 1 else update


def _merge_averages(averages: Iterable[NestedDict | None]) -> NestedDict | None:
  """Returns the averages of all rules, merged; None if no rule keeps averages."""
  kept = [tree for tree in averages if tree is not None]
  return merge(*kept) if kept else None
