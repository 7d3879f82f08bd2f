"""An optax optimizer over a tree in which some variables are stacks of layers.

A repeated layer keeps the weights of all its repetitions in one array. Optimizers that look at a whole variable (trust
ratios, RMS clipping, orthogonalization) must look at each layer's, so the optimizer is mapped over the stack: variables
are grouped by their repeat prefix, and each group has an optimizer of its own. Elementwise optimizers give the same
either way, and run as one group without the map.

    opt_states = {'all': state}                                          elementwise
    opt_states = {'single': state, 'repeated_12': state of [12, ...]}    otherwise
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax

from praxis_lite.config import Config
from praxis_lite.errors import ConfigError
from praxis_lite.learning.subtrees import leaves, merge, select
from praxis_lite.weights import WeightHParams, WeightHParamsCollection

# Optimizers each of whose updates depends on one element of the gradient and its own slots.
_ELEMENTWISE = frozenset(
  [
    *('adabelief', 'adadelta', 'adagrad', 'adam', 'adamax', 'adamaxw', 'adamw', 'adan', 'amsgrad'),
    *('lion', 'nadam', 'nadamw', 'radam', 'rmsprop', 'rprop', 'sgd', 'sign_sgd', 'yogi'),
  ]
)
_MASK_ARGUMENTS = ('mask', 'weight_decay_mask')


class GroupedOptimizer:
  """Applies an optimizer to each group of variables that are stacked alike.

  Args:
    config: config of a function that returns an optax transformation. Where it takes a `learning_rate` and has none, it
      gets the one of the step; where it takes a mask for weight decay and has none, it gets one that spares the
      variables marked to skip regularization.
    weights: declarations of the variables it updates, a nested dict.
  """

  def __init__(self, config: Config, weights: Any):
    self._config = config
    self._target = config.__fn_or_cls__
    self._groups = _groups(weights, elementwise=is_elementwise(self._target))

  def init(self, variables: Any) -> dict[str, Any]:
    """Returns the first state for `variables`."""
    states = {}
    for name, (part, depth) in self._groups.items():
      init = _mapped(self._transformation(part, 1.0).init, depth)
      states[name] = init(_part(variables, part))
    return states

  def update(
    self, gradients: Any, states: dict[str, Any], variables: Any, learning_rate: Any
  ) -> tuple[Any, dict[str, Any]]:
    """Returns (updates to add to the variables, new state)."""
    updates, new_states = [], {}
    for name, (part, depth) in self._groups.items():
      # An optimizer built in the step takes the step's learning rate as a value, so it keeps no count of its own.
      update = _mapped(self._transformation(part, learning_rate).update, depth)
      changes, new_states[name] = update(_part(gradients, part), states[name], _part(variables, part))
      updates.append(changes)
    return merge(*updates), new_states

  def _transformation(self, part: Any, learning_rate: Any) -> optax.GradientTransformation:
    given = self._config.__arguments__
    filled: dict[str, Any] = {}
    for name in _parameter_names(self._target):
      if name in given and given[name] is not None:
        continue
      if name == 'learning_rate':
        filled[name] = learning_rate
      elif name in _MASK_ARGUMENTS:
        filled[name] = jax.tree.map(_is_regularized, part)
    result = self._config.instantiate(**filled)
    if not isinstance(result, optax.GradientTransformation):
      raise ConfigError(
        f'learner.optimizer: {self._target.__qualname__} returned {type(result).__name__}, not an optax transformation'
      )
    return result


def takes_learning_rate(config: Config) -> bool:
  """Whether the optimizer leaves the learning rate to the learner."""
  return 'learning_rate' in _parameter_names(config.__fn_or_cls__) and 'learning_rate' not in config.__arguments__


def is_elementwise(target: Callable[..., Any]) -> bool:
  """Whether an optimizer is one of optax's that treat every element by itself."""
  module = getattr(target, '__module__', '') or ''
  return module.split('.')[0] == 'optax' and getattr(target, '__name__', '') in _ELEMENTWISE


def _groups(weights: Any, elementwise: bool) -> dict[str, tuple[Any, int]]:
  """Returns for each group its part of `weights`, and over how many leading dimensions its optimizer is mapped."""
  if elementwise:
    return {'all': (weights, 0)}
  by_path = leaves(weights)
  groups = {}
  for prefix in sorted({weight.repeat_prefix for weight in by_path.values()}):
    paths = {path for path, weight in by_path.items() if weight.repeat_prefix == prefix}
    name = '_'.join(['repeated', *map(str, prefix)]) if prefix else 'single'
    groups[name] = (select(weights, paths.__contains__), len(prefix))
  return groups


def _part(tree: Any, like: Any) -> Any:
  wanted = leaves(like).keys()
  return select(tree, lambda path: path in wanted)


def _mapped(fn: Callable[..., Any], depth: int) -> Callable[..., Any]:
  for _ in range(depth):
    fn = jax.vmap(fn)
  return fn


def _is_regularized(weight: WeightHParams) -> bool:
  return WeightHParamsCollection.SKIP_REGULARIZATION not in weight.collections


def _parameter_names(target: Callable[..., Any]) -> list[str]:
  try:
    return list(inspect.signature(target).parameters)
  except (TypeError, ValueError):
    return []
