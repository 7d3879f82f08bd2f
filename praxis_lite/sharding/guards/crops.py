"""Guards of convolutions and pads that crop, which XLA computes wrongly even on one CPU device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from praxis_lite.common.jax_internals.mlir import ir, stablehlo
from praxis_lite.sharding.guards.arrays import integers, zeros


def crop_before_convolutions(convolutions: Iterable[ir.Operation]) -> list[ir.Operation]:
  """Replaces negative paddings of convolutions by slices of their operands; returns the changed convolutions.

  With a negative padding, the CPU's convolution in float32 reads past its operand, so that results differ from run to
  run. Such a padding occurs in the gradient of a convolution that pads by more than its filter reaches. Example:
  `conv(x, w)` of [3, 6, 3, 2] and [2, 2, 2, 3] with paddings (-1, 1). The result is right in float64, and if the
  operand is dilated. Test: `test_convolutions_that_crop`.
  """
  changed = []
  for convolution in convolutions:
    if 'padding' not in convolution.attributes:
      continue
    padding = np.array(ir.DenseIntElementsAttr(convolution.attributes['padding']))
    dilation = integers(convolution, 'lhs_dilation', [1] * len(padding))
    numbers = stablehlo.ConvDimensionNumbers(convolution.attributes['dimension_numbers'])
    image = convolution.operands[0].type
    crops = [
      dim
      for dim, edges in enumerate(padding)
      if dilation[dim] == 1 and min(edges) < 0 and not image.is_dynamic_dim(numbers.input_spatial_dimensions[dim])
    ]
    if crops:
      padding[crops] = _crop(convolution, {dim: (int(padding[dim][0]), int(padding[dim][1])) for dim in crops})
      convolution.attributes['padding'] = ir.DenseIntElementsAttr.get(padding)  # type: ignore[call-overload]
      changed.append(convolution)
  return changed


def pad_only_between_entries(pads: Iterable[ir.Operation]) -> None:
  """Removes the padding between entries from dimensions with at most one entry, where it has no effect.

  XLA merges windows with such a pad, and the result is wrong if the pad also crops another dimension. Example:
  `lax.cumsum(lax.pad(x, 0.0, [(1, -1, 0), (0, 0, 2)]), reverse=True)` of x [2, 1]. Test:
  `test_sums_over_pads_that_crop`.
  """
  for pad in pads:
    between, array = integers(pad, 'interior_padding'), pad.operands[0].type
    is_short = [not array.is_dynamic_dim(dim) and array.get_dim_size(dim) <= 1 for dim in range(array.rank)]
    needed = [0 if short else n for n, short in zip(between, is_short)]
    if needed != between:
      pad.attributes['interior_padding'] = ir.DenseI64ArrayAttr.get(needed)


def _crop(convolution: ir.Operation, padding: Mapping[int, tuple[int, int]]) -> list[tuple[int, int]]:
  """Slices the operand for negative paddings of some spatial dimensions; returns the paddings that remain."""
  numbers = stablehlo.ConvDimensionNumbers(convolution.attributes['dimension_numbers'])
  image = convolution.operands[0]
  begin, end, left = [0] * image.type.rank, [*image.type.shape], []
  for spatial, (low, high) in padding.items():
    dim = numbers.input_spatial_dimensions[spatial]
    first, last = max(-low, 0), max(-high, 0)
    if first + last <= end[dim]:
      begin[dim], end[dim] = first, end[dim] - last
      left.append((low + first, high + last))
    else:  # The crop removes the whole image and some of the padding on the other side.
      left.append((0, end[dim] + low + high))
      end[dim] = 0
  with ir.InsertionPoint(convolution), convolution.location:
    if image.type.has_static_shape:
      convolution.operands[0] = stablehlo.slice(image, begin, end, [1] * len(begin))
    else:  # The batch size is symbolic, as in exported programs, and a slice would need to know it.
      cut = [0 if image.type.is_dynamic_dim(dim) else end[dim] - n for dim, n in enumerate(image.type.shape)]
      zero = zeros(ir.RankedTensorType.get([], image.type.element_type))
      convolution.operands[0] = stablehlo.pad(image, zero, [-n for n in begin], cut, [0] * len(begin))
  return left
