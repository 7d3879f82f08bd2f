"""Logical axis names of train states: what declarations say, what overrides change, what optimizer slots inherit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import jax

from praxis_lite.errors import ShardingError
from praxis_lite.partitioning.slots import owner_of
from praxis_lite.trees import Path, leaves_by_path, path_matches, path_names

AxisNamesOverrides = Sequence[tuple[str, Sequence[str | None]]]


class AxisNames(tuple[Any, ...]):
  """The names of an array's axes: `AxisNames('embed', 'mlp')`. A leaf of trees, unlike the tuple it is otherwise."""

  def __new__(cls, *names: Any) -> Self:
    return super().__new__(cls, names)

  def __repr__(self) -> str:
    return f'AxisNames{super().__repr__()}'


def declared_axis_names(weights: Any) -> Any:
  """Returns the names that a tree of weight declarations gives to its arrays, repeat prefixes included.

  Args:
    weights: tree of `WeightHParams`, or of things that carry their names as `logical_axes`.

  Raises:
    ShardingError: a leaf is neither, so that nothing is known about its axes.
  """
  return jax.tree_util.tree_map_with_path(_declared, weights)


def override_axis_names(axes: Any, overrides: AxisNamesOverrides) -> Any:
  """Returns `axes` with the names of the arrays replaced whose path a pattern matches.

  Args:
    axes: tree of AxisNames.
    overrides: pairs (pattern, names). A pattern matches a whole path, 'lm.softmax.w' or 'lm/softmax/w'; each array
      takes
      the first that matches it.

  Raises:
    ShardingError: an override replaces nothing, or has not as many names as an array it matches has axes.
  """
  by_path = leaves_by_path(axes)
  deciding = {path: _first_match(path, overrides) for path in by_path}
  for i, (pattern, names) in enumerate(overrides):
    matched = [path for path, index in deciding.items() if index == i]
    if not matched:
      earlier = next((deciding[p] for p in by_path if path_matches(pattern, p)), None)
      why = f'; {overrides[earlier][0]!r} comes first' if earlier is not None else ''
      raise ShardingError(
        f'the axis names override {pattern!r} changes nothing{why}; the paths are {_some(list(by_path))}'
      )
    for path in matched:
      if len(names) != len(by_path[path]):
        raise ShardingError(
          f'the axis names override {pattern!r} has {len(names)} names {tuple(names)!r}, and {".".join(path)} has '
          f'{len(by_path[path])} axes {tuple(by_path[path])!r}'
        )

  def replace(key_path: Any, names: AxisNames) -> AxisNames:
    index = deciding[path_names(key_path)]
    return names if index is None else AxisNames(*overrides[index][1])

  return jax.tree_util.tree_map_with_path(replace, axes)


def slot_axis_names(params_struct: Any, params_axes: Any, state_struct: Any) -> Any:
  """Returns the names of the arrays of an optimizer's state.

  A slot with the shape of its parameter inherits its names. Any other, a factored slot or a counter, has none, so
  that it is replicated unless an override names its axes.

  Args:
    params_struct: tree of things with a shape.
    params_axes: the same tree of AxisNames.
    state_struct: the state, as arrays or shapes.
  """
  shapes = {path: tuple(x.shape) for path, x in leaves_by_path(params_struct).items()}
  names = leaves_by_path(params_axes)

  def inherit(key_path: Any, slot: Any) -> AxisNames:
    owner = owner_of(path_names(key_path), shapes)
    if owner is not None and tuple(slot.shape) == shapes[owner]:
      return names[owner]
    return AxisNames(*(None,) * len(slot.shape))

  return jax.tree_util.tree_map_with_path(inherit, state_struct)


def _declared(key_path: Any, weight: Any) -> AxisNames:
  names = getattr(weight, 'logical_axes', None)
  if names is None:
    names = getattr(weight, 'full_split_dims_mapping', None)
  if names is None:
    raise ShardingError(
      f'{".".join(path_names(key_path))}: a {type(weight).__name__} does not name its axes; pass the declarations '
      "of the variables, model.abstract_init(), as the state's mdl_vars"
    )
  return AxisNames(*names)


def _first_match(path: Path, overrides: AxisNamesOverrides) -> int | None:
  return next((i for i, (pattern, _) in enumerate(overrides) if path_matches(pattern, path)), None)


def _some(paths: list[Path]) -> str:
  shown = ', '.join('.'.join(path) for path in paths[:8])
  return shown + (f', ... ({len(paths)} in all)' if len(paths) > 8 else '')
