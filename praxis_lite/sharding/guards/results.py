"""The guard of a program's results: makes their splits such that JAX can say which part of an array a device has."""

from __future__ import annotations

from collections.abc import Sequence

from praxis_lite.sharding.propagation import ArraySplit, Axis, count_parts

RETURN = 'func.return'


def guard_results(shapes: Sequence[Sequence[int]], splits: Sequence[ArraySplit]) -> tuple[ArraySplit, ...]:
  """Splits each dimension of a result only over axes that divide it evenly.

  If `out_shardings` does not say how a result is split, XLA may split an uneven dimension over a part of an axis, which
  a `NamedSharding` cannot express. Since release 0.11, JAX then compiles the program and raises an internal error;
  earlier releases treated the result as replicated. Example: on a mesh a 4, a program that ends with
  `with_sharding_constraint(x, P('a'))`, where x has 2 rows. Test: `test_results_that_do_not_divide`.
  """
  return tuple(tuple(map(_that_divide, shape, split)) for shape, split in zip(shapes, splits))


def _that_divide(size: int, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
  """Returns the longest prefix of `axes` that divides `size`."""
  return max((axes[:n] for n in range(len(axes) + 1) if size % count_parts(axes[:n]) == 0), key=len)
