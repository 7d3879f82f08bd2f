"""Maps the tensors of a checkpoint, and their dimensions, to variables. One table serves both directions.

    Pair('model.layers.{layer}.self_attn.q_proj.weight', 'transformer.layers.attention.query.w', 'D N H -> (N H) D')

says that the query weight [D, N, H] of a layer is stored transposed, with heads and dims per head in one dimension. The
letters only name dimensions. Several variables may share a tensor. Numbers count the entries of other variables:

    'D N H -> (2+N+1 H) D'      two other heads come before these, and one after
    'D N H -> D (1+.+1 N H)'    the second of three parts; `.` is a dimension of size 1 that the variable lacks
    'D N H -> 7|(N H)|9 D'      7 entries come before all heads and dims per head, and 9 after them
    'D (G R=2) H -> (G 1+R H) D'    the heads form groups of two, and the entries of one other head precede each group

Each `{layer}` has its own tensor, whether the layers are one stack or the children `layers_0`, `layers_1`, ... If the
layers repeat in a pattern, each of these children is a stack. The layers before the stacks are `first_0`, `first_1`,
..., and those after them `rest_0`, `rest_1`, ...
If a dimension stands before a colon, each of its entries, an `{expert}`, has its own tensor:

    Pair('model.layers.{layer}.experts.{expert}.up.weight', 'transformer.layers.ff.up', 'E: D F -> F D')
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from praxis_lite.bridges.hf.files import Tensor
from praxis_lite.common.errors import CheckpointError, first_names
from praxis_lite.common.trees import NestedDict, Path, leaves, path_name
from praxis_lite.sharding.weights import WeightHParams


class Extent(NamedTuple):
  """One of the dimensions that are joined in a dimension of a tensor.

  It has the entries of a dimension of the variable, between entries of other variables.
  """

  # The dimension of the variable; None if it has no such dimension, and so only one entry.
  axis: int | None
  before: int = 0  # The number of entries of other variables that come before the variable's own.
  after: int = 0  # The number of entries of other variables that come after them.


class Pair(NamedTuple):
  """One row of the table."""

  theirs: str  # Name of the tensor, with {layer} for the number of its layer, and {expert} for the number of an expert.
  ours: str  # Path of the variable below the network, without the number of the layer.
  # How the tensor's dimensions are made of the variable's, in the notation above; '' if they are the same.
  axes: str = ''


@dataclasses.dataclass(frozen=True)
class View:
  """A tensor, or part of one, seen with the dimensions of a variable."""

  shape: tuple[int, ...]  # Shape of the variable, in one layer and for one expert.
  groups: tuple[tuple[Extent, ...], ...]  # For each dimension of the tensor, its extents, outermost first.
  # For each dimension of the tensor, how many entries come before and after all of its extents; () if none do.
  around: tuple[tuple[int, int], ...] = ()
  # The dimension of the variable that is split into two for the extents: the groups, and the entries in a group. None
  # if there is no such dimension.
  parted: int | None = None
  num_in_group: int = 1  # How many entries of that dimension form a group.

  @classmethod
  def parse(cls, shape: tuple[int, ...], axes: str) -> View:
    """Returns the view that `Pair.axes` describes, without experts."""
    if not axes:
      return cls(shape, tuple((Extent(i),) for i in range(len(shape))))
    return cls(shape, parse_axes(axes), parse_around(axes), *_parse_parted(axes))

  @property
  def their_shape(self) -> tuple[int, ...]:
    """Shape of the whole tensor."""
    sizes = [math.prod(map(self._size, group)) for group in self.groups]
    return tuple(size + sum(around) for size, around in zip(sizes, self._around))

  @property
  def outermost(self) -> int:
    """The variable's dimension that is outermost in the tensor, so each of its entries is contiguous there."""
    axis = next(extent.axis for extent in self._extents if extent.axis is not None)
    return axis if self.parted is None or axis <= self.parted else axis - 1

  def read(self, tensor: Tensor, index: tuple[slice, ...]) -> np.ndarray:
    """Returns the part `index` of the variable; reads hardly more of the tensor than this part."""
    if self.parted is None:
      return self._read(tensor, index)
    at, size = self.parted, self.num_in_group
    low, high, _ = index[at].indices(self.shape[at])
    first = low // size
    groups = slice(first, max(first, -(-high // size)))
    part = self._read(tensor, (*index[:at], groups, slice(None), *index[at + 1 :]))
    joined = part.reshape(*part.shape[:at], part.shape[at] * size, *part.shape[at + 2 :])
    return joined[(*[slice(None)] * at, slice(low - first * size, high - first * size))]

  def _read(self, tensor: Tensor, index: tuple[slice, ...]) -> np.ndarray:
    their_index, split_shape, split_index = [], [], []
    for group, (before, _) in zip(self.groups, self._around):
      sizes, bounds = [self._size(extent) for extent in group], [self._bounds(extent, index) for extent in group]
      # If the part has one entry in each outer dimension, its range in the next dimension is contiguous.
      outer = next((i for i, (low, high) in enumerate(bounds) if high - low != 1), len(group) - 1)
      inner = math.prod(sizes[outer + 1 :])
      start = before + sum(low * math.prod(sizes[i + 1 :]) for i, (low, _) in enumerate(bounds[: outer + 1]))
      low, high = bounds[outer]
      their_index.append(slice(start, start + (high - low) * inner))
      split_shape += [*[1] * outer, high - low, *sizes[outer + 1 :]]
      split_index += [*[slice(None)] * (outer + 1), *(slice(*b) for b in bounds[outer + 1 :])]
    return self._ours(tensor.read(tuple(their_index)).reshape(split_shape)[tuple(split_index)])

  def write(self, theirs: np.ndarray, index: tuple[slice, ...], ours: np.ndarray) -> None:
    """Writes the part `index` of the variable into the whole tensor `theirs`, which must be contiguous."""
    if self.parted is None:
      self._within(theirs)[index] = ours
      return
    at = self.parted
    places: tuple[Any, ...] = np.divmod(np.arange(*index[at].indices(self.shape[at])), self.num_in_group)
    self._within(theirs)[(*index[:at], *places, *index[at + 1 :])] = ours

  def _within(self, theirs: np.ndarray) -> np.ndarray:
    """Returns the variable's part of the whole tensor `theirs`, as a NumPy view."""
    whole = tuple(slice(0, size) for size in self._seen)
    theirs = _part(theirs, (slice(before, n - after) for n, (before, after) in zip(theirs.shape, self._around)))
    split = theirs.reshape([self._size(extent) for extent in self._extents])
    return self._ours(_part(split, (slice(*self._bounds(extent, whole)) for extent in self._extents)))

  def _ours(self, split: np.ndarray) -> np.ndarray:
    """Returns a view of `split`, which has a dimension for each extent; the view has the variable's dimensions."""
    axes = [extent.axis for extent in self._extents]
    whole = _part(split, (0 if axis is None else slice(None) for axis in axes))
    kept = [axis for axis in axes if axis is not None]
    return whole.transpose([kept.index(i) for i in range(len(self._seen))])

  @property
  def _seen(self) -> tuple[int, ...]:
    """The shape of the variable; the dimension `parted` counts as two, the groups and the entries of a group."""
    if self.parted is None:
      return self.shape
    at, size = self.parted, self.num_in_group
    return (*self.shape[:at], self.shape[at] // size, size, *self.shape[at + 1 :])

  @property
  def _around(self) -> tuple[tuple[int, int], ...]:
    return self.around or ((0, 0),) * len(self.groups)

  @property
  def _extents(self) -> list[Extent]:
    return [extent for group in self.groups for extent in group]

  def _size(self, extent: Extent) -> int:
    return extent.before + (1 if extent.axis is None else self._seen[extent.axis]) + extent.after

  def _bounds(self, extent: Extent, index: tuple[slice, ...]) -> tuple[int, int]:
    low, high = (0, 1) if extent.axis is None else index[extent.axis].indices(self._seen[extent.axis])[:2]
    return extent.before + low, extent.before + high


def _part(x: np.ndarray, index: Iterable[int | slice]) -> np.ndarray:
  """Returns x[index] as a view, even if this is a single number."""
  at: Any = (*index, ...)
  return x[at]


@functools.cache
def parse_axes(axes: str) -> tuple[tuple[Extent, ...], ...]:
  """Returns the extents of each dimension of a tensor, outermost first.

  'D N H -> D (1+.+1 N H)' gives ((Extent(0),), (Extent(None, 1, 1), Extent(1), Extent(2))).
  """
  ours, theirs = axes.split(' -> ')
  names = _NAME.findall(ours)

  def parse(text: str) -> Extent:
    name = re.fullmatch(r'(?:(\d+)\+)?([A-Za-z.])(?:\+(\d+))?', text)
    assert name is not None, axes
    axis = None if name[2] == '.' else names.index(name[2])
    return Extent(axis, int(name[1] or 0), int(name[3] or 0))

  groups = _GROUP.findall(theirs)
  return tuple(tuple(parse(name) for name in (group or single).split()) for _, group, single, _ in groups)


def parse_around(axes: str) -> tuple[tuple[int, int], ...]:
  """Returns how many entries come before and after each dimension: ((7, 9), (0, 0)) for 'D N H -> 7|(N H)|9 D'."""
  return tuple((int(before or 0), int(after or 0)) for before, *_, after in _GROUP.findall(axes.split(' -> ')[1]))


def _parse_parted(axes: str) -> tuple[int | None, int]:
  """Returns `View.parted` and `View.num_in_group`: (1, 2) for 'D (G R=2)', (None, 1) if no dimension is parted."""
  ours, _ = axes.split(' -> ')
  size = re.search(r'=(\d+)\)', ours)
  return (None, 1) if size is None else (len(_NAME.findall(ours[: ours.index('(')])), int(size[1]))


_NAME = re.compile(r'[A-Za-z]')
_GROUP = re.compile(r'(?:(\d+)\|)?(?:\(([^)]*)\)|([^\s|]+))(?:\|(\d+))?')


class Piece(NamedTuple):
  """A part of a variable, and the tensor that holds it. The part is a layer of a stack or an expert, or all of it."""

  name: str  # Name of the tensor.
  path: Path  # Path of the variable.
  at: tuple[int, ...]  # Index along the first dimensions of the variable, its layers and experts; () if it has neither.
  view: View  # Says where in the tensor the variable's entries are.

  def box(self, inside: Sequence[slice]) -> tuple[slice, ...]:
    """Returns the index, within the variable, of the part `inside` of this piece."""
    return (*(slice(i, i + 1) for i in self.at), *inside)


def pieces(table: Iterable[Pair], weights: NestedDict) -> dict[Path, list[Piece]]:
  """Returns the pieces of each declared variable of a network, in the order of their indices.

  Raises CheckpointError if the table has no row for a variable.
  """
  rows, declared = {pair.ours: pair for pair in table}, leaves(weights)
  order = _layer_order(declared)
  return {path: list(_pieces_of(rows, path, weight, order)) for path, weight in declared.items()}


def add_copies(found: dict[Path, list[Piece]], copies: Mapping[str, str]) -> dict[Path, list[Piece]]:
  """Returns the pieces to write: `found`, with each piece of an original tensor once more under the name of its copy.

  `copies` is {copy: original}.
  """
  again = {
    path: [p._replace(name=c) for p in of for c, o in copies.items() if p.name == o] for path, of in found.items()
  }
  return {path: [*of, *again[path]] for path, of in found.items()}


class _LayerOrder(NamedTuple):
  """The order of layers: `first_0`, ...; then `layers_0`, ..., which may be stacks; then `rest_0`, ..."""

  # For each of these names, the number of its first layer. If there is a single stack, its name is `layers`.
  start: dict[str, int]
  period: int  # The difference of the numbers of successive layers in one of the stacks `layers_0`, ...


def _layer_order(declared: Mapping[Path, WeightHParams]) -> _LayerOrder:
  counts = {
    match[1]: math.prod(weight.repeat_prefix)
    for path, weight in declared.items()
    if (match := _NUMBERED.search(path_name(path)))
  }
  of_kind = {kind: [name for name in counts if name.startswith(kind)] for kind in ('first', 'layers')}
  num_first = len(of_kind['first'])
  before = {'first': 0, 'layers': num_first, 'rest': num_first + sum(counts[name] for name in of_kind['layers'])}
  kinds = {name: name.split('_') for name in counts}
  start = {name: before[kind] + int(number) for name, (kind, number) in kinds.items()}
  return _LayerOrder(start | {'layers': num_first}, len(of_kind['layers']))


_NUMBERED = re.compile(r'\.((?:first|layers|rest)_\d+)\.')


def path_in_table(path: Path) -> str:
  """Returns the path of a variable as `Pair.ours` has it, without the number of its layer."""
  return _NUMBERED.sub('.layers.', path_name(path))


def _pieces_of(rows: Mapping[str, Pair], path: Path, weight: WeightHParams, order: _LayerOrder) -> Iterator[Piece]:
  name = path_name(path)
  number = _NUMBERED.search(name)
  first, step = (order.start[number[1]], order.period) if number else (order.start['layers'], 1)
  pair = rows.get(path_in_table(path))
  if pair is None:
    raise CheckpointError(f'{name}: checkpoints of this kind have no such variable')
  experts, _, axes = pair.axes.rpartition(': ')
  shape = weight.shape[1:] if experts else weight.shape
  view = View.parse(shape, axes)
  counts = (*weight.repeat_prefix, *weight.shape[: len(weight.shape) - len(shape)])
  for index in np.ndindex(*counts):
    stack = index[: len(weight.repeat_prefix)]  # A pipeline of several rounds has two stack dimensions.
    layer = first + step * (int(np.ravel_multi_index(stack, weight.repeat_prefix)) if stack else 0)
    yield Piece(pair.theirs.format(layer=layer, expert=index[-1] if experts else None), path, index, view)


_SHOWN = 3


def check_tensors(found: Mapping[str, Tensor], wanted: Iterable[Piece], where: str) -> None:
  """Checks that a checkpoint has exactly the tensors of a model.

  Raises:
    CheckpointError: a tensor is missing, left over or of another shape; the message names the first ones.
  """
  shapes = {piece.name: piece.view.their_shape for piece in wanted}
  missing = [name for name in shapes if name not in found]
  extra = [name for name in found if name not in shapes]
  for names, what in ((missing, 'lacks'), (extra, 'has tensors that its config.json does not account for:')):
    if names:
      raise CheckpointError(f'{where} {what} {first_names(names, _SHOWN)}')
  for name, shape in shapes.items():
    if found[name].shape != shape:
      raise CheckpointError(
        f'{found[name].file}: {name} has shape {list(found[name].shape)}, and config.json makes it {list(shape)}'
      )
