"""Convolutions that crop, which XLA's CPU computes wrongly on one device too."""

from __future__ import annotations

import numpy as np

from praxis_lite.jax_internals.mlir import ir, stablehlo
from praxis_lite.partitioning.propagation import operations


def crop_before_convolutions(module: ir.Operation) -> list[ir.Operation]:
  """Slices what a convolution crops off its operand, and returns the convolutions that did.

  Where an edge has a padding below 0, as in the gradient of a convolution that pads by more than its filter reaches,
  the CPU's convolution in float32 reads past its operand: what it returns differs from run to run. `conv(x, w)` of [3,
  6, 3, 2] and [2, 2, 2, 3] with paddings (-1, 1). In float64, and where the operand is dilated, it is right. Test:
  `test_convolutions_that_crop`.
  """
  changed = []
  for convolution in operations(module, {'stablehlo.convolution'}):
    if 'padding' not in convolution.attributes:
      continue
    padding = np.array(ir.DenseIntElementsAttr(convolution.attributes['padding']))
    dilation = [1] * len(padding)
    if 'lhs_dilation' in convolution.attributes:
      dilation = [*ir.DenseI64ArrayAttr(convolution.attributes['lhs_dilation'])]
    cropped = np.where(np.array(dilation)[:, None] == 1, np.maximum(-padding, 0), 0)
    if cropped.any():
      _crop(convolution, cropped)
      convolution.attributes['padding'] = ir.DenseIntElementsAttr.get(padding + cropped)  # type: ignore[call-overload]
      changed.append(convolution)
  return changed


def _crop(convolution: ir.Operation, cropped: np.ndarray) -> None:
  """Puts a slice before a convolution: without the first and last entries of each spatial dimension."""
  numbers = stablehlo.ConvDimensionNumbers(convolution.attributes['dimension_numbers'])
  image = convolution.operands[0]
  begin, end = [0] * image.type.rank, [*image.type.shape]
  for dim, (first, last) in zip(numbers.input_spatial_dimensions, cropped):
    begin[dim], end[dim] = int(first), max(int(first), end[dim] - int(last))
  with ir.InsertionPoint(convolution), convolution.location:
    convolution.operands[0] = stablehlo.slice(image, begin, end, [1] * len(begin))
