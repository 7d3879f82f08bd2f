"""Results of a program: how each device's part is read afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from praxis_lite.sharding.propagation import Axis, Split, num_parts

RETURN = 'func.return'


def guard_results(shapes: Sequence[Sequence[int]], splits: Sequence[Split]) -> tuple[Split, ...]:
  """Splits the dimensions of results over no more axes than they divide by.

  Where `out_shardings` leaves it open how a result is split, XLA splits what does not divide over part of an axis. A
  `NamedSharding` cannot say so: from 0.11 on JAX refuses the program after it has compiled it, with an error of its
  own parts; before, it took the result for replicated. On a mesh a 4: `with_sharding_constraint(x, P('a'))` of 2 rows,
  as the last thing. Test: `test_results_that_do_not_divide`.
  """
  return tuple(tuple(map(_that_divide, shape, split)) for shape, split in zip(shapes, splits))


def _that_divide(size: int, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
  """The first axes of a dimension, as many as it divides by."""
  return max((axes[:n] for n in range(len(axes) + 1) if size % num_parts(axes[:n]) == 0), key=len)
