"""Convolutions, and windows that move along dimensions; pads, which XLA joins with windows."""

from __future__ import annotations

import numpy as np

from praxis_lite.jax_internals.mlir import ir, stablehlo
from praxis_lite.partitioning.guards.arrays import if_changed, integer, integers, padding, split_over, whole
from praxis_lite.partitioning.propagation import Axis, Instance, Split, num_parts


def guard_convolution(convolution: Instance) -> tuple[Split, ...] | None:
  """Gathers height and width of images and filters, and splits the groups of grouped convolutions alike.

  Where a window overlaps the part of another device, XLA exchanges the borders, and is wrong for some filters; the
  gradient of the filter is summed over axes that are not used too. On a mesh a 2 x b 2: `conv(x, w)` with x over
  (None, 'a', None, None). Test: `test_convolution_of_split_images`.

  The gradient of the filter of a grouped convolution is that sum even for whole images, x over ('a', None, None, None),
  so no axis is left unused there: rows are split over 'b' too. It is also wrong where the channels of one array are
  split, and those of another are not. Test: `test_filter_gradient_of_a_grouped_convolution`.

  Where channels are split alike, some groups are still wrong (`_is_mistaken`): x and w of 1 x 1 over (None, None, None,
  'a'). Test: `test_grouped_convolution_that_is_a_product`.

  Groups of rows (the filter's gradient is such a convolution) are also wrong, or abort the process, where rows of the
  result are split: with w over (None, None, 'a', None). Test: `test_grouped_convolution_with_a_split_filter`.
  """
  op = convolution.site.op
  numbers = stablehlo.ConvDimensionNumbers(op.attributes['dimension_numbers'])
  spatial = (numbers.input_spatial_dimensions, numbers.kernel_spatial_dimensions, numbers.output_spatial_dimensions)
  after = [whole(split, dims) for split, dims in zip(convolution.splits, spatial)]
  of_rows, of_features = (integer(op, f'{kind}_group_count') for kind in ('batch', 'feature'))
  if of_rows == of_features == 1:
    return tuple(map(whole, convolution.compatible, spatial))
  batch, features = numbers.input_batch_dimension, numbers.input_feature_dimension
  summed = (features if of_rows > 1 else None, numbers.kernel_input_feature_dimension)
  groups = batch if of_rows > 1 else features
  grouped = (groups, numbers.kernel_output_feature_dimension, numbers.output_feature_dimension)
  channels = next((split[dim] for split, dim in zip(reversed(after), reversed(grouped)) if split[dim]), ())
  if _is_mistaken(convolution, numbers) or max(of_rows, of_features) % num_parts(channels):
    channels = ()
  after = [split_over(split, dim, channels) for split, dim in zip(after, grouped)]
  if of_rows > 1:
    after[2] = whole(after[2], [numbers.output_batch_dimension])
  rows: tuple[Axis, ...] = ()
  if of_rows > 1 and (rows := after[0][features] or after[1][summed[1]]):
    used = {axis.name for axes in (rows, *after[0], *after[1], *after[2]) for axis in axes}
    rows = (*rows, *(axis for axis in convolution.site.mesh if axis.name not in used))
  after[:2] = [split if dim is None else split_over(split, dim, rows) for split, dim in zip(after, summed)]
  return if_changed(convolution, after)


def _is_mistaken(convolution: Instance, numbers: stablehlo.ConvDimensionNumbers) -> bool:
  """Whether XLA takes a convolution with groups of channels for a product, or mistakes the order of its dimensions."""
  if integer(convolution.site.op, 'feature_group_count') == 1:
    return False
  _, of_filter, of_result = convolution.site.shapes
  spatial = zip(numbers.kernel_spatial_dimensions, numbers.output_spatial_dimensions)
  before = (numbers.input_batch_dimension, numbers.input_feature_dimension, *numbers.input_spatial_dimensions)
  after = (numbers.output_batch_dimension, numbers.output_feature_dimension, *numbers.output_spatial_dimensions)
  is_depthwise = of_filter[numbers.kernel_input_feature_dimension] == 1
  return all(1 in (of_filter[i], of_result[j]) for i, j in spatial) or (is_depthwise and before != after)


def guard_max_pooling_gradient(pooling: Instance) -> tuple[Split, ...] | None:
  """Gathers dimensions along which the windows of max pooling overlap, before its gradient is taken.

  Where a window lies in the parts of two devices, its gradient is added on both, or on none. On a mesh a 2: the
  gradient of the maximum over windows of 2 with stride 1, x over 'a'. Test: `test_gradient_of_overlapping_max_pooling`.
  """
  window, strides = (integers(pooling.site.op, f'window_{name}') for name in ('dimensions', 'strides'))
  overlap = [dim for dim, (size, stride) in enumerate(zip(window, strides)) if size > stride]
  after = [whole(split, overlap) if split else split for split in pooling.splits]
  if any(old != new for old, new in zip(pooling.splits, after)):  # Else they may still be wrong if they differ.
    after = [after[0] if split else split for split in after]
  return if_changed(pooling, after)


def guard_windows(pooling: Instance) -> tuple[Split, ...] | None:
  """Gathers dimensions that windows move along, unless each device has whole windows.

  XLA exchanges the borders, and aborts the process for some paddings and sizes. On a mesh a 2: sums over windows of 1
  of an array of one row with a row of padding, over 'a'. Test: `test_sums_over_windows_with_padding`.
  """
  op, rank = pooling.site.op, len(pooling.site.shapes[0])

  def numbers(name: str) -> list[int]:
    return integers(op, name) if name in op.attributes else [1] * rank

  window, strides = numbers('window_dimensions'), numbers('window_strides')
  given = 'padding' in op.attributes
  padded = np.array(ir.DenseIntElementsAttr(op.attributes['padding'])) if given else np.zeros((rank, 2))
  before = op.operands[0].owner
  if not isinstance(before, ir.Block) and before.operation.name == 'stablehlo.pad':  # XLA makes both one operation.
    padded = np.array([*padded.T, *padding(before.operation)]).T
  moved = []
  for dim, (size, stride) in enumerate(zip(window, strides)):
    still = size == stride and not np.any(padded[dim]) and numbers('base_dilations')[dim] == 1
    still = still and numbers('window_dilations')[dim] == 1
    parts = max(num_parts(split[dim]) for split in pooling.splits if split)
    if parts > 1 and not (still and (size == 1 or pooling.site.shapes[0][dim] % (parts * stride) == 0)):
      moved.append(dim)
  return if_changed(pooling, [whole(split, moved) if split else split for split in pooling.splits])


def guard_pad(pad: Instance) -> tuple[Split, ...] | None:
  """Splits what is cropped, or padded between entries, before and after alike.

  XLA gives each device too much or too little of the result. On a mesh a 2: `lax.pad(x, 0.0, [(-1, 0, 0)])` of 4
  entries, of which only the result is over 'a'. Test: `test_pads_that_crop`.
  """
  edges = zip(*padding(pad.site.op))
  dims = [dim for dim, (low, high, interior) in enumerate(edges) if min(low, high) < 0 or interior]
  before, zero, after = pad.splits
  dims = [dim for dim in dims if before[dim] != after[dim]]
  return if_changed(pad, (whole(before, dims), zero, whole(after, dims)))
