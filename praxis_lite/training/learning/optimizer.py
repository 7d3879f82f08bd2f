"""Builds an optax transformation from its config, for a tree in which some variables are stacks of layers.

The learner fills in these arguments, in nested configs too:

    Config(optax.adamw, weight_decay=0.1)     learning_rate = the learner's rate at this step
                                              mask = the variables not marked to skip regularization
    Config(optax.contrib.muon)                the same, and muon_weight_dimension_numbers: see `matrices.py`
    Config(muon)                              the same, as `matrices`
    Config(optax.chain, Config(optax.scale_by_adam), Config(optax.scale_by_learning_rate))

The rate is a number: the value of the schedule at the train state's step. So it does not depend on the optimizer's own
count of updates, which does not advance when a step is skipped.

A repeated layer stores the weights of all repetitions in one array [layers, ...]. Some optimizers use statistics of a
whole variable (LAMB's trust ratio, Adafactor's RMS, Muon's matrix), which must be computed for each layer. So the
optimizer is mapped over the stack: variables are grouped by their repeat prefix, and each group has its own optimizer.
Then a layer in a stack is trained like a separate layer. Optimizers that already do this without a map, such as
elementwise ones, run as one group; `probe.py` detects them.

    opt_states = {'all': state}
    opt_states = {'single': state, 'repeated_12': state of [12, ...]}

Optimizers that take `matrices`, such as `muon`, know which axes index layers, so they are not mapped either, unless
another part of the optimizer is. If they are not mapped, their `update` also gets the `Splits` of the variables.

In a mapped state, values that belong to no variable and cannot differ between layers, such as a count, are stored once
for all layers. So a decision that an optimizer takes every few steps is still the same for all layers.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import jax
import optax
from jax.sharding import PartitionSpec

from praxis_lite.common.config import REQUIRED, Config, build_at, config_values, map_nested, nested_configs, target
from praxis_lite.common.errors import ConfigError, UserError, first_line
from praxis_lite.common.trees import NestedDict, Path, leaves, leaves_by_path, merge, path_name, select
from praxis_lite.sharding.slots import owner_of
from praxis_lite.sharding.weights import WeightHParams, WeightHParamsCollection
from praxis_lite.training.learning.matrices import MATRIX_ARGUMENTS, STACKED_MATRICES, matrix_dims
from praxis_lite.training.learning.matrix_optimizer import MatrixOptimizer
from praxis_lite.training.learning.moments import compress_moments
from praxis_lite.training.learning.owners import Splits, is_square_array
from praxis_lite.training.learning.probe import is_elementwise, is_stackable, looks_at_all, slot_axes
from praxis_lite.training.learning.update_sizes import update_factors

Transformation: TypeAlias = optax.GradientTransformationExtraArgs
Rate = jax.Array | float
States = dict[str, object]

_RATE = 'learning_rate'

# Factories that treat each entry of a variable separately, provided that their arguments are numbers, texts or names.
# `probe.py` could detect this, but takes half a second for a language model. A test compares this list with the results
# of `probe.py`.
ELEMENTWISE = frozenset(
  {
    *(optax.adabelief, optax.adagrad, optax.adam, optax.adamax, optax.adamaxw, optax.adamw, optax.amsgrad, optax.lion),
    *(optax.radam, optax.rmsprop, optax.sgd, optax.chain, optax.identity, optax.trace),
    *(optax.scale_by_adam, optax.scale_by_lion, optax.add_decayed_weights, optax.scale, optax.scale_by_learning_rate),
  }
)

# For each argument that sets a weight decay, the arguments for the mask of this decay. Masks of other decays are named
# `<decay>_mask`.
_MASKS_OF_DECAYS = {'weight_decay': ('mask', 'weight_decay_mask'), 'weight_decay_rate': ('weight_decay_mask',)}


class GroupedOptimizer:
  """Applies an optimizer to each group of variables with the same kind of stacking.

  Args:
    config: config of an optax factory, or of a function that returns a transformation; it is not changed.
    weights: declarations of the variables that the optimizer updates, a nested dict.
    per_layer: whether each layer of a stack is updated separately; with None, only if that may make a difference.
    moments: how moments are stored; see `moments.py`.

  `init` and `update` raise ConfigError if no factory takes the learning rate, if weight decay would apply to variables
  that are marked to skip it, or if the config builds no optax transformation. With `per_layer=None`, they also raise it
  if one part of the optimizer must see all layers together and another must see each layer separately.
  """

  def __init__(self, config: Config, weights: NestedDict, per_layer: bool | None = None, moments: str = 'float32'):
    self._config, self._weights, self._per_layer, self._moments = config, weights, per_layer, moments
    self._regularized = {path: is_regularized(weight) for path, weight in leaves(weights).items()}
    # Whether a factory takes `matrices`, and so treats the layers of a stack separately without a map.
    self._treats_stacks = any(map(_treats_stacks, nested_configs(config)))

  def is_of(self, config: Config, weights: NestedDict, per_layer: bool | None, moments: str) -> bool:
    """Whether this optimizer was made from arguments equal to the given ones."""
    if (self._per_layer, self._moments, self._weights) != (per_layer, moments, weights):
      return False
    try:
      return bool(self._config == config)
    except ValueError:  # The comparison of arrays in configs has no single truth value.
      return False

  def init(self, variables: NestedDict, learning_rate: Rate) -> States:
    """Returns the initial state; `learning_rate` is the rate of the first step, a scalar."""
    optimizer = self._build(learning_rate)
    return {name: _init(optimizer, _part(variables, paths), depth) for name, (paths, depth) in self._groups.items()}

  def update(
    self,
    gradients: NestedDict,
    states: States,
    variables: NestedDict,
    learning_rate: Rate,
    loss: jax.Array | None = None,
    splits: Splits | None = None,
  ) -> tuple[NestedDict, States]:
    """Returns (updates to add to the variables, new state).

    Args:
      gradients, variables: nested dicts of the same structure.
      states: the state.
      learning_rate, loss: scalars of this step; few optimizers use the loss.
      splits: how a mesh splits the variables; None if there is no mesh.

    Raises:
      ConfigError: the optimizer needs another argument, such as a function that evaluates the loss again.
    """
    optimizer, updates, new_states = self._build(learning_rate), [], {}
    extra: dict[str, object] = {'splits': splits} if self._treats_stacks else {}
    for name, (paths, depth) in self._groups.items():
      parts = _part(gradients, paths), states[name], _part(variables, paths)
      try:
        changes, state = _update(optimizer, *parts, depth, loss, {} if depth else extra)
      except (TypeError, ValueError) as error:
        if not re.search('required keyword-only argument|must be provided', str(error)):
          raise
        raise ConfigError(f'learner.optimizer: it needs what a training step does not have: {error}') from None
      updates.append(changes)
      # Some optimizers promote the dtype of a slot. It is cast back, so that the state can be donated and saved.
      new_states[name] = jax.tree.map(lambda old, new: new.astype(old.dtype), states[name], state)
    return merge(*updates), new_states

  def update_factors(self, size: str) -> dict[Path, float]:
    """Returns the factor of each variable's update, for a model with `Mup`; see `update_sizes.py`."""
    alone = GroupedOptimizer(_remove_decay(self._config), self._weights, self._per_layer, self._moments)
    return update_factors(self._config, alone._build, self._weights, size, self.decays)

  @property
  def decays(self) -> bool:
    """Whether an optimizer in the config has a weight decay."""
    values = [item for nested in nested_configs(self._config) for item in config_values(nested).items()]
    return any(value for name, value in values if _is_decay(name))

  def not_elementwise(self) -> list[str]:
    """Returns the names of the factories in the config whose updates may differ if they get shards of the variables."""
    if self._is_known_elementwise or (not self._treats_stacks and is_elementwise(self._build, self._weights)):
      return []
    at_fault = [name for name, build in self._others() if not is_elementwise(build, self._weights)]
    if self._treats_stacks and any(depth for _, depth in self._groups.values()):
      at_fault += map(_name, filter(_treats_stacks, nested_configs(self._config)))
    if at_fault or self._moments == 'int8':
      return at_fault or ["learner.moments='int8'"]
    # Factories that take `matrices` gather the shards that they need.
    return [] if self._treats_stacks else [_name(self._config)]

  def slot_axes(self) -> dict[Path, tuple[int | None, ...]]:
    """Returns for each slot the list of axes of the variable that correspond to its dimensions.

    See `BoundLearner.slot_axes`.
    """
    axes: dict[Path, tuple[int | None, ...]] = {}
    for name, (paths, depth) in self._groups.items():
      layers = jax.tree.map(
        lambda w, depth=depth: dataclasses.replace(w, repeat_prefix=w.repeat_prefix[depth:]),
        _part(self._weights, paths),
      )
      for path, along in slot_axes(self._build, layers).items():
        axes[name, *path] = (*range(depth), *(None if axis is None else axis + depth for axis in along))
    return axes

  def slot_specs(self, states: States, splits: Splits) -> dict[Path, PartitionSpec]:
    """Returns the specs, by path, of the square arrays of matrix optimizers; see `owners.py`."""
    specs: dict[Path, PartitionSpec] = {}
    for made, weights in self._matrix_optimizers():
      owners = made.square_specs(weights, splits)
      for path in leaves_by_path({name: states[name] for name, (_, depth) in self._groups.items() if not depth}):
        owner = owner_of(path, owners)
        if owner is not None and is_square_array(path, owner):
          specs[path] = owners[owner]
    return specs

  def describe_exchanges(self, splits: Splits) -> list[str]:
    """Returns a sentence for each group of matrices that owners compute for other devices on a mesh."""
    found = []
    for made, weights in self._matrix_optimizers():
      # Directions are computed in at least float32.
      itemsize = max((x.dtype.itemsize for x in jax.tree.leaves(weights)), default=0)
      found += [f'{made.name}: {exchange.describe(max(itemsize, 4))}' for exchange in made.exchanges(weights, splits)]
    return found

  def _matrix_optimizers(self) -> list[tuple[MatrixOptimizer, NestedDict]]:
    """Returns the matrix optimizers in the config, each with the shapes of the variables that it updates at once.

    Variables over whose stacked layers an optimizer is mapped are left out.
    """
    if not self._treats_stacks:
      return []
    not_mapped = set[Path]().union(*(paths for paths, depth in self._groups.values() if not depth))
    weights = jax.tree.map(lambda weight: weight.as_struct(), _part(self._weights, not_mapped))
    made = (self._fill_in(config, 1.0, []).instantiate() for config in nested_configs(self._config))
    return [(each, weights) for each in made if isinstance(each, MatrixOptimizer)]

  @functools.cached_property
  def _groups(self) -> dict[str, tuple[set[Path], int]]:
    """For each group, by name, a pair: its variables; and the number of leading dimensions over which it is mapped."""
    weights = leaves(self._weights)
    prefixes = sorted({weight.repeat_prefix for weight in weights.values()})
    apart = self._per_layer
    if apart is None:
      # Stacks of a single layer and stacks of scalars are mapped, since checkpoints have their states layer by layer.
      is_trivial = any(w.repeat_prefix and 1 in (*w.repeat_prefix, math.prod(w.shape)) for w in weights.values())
      apart = any(prefixes) and not self._is_stackable(is_trivial)
    elif apart and self._treats_stacks:
      apart = not self._is_stackable(False)
    if not apart:
      return {'all': (set(weights), 0)}
    if self._per_layer is None:
      self._check_looks_at_each()
    names = ['_'.join(['repeated', *map(str, prefix)]) if prefix else 'single' for prefix in prefixes]
    return {
      name: ({path for path, weight in weights.items() if weight.repeat_prefix == prefix}, len(prefix))
      for name, prefix in zip(names, prefixes)
    }

  def _is_stackable(self, is_trivial: bool) -> bool:
    if self._treats_stacks:
      return all(is_stackable(build, self._weights) for _, build in self._others())
    return not is_trivial and (self._is_known_elementwise or is_stackable(self._build, self._weights))

  @property
  def _is_known_elementwise(self) -> bool:
    return self._moments == 'float32' and _is_known_elementwise(self._config)

  def _check_looks_at_each(self) -> None:
    for name, build in self._factories():
      if looks_at_all(build, self._weights):
        raise ConfigError(
          f'learner.optimizer: {name} looks at all variables together, but a part of it looks at each variable, and '
          'so repeated layers are updated separately. Clip by learner.clip_gradient_norm_to_value, or set '
          'learner.per_layer_statistics: True treats each layer separately, False each stack of layers as one variable'
        )

  # ---------------------------------------------------------------- the transformation

  def _build(self, learning_rate: Rate) -> Transformation:
    self._check_decay()
    took_rate: list[Config] = []
    filled = self._fill_in(self._config, learning_rate, took_rate)
    try:
      transformation = build_at('learner.optimizer', filled)
    except (TypeError, ValueError) as error:
      if isinstance(error, UserError):
        raise
      raise ConfigError(f'learner.optimizer: {_name(self._config)} cannot be made: {first_line(error)}') from error
    if not took_rate:
      if any(_RATE in nested.__arguments__ for nested in nested_configs(self._config)):
        raise ConfigError(
          'learner.optimizer.learning_rate: set learner.learning_rate and learner.schedule instead, which are filled '
          'in here and reported'
        )
      raise ConfigError(
        f'learner.optimizer: {_name(self._config)} takes no learning_rate, so learner.learning_rate would have no '
        'effect; use a Config(optax.chain, ...) that ends with Config(optax.scale_by_learning_rate)'
      )
    if not isinstance(transformation, optax.GradientTransformation):
      kind = type(transformation).__name__
      raise ConfigError(f'learner.optimizer: {_name(self._config)} returned {kind}, not an optax transformation')
    return compress_moments(optax.with_extra_args_support(transformation), self._moments)

  def _fill_in(self, config: Config, rate: Rate, took_rate: list[Config]) -> Config:
    """Returns a copy of `config` with rates and masks filled in; adds configs that take the rate to `took_rate`."""
    filled, parameters = config.clone(), config.__signature_info__.parameters
    arguments = filled.__arguments__
    for key, value in list(arguments.items()):
      arguments[key] = map_nested(lambda nested: self._fill_in(nested, rate, took_rate), value)
    if _RATE in parameters and arguments.get(_RATE, REQUIRED) is REQUIRED:
      arguments[_RATE] = rate
      took_rate.append(config)
    for name in MATRIX_ARGUMENTS:
      if name in parameters and arguments.get(name) is None:
        arguments[name] = functools.partial(matrix_dims, leaves(self._weights))
    for decay in filter(_is_decay, parameters):
      for name in _masks_of(decay):
        if name in parameters and arguments.get(name) is None:
          arguments[name] = self._regularization_mask
    return filled

  def _regularization_mask(self, params: NestedDict) -> object:
    """Returns a mask for `params`, which may be a part of the tree, because some optimizers treat parts separately."""

    def may_be_regularized(path: jax.tree_util.KeyPath, _: object) -> bool:
      names = tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
      return self._regularized[names]

    return jax.tree_util.tree_map_with_path(may_be_regularized, params)

  def _others(self) -> list[tuple[str, Callable[[Rate], Transformation]]]:
    """Returns the result of `_factories` for the factories that do not take `matrices`."""
    known = {_name(config) for config in nested_configs(self._config) if _treats_stacks(config)}
    return [(name, build) for name, build in self._factories() if name not in known]

  def _factories(self) -> list[tuple[str, Callable[[Rate], Transformation]]]:
    """Returns, for each factory in the config, its name and a function that builds its transformation.

    In the transformation, nested transformations are replaced by the identity.
    """

    def build(config: Config, rate: Rate) -> object:
      return self._fill_in(config, rate, []).instantiate()

    def makes_one(config: Config) -> bool:  # Other configs make schedules, for example for a decay.
      return isinstance(build(config, 1.0), optax.GradientTransformation)

    def alone(config: Config, rate: Rate) -> Transformation:
      copy = config.clone()
      for key, value in list(copy.__arguments__.items()):
        copy.__arguments__[key] = map_nested(lambda c: Config(optax.identity) if makes_one(c) else c, value)
      return optax.with_extra_args_support(build(copy, rate))

    configs = [config for config in nested_configs(self._config) if makes_one(config)]
    return [(_name(config), functools.partial(alone, config)) for config in configs]

  def _check_decay(self) -> None:
    marked = [path for path, regularized in self._regularized.items() if not regularized]
    if not marked:
      return
    for nested in nested_configs(self._config):
      parameters = nested.__signature_info__.parameters
      for name, value in nested.__arguments__.items():
        if _is_decay(name) and value and not any(mask in parameters for mask in _masks_of(name)):
          instead = 'learner.decoupled_weight_decay'
          if _name(nested).startswith('schedule_free'):  # The learner cannot decay the variables in its state.
            base = 'Config(optax.adamw, b1=0.0, weight_decay=...)'
            instead = f'Config(optax.contrib.schedule_free, base_optimizer={base})'
          raise ConfigError(
            f'learner.optimizer: {name} of {_name(nested)} decays every variable, but {path_name(marked[0])} is marked '
            f'to skip regularization; use {instead}, which respects the mark'
          )


_RECENT: collections.deque[GroupedOptimizer] = collections.deque(maxlen=8)


def grouped_optimizer(config: Config, weights: NestedDict, per_layer: bool | None, moments: str) -> GroupedOptimizer:
  """Returns a `GroupedOptimizer` for these arguments, possibly one that was made earlier from equal arguments.

  A `GroupedOptimizer` caches properties of its optimizer, which do not depend on how a mesh splits the variables. So a
  search over meshes, or a comparison of a mesh with one device, traces the optimizer only once.
  """
  declared = jax.tree.map(_strip_split, weights)
  for known in _RECENT:
    if known.is_of(config, declared, per_layer, moments):
      return known
  _RECENT.append(GroupedOptimizer(config.clone(), declared, per_layer, moments))
  return _RECENT[-1]


def _remove_decay(config: Config) -> Config:
  copy = config.clone()
  for key, value in list(copy.__arguments__.items()):
    is_decay = key in _MASKS_OF_DECAYS and value
    copy.__arguments__[key] = 0.0 if is_decay else map_nested(_remove_decay, value)
  return copy


def _strip_split(weight: WeightHParams) -> WeightHParams:
  """Returns the declaration without its split, because no optimizer depends on the split."""
  kept = ('shape', 'dtype', 'repeat_prefix', 'fan_in_axes', 'fan_out_axes', 'collections', 'growth')
  init = None if weight.growth is None else weight.init
  return WeightHParams(init=init, **{name: getattr(weight, name) for name in kept})


def is_regularized(weight: WeightHParams) -> bool:
  """Whether a variable may be regularized: whether it lacks the mark to skip regularization."""
  return WeightHParamsCollection.SKIP_REGULARIZATION not in weight.collections


def _is_known_elementwise(config: Config) -> bool:
  """Whether a config has only factories in `ELEMENTWISE`, with numbers, texts or names as arguments.

  Functions, such as masks or schedules, are excluded because they may do anything.
  """
  plain = bool | int | float | str | None
  return target(config) in ELEMENTWISE and all(
    _is_known_elementwise(value) if isinstance(value, Config) else value is REQUIRED or isinstance(value, plain)
    for value in _flat(config_values(config).values())
  )


def _flat(values: Iterable[object]) -> Iterator[object]:
  for value in values:
    yield from _flat(value) if isinstance(value, tuple | list) else (value,)


def _treats_stacks(config: Config) -> bool:
  return STACKED_MATRICES in config.__signature_info__.parameters


def _is_decay(argument: object) -> bool:
  return isinstance(argument, str) and argument.endswith(('weight_decay', 'weight_decay_rate'))


def _masks_of(decay: str) -> tuple[str, ...]:
  return _MASKS_OF_DECAYS.get(decay, (f'{decay}_mask',))


def _part(tree: NestedDict, paths: set[Path]) -> NestedDict:
  return select(tree, paths.__contains__)


def _name(config: Config) -> str:
  return getattr(target(config), '__qualname__', repr(target(config)))


# ---------------------------------------------------------------- mapping over layers


def _init(optimizer: Transformation, variables: NestedDict, depth: int) -> object:
  if not depth:
    return optimizer.init(variables)
  alone = _one_layer(variables, depth)
  state = jax.eval_shape(optimizer.init, alone)
  axes = _state_axes(optimizer, alone, state)

  def init(variables: NestedDict) -> list[jax.Array]:
    return jax.tree.leaves(optimizer.init(variables))

  for _ in range(depth):
    init = jax.vmap(init, 0, axes)
  return jax.tree.unflatten(jax.tree.structure(state), init(variables))


def _update(
  optimizer: Transformation,
  gradients: NestedDict,
  state: object,
  variables: NestedDict,
  depth: int,
  loss: jax.Array | None,
  extra: dict[str, object],
) -> tuple[NestedDict, object]:
  if not depth:
    return optimizer.update(gradients, state, variables, value=loss, **extra)
  slots, structure = jax.tree.flatten(state)
  alone = jax.tree.leaves(jax.eval_shape(optimizer.init, _one_layer(variables, depth)))
  axes = [0 if slot.ndim > one.ndim else None for slot, one in zip(slots, alone)]

  def update(
    gradients: NestedDict, slots: list[jax.Array], variables: NestedDict
  ) -> tuple[NestedDict, list[jax.Array]]:
    updates, state = optimizer.update(gradients, jax.tree.unflatten(structure, slots), variables, value=loss)
    return updates, jax.tree.leaves(state)

  for _ in range(depth):
    update = jax.vmap(update, (0, axes, 0), (0, axes))
  updates, slots = update(gradients, slots, variables)
  return updates, jax.tree.unflatten(structure, slots)


def _state_axes(optimizer: Transformation, variables: NestedDict, state: object) -> list[int | None]:
  """Returns, for each array of a layer's state, the axis of layers: 0, or None if all layers share the array."""
  known = leaves_by_path(variables)
  slots, structure = leaves_by_path(state), jax.tree.structure(state)
  axes = [None if owner_of(path, known) is None else 0 for path in slots]
  two_layers = [s if axis is None else _stack(s) for axis, s in zip(axes, slots.values())]

  def update(slots: Sequence[jax.Array], variables: NestedDict) -> list[jax.Array]:
    return jax.tree.leaves(optimizer.update(variables, jax.tree.unflatten(structure, slots), variables, value=0.0)[1])

  try:
    jax.eval_shape(jax.vmap(update, (axes, 0), axes), two_layers, jax.tree.map(_stack, variables))
  except ValueError:  # A slot that belongs to no variable depends on gradients, so each layer has its own.
    return [0] * len(axes)
  return axes


def _one_layer(variables: NestedDict, depth: int) -> NestedDict:
  return jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[depth:], v.dtype), variables)


def _stack(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((2, *x.shape), x.dtype)
