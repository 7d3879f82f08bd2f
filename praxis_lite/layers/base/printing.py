"""The tree of a layer as text: each layer with its number of parameters, each variable with its shape and dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

from praxis_lite.common.trees import NestedDict, leaves
from praxis_lite.sharding.weights import WeightHParams


class Printed(Protocol):
  """The part of a layer that printing needs."""

  _weights: dict[str, WeightHParams]

  def children(self) -> Iterator[tuple[str, Printed]]: ...


def tree_lines(layer: Printed, name: str, tree: NestedDict) -> Iterator[str]:
  """Yields the lines of `str(layer)`, called `name`; `tree` declares its variables, stacked as in the root layer."""
  count, kind = sum(math.prod(w.full_shape) for w in leaves(tree).values()), type(layer).__name__
  yield f'{kind if name == kind else f"{name}: {kind}"}, {count:,} parameter{"s" * (count != 1)}'
  for key in layer._weights:
    weight: WeightHParams = tree[key]
    shape = ' x '.join(map(str, weight.full_shape)) or 'scalar'
    yield f'  {key}: {shape} {weight.as_struct().dtype.name}{"" if weight.trainable else ", not trainable"}'
  for key, child in layer.children():
    yield from (f'  {line}' for line in tree_lines(child, key, tree.get(key, {})))
