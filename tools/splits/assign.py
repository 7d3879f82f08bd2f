"""Lists the ways to split the arrays of an operation over the axes of a mesh."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

from praxis_lite.sharding.guards.arrays import join_axes
from praxis_lite.sharding.guards.products import is_nearly_local
from praxis_lite.sharding.propagation import ArraySplit, Axis

# The name of each dimension of each array: of the operands, then of the results. If an operation is local to each
# device, dimensions with the same name are split alike, and dimensions without a name are not split.
Dims = tuple[tuple[str | None, ...], ...]
Splits = tuple[ArraySplit, ...]  # How each array of an operation is split.


def axes_of_mesh(shape: Sequence[int]) -> tuple[Axis, ...]:
  """Returns the axes 'a', 'b', ... of a mesh. A composite axis is returned in two parts: 4 as 2 and 2, 6 as 2 and 3."""
  return ways_to_part(shape)[0]


def ways_to_part(shape: Sequence[int]) -> list[tuple[Axis, ...]]:
  """Returns every way to take apart the composite axes of a mesh: 6, for example, as 2 and 3 or as 3 and 2."""
  ways: list[list[tuple[Axis, ...]]] = []
  for name, size in zip('abcdef', shape):
    divisors = [d for d in range(2, size) if size % d == 0]
    ways.append([(Axis(name, d), Axis(name, size // d, d)) for d in divisors] or [(Axis(name, size),)])
  return [tuple(itertools.chain(*way)) for way in itertools.product(*ways)]


def arrangements(axes: Sequence[Axis], places: int) -> list[ArraySplit]:
  """Returns every way to place some of the axes, in every order, on a number of dimensions."""
  if not places:
    return [()]
  found: dict[ArraySplit, None] = {}
  for number in range(len(axes) + 1):
    for chosen in itertools.permutations(axes, number):
      for cuts in itertools.combinations_with_replacement(range(number + 1), places - 1):
        found[tuple(join_axes(chosen[i:j]) for i, j in itertools.pairwise((0, *cuts, number)))] = None
  return [*found]


def local(axes: Sequence[Axis], dims: Dims) -> list[Splits]:
  """Returns the splits for which an operation is local to each device, except for sums: equal names are split alike."""
  names = list(dict.fromkeys(name for array in dims for name in array if name is not None))
  found = []
  for split in arrangements(axes, len(names)):
    of_name = dict(zip(names, split))
    found.append(tuple(tuple(of_name[name] if name is not None else () for name in array) for array in dims))
  return found


def nearly_local(axes: Sequence[Axis], dims: Dims, most: int) -> list[Splits]:
  """Returns at most `most` random local splits in which one array is split further over other axes."""
  rng, every, found = random.Random(0), local(axes, dims), dict[Splits, None]()
  for _ in range(most):
    splits, i = rng.choice(every), rng.randrange(len(dims))
    used = [part for entry in splits[i] for part in entry]
    free = [axis for axis in axes if not any(_overlap(axis, part) for part in used)]
    more = rng.choice(arrangements(free, len(dims[i])))
    found[(*splits[:i], tuple(join_axes((*x, *y)) for x, y in zip(splits[i], more)), *splits[i + 1 :])] = None
  return [*found]


def _overlap(axis: Axis, part: Axis) -> bool:
  return axis.name == part.name and part.before <= axis.before < part.before * part.size


def left_as_stated(shape: Sequence[int], dims: Dims) -> list[Splits]:
  """Returns all splits of a product on a mesh that the guards do not change: the class of `is_nearly_local`.

  These are all assignments of axes, and of the two parts of an axis, to the dimensions of a local operation, in all
  orders if several axes split one dimension. In addition, one of the arrays is split over the remaining axes in every
  way. No case is left out because of a symmetry: XLA numbers devices in the order of the mesh, so two axes of the same
  size differ.
  """
  mesh = [Axis(name, size) for name, size in zip('abcdef', shape)]
  found = dict[Splits, None]()
  for axes in ways_to_part(shape):
    for splits in local(axes, dims):
      for i, split in enumerate(splits):
        used = [part for entry in split for part in entry]
        free = [axis for axis in axes if not any(_overlap(axis, part) for part in used)]
        for more in arrangements(free, len(split)):
          further = (*splits[:i], tuple(join_axes((*x, *y)) for x, y in zip(split, more)), *splits[i + 1 :])
          if further not in found and is_nearly_local(further, dims, mesh):
            found[further] = None
  return [*found]


def combinations_of_splits(axes: Sequence[Axis], dims: Dims, most: int) -> list[Splits]:
  """Returns all combinations of splits of the arrays, or `most` random ones if there are more."""
  ways = [arrangements(axes, len(array)) for array in dims]
  if math.prod(map(len, ways)) <= most:
    return [*itertools.product(*ways)]
  rng = random.Random(0)
  return [*dict.fromkeys(tuple(map(rng.choice, ways)) for _ in range(most))]


def format_splits(splits: Splits) -> str:
  """Returns a line such as "(a:1x2)(b:1x3) (a:2x2)()". 1x2 is the major half of an axis of 4, and 2x2 the minor."""
  return ' '.join(''.join(f'({" ".join(map(_format_axis, axes))})' for axes in split) or '-' for split in splits)


def _format_axis(axis: Axis) -> str:
  return f'{axis.name}:{axis.before}x{axis.size}'


def make_cases(axes: Sequence[Axis], dims: Dims, most: int) -> Iterator[Splits]:
  """Yields up to `most` local splits, as many nearly local ones, and as many others, each once."""
  every = local(axes, dims)
  first = every if len(every) <= most else random.Random(0).sample(every, most)
  yield from dict.fromkeys([*first, *nearly_local(axes, dims, most), *combinations_of_splits(axes, dims, most)])
