"""Lists the ways to split arrays over the axes of a mesh."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from praxis_lite.partitioning.propagation import Axis, Split

# The name of each dimension of each array of an operation: the operands, then the results. Dimensions with the same name
# are split alike where the operation is local to each device; one without a name is whole there.
Dims = tuple[tuple[str | None, ...], ...]


def axes_of_mesh(shape: Sequence[int], parts: bool = True) -> tuple[Axis, ...]:
  """The axes 'a', 'b', ... of a mesh; one of 4 or 6, say, as its parts of 2 and 2, or 2 and 3, if wanted."""
  axes = []
  for name, size in zip('abcdef', shape):
    divisor = next((d for d in range(2, size) if size % d == 0), None) if parts else None
    if divisor is None:
      axes.append(Axis(name, size))
    else:
      axes += [Axis(name, divisor), Axis(name, size // divisor, divisor)]
  return tuple(axes)


def arrangements(axes: Sequence[Axis], places: int) -> Iterator[Split]:
  """Every way to put some of the axes, in every order, into a number of dimensions."""
  for number in range(len(axes) + 1):
    for chosen in itertools.permutations(axes, number):
      for cuts in itertools.combinations_with_replacement(range(number + 1), places - 1 if places else 0):
        bounds = (0, *cuts, number)
        if places:
          yield tuple(_joined(chosen[i:j]) for i, j in itertools.pairwise(bounds))
        elif not number:
          yield ()


def local_splits(axes: Sequence[Axis], dims: Dims) -> Iterator[tuple[Split, ...]]:
  """The splits with which an operation is local to each device, but for sums: those of one name are alike."""
  names = list(dict.fromkeys(name for array in dims for name in array if name is not None))
  for split in arrangements(axes, len(names)):
    of_name = dict(zip(names, split))
    yield tuple(tuple(of_name[name] if name is not None else () for name in array) for array in dims)


def all_splits(axes: Sequence[Axis], dims: Dims) -> Iterator[tuple[Split, ...]]:
  """Every combination of splits of the arrays."""
  return itertools.product(*(arrangements(axes, len(array)) for array in dims))


def _joined(axes: Sequence[Axis]) -> tuple[Axis, ...]:
  """Parts of an axis that follow each other are one."""
  joined: list[Axis] = []
  for axis in axes:
    last = joined[-1] if joined else None
    if last is not None and last.name == axis.name and last.before * last.size == axis.before:
      joined[-1] = Axis(axis.name, last.size * axis.size, last.before)
    else:
      joined.append(axis)
  return tuple(joined)
