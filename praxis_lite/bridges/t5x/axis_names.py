"""Logical axis names of train states: declared, changed by overrides, and inherited by optimizer slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import jax

from praxis_lite.common.errors import ShardingError
from praxis_lite.common.figures import number_of
from praxis_lite.common.trees import Path, is_named_box, leaves_by_path, map_with_path, path_matches, path_name
from praxis_lite.sharding.slots import slot_origins

if TYPE_CHECKING:
  from praxis_lite.training.state import TrainState

AxisNamesOverrides = Sequence[tuple[str, Sequence[str | None]]]
# A function for slots whose shapes differ from their parameters': it returns the parameter's axis names that the slot
# keeps. The argument is the path of the parameter and then of the slot, such as 'mlp/expert/kernel/v_row'.
KeptNames = Callable[[str], Collection[str]]
Tree = TypeVar('Tree')


class AxisNames(tuple[Any, ...]):
  """The names of an array's axes: `AxisNames('embed', 'mlp')`. JAX treats this tuple as a leaf of a tree."""

  def __new__(cls, *names: object) -> Self:
    return super().__new__(cls, names)

  def __repr__(self) -> str:
    return f'AxisNames{super().__repr__()}'


@dataclasses.dataclass(frozen=True)
class _Boxed:
  """The declaration of a variable that is given as an array in a Flax box."""

  logical_axes: tuple[Any, ...] | None
  struct: Any

  def as_struct(self) -> Any:
    return self.struct


def remove_boxes(train_state: Any) -> Any:
  """Returns a train state without Flax boxes: boxed variables become declarations, and other boxes arrays."""

  def declaration(x: Any) -> Any:
    return _Boxed(x.names, x.value) if is_named_box(x) else x

  def unbox(x: Any) -> Any:
    return x.value if is_named_box(x) else x

  rest = jax.tree.map(unbox, train_state, is_leaf=is_named_box)
  return dataclasses.replace(rest, mdl_vars=jax.tree.map(declaration, train_state.mdl_vars, is_leaf=is_named_box))


def declared_axis_names(weights: Tree) -> Tree:
  """Returns the AxisNames of a tree of weight declarations, or of objects with an attribute `logical_axes`.

  Raises ShardingError if a leaf is neither, because its axes are then unknown.
  """

  def read_declared(path: Path, weight: object) -> AxisNames:
    for attribute in ('logical_axes', 'full_split_dims_mapping'):
      names = getattr(weight, attribute, None)
      if names is not None:
        return AxisNames(*names)
    raise ShardingError(
      f'{path_name(path)}: a {type(weight).__name__} does not name its axes; pass the declarations of the variables, '
      "model.abstract_init(), as the state's mdl_vars"
    )

  return map_with_path(read_declared, weights)


def override_axis_names(axes: Tree, overrides: AxisNamesOverrides) -> Tree:
  """Returns a tree of AxisNames in which `overrides`, pairs (pattern on a whole path, names), replace names.

  For each array the first match counts.

  Raises:
    ShardingError: an override replaces nothing, or its number of names differs from the axes of a matching array.
  """
  by_path = leaves_by_path(axes)
  deciding = {
    path: next((i for i, (pattern, _) in enumerate(overrides) if path_matches(pattern, path)), None) for path in by_path
  }
  for i, (pattern, names) in enumerate(overrides):
    matched = [path for path, index in deciding.items() if index == i]
    if not matched:
      earlier = next((deciding[path] for path in by_path if path_matches(pattern, path)), None)
      why = f'; {overrides[earlier][0]!r} comes first' if earlier is not None else ''
      more = f', ... ({len(by_path)} in all)' if len(by_path) > 8 else ''
      shown = ', '.join(map(path_name, list(by_path)[:8])) + more
      raise ShardingError(f'the axis names override {pattern!r} changes nothing{why}; the paths are {shown}')
    for path in matched:
      if len(names) != len(by_path[path]):
        raise ShardingError(
          f'the axis names override {pattern!r} has {number_of(len(names), "name")} {tuple(names)!r}, and '
          f'{path_name(path)} has {number_of(len(by_path[path]), "axis")} {tuple(by_path[path])!r}'
        )

  chosen = {path: AxisNames(*overrides[i][1]) for path, i in deciding.items() if i is not None}
  return map_with_path(chosen.get, axes)


def state_axis_names(
  train_state: TrainState, params: AxisNamesOverrides, state: AxisNamesOverrides, kept: KeptNames
) -> TrainState[AxisNames]:
  """Returns the train state with the `AxisNames` of each array in its place.

  The train state has declarations in `mdl_vars` and shapes elsewhere; for inference, it lacks optimizer state and
  averages. The overrides `params` apply to `mdl_vars`, and slots and averages inherit them; the overrides `state` apply
  to paths in `opt_states`, such as 'opt_states/0/v_row/.*'.
  """
  structs = jax.tree.map(lambda weight: weight.as_struct(), train_state.mdl_vars)
  axes = override_axis_names(declared_axis_names(train_state.mdl_vars), params)
  changes: dict[str, Any] = {'mdl_vars': axes, **({} if train_state.step is None else {'step': AxisNames()})}
  opt_states, ema_vars = (getattr(train_state, name, None) for name in ('opt_states', 'ema_vars'))
  if opt_states is not None:
    slots = slot_axis_names(structs, axes, opt_states, kept)
    changes |= override_axis_names({'opt_states': slots}, state)
  if ema_vars is not None:
    changes['ema_vars'] = slot_axis_names(structs, axes, ema_vars)
  return dataclasses.replace(train_state, **changes)


def slot_axis_names(
  params_struct: object, params_axes: object, state_struct: Tree, kept: KeptNames = lambda path: ()
) -> Tree:
  """Returns the AxisNames of the arrays of an optimizer's state.

  A slot with the shape of its parameter inherits the parameter's names. Any other slot, factored or a counter, gets
  only the names that `kept` returns for it. All its other axes are replicated, unless an override names them.
  """
  names_of, origins = leaves_by_path(params_axes), slot_origins(params_struct, state_struct)

  def inherit(path: Path, slot: Any) -> AxisNames:
    origin = origins.get(path)
    if origin is None:
      return AxisNames(*(None,) * len(slot.shape))
    names = names_of[origin.owner]
    if origin.whole:
      return names
    keeps = kept('/'.join((*origin.owner, *path[: len(path) - len(origin.owner)][-1:])))
    return AxisNames(*(names[d] if d is not None and names[d] in keeps else None for d in origin.dims))

  return map_with_path(inherit, state_struct)
