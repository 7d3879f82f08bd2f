"""Guards of matrix products, and of transposes, which XLA merges with products."""

from __future__ import annotations

from collections.abc import Sequence

from praxis_lite.common.jax_internals.mlir import ir, stablehlo
from praxis_lite.sharding.propagation import ArraySplit, Axis, Instance

# The name of each dimension of each array. Dimensions with the same name have the same index in the product.
Names = tuple[Sequence[str | None], ...]


def guard_product(product: Instance) -> tuple[ArraySplit, ...]:
  """Makes a product local: each device multiplies its parts of the operands, and the partial results are summed.

  For products that are not local, XLA groups the devices by some of the axes, and orders them within a group by the
  other axes. That order can differ from the order of the result. On a mesh r 2 x d 2 x m 2, rows come back permuted:

      y[b, c] = sum_v x[b, v] w[c, v]        x, y over (('r', 'd'), 'm')        w over ('d', 'm')

  On a mesh a 2 x b 2 x c 3, the result is wrong because of the axis of 3; an axis of 5 has the same effect:

      y[b, t, d] = sum_f x[b, t, f] w[f, d]  x over ('b', None, 'a')  w over ('b', 'a')  y over (None, 'a', 'c')

  Tests: `test_product_with_a_weight_over_one_of_two_row_axes`, `test_product_beside_an_axis_of_3`.

  On a mesh of four axes, even a product in which only one operand has to be gathered can be wrong. One example is the
  gradient of w in y = einsum('hge,egfj->jfh', x, w) on 2 x 2 x 2 x 2, x over ('a', 'c', 'd'), w over ('d', None, 'c',
  'b'). Three axes behave like four if only a part of one splits an array. An example on a 2 x b 4 x c 2 is y[b, c] =
  sum_v x[b, v] w[v, c], x over (('a', minor half of 'b'), 'c'), w over ('c', ('a', major half of 'b')), y over (None,
  ('a', major half of 'b')). Tests: `test_gradient_of_a_product_of_which_one_operand_is_gathered`,
  `test_products_over_parts_of_an_axis`.
  """
  names = _names(product.site.op)
  return product.splits if is_nearly_local(product.splits, names, product.site.mesh) else product.compatible


def guard_transpose(transpose: Instance) -> tuple[ArraySplit, ...]:
  """Splits each dimension in the same way before and after a transpose.

  XLA folds transposes into products before it partitions them, so a transpose that changes the split of a dimension
  would change the split of a product.
  """
  return transpose.compatible


def is_nearly_local(splits: Sequence[ArraySplit], names: Names, mesh: Sequence[Axis]) -> bool:
  """Whether an operation is local except for sums and for one array.

  That array may be an operand that is gathered first, or the result, which may afterwards be split further by one axis.
  The conditions are:

  * Dimensions of the same name are split alike in the other arrays. Each axis splits dimensions of one name only.
  * Dimensions without a name are not split.
  * The result is split further by at most one axis. With several axes, XLA permutes parts of the result: on a mesh a 2
    x b 2 x c 3, x over (None, 'a'), w over ('a', None), y over ('a', ('c', 'b')).
  * A dimension that all arrays have is split alike in all of them. Otherwise y[g, h, b] = sum_v x[g, h, b, v]
    w[g, h, v] is wrong on that mesh, x over (None, None, 'a', 'b'), w over ('a', None, 'b'), y over (None, None, 'a').
    Test: `test_products_of_matrices_in_two_dimensions`.

  `tools/enumerate_splits.py --class` runs every case of this class for products of matrices, single and in batches, on
  meshes of three axes. docs/xla-partitioner-faults.md has the meshes, sizes, releases of JAX and counts. Products whose
  operands have two free dimensions, and convolutions, were sampled.
  """
  if _num_axes(mesh, splits) > 3:  # With more axes, products with a gathered operand were wrong: see `guard_product`.
    return False
  if any(name is None and axes for array, split in zip(names, splits) for name, axes in zip(array, split)):
    return False
  return any(_is_local_but(i, names, splits) for i in range(len(splits)))


def _num_axes(mesh: Sequence[Axis], splits: Sequence[ArraySplit]) -> int:
  """Returns the number of mesh axes. If splits use parts of an axis, each part counts as one axis."""
  ends = {axis.name: {1, axis.size} for axis in mesh}
  for axis in (axis for split in splits for axes in split for axis in axes):
    ends[axis.name] |= {axis.before, axis.before * axis.size}
  return sum(len(of_axis) - 1 for of_axis in ends.values())


def _is_local_but(moved: int, names: Names, splits: Sequence[ArraySplit]) -> bool:
  entries: dict[str | None, tuple[Axis, ...]] = {}
  for i, (array, split) in enumerate(zip(names, splits)):
    if i != moved and any(entries.setdefault(name, axes) != axes for name, axes in zip(array, split)):
      return False
  used = [axis.name for axes in entries.values() for axis in axes]
  pairs = [(entries.get(name, ()), axes) for name, axes in zip(names[moved], splits[moved])]
  num_further = sum(len(axes) - len(first) for first, axes in pairs)
  if any(first != axes for name, (first, axes) in zip(names[moved], pairs) if all(name in array for array in names)):
    return False
  return (
    len(used) == len({*used})
    and all(axes[: len(first)] == first for first, axes in pairs)
    and (moved < len(splits) - 1 or num_further <= 1)
  )


def _names(product: ir.Operation) -> Names:
  numbers = stablehlo.DotDimensionNumbers(product.attributes['dot_dimension_numbers'])
  left, right = ([f'{side} {i}' for i in range(x.type.rank)] for side, x in zip(('left', 'right'), product.operands))
  for kind in ('batching', 'contracting'):
    pairs = zip(*(getattr(numbers, f'{side}_{kind}_dimensions') for side in ('lhs', 'rhs')))
    for n, (i, j) in enumerate(pairs):
      left[i] = right[j] = f'{kind} {n}'
  batch = [f'batching {n}' for n in range(len(numbers.lhs_batching_dimensions))]
  return left, right, [*batch, *(name for name in (*left, *right) if name.startswith(('left', 'right')))]
