"""Maps the tensors of a checkpoint, and their dimensions, to variables. One table serves both directions.

    Pair('model.layers.{layer}.self_attn.q_proj.weight', 'transformer.layers.attention.query.w', 'D N H -> (N H) D')

says that the query weight [D, N, H] of a layer is stored transposed, with heads and dims per head in one dimension. The
letters only name dimensions. A fraction is a part of a tensor that several variables share:

    'D N H -> D (1/3 N H)'      the second of three parts, along the second dimension

The stacked variables of a repeated layer have a tensor for each `{layer}`. The variables of `layers_0`, `layers_1`, ...
do too; if these layers form a pattern that is repeated, they are stacked, and `rest_0`, ... are the layers after them.
If a dimension stands before a colon, each of its entries, an `{expert}`, has its own tensor:

    Pair('model.layers.{layer}.experts.{expert}.up.weight', 'transformer.layers.ff.up', 'E: D F -> F D')
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from praxis_lite.bridges.hf.files import StoredTensor
from praxis_lite.common.errors import CheckpointError
from praxis_lite.common.trees import NestedDict, Path, leaves, path_name
from praxis_lite.sharding.weights import WeightHParams


class Part(NamedTuple):
  """Part number `at` of `of` equal parts."""

  at: int
  of: int


class Pair(NamedTuple):
  """One row of the table.

  Attributes:
    theirs: name of the tensor, with {layer} for the number of its layer, and {expert} for the number of an expert.
    ours: path of the variable below the `TransformerLm`, without the number of the layer.
    axes: the dimensions of the variable, and how those of the tensor are made from them; '' if they are the same.
  """

  theirs: str
  ours: str
  axes: str = ''


@dataclasses.dataclass(frozen=True)
class View:
  """A tensor, or part of one, seen with the dimensions of a variable.

  Attributes:
    shape: shape of the variable, in one layer and for one expert.
    groups: for each dimension of the tensor, the dimensions of the variable that form it, outermost first.
  """

  shape: tuple[int, ...]
  groups: tuple[tuple[int | Part, ...], ...]

  @property
  def their_shape(self) -> tuple[int, ...]:
    """Shape of the whole tensor."""
    return tuple(math.prod(self._sizes(group)) for group in self.groups)

  @property
  def outermost(self) -> int:
    """The dimension of the variable whose entries are contiguous pieces of the tensor."""
    return next(axis for group in self.groups for axis in group if not isinstance(axis, Part))

  def read(self, tensor: StoredTensor, index: tuple[slice, ...]) -> np.ndarray:
    """Returns the part `index` of the variable; reads little more of the tensor than this part."""
    their_index, split_shape, split_index = [], [], []
    for group in self.groups:
      sizes, bounds = self._sizes(group), [self._bounds(axis, index) for axis in group]
      # If the part has one entry in each outer dimension, its range in the next dimension is contiguous.
      outer = next((i for i, (low, high) in enumerate(bounds) if high - low != 1), len(group) - 1)
      inner = math.prod(sizes[outer + 1 :])
      start = sum(low * math.prod(sizes[i + 1 :]) for i, (low, _) in enumerate(bounds[: outer + 1]))
      low, high = bounds[outer]
      their_index.append(slice(start, start + (high - low) * inner))
      split_shape += [*[1] * outer, high - low, *sizes[outer + 1 :]]
      split_index += [*[slice(None)] * (outer + 1), *(slice(*b) for b in bounds[outer + 1 :])]
    return self._ours(tensor.read(tuple(their_index)).reshape(split_shape)[tuple(split_index)])

  def within(self, theirs: np.ndarray) -> np.ndarray:
    """Returns the variable in the whole tensor `theirs`, which must be contiguous, as a view to write to."""
    split = theirs.reshape([size for group in self.groups for size in self._sizes(group)])
    return self._ours(split[tuple(slice(a.at, a.at + 1) if isinstance(a, Part) else slice(None) for a in self._axes)])

  def _ours(self, split: np.ndarray) -> np.ndarray:
    """Returns `split`, which has a dimension for each entry of the groups, as a view with the variable's dimensions."""
    axes = self._axes
    whole = split[tuple(0 if isinstance(a, Part) else slice(None) for a in axes)]
    kept = [a for a in axes if not isinstance(a, Part)]
    return whole.transpose([kept.index(i) for i in range(len(self.shape))])

  @property
  def _axes(self) -> list[int | Part]:
    return [axis for group in self.groups for axis in group]

  def _sizes(self, group: Sequence[int | Part]) -> list[int]:
    return [axis.of if isinstance(axis, Part) else self.shape[axis] for axis in group]

  def _bounds(self, axis: int | Part, index: tuple[slice, ...]) -> tuple[int, int]:
    return (axis.at, axis.at + 1) if isinstance(axis, Part) else index[axis].indices(self.shape[axis])[:2]


@functools.cache
def parse_axes(axes: str) -> tuple[tuple[int | Part, ...], ...]:
  """Returns the groups of 'D N H -> D (1/3 N H)': ((0,), (Part(1, 3), 1, 2))."""
  ours, theirs = (side.split() for side in axes.split(' -> '))
  groups = re.findall(r'\(([^)]*)\)|(\S+)', ' '.join(theirs))

  def parse(name: str) -> int | Part:
    return Part(*map(int, name.split('/'))) if '/' in name else ours.index(name)

  return tuple(tuple(parse(name) for name in (group or single).split()) for group, single in groups)


class Piece(NamedTuple):
  """A variable, or one entry along its first dimensions, and the tensor that holds it.

  Attributes:
    name: name of the tensor.
    path: path of the variable.
    at: index along the first dimensions of the variable, for layers and experts; empty if it has neither.
    view: the tensor seen as the variable.
  """

  name: str
  path: Path
  at: tuple[int, ...]
  view: View

  def box(self, inside: Sequence[slice]) -> tuple[slice, ...]:
    """Returns the place in the variable of the part `inside` of this piece."""
    return (*(slice(i, i + 1) for i in self.at), *inside)


def pieces(table: Iterable[Pair], weights: NestedDict) -> dict[Path, list[Piece]]:
  """Returns the pieces of each variable, in the order of their indices.

  Args:
    table: must have a row for each variable.
    weights: declarations of the variables below the `TransformerLm`.
  """
  rows, declared = {pair.ours: pair for pair in table}, leaves(weights)
  order = _layer_order(declared)
  return {path: list(_pieces_of(rows, path, weight, order)) for path, weight in declared.items()}


class _LayerOrder(NamedTuple):
  """The order of layers in `layers_0`, `layers_1`, ..., which may be stacks, and in `rest_0`, ... after them.

  Attributes:
    first: the number of the first layer in each of these, by its name.
    period: how many layers lie between successive entries of a stack.
  """

  first: dict[str, int]
  period: int


def _layer_order(declared: Mapping[Path, WeightHParams]) -> _LayerOrder:
  counts = {
    match[1]: (weight.repeat_prefix or (1,))[0]
    for path, weight in declared.items()
    if (match := _NUMBERED.search(path_name(path)))
  }
  cycle = [name for name in counts if name.startswith('layers')]
  before = {'layers': 0, 'rest': sum(counts[name] for name in cycle)}
  kinds = {name: name.split('_') for name in counts}
  return _LayerOrder({name: before[kind] + int(number) for name, (kind, number) in kinds.items()}, len(cycle))


_NUMBERED = re.compile(r'\.((?:layers|rest)_\d+)\.')


def _pieces_of(rows: Mapping[str, Pair], path: Path, weight: WeightHParams, order: _LayerOrder) -> Iterator[Piece]:
  name = path_name(path)
  number = _NUMBERED.search(name)
  first, step = (order.first[number[1]], order.period) if number else (0, 1)
  pair = rows.get(_NUMBERED.sub('.layers.', name))
  if pair is None:
    raise CheckpointError(f'{name}: checkpoints of this kind have no such variable')
  experts, _, axes = pair.axes.rpartition(': ')
  shape = weight.shape[1:] if experts else weight.shape
  view = View(shape, parse_axes(axes) if axes else tuple((i,) for i in range(len(shape))))
  counts = (*weight.repeat_prefix, *weight.shape[: len(weight.shape) - len(shape)])
  for index in np.ndindex(*counts):
    stack = index[: len(weight.repeat_prefix)]  # A pipeline of several rounds has two stack dimensions.
    layer = first + step * (int(np.ravel_multi_index(stack, weight.repeat_prefix)) if stack else 0)
    yield Piece(pair.theirs.format(layer=layer, expert=index[-1] if experts else None), path, index, view)


_SHOWN = 3


def check_tensors(found: Mapping[str, StoredTensor], wanted: Iterable[Piece], where: str) -> None:
  """Checks that a checkpoint has exactly the tensors of a model.

  Raises:
    CheckpointError: a tensor is missing, left over or of another shape; the message names the first ones.
  """
  shapes = {piece.name: piece.view.their_shape for piece in wanted}
  missing = [name for name in shapes if name not in found]
  extra = [name for name in found if name not in shapes]
  for names, what in ((missing, 'lacks'), (extra, 'has tensors that its config.json does not account for:')):
    if names:
      more = f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''
      raise CheckpointError(f'{where} {what} {", ".join(names[:_SHOWN])}{more}')
  for name, shape in shapes.items():
    if found[name].shape != shape:
      raise CheckpointError(
        f'{found[name].file}: {name} has shape {list(found[name].shape)}, and config.json makes it {list(shape)}'
      )
