"""An optax optimizer over a tree in which some variables are stacks of layers.

A repeated layer keeps the weights of all its repetitions in one array [layers, ...]. Optimizers that look at a whole
variable (LAMB's trust ratio, Adafactor's RMS, Muon's matrix) must look at each layer's, so the optimizer is mapped over
the stack: variables are grouped by their repeat prefix, and each group has an optimizer of its own. A layer in a stack
is then trained as if it stood alone. Optimizers that do to a stack what they do to its parts, the elementwise ones
among them, run as one group without the map.

    opt_states = {'all': state}
    opt_states = {'single': state, 'repeated_12': state of [12, ...]}

A mapped state keeps once, not per layer, what belongs to no variable and cannot differ between layers, such as a count:
what an optimizer does every so many steps is then still decided once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from praxis_lite.config import Config
from praxis_lite.errors import ConfigError
from praxis_lite.learning.optimizer_config import build_optimizer, is_stackable, looking_at_all
from praxis_lite.partitioning.slots import owner_of
from praxis_lite.trees import Path, leaves, leaves_by_path, merge, path_names, select
from praxis_lite.weights import WeightHParams, WeightHParamsCollection


class GroupedOptimizer:
  """Applies an optimizer to each group of variables that are stacked alike.

  Args:
    config: config of a function that returns an optax transformation; see `build_optimizer` for what is filled in.
    weights: declarations of the variables it updates, a nested dict.
    learning_rate: of this step, or of the first one for `init`; a scalar, which may be traced.
    per_layer: whether repeated layers are updated each by itself; None does so where it makes a difference, or might.

  Raises:
    ConfigError: see `build_optimizer`; or `per_layer` is None, and parts of the optimizer call for both.
  """

  def __init__(self, config: Config, weights: Any, learning_rate: Any, per_layer: bool | None = None):
    by_path = leaves(weights)
    regularized = {path: is_regularized(weight) for path, weight in by_path.items()}
    self._optimizer = build_optimizer(config, learning_rate, regularized)
    self._groups = _groups(by_path, apart=not is_stackable(config) if per_layer is None else per_layer)
    whole = looking_at_all(config)
    if whole and per_layer is None and self._groups.keys() - {'all', 'single'}:
      raise ConfigError(
        f'learner.optimizer: {whole[0]} looks at all variables together, and something else in it at each, for which '
        'repeated layers are updated one by one. Clip by learner.clip_gradient_norm_to_value, or set '
        'learner.per_layer_statistics: True looks at each layer alone, False at each stack of layers as one variable'
      )

  def init(self, variables: Any) -> dict[str, Any]:
    """Returns the first state for `variables`."""
    return {
      name: _init(self._optimizer, _part(variables, paths), depth) for name, (paths, depth) in self._groups.items()
    }

  def update(
    self, gradients: Any, states: dict[str, Any], variables: Any, loss: jax.Array | None = None
  ) -> tuple[Any, dict[str, Any]]:
    """Returns (updates to add to the variables, new state).

    Args:
      gradients: a nested dict like `variables`.
      states: the state.
      variables: the variables.
      loss: for the few optimizers that use it.

    Raises:
      ConfigError: the optimizer needs something else, such as a function that evaluates the loss again.
    """
    updates, new_states = [], {}
    for name, (paths, depth) in self._groups.items():
      parts = _part(gradients, paths), states[name], _part(variables, paths)
      try:
        changes, state = _update(self._optimizer, *parts, depth, loss)
      except TypeError as error:
        if 'required keyword-only argument' not in str(error):
          raise
        raise ConfigError(f'learner.optimizer: it needs what a training step does not have: {error}') from None
      updates.append(changes)
      # Some optimizers promote the dtype of a slot; a state keeps its own, so that it can be donated and saved.
      new_states[name] = jax.tree.map(lambda new, old: _as_dtype(new, old.dtype), state, states[name])
    return merge(*updates), new_states


def is_regularized(weight: WeightHParams) -> bool:
  """Whether a variable is not marked to skip regularization."""
  return WeightHParamsCollection.SKIP_REGULARIZATION not in weight.collections


def _groups(weights: dict[Path, WeightHParams], apart: bool) -> dict[str, tuple[set[Path], int]]:
  """Returns for each group its variables, and over how many leading dimensions its optimizer is mapped."""
  if not apart:
    return {'all': (set(weights), 0)}
  groups: dict[str, tuple[set[Path], int]] = {}
  for prefix in sorted({weight.repeat_prefix for weight in weights.values()}):
    name = '_'.join(['repeated', *map(str, prefix)]) if prefix else 'single'
    groups[name] = ({path for path, weight in weights.items() if weight.repeat_prefix == prefix}, len(prefix))
  return groups


def _part(tree: Any, paths: set[Path]) -> Any:
  return select(tree, paths.__contains__)


# ---------------------------------------------------------------- mapping over layers


def _init(optimizer: optax.GradientTransformationExtraArgs, variables: Any, depth: int) -> Any:
  if not depth:
    return optimizer.init(variables)
  alone = _one_layer(variables, depth)
  state = jax.eval_shape(optimizer.init, alone)
  init = _mapped(lambda v: jax.tree.leaves(optimizer.init(v)), depth, 0, _state_axes(optimizer, alone, state))
  return jax.tree.unflatten(jax.tree.structure(state), init(variables))


def _update(
  optimizer: optax.GradientTransformationExtraArgs,
  gradients: Any,
  state: Any,
  variables: Any,
  depth: int,
  loss: jax.Array | None,
) -> tuple[Any, Any]:
  if not depth:
    return optimizer.update(gradients, state, variables, value=loss)
  slots, structure = jax.tree.flatten(state)
  alone = jax.tree.leaves(jax.eval_shape(optimizer.init, _one_layer(variables, depth)))
  axes = [0 if slot.ndim > one.ndim else None for slot, one in zip(slots, alone)]

  def update(gradients: Any, slots: list[jax.Array], variables: Any) -> tuple[Any, list[jax.Array]]:
    updates, state = optimizer.update(gradients, jax.tree.unflatten(structure, slots), variables, value=loss)
    return updates, jax.tree.leaves(state)

  updates, slots = _mapped(update, depth, (0, axes, 0), (0, axes))(gradients, slots, variables)
  return updates, jax.tree.unflatten(structure, slots)


def _state_axes(optimizer: optax.GradientTransformationExtraArgs, variables: Any, state: Any) -> list[int | None]:
  """Returns 0 for each array of a state that each layer has its own of, None for those that all share.

  Args:
    optimizer: what is mapped.
    variables, state: shapes of those of one layer.
  """
  known = leaves_by_path(variables)
  slots, structure = jax.tree_util.tree_flatten_with_path(state)
  axes = [None if owner_of(path_names(path), known) is None else 0 for path, _ in slots]
  two_layers = [s if axis is None else _stacked(s) for axis, (_, s) in zip(axes, slots)]

  def update(slots: list[jax.Array], variables: Any) -> list[jax.Array]:
    return jax.tree.leaves(optimizer.update(variables, jax.tree.unflatten(structure, slots), variables, value=0.0)[1])

  try:
    jax.eval_shape(jax.vmap(update, (axes, 0), axes), two_layers, jax.tree.map(_stacked, variables))
  except ValueError:  # Something without an owner depends on the gradients after all: each layer needs its own.
    return [0] * len(axes)
  return axes


def _one_layer(variables: Any, depth: int) -> Any:
  return jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[depth:], v.dtype), variables)


def _stacked(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((2, *x.shape), x.dtype)


def _mapped(fn: Callable[..., Any], depth: int, in_axes: Any, out_axes: Any) -> Callable[..., Any]:
  for _ in range(depth):
    fn = jax.vmap(fn, in_axes, out_axes)
  return fn


def _as_dtype(x: jax.Array, dtype: Any) -> jax.Array:
  return x if x.dtype == dtype else x.astype(dtype)
