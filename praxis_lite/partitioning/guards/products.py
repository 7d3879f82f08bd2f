"""Products of matrices, and transposes, which XLA joins with them."""

from __future__ import annotations

from collections.abc import Sequence

from praxis_lite.jax_internals.mlir import ir, stablehlo
from praxis_lite.partitioning.propagation import Axis, Instance, Split

# The name of each dimension of each array; dimensions with the same name are multiplied, summed or written together.
Names = tuple[Sequence[str | None], ...]


def guard_product(product: Instance) -> tuple[Split, ...]:
  """Each device multiplies its parts of the operands, and parts are summed.

  XLA groups the devices of other products by some of the axes, and takes the others in an order that need not be that
  of the result. Rows come back permuted on a mesh r 2 x d 2 x m 2:

      y[b, c] = sum_v x[b, v] w[c, v]        x, y over (('r', 'd'), 'm')        w over ('d', 'm')

  or are wrong beside an axis of 3 or 5, on a mesh a 2 x b 2 x c 3:

      y[b, t, d] = sum_f x[b, t, f] w[f, d]  x over ('b', None, 'a')  w over ('b', 'a')  y over (None, 'a', 'c')

  Tests: `test_product_with_a_weight_over_one_of_two_row_axes`, `test_product_beside_an_axis_of_3`.
  """
  return local(product, _names(product.site.op))


def guard_transpose(transpose: Instance) -> tuple[Split, ...]:
  """Dimensions are split alike before and after: XLA folds transposes into products before it partitions them, so one
  that splits them otherwise would change how a product is split."""
  return transpose.compatible


def local(operation: Instance, names: Names) -> tuple[Split, ...]:
  """Splits with which each device computes its part of an operation from its parts of the operands, but for sums.

  In all dimensions with the same name arrays are split alike, and no axis splits two that have different names. Those
  without a name are whole. Such splits are Shardy's; where it has found none, no array is split.

  An operand that would only have to be gathered, or a result that would only be split further, is no exception: XLA
  permutes some of them, on a mesh a 2 x b 2 x c 2 x d 2 with x over (('c', 'd'), 'a'), w over ('a', ('b', 'd')) and y
  over (('c', 'd'), 'b'). Stated apart, they cost what they cost within. Test:
  `test_gradient_of_a_product_of_which_one_operand_is_gathered`.
  """
  found = tuple(
    tuple(() if name is None else axes for name, axes in zip(array, split))
    for array, split in zip(names, operation.compatible)
  )
  entries: dict[str | None, tuple[Axis, ...]] = {None: ()}
  pairs = [pair for array, split in zip(names, found) for pair in zip(array, split)]
  agree = all(entries.setdefault(name, axes) == axes for name, axes in pairs)
  used = [axis for axes in entries.values() for axis in axes]
  return found if agree and len(used) == len({*used}) else tuple(((),) * len(split) for split in found)


def _names(product: ir.Operation) -> Names:
  numbers = stablehlo.DotDimensionNumbers(product.attributes['dot_dimension_numbers'])
  left, right = ([f'{side} {i}' for i in range(x.type.rank)] for side, x in zip(('left', 'right'), product.operands))
  for kind in ('batching', 'contracting'):
    pairs = zip(*(getattr(numbers, f'{side}_{kind}_dimensions') for side in ('lhs', 'rhs')))
    for n, (i, j) in enumerate(pairs):
      left[i] = right[j] = f'{kind} {n}'
  batch = [f'batching {n}' for n in range(len(numbers.lhs_batching_dimensions))]
  return left, right, [*batch, *(name for name in (*left, *right) if name.startswith(('left', 'right')))]
