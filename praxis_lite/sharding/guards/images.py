"""Convolutions, and windows that move along dimensions; pads, which XLA joins with windows."""

from __future__ import annotations

import numpy as np

from praxis_lite.common.jax_internals.mlir import ir, stablehlo
from praxis_lite.sharding.guards.arrays import integer, integers, join_axes, padding, unused_axes, whole
from praxis_lite.sharding.guards.products import Names, is_nearly_local
from praxis_lite.sharding.propagation import Axis, Instance, Split, num_parts

CONVOLUTION = 'stablehlo.convolution'


def guard_convolution(convolution: Instance) -> tuple[Split, ...]:
  """Gathers height and width of images and filters; else a convolution is as a product of rows and channels.

  Where a window overlaps the part of another device, XLA exchanges the borders, and is wrong for some filters; the
  gradient of the filter is summed over axes that are not used too. On a mesh a 2 x b 2: `conv(x, w)` with x over
  (None, 'a', None, None). Test: `test_convolution_of_split_images`. Its arrays are then kept as they are, where XLA
  would take another split from what it simplifies. Test: `test_convolution_beside_a_sort_of_its_filter`.
  """
  op = convolution.site.op
  numbers = stablehlo.ConvDimensionNumbers(op.attributes['dimension_numbers'])
  if integer(op, 'batch_group_count') > 1 or integer(op, 'feature_group_count') > 1:
    return _split_over_rows(convolution, numbers)
  names = _names(convolution, numbers)
  if is_nearly_local(convolution.splits, names, convolution.site.mesh):
    return convolution.splits
  return tuple(
    whole(split, [dim for dim, name in enumerate(array) if name is None])
    for array, split in zip(names, convolution.compatible)
  )


def _names(convolution: Instance, numbers: stablehlo.ConvDimensionNumbers) -> Names:
  """Of the dimensions that may be split: height and width have none."""
  no_names: list[str | None] = [None]
  images, filters, result = ([*no_names] * len(split) for split in convolution.splits)
  images[numbers.input_batch_dimension] = result[numbers.output_batch_dimension] = 'rows'
  images[numbers.input_feature_dimension] = filters[numbers.kernel_input_feature_dimension] = 'summed'
  filters[numbers.kernel_output_feature_dimension] = result[numbers.output_feature_dimension] = 'channels'
  return images, filters, result


def _split_over_rows(convolution: Instance, numbers: stablehlo.ConvDimensionNumbers) -> tuple[Split, ...]:
  """Splits a convolution with groups over rows alone.

  XLA takes some for products, and multiplies channels of one group with the filter of another: x and w of 1 x 1 over
  (None, None, None, 'a'). Test: `test_grouped_convolution_that_is_a_product`.

  The gradient of the filter sums over rows, and XLA sums over axes that are not used too, where the sums are the same:
  x over ('a', None, None, None) on a mesh a 2 x b 2, or what uses the gradient over part of an axis. So no part of an
  axis is left unused. Tests: `test_filter_gradient_of_a_grouped_convolution`,
  `test_filter_gradient_that_is_split_by_part_of_an_axis`.
  """
  rows: tuple[Axis, ...]
  images, filters, result = ([*whole(split, range(len(split)))] for split in convolution.splits)
  if integer(convolution.site.op, 'feature_group_count') > 1:
    rows = convolution.compatible[2][numbers.output_batch_dimension]
    images[numbers.input_batch_dimension] = result[numbers.output_batch_dimension] = rows
  else:
    rows = convolution.compatible[0][numbers.input_feature_dimension]
    rows = join_axes((*rows, *unused_axes(convolution.site.mesh, rows))) if rows else ()
    images[numbers.input_feature_dimension] = filters[numbers.kernel_input_feature_dimension] = rows
  return tuple(images), tuple(filters), tuple(result)


def guard_max_pooling_gradient(pooling: Instance) -> tuple[Split, ...]:
  """Gathers dimensions along which the windows of max pooling move, before its gradient is taken.

  Where a window lies in the parts of two devices, its gradient is added on both, or on none. On a mesh a 2: the
  gradient of the maximum over windows of 2 with stride 1, x over 'a'. Test: `test_gradient_of_overlapping_max_pooling`.
  """
  op, rank = pooling.site.op, len(pooling.site.shapes[0])
  numbers = [_numbers(op, f'window_{name}', rank) for name in ('dimensions', 'strides')]
  still = np.all([*(np.array(n) == 1 for n in numbers), *(_edges(op, rank).T == 0)], axis=0)
  return _whole_along(pooling, still)


def guard_windows(pooling: Instance) -> tuple[Split, ...]:
  """Gathers dimensions that windows move along.

  XLA exchanges the borders, and aborts the process for some paddings and sizes. On a mesh a 2: sums over windows of 1
  of an array of one row with a row of padding, over 'a'. Test: `test_sums_over_windows_with_padding`.
  """
  op, rank = pooling.site.op, len(pooling.site.shapes[0])
  names = ('window_dimensions', 'window_strides', 'base_dilations', 'window_dilations')
  still = np.all([*(np.array(_numbers(op, name, rank)) == 1 for name in names), *(_edges(op, rank).T == 0)], axis=0)
  before = op.operands[0].owner
  if not isinstance(before, ir.Block) and before.operation.name == 'stablehlo.pad':  # XLA makes both one operation.
    still &= np.all(np.array(padding(before.operation)) == 0, axis=0)
  return _whole_along(pooling, still)


def guard_pad(pad: Instance) -> tuple[Split, ...]:
  """Splits an array before and after it is padded alike, and not at all where it is cropped or padded between entries.

  There XLA gives each device too much or too little of the result, or aborts the process. On a mesh a 2:
  `lax.pad(x, 0.0, [(-1, 0, 0)])` of 4 entries, of which only the result is over 'a'; `lax.pad(x, 0.0, [(-1, 0, 2)])` of
  2 entries, both over 'a'. Tests: `test_pads_that_crop`, `test_pads_that_crop_and_pad_between_entries`.

  Where only last entries are cropped, and parts keep their size, nothing moves: what was padded for a mesh is cropped
  at no cost. Test: `test_pads_that_crop_what_was_padded_for_a_mesh`.
  """
  low, high, between = map(np.array, padding(pad.site.op))
  parts = np.array([num_parts(axes) for axes in pad.compatible[0]])
  before, after = (-(-np.array(pad.site.shapes[i]) // parts) for i in (0, -1))
  is_end_cropped = (low == 0) & (high < 0) & (before == after)
  return _whole_along(pad, (((low >= 0) & (high >= 0)) | is_end_cropped) & (between == 0))


def _whole_along(operation: Instance, still: np.ndarray) -> tuple[Split, ...]:
  """Splits that agree, and split only the dimensions along which nothing moves."""
  moved = np.flatnonzero(~still)
  return tuple(whole(split, moved) if split else split for split in operation.compatible)


def _numbers(op: ir.Operation, name: str, rank: int) -> list[int]:
  return integers(op, name) if name in op.attributes else [1] * rank


def _edges(op: ir.Operation, rank: int) -> np.ndarray:
  """What windows are padded with before and after each dimension."""
  given = 'padding' in op.attributes
  return np.array(ir.DenseIntElementsAttr(op.attributes['padding'])) if given else np.zeros((rank, 2))
