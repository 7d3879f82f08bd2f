"""An optax transformation from its config, with what the learner knows filled in, in nested configs too.

    Config(optax.adamw, weight_decay=0.1)     learning_rate = the learner's rate at this step
                                              mask = the variables not marked to skip regularization
    Config(optax.chain, Config(optax.scale_by_adam), Config(optax.scale_by_learning_rate))

The rate is a number, the value of the schedule at the train state's step, so an optimizer's own count of updates, which
stands still when a step is skipped, does not enter it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import optax

from praxis_lite.config import REQUIRED, Config
from praxis_lite.errors import ConfigError
from praxis_lite.trees import Path, path_name

_RATE = 'learning_rate'

# The masks that keep each argument which decays weights from some of them.
_MASKS_OF_DECAYS = {'weight_decay': ('mask', 'weight_decay_mask'), 'weight_decay_rate': ('weight_decay_mask',)}

# Transformations that do to a stack of variables what they do to each of them: they treat every entry by itself, or
# depend on the others only through sums over all variables.
_ELEMENTWISE = """
  adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad lion nadam nadamw noisy_sgd optimistic_adam_v2
  optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum yogi
  acprop ademamix adopt cocob madgrad schedule_free_adamw schedule_free_sgd simplified_ademamix
  add_decayed_weights add_noise clip ema identity keep_params_nonnegative scale scale_by_adadelta scale_by_adam
  scale_by_adamax scale_by_adan scale_by_amsgrad scale_by_belief scale_by_learning_rate scale_by_lion scale_by_radam
  scale_by_rms scale_by_rss scale_by_schedule scale_by_sign scale_by_stddev scale_by_yogi set_to_zero trace zero_nans
"""
_GLOBAL = 'apply_if_finite clip_by_global_norm dadapt_adamw dog dowg lbfgs momo momo_adam polyak_sgd prodigy'
_COMBINING = 'chain masked multi_transform named_chain partition'
# They draw noise: the same for each part of a variable, and for padding too.
_DRAWING = frozenset(['add_noise', 'noisy_sgd'])
_STACKABLE = frozenset([*_ELEMENTWISE.split(), *_GLOBAL.split(), *_COMBINING.split()])


def build_optimizer(
  config: Config, learning_rate: Any, regularized: Mapping[Path, bool]
) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation that `config` describes.

  Args:
    config: of an optax factory, or of a function that returns a transformation; it is not changed.
    learning_rate: scalar, a number or traced, put in wherever a factory takes a `learning_rate` and none is set.
    regularized: for each variable whether it may be regularized, put in wherever a factory takes a mask for its weight
      decay and none is set.

  Raises:
    ConfigError: no factory takes the learning rate, weight decay cannot be kept from variables marked to skip it, or
      what is built is not an optax transformation.
  """
  _check_decay(config, regularized)
  filled, takes_rate = _fill(config.clone(), learning_rate, _path_mask(regularized))
  if not takes_rate:
    raise ConfigError(_no_rate_message(config))
  transformation = filled.instantiate()
  if not isinstance(transformation, optax.GradientTransformation):
    kind = type(transformation).__name__
    raise ConfigError(f'learner.optimizer: {_name(config)} returned {kind}, not an optax transformation')
  return optax.with_extra_args_support(transformation)


def is_stackable(config: Config) -> bool:
  """Whether an optimizer is known to do to a stack of variables what it does to each of them."""
  return all(
    _module(c).startswith('optax.') and getattr(c.__fn_or_cls__, '__name__', '') in _STACKABLE
    for c in _configs(config)
    if not _makes_schedule(c)
  )


def looking_at_all(config: Config) -> list[str]:
  """Returns the names of the factories in `config` known to look at all variables together, such as their norm."""
  return [_name(c) for c in _configs(config) if _module(c).startswith('optax.') and _name(c) in _GLOBAL.split()]


def not_elementwise(config: Config) -> list[str]:
  """Returns the names of the factories in `config` that are not known to treat every entry of a variable by itself."""
  known = frozenset([*_ELEMENTWISE.split(), *_COMBINING.split()]) - _DRAWING
  return [
    _name(c)
    for c in _configs(config)
    if not _makes_schedule(c)
    and not (_module(c).startswith('optax.') and getattr(c.__fn_or_cls__, '__name__', '') in known)
  ]


def _fill(config: Config, rate: Any, mask: Callable[[Any], Any]) -> tuple[Config, bool]:
  """Fills rates and masks into `config` in place; returns it, and whether any rate was filled in."""
  took_rate = False

  def walk(value: Any) -> Any:
    nonlocal took_rate
    if isinstance(value, Config):
      value, took = _fill(value, rate, mask)
      took_rate = took_rate or took
    elif isinstance(value, (list, tuple)) and not hasattr(value, '_fields'):
      value = type(value)(walk(v) for v in value)
    elif isinstance(value, dict):
      value = {k: walk(v) for k, v in value.items()}
    return value

  arguments, parameters = config.__arguments__, _parameters(config)
  for key, value in list(arguments.items()):
    arguments[key] = walk(value)
  if _RATE in parameters and arguments.get(_RATE, REQUIRED) is REQUIRED:
    arguments[_RATE] = rate
    took_rate = True
  for decay, masks in _MASKS_OF_DECAYS.items():
    for name in masks:
      if decay in parameters and name in parameters and arguments.get(name) is None:
        arguments[name] = mask
  return config, took_rate


def _path_mask(regularized: Mapping[Path, bool]) -> Callable[[Any], Any]:
  """A mask by path: it fits any part of the tree, such as optimizers that treat some variables apart pass on."""

  def mask(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: regularized[tuple(entry.key for entry in path)], params)

  return mask


def _check_decay(config: Config, regularized: Mapping[Path, bool]) -> None:
  marked = [path for path, is_regularized in regularized.items() if not is_regularized]
  if not marked:
    return
  for nested in _configs(config):
    parameters = _parameters(nested)
    for name, value in nested.__arguments__.items():
      is_decay = isinstance(name, str) and name.endswith(('weight_decay', 'weight_decay_rate'))
      if is_decay and value and not any(mask in parameters for mask in _MASKS_OF_DECAYS.get(name, ())):
        raise ConfigError(
          f'learner.optimizer: {name} of {_name(nested)} decays every variable, but {path_name(marked[0])} is marked '
          'to skip regularization; use learner.decoupled_weight_decay, which respects the mark'
        )


def _no_rate_message(config: Config) -> str:
  if any(_RATE in c.__arguments__ for c in _configs(config)):
    return (
      'learner.optimizer.learning_rate: set learner.learning_rate and learner.schedule instead, which are filled in '
      'here and reported'
    )
  return (
    f'learner.optimizer: {_name(config)} takes no learning_rate, so learner.learning_rate would have no effect; '
    'use a Config(optax.chain, ...) that ends with Config(optax.scale_by_learning_rate)'
  )


def _configs(value: Any) -> Iterator[Config]:
  """All configs in a value, the outermost first."""
  if isinstance(value, Config):
    yield value
    value = value.__arguments__
  if isinstance(value, dict):
    value = list(value.values())
  if isinstance(value, (list, tuple)):
    for v in value:
      yield from _configs(v)


def _makes_schedule(config: Config) -> bool:
  """Whether a nested config makes a function of the step, such as a decay that changes, and no transformation."""
  target = config.__fn_or_cls__
  return 'schedule' in _module(config) or getattr(target, '__name__', '').endswith('_schedule')


def _module(config: Config) -> str:
  return getattr(config.__fn_or_cls__, '__module__', '') or ''


def _parameters(config: Config) -> Mapping[str, inspect.Parameter]:
  try:
    return inspect.signature(config.__fn_or_cls__).parameters
  except (ValueError, TypeError):
    return {}


def _name(config: Config) -> str:
  return getattr(config.__fn_or_cls__, '__qualname__', repr(config.__fn_or_cls__))
