"""Guards of convolutions, of windows that move along dimensions, and of pads, which XLA merges with windows."""

from __future__ import annotations

import numpy as np

from praxis_lite.common.jax_internals.mlir import ir, stablehlo
from praxis_lite.sharding.guards.arrays import integer, integers, join_axes, padding, unused_axes, whole
from praxis_lite.sharding.guards.products import Names, is_nearly_local
from praxis_lite.sharding.propagation import ArraySplit, Axis, Instance, count_parts

CONVOLUTION = 'stablehlo.convolution'


def guard_convolution(convolution: Instance) -> tuple[ArraySplit, ...]:
  """Gathers height and width of images and filters; treats rows and channels like the dimensions of a matrix product.

  If a window overlaps the part of another device, XLA exchanges the borders, and computes some filters wrongly. It also
  sums the gradient of a filter over unused axes. Example: on a mesh a 2 x b 2, `conv(x, w)` with x over
  (None, 'a', None, None). Test: `test_convolution_of_split_images`.

  The splits are pinned even if they are right, because XLA could choose others after it has simplified the program.
  Test: `test_convolution_beside_a_sort_of_its_filter`.
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
  """Returns a name for each dimension of each array that may be split; height and width get no name."""
  no_names: list[str | None] = [None]
  images, filters, result = ([*no_names] * len(split) for split in convolution.splits)
  images[numbers.input_batch_dimension] = result[numbers.output_batch_dimension] = 'rows'
  images[numbers.input_feature_dimension] = filters[numbers.kernel_input_feature_dimension] = 'summed'
  filters[numbers.kernel_output_feature_dimension] = result[numbers.output_feature_dimension] = 'channels'
  return images, filters, result


def _split_over_rows(convolution: Instance, numbers: stablehlo.ConvDimensionNumbers) -> tuple[ArraySplit, ...]:
  """Splits a convolution with groups over its rows only.

  XLA turns some of these convolutions into products, and multiplies channels of one group with the filter of another.
  Example: x and a 1 x 1 filter w, both over (None, None, None, 'a'). Test:
  `test_grouped_convolution_that_is_a_product`.

  The gradient of a filter is a sum over rows. XLA also sums it, wrongly, over axes that do not split the rows: all
  devices along them have the same summands. Examples: x over ('a', None, None, None) on a mesh a 2 x b 2; a gradient
  whose users are split over part of an axis. So the rows are split over all axes and parts of axes. Tests:
  `test_filter_gradient_of_a_grouped_convolution`, `test_filter_gradient_that_is_split_by_part_of_an_axis`.
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


def guard_max_pooling_gradient(pooling: Instance) -> tuple[ArraySplit, ...]:
  """Gathers the dimensions that windows move along in the gradient of max pooling.

  If a window lies in the parts of two devices, XLA adds its gradient on both, or on neither. Example: on a mesh a 2,
  the gradient of the maximum over windows of 2 with stride 1, x over 'a'. Test:
  `test_gradient_of_overlapping_max_pooling`.
  """
  op, rank = pooling.site.op, len(pooling.site.shapes[0])
  return _whole_along(pooling, _stands_still(op, rank, 'window_dimensions', 'window_strides'))


def guard_windows(pooling: Instance) -> tuple[ArraySplit, ...]:
  """Gathers the dimensions that windows move along.

  XLA would exchange the borders of the parts, which aborts the process for some paddings and sizes. Example: the
  axis 'a' has two devices and splits an array of one row, to which one row of padding is added, and windows of one row
  are summed. Test: `test_sums_over_windows_with_padding`.
  """
  op, rank = pooling.site.op, len(pooling.site.shapes[0])
  still = _stands_still(op, rank, 'window_dimensions', 'window_strides', 'base_dilations', 'window_dilations')
  before = op.operands[0].owner
  if not isinstance(before, ir.Block) and before.operation.name == 'stablehlo.pad':  # XLA merges the two operations.
    still &= np.all(np.array(padding(before.operation)) == 0, axis=0)
  return _whole_along(pooling, still)


def guard_pad(pad: Instance) -> tuple[ArraySplit, ...]:
  """Splits operand and result of a pad alike, and does not split dimensions that are cropped or padded between entries.

  In such dimensions, XLA gives each device too many or too few entries, or aborts the process. Examples on a mesh a 2:
  `lax.pad(x, 0.0, [(-1, 0, 0)])` of 4 entries, only the result over 'a'; `lax.pad(x, 0.0, [(-1, 0, 2)])` of 2 entries,
  operand and result over 'a'. Tests: `test_pads_that_crop`, `test_pads_that_crop_and_pad_between_entries`.

  An exception is a crop at the end that leaves the size of each device's part unchanged, like the crop of the padding
  for a mesh. No entry moves, so the dimension stays split. Test: `test_pads_that_crop_what_was_padded_for_a_mesh`.
  """
  low, high, between = map(np.array, padding(pad.site.op))
  parts = np.array([count_parts(axes) for axes in pad.compatible[0]])
  before, after = (-(-np.array(pad.site.shapes[i]) // parts) for i in (0, -1))
  is_end_cropped = (low == 0) & (high < 0) & (before == after)
  return _whole_along(pad, (((low >= 0) & (high >= 0)) | is_end_cropped) & (between == 0))


def _whole_along(operation: Instance, still: np.ndarray) -> tuple[ArraySplit, ...]:
  """Returns the compatible splits, changed so that dimensions with a False in `still` are whole on each device."""
  moved = np.flatnonzero(~still)
  return tuple(whole(split, moved) if split else split for split in operation.compatible)


def _stands_still(op: ir.Operation, rank: int, *names: str) -> np.ndarray:
  """Returns, for each dimension, whether windows stand still: it has no padding, and all attributes `names` are 1."""
  still = np.all([np.array(integers(op, name, [1] * rank)) == 1 for name in names], axis=0)
  if 'padding' in op.attributes:
    still &= (np.array(ir.DenseIntElementsAttr(op.attributes['padding'])) == 0).all(axis=1)
  return still
