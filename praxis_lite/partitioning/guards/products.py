"""Products of matrices, and transposes, which XLA joins with them."""

from __future__ import annotations

from praxis_lite.partitioning.propagation import Instance, Split


def local(operation: Instance) -> tuple[Split, ...]:
  """Each device multiplies its parts of the operands: the splits agree in each dimension, but for those summed over.

  XLA is right too where one operand alone is brought into such splits, or the result alone is split further. Else it
  groups the devices by some of the axes, and takes the others in an order that need not be that of the result. Rows
  come back permuted on a mesh r 2 x d 2 x m 2:

      y[b, c] = sum_v x[b, v] w[c, v]        x, y over (('r', 'd'), 'm')        w over ('d', 'm')

  or are wrong beside an axis of 3 or 5, on a mesh a 2 x b 2 x c 3:

      y[b, t, d] = sum_f x[b, t, f] w[f, d]  x over ('b', None, 'a')  w over ('b', 'a')  y over (None, 'a', 'c')

  Tests: `test_product_with_a_weight_over_one_of_two_row_axes`, `test_product_beside_an_axis_of_3`. XLA folds transposes
  into products before it partitions them; where a transpose is local too, the folded product is.
  """
  splits, wanted = operation.splits, operation.compatible
  moved = [i for i, (old, new) in enumerate(zip(splits, wanted)) if old != new]
  is_split_further = all(old[: len(new)] == new for old, new in zip(splits[-1], wanted[-1]))
  return splits if len(moved) == 1 and (moved[0] < len(splits) - 1 or is_split_further) else wanted
