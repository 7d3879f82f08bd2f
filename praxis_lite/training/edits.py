"""Edits of values between layers in evaluation and decoding, such as adding a steering vector, or ablations.

    add(vector)              x + vector
    replace(value)           value in place of x
    zero(units=(3, 8))       zeros in place of these entries of the last dimension; zero() replaces all entries

`layers=(2, -1)` edits these layers of a stack, counted from 0, and leaves the others as they are. The values are
constants of the compiled program. `layers/base/taps.py` applies them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from praxis_lite.common.errors import ConfigError, did_you_mean
from praxis_lite.common.figures import number_of
from praxis_lite.common.trees import NestedDict, Path, insert, leaves, merge, node_at, path_name
from praxis_lite.layers.base import Layer
from praxis_lite.layers.base.call import Surroundings
from praxis_lite.layers.base.taps import edit_name


@dataclasses.dataclass(frozen=True, eq=False)
class Edit:
  """A change of a value x to x + add, or to `add` if `drops` is True.

  It applies to these `units` and these `layers`; None means all of them.
  """

  add: ArrayLike = 0.0
  drops: bool = False
  units: tuple[int, ...] | None = None
  layers: tuple[int, ...] | None = None


def add(vector: ArrayLike, *, layers: Sequence[int] | None = None) -> Edit:
  """Returns an edit that adds an array to the value. The array is broadcast, for example from [D] to [B, T, D]."""
  return Edit(vector, layers=_integers('layers', layers))


def replace(value: ArrayLike, *, layers: Sequence[int] | None = None) -> Edit:
  """Returns an edit that puts an array, or a number, in place of the value."""
  return Edit(value, drops=True, layers=_integers('layers', layers))


def zero(*, units: Sequence[int] | None = None, layers: Sequence[int] | None = None) -> Edit:
  """Returns an edit that puts zeros in place of some entries of the last dimension, or of all."""
  return Edit(drops=True, units=_integers('units', units), layers=_integers('layers', layers))


def _integers(name: str, values: Sequence[int] | None) -> tuple[int, ...] | None:
  if values is None:
    return None
  given = np.asarray(values)
  if given.ndim != 1 or not given.size or not np.issubdtype(given.dtype, np.integer):
    raise ConfigError(f'edit: {name} = {values!r}: expected numbers, as in {name}=(0, 3), or None for all')
  return tuple(map(int, given))


class Edits:
  """All edits of the values of a model: one or several for each path of a layer, applied after the edits in `before`.

  Raises ConfigError if a path names no layer, or a layer index is not in the layer's stack.
  """

  def __init__(self, model: Layer, edits: Mapping[str, Edit | Sequence[Edit]], before: Edits | None = None):
    self._edits: dict[str, list[Edit]] = {name: list(own) for name, own in before._edits.items()} if before else {}
    self._layers = {path_name(layer.path): layer for layer in model.descendants() if layer.path}
    self._variables: NestedDict = before._variables if before else {}
    self._declared = model.abstract_init()
    for name, given in edits.items():
      for edit in given if isinstance(given, list | tuple) else [given]:
        if not isinstance(edit, Edit):
          raise ConfigError(f'edit of {name}: expected add(...), replace(...) or zero(...), got {edit!r}')
        path, number = self._path_of(name), len(self._edits.setdefault(name, []))
        self._edits[name].append(edit)
        at = (*path, edit_name(name), f'{number:03}')
        self._variables = insert(self._variables, at, _arrays(name, edit, self._stacked_above(name, path)))

  def _path_of(self, name: str) -> Path:
    """Returns the path of the layer that an edit's name means: ('a', 'b') for 'a.b' or 'a.b.method'."""
    owner, _, method = name.rpartition('.')
    if name in self._layers:
      return self._layers[name].path
    if owner in self._layers and callable(getattr(type(self._layers[owner]), method, None)):
      return self._layers[owner].path
    close = did_you_mean(name, self._layers)
    raise ConfigError(f'edit of {name}: there is no such layer.{close} `praxis-lite show` prints the layers')

  def _stacked_above(self, name: str, path: Path) -> tuple[int, ...]:
    """Returns the sizes of the stacks that contain a layer, the outermost first."""
    for length in range(len(path), 0, -1):
      layer = self._layers[path_name(path[:length])]
      if hasattr(layer, 'layers_by_turn') and length < len(path):
        break
      own = leaves(layer.abstract_init())
      if own:
        inner, weight = next(iter(own.items()))
        whole = node_at(self._declared, (*path[:length], *inner)).repeat_prefix
        return tuple(whole[: len(whole) - len(weight.repeat_prefix)])
    raise ConfigError(f'edit of {name}: it has no weights, so its place in a stack is unknown; edit the layer above')

  def add_to(self, variables: NestedDict, surroundings: Surroundings) -> tuple[NestedDict, Surroundings]:
    """Returns the variables and the surroundings of a call, with the edits added."""
    return merge(variables, self._variables), dataclasses.replace(surroundings, edited={})

  def check_met(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ConfigError if the step did not call the layer of an edit, or the layer's value lacks a unit of the edit.

    `shapes` has the shapes of the values in the step, by the name that an edit gives them.
    """
    for name, edits in self._edits.items():
      if name not in shapes:
        raise ConfigError(f'edit of {name}: the step does not call this layer.{did_you_mean(name, shapes)}')
      for unit in (unit for edit in edits for unit in edit.units or ()):
        if not 0 <= unit < shapes[name][-1]:
          raise ConfigError(f'edit of {name}: there is no unit {unit}; the units are 0 to {shapes[name][-1] - 1}')


def _arrays(name: str, edit: Edit, stacked: tuple[int, ...]) -> dict[str, Any]:
  """Returns the arrays of an edit. Their first dimensions run over the stacks of layers, whose sizes are `stacked`."""
  size, value = math.prod(stacked), np.asarray(edit.add, np.float32)
  chosen = np.ones(size, bool)
  if edit.layers is not None:
    wrong = [layer for layer in edit.layers if not stacked or not -size <= layer < size]
    if wrong:
      have = f'it is in a stack of {number_of(size, "layer")}' if stacked else 'it is in no stack of layers'
      raise ConfigError(f'edit of {name}: layers = {edit.layers}: there is no layer {wrong[0]}; {have}')
    chosen = np.isin(np.arange(size), np.array(edit.layers) % size)
  of_layers = np.where(chosen.reshape(-1, *(1,) * value.ndim), value[None], 0)
  arrays = {'drop': (chosen & edit.drops).reshape(stacked), 'add': of_layers.reshape((*stacked, *value.shape))}
  if edit.units is not None:
    arrays['units'] = np.broadcast_to(np.array(edit.units, np.int32), (*stacked, len(edit.units))).copy()
  return arrays
