"""What decided the spec of each dimension, in words that say where to change it.

A variable's mapping comes from a field of the layer that declares it, whose own mapping may come from a field of the
layer around it:

    lm.transformer.layers.ff.down.w   'lm.transformer.layers.ff.weight_split_dims_mapping.wt'

so the outermost layer whose field holds the same axes for the same weight is named: it is the one to set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from praxis_lite.layer import Layer
from praxis_lite.partitioning.rules import LogicalAxisRules, match_rules
from praxis_lite.partitioning.specs import spec_axes
from praxis_lite.weights import WeightHParams

_GROUP = 'weight_split_dims_mapping'


def mapping_sources(
  mapping: Sequence[Any] | None, spec: PartitionSpec, rules: LogicalAxisRules | None, field: str
) -> tuple[str, ...]:
  """For each dimension what `field`, which holds `mapping`, or the rule that it leads to, says."""
  if mapping is None:
    return (f'{field} is not set',) * len(spec)
  logical = {name for name, _ in rules or ()}
  names = [entry if isinstance(entry, str) and entry in logical else None for entry in mapping]
  taken = [axis for name, entry in zip(names, spec) if name is None for axis in spec_axes(entry)]
  deciding = match_rules(names, rules or (), taken)

  def source(name: str | None, index: int | None) -> str:
    if name is None:
      return field
    if index is None:
      return f'{field}: {name!r}, for which no rule finds a free axis'
    return f'rule {tuple((rules or ())[index])!r}, for {name!r} in {field}'

  return tuple(source(name, index) for name, index in zip(names, deciding))


def layers_to(root: Layer, path: Sequence[str]) -> list[Layer]:
  """The layers from `root` down to the one that declares the variable at `path`."""
  found = [root]
  for name in path[:-1]:
    child = next((c for n, c in found[-1].children() if n == name), None)
    if child is None:
      break
    found.append(child)
  return found


def weight_field(layers: Sequence[Layer], mapping: Any) -> str:
  """The field that a weight's mapping comes from: of its own layer, or of one around it that has passed it down.

  Args:
    layers: from the root to the layer that declares the weight.
    mapping: of the weight, without repeat prefix; None where there is none.
  """
  own = layers[-1]
  if mapping is None:
    return f'{own.path_name}.{_GROUP}.{next(iter(_fields(own)), "wt")}'
  found = _holding(own, mapping) or f'{own.path_name}.{_GROUP}'
  for parent in reversed(layers[:-1]):
    above = _holding(parent, mapping)
    if above is None:
      break
    found = above
  return found


def repeat_fields(layers: Sequence[Layer], weight: WeightHParams) -> list[str]:
  """The field of each dimension of the repeat prefix, outermost first: of the layers that stack weights."""
  stacking = []
  for layer in layers:
    fields = _fields(layer)
    if 'stack' in fields:
      unset = ' is not set' if fields['stack'] is None else ''
      stacking.append(f'{layer.path_name}.{_GROUP}.stack{unset}')
  missing = len(weight.repeat_prefix) - len(stacking)
  return ['the layer that repeats it'] * missing + stacking[: len(weight.repeat_prefix)]


def _holding(layer: Layer, mapping: Any) -> str | None:
  """The weight split field of a layer that holds this mapping, or a longer or reversed one that it was cut from."""
  fields = {name: value for name, value in _fields(layer).items() if isinstance(value, tuple | list)}
  wanted = tuple(mapping)
  for same in (_equal, _ending, _permuted):
    for name, value in fields.items():
      if same(tuple(value), wanted):
        return f'{layer.path_name}.{_GROUP}.{name}'
  return None


def _equal(value: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
  return value == wanted


def _ending(value: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
  """A bias is split as the last dimensions of its weight."""
  return 0 < len(wanted) < len(value) and value[-len(wanted) :] == wanted


def _permuted(value: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
  """A projection back is split as the one forth, the other way around."""
  return sorted(map(repr, value)) == sorted(map(repr, wanted))


def _fields(layer: Layer) -> dict[str, Any]:
  group = getattr(layer, _GROUP)
  if group is None:
    return {}
  return {f.name: getattr(group, f.name) for f in dataclasses.fields(group.__fn_or_cls__)}
