"""The rules of a `MultiLearner`: each has a learner, and the variables that it trains."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

import jax
import numpy as np

from praxis_lite.common.config import REQUIRED, Config, Configurable, build_at, target, template
from praxis_lite.common.errors import ConfigError, prefix_errors
from praxis_lite.common.trees import NestedDict, Path, leaves, path_name
from praxis_lite.training.learning.base_learner import matching_paths
from praxis_lite.training.learning.layer_decay import LayerDecay
from praxis_lite.training.learning.learner import Learner

T = TypeVar('T', bound=Configurable)

# Fields of a `Learner` that concern all variables together, and so belong to the `MultiLearner`.
_OF_ALL = (
  'bprop_variable_inclusion',
  'bprop_variable_exclusion',
  'num_microbatches',
  'on_nonfinite',
  'report_param_norm',
  'report_noise_scale',
)


class LearnerRule(Configurable):
  """A learner of a `MultiLearner`, with the variables that it trains, its steps and its factors.

  Attributes:
    name: letters, digits and underscores; the key of its optimizer state, and a part of the names of its metrics.
    regex: regexes that match the whole paths of its variables; None means all variables that no other rule takes.
    loss: the metric of the model that its variables are trained to reduce. Microbatches and devices are averaged by the
      weight of this metric. For 'loss', auxiliary losses are added, as in other learners.
    learner: config of a `Learner`. Fields that concern all variables together, such as `num_microbatches`, must be set
      in the `MultiLearner` instead.
    train_from_step, train_until_step: the rule trains in the steps s of the run, counted from 0, with
      `train_from_step` <= s < `train_until_step`; None means no end. In other steps, its variables and slots do not
      change. The schedule of its learner counts the steps of the run.
    gradient_factor: factor of its gradient, before any clipping.
    update_factor: factor of its updates, including weight decay.
    layer_decay: config of a `LayerDecay`, which multiplies the updates of each layer by another factor; None disables
      it.

  Raises:
    ConfigError: a value is out of range, or the learner cannot be built.
  """

  name: str = REQUIRED
  regex: tuple[str, ...] | str | None = None
  loss: str = 'loss'
  learner: Config = template(Learner)
  train_from_step: int = 0
  train_until_step: int | None = None
  gradient_factor: float = 1.0
  update_factor: float = 1.0
  layer_decay: Config | None = None

  def __post_init__(self) -> None:
    if not re.fullmatch(r'[A-Za-z]\w*', self.name):
      raise ConfigError(f'LearnerRule.name: expected letters, digits and underscores, got {self.name!r}')
    if self.regex is not None and not self.regex:
      raise ConfigError(f'LearnerRule.regex: expected a regex, or None for all other variables, got {self.regex!r}')
    if self.train_from_step < 0:
      raise ConfigError(f'LearnerRule.train_from_step: expected a number of steps, got {self.train_from_step}')
    if self.train_until_step is not None and self.train_until_step <= self.train_from_step:
      raise ConfigError(
        f'LearnerRule.train_until_step: expected more than train_from_step, {self.train_from_step}, or None, got '
        f'{self.train_until_step}; variables that are never trained belong in learner.bprop_variable_exclusion'
      )
    for field in ('gradient_factor', 'update_factor'):
      if not 0 < getattr(self, field) < math.inf:
        raise ConfigError(f'LearnerRule.{field}: expected a finite number above 0, got {getattr(self, field)}')
    self.built_learner = _build_learner(self.learner)
    self._decay = None if self.layer_decay is None else _build(LayerDecay, 'LearnerRule.layer_decay', self.layer_decay)

  def is_training(self, step: jax.Array) -> jax.Array | None:
    """Returns whether the rule trains in step `step`, a bool scalar; None if the rule trains in all steps."""
    after = step >= self.train_from_step if self.train_from_step else None
    if self.train_until_step is None:
      return after
    before = step < self.train_until_step
    return before if after is None else after & before

  def factors(self, trained: NestedDict, weights: NestedDict) -> dict[Path, float | np.ndarray]:
    """Returns the update factor of each variable of the rule, by path: a number, or [layers, 1, ...] for a stack.

    `trained` are the declarations of the variables of the rule, and `weights` those of all variables of the model.
    """
    by_layer = {} if self._decay is None else self._decay.factors(weights)
    if self._decay is not None and by_layer.keys().isdisjoint(leaves(trained)):
      raise ConfigError('layer_decay: none of the variables of this rule is in a layer; the rule needs no layer_decay')
    return {path: self.update_factor * by_layer.get(path, 1.0) for path in leaves(trained)}

  def describe(self) -> str:
    """Returns a text for reports with the rule's name, loss, steps and factors."""
    steps = f'from step {self.train_from_step}' if self.train_from_step else ''
    until = f'until step {self.train_until_step}' if self.train_until_step is not None else ''
    factor = f'times {self.update_factor:g}' if self.update_factor != 1 else ''
    by_layer = '' if self._decay is None else f'with decay {self._decay.factor:g} by layer'
    loss = f'to reduce {self.loss}' if self.loss != 'loss' else ''
    return ' '.join(filter(None, [f'trained by rule {self.name!r}', loss, steps, until, factor, by_layer]))


def build_rules(configs: Iterable[object]) -> list[LearnerRule]:
  """Builds the rules of a `MultiLearner`.

  Raises ConfigError if there is no rule, a rule cannot be built, or two rules have the same name or no regex.
  """
  rules: list[LearnerRule] = []
  for i, config in enumerate(configs):
    where = f'learner.rules[{i}]'
    rule = _build(LearnerRule, where, config)
    for j, other in enumerate(rules):
      if rule.name == other.name:
        raise ConfigError(f'{where}.name: rules[{j}] has the name {rule.name!r} too; names of rules differ')
      if rule.regex is None and other.regex is None:
        raise ConfigError(
          f'{where}.regex: None takes the variables that no other rule takes, as rules[{j}] does; set one of them'
        )
    rules.append(rule)
  if not rules:
    raise ConfigError('learner.rules: expected at least one LearnerRule')
  return rules


def assign_variables(rules: Sequence[LearnerRule], trained: NestedDict) -> dict[Path, int]:
  """Returns the index of the rule of each trained variable.

  Raises ConfigError if a variable belongs to no rule or to two, or a rule or regex matches no variable.
  """
  declared, owners = leaves(trained), dict[Path, int]()
  for i, rule in enumerate(rules):
    patterns = () if rule.regex is None else rule.regex
    for path in sorted(matching_paths(f'learner.rules[{i}].regex', patterns, declared, 'trained variable')):
      if path in owners:
        other = owners[path]
        raise ConfigError(
          f'learner.rules[{i}].regex: {path_name(path)} belongs to rules[{other}] ({rules[other].name!r}) and to '
          f'rules[{i}] ({rule.name!r}); each variable belongs to one rule, and a rule without regex takes the others'
        )
      owners[path] = i
  others = [path for path in declared if path not in owners]
  rest = next((i for i, rule in enumerate(rules) if rule.regex is None), None)
  if others and rest is None:
    more = f' and {len(others) - 1} more belong' if len(others) > 1 else ' belongs'
    raise ConfigError(
      f'learner.rules: {path_name(others[0])}{more} to no rule; a rule without regex takes all others, and '
      'learner.bprop_variable_exclusion names variables that are not trained'
    )
  if rest is not None and not others:
    raise ConfigError(f'learner.rules[{rest}]: the other rules leave no variable for {rules[rest].name!r}; remove it')
  return owners | dict.fromkeys(others, rest or 0)


def _build(kind: type[T], where: str, config: object) -> T:
  made = target(config) if isinstance(config, Config) else None
  if not isinstance(config, Config) or not (isinstance(made, type) and issubclass(made, kind)):
    raise ConfigError(f'{where}: expected the config of a {kind.__name__}, got {config!r}')
  built: T = build_at(where, config)
  return built


def _build_learner(config: Config) -> Learner:
  with prefix_errors('LearnerRule', 'learner'):
    learner = _build(Learner, 'learner', config)
    for field in _OF_ALL:
      if getattr(learner, field) != getattr(Learner, field):
        raise ConfigError(f'learner.{field}: it holds for all variables together; set it in the MultiLearner')
  return learner
