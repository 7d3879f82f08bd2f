"""Products of matrices, and transposes, which XLA joins with them."""

from __future__ import annotations

from collections.abc import Sequence

from praxis_lite.common.jax_internals.mlir import ir, stablehlo
from praxis_lite.sharding.propagation import Axis, Instance, Split

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

  On a mesh of four axes it does not suffice that only one operand has to be gathered: the gradient of w in
  y = einsum('hge,egfj->jfh', x, w) on 2 x 2 x 2 x 2 was wrong, x over ('a', 'c', 'd'), w over ('d', None, 'c', 'b').
  The same is true of three axes where part of one splits an array: of y[b, c] = sum_v x[b, v] w[v, c] on a 2 x b 4 x
  c 2, x over (('a', minor half of 'b'), 'c'), w over ('c', ('a', major half of 'b')), y over (None, ('a', major half of
  'b')). Tests: `test_gradient_of_a_product_of_which_one_operand_is_gathered`, `test_products_over_parts_of_an_axis`.
  """
  names = _names(product.site.op)
  return product.splits if is_nearly_local(product.splits, names, product.site.mesh) else product.compatible


def guard_transpose(transpose: Instance) -> tuple[Split, ...]:
  """Dimensions are split alike before and after: XLA folds transposes into products before it partitions them, so one
  that splits them otherwise would change how a product is split."""
  return transpose.compatible


def is_nearly_local(splits: Sequence[Split], names: Names, mesh: Sequence[Axis]) -> bool:
  """Whether an operation needs no communication but sums, once one of its arrays is split less: an operand is gathered
  first, or the result is split further, by one axis.

  In all dimensions with the same name the other arrays are split alike, and no axis splits two that have different
  names. Those without a name are whole. Where a result is split further by several axes, XLA permutes some of it: on a
  mesh a 2 x b 2 x c 3, x over (None, 'a'), w over ('a', None), y over ('a', ('c', 'b')). In a dimension that all arrays
  have none is split further: there y[g, h, b] = sum_v x[g, h, b, v] w[g, h, v] is wrong on that mesh, x over (None,
  None, 'a', 'b'), w over ('a', None, 'b'), y over (None, None, 'a').
  Test: `test_products_of_matrices_in_two_dimensions`.

  This class was enumerated for products of matrices, one by one and in batches: each case was run on meshes of three
  axes. `tools/enumerate_splits.py --class` does so, and docs/xla-partitioner-faults.md has the meshes, sizes, releases
  of JAX and counts. Products with two free dimensions of an operand, and convolutions, were sampled.
  """
  if _num_axes(mesh, splits) > 3:  # There an operand that is gathered was wrong: see `guard_product`.
    return False
  if any(name is None and axes for array, split in zip(names, splits) for name, axes in zip(array, split)):
    return False
  return any(_is_local_but(i, names, splits) for i in range(len(splits)))


def _num_axes(mesh: Sequence[Axis], splits: Sequence[Split]) -> int:
  """How many axes a mesh has if each part of an axis that splits an array is one, and so is what is left of it."""
  ends = {axis.name: {1, axis.size} for axis in mesh}
  for axis in (axis for split in splits for axes in split for axis in axes):
    ends[axis.name] |= {axis.before, axis.before * axis.size}
  return sum(len(of_axis) - 1 for of_axis in ends.values())


def _is_local_but(moved: int, names: Names, splits: Sequence[Split]) -> bool:
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
