"""The guard of reshapes that merge dimensions, or divide one into several."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from praxis_lite.sharding.guards.arrays import whole
from praxis_lite.sharding.propagation import ArraySplit, Instance, count_parts

RESHAPE = 'stablehlo.reshape'


def guard_reshape(reshape: Instance) -> tuple[ArraySplit, ...] | None:
  """Gathers dimensions that a reshape merges or divides, if one of them is split unevenly.

  XLA aborts the process in many of these cases. Examples: on a mesh a 3 x b 4, `x.reshape(8, 4, 6, 2)` of x [32, 12]
  over ('a', 'b'), the result over (None, None, 'b'); on a mesh a 2 x b 3, `x.reshape(1, 63)` of x [3, 7, 3] over
  ('b', 'a'), the result over ('a', 'b'); on a mesh a 2, `x.reshape(5, 5)` of x [25, 1, 1], both over 'a'. XLA is right
  if only the first of the dimensions is sharded, as for 6 heads over 4 devices, and no dimension of the array has one
  entry. Then the reshape stays as it is.
  Tests: `test_reshapes_of_several_dimensions_that_do_not_divide`, `test_reshapes_to_one_row`,
  `test_reshapes_of_dimensions_of_one_entry`.
  """
  before, after = reshape.splits
  shapes = reshape.site.shapes
  if 0 in shapes[0]:
    return None
  groups = [(i, j) for i, j in factor_groups(*shapes) if _long(shapes[0], i) != _long(shapes[1], j)]
  split = [(i, j) for i, j in groups if any(before[dim] for dim in i) or any(after[dim] for dim in j)]
  is_known = len(split) == 1 and 1 not in (*shapes[0], *shapes[1])
  for i, j in split:
    is_first = not any(before[dim] for dim in i[1:]) and not any(after[dim] for dim in j[1:])
    is_uneven = _is_uneven(shapes[0], before, i) or _is_uneven(shapes[1], after, j)
    if is_uneven and not (is_known and is_first):
      before, after = whole(before, i), whole(after, j)
  return before, after


def _long(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
  """Returns the sizes of the dimensions `dims` that are larger than 1."""
  return [shape[dim] for dim in dims if shape[dim] > 1]


def _is_uneven(shape: Sequence[int], split: ArraySplit, dims: Sequence[int]) -> bool:
  return any(shape[dim] % count_parts(split[dim]) for dim in dims)


def factor_groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[range, range]]:
  """Yields pairs of groups of dimensions, one before and one after a reshape, that hold the same entries.

  The groups are as small as possible.
  """
  i = j = 0
  while i < len(before) or j < len(after):
    first, second = i, j
    i, j = min(i + 1, len(before)), min(j + 1, len(after))
    while (sizes := (math.prod(before[first:i]), math.prod(after[second:j])))[0] != sizes[1]:
      if sizes[0] < sizes[1]:
        i += 1
      else:
        j += 1
    yield range(first, i), range(second, j)
