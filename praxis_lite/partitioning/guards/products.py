"""Products of matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from praxis_lite.jax_internals.mlir import ir, stablehlo
from praxis_lite.partitioning.guards.arrays import PRODUCT, axes_of, integers
from praxis_lite.partitioning.propagation import Axis, Instance, Split, num_parts

# The axes of each dimension of an array, by the name of the dimension in the product.
_Entries = dict[str, tuple[Axis, ...]]


def guard_product(
  product: Instance, transposes: Mapping[ir.Operation, Instance] | None = None
) -> tuple[Split, ...] | None:
  """Keeps rows of a product from coming back permuted. On a mesh r 2 x d 2 x m 2:

      y[b, c] = sum_v x[b, v] w[c, v]        x, y over (('r', 'd'), 'm')        w over ('d', 'm')

  XLA groups the devices by an axis that splits both a contracted dimension and a dimension of the product (m), and
  takes the others in the order of the larger operand, which need not be that of the product. It folds transposes into
  products, so a product is looked at with those too. Where neither operand, or only one, has to be communicated, the
  product is right. Test: `test_product_with_a_weight_over_one_of_two_row_axes`. Convolutions without groups become
  products in XLA, with the same fault. Test: `test_convolution_that_is_a_permuted_product`.
  """
  one_moves = sum(old != new for old, new in zip(product.splits[:2], product.compatible)) < 2
  if not (one_moves and product.splits[2] == product.compatible[2]) and _permutes(product, product.splits):
    return product.compatible
  folded = _with_transposes(product, transposes or {})
  if folded != product.splits and not _is_local(_by_kind(product, folded)) and _permutes(product, folded):
    return product.compatible
  return None


def _permutes(product: Instance, splits: Sequence[Split]) -> bool:
  """Whether XLA may permute rows of the product of arrays with these splits. False was right in all of many thousands
  of random products, with three axes and with two."""
  left, right, out = kinds = _by_kind(product, splits)
  sums_left, sums_right = _summed(left), _summed(right)
  axes_left, axes_right, axes_out = map(axes_of, (sums_left, sums_right, out.values()))
  if any(not left[key] == right[key] == out[key] for key in left.keys() & right.keys() & out.keys()):
    return bool((axes_left | axes_right) & axes_out)
  sizes = [
    math.prod(-(-n // num_parts(axes)) for n, axes in zip(shape, split))
    for shape, split in zip(product.site.shapes, splits)
  ]
  for entry in map(frozenset, out.values()):
    if not entry or not (entry <= axes_left or entry <= axes_right):
      continue
    if sums_left != sums_right and entry <= axes_left & axes_right:
      return True
    summed = axes_left if entry <= axes_left else axes_right
    if summed - axes_out:
      continue  # A sum over more axes than those is done first.
    if sums_left == sums_right and len(summed) > 1:
      return True
    order_left, order_right, order_out = (_order(array.values(), entry, product.site.mesh) for array in kinds)
    larger_left, larger_right = (
      (True, True) if sums_left != sums_right else (sizes[0] >= sizes[1], sizes[1] >= sizes[0])
    )
    if (larger_left and order_left != order_out) or (larger_right and order_right != order_out):
      return True
  return False


def keeps_product(product: Instance) -> bool:
  """Whether a product that is right might not be if XLA split its result in another way: one whose arrays differ in
  the order of the axes that are summed over."""
  kinds = left, right, _ = _by_kind(product, product.splits)
  summed = frozenset.intersection(*(axes_of(_summed(operand)) for operand in (left, right)))
  orders = [_order(array.values(), summed, product.site.mesh) for array in kinds]
  return bool(summed) and orders != orders[:1] * 3


def _by_kind(product: Instance, splits: Sequence[Split]) -> tuple[_Entries, _Entries, _Entries]:
  """The entries of left, right and out: dimensions with the same name are multiplied, summed or written together."""
  names = _names(product.site.op) if product.site.op.name == PRODUCT else _names_of_convolution(product.site.op)
  left, right, out = (dict(zip(keys, split)) for keys, split in zip(names, splits))
  return left, right, out


def _names(product: ir.Operation) -> tuple[list[str], list[str], list[str]]:
  numbers = stablehlo.DotDimensionNumbers(product.attributes['dot_dimension_numbers'])
  left, right = ([f'{side} {i}' for i in range(x.type.rank)] for side, x in zip(('left', 'right'), product.operands))
  for kind in ('batching', 'contracting'):
    pairs = zip(*(getattr(numbers, f'{side}_{kind}_dimensions') for side in ('lhs', 'rhs')))
    for n, (i, j) in enumerate(pairs):
      left[i] = right[j] = f'{kind} {n}'
  batch = [f'batching {n}' for n in range(len(numbers.lhs_batching_dimensions))]
  return left, right, [*batch, *(name for name in (*left, *right) if name.startswith(('left', 'right')))]


def _names_of_convolution(convolution: ir.Operation) -> tuple[list[str], list[str], list[str]]:
  """A convolution without groups is a product of rows and channels for each place of its window."""
  numbers = stablehlo.ConvDimensionNumbers(convolution.attributes['dimension_numbers'])
  left, right, out = (
    [f'{side} {i}' for i in range(convolution.operands[0].type.rank)] for side in ('left', 'right', 'out')
  )
  left[numbers.input_batch_dimension] = out[numbers.output_batch_dimension] = 'rows'
  right[numbers.kernel_output_feature_dimension] = out[numbers.output_feature_dimension] = 'channels'
  left[numbers.input_feature_dimension] = right[numbers.kernel_input_feature_dimension] = 'contracting'
  return left, right, out


def _summed(operand: _Entries) -> list[tuple[Axis, ...]]:
  """The entries of the dimensions that are summed over, in the same order for both operands."""
  return [operand[key] for key in sorted(operand) if key.startswith('contracting')]


def _is_local(kinds: tuple[_Entries, _Entries, _Entries]) -> bool:
  """Whether each device computes its part of a product from its parts of the operands, but for sums."""
  every: _Entries = {}
  for array in kinds:
    every |= array
  used = [axis for axes in every.values() for axis in axes]
  return len(used) == len(set(used)) and all(array[key] == every[key] for array in kinds for key in array)


def _with_transposes(product: Instance, transposes: Mapping[ir.Operation, Instance]) -> tuple[Split, ...]:
  """The splits of a product's arrays before operands are transposed, and after the result is."""
  splits = [*product.splits]
  for i, value in enumerate(product.site.op.operands):
    before = None if isinstance(value.owner, ir.Block) else transposes.get(value.owner.operation)
    if before is not None:
      splits[i] = tuple(before.splits[0][dim] for dim in _permutation(before))
  users = [transposes.get(use.owner.operation) for use in product.site.op.results[0].uses]
  if len(users) == 1 and users[0] is not None:
    order = _permutation(users[0])
    splits[2] = tuple(users[0].splits[1][order.index(dim)] for dim in range(len(order)))
  return tuple(splits)


def _permutation(transpose: Instance) -> list[int]:
  return integers(transpose.site.op, 'permutation')


def _order(entries: Iterable[tuple[Axis, ...]], without: frozenset[Axis], mesh: Sequence[Axis]) -> list[Axis]:
  """The axes of an array in the order of its dimensions, then those that it is replicated over."""
  used = [axis for axes in entries for axis in axes]
  names = {axis.name for axis in used}
  return [axis for axis in (*used, *(a for a in mesh if a.name not in names)) if axis not in without]
