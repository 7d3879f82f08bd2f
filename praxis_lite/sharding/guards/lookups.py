"""Gathers and slices, which read parts of an array, and scatters, which write them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from praxis_lite.common.jax_internals.mlir import ir, stablehlo
from praxis_lite.sharding.guards.arrays import IDS, ROWS, axes_of, if_changed, integers, make_constant, whole
from praxis_lite.sharding.propagation import Axis, Instance, Split, num_parts


def guard_lookup(lookup: Instance) -> tuple[Split, ...] | None:
  """Each device looks up its rows in its part of the table: ids are split as rows, slices as the table.

  XLA does not compile other lookups, or gathers wrongly. On a mesh a 2 x b 2: `jnp.take(table, ids, axis=0)`, the table
  over (None, 'a'), ids over (None, 'a'). Tests: `test_lookup_with_table_and_ids_over_the_same_axis`,
  `test_lookup_with_ids_that_are_split_twice`, `test_lookup_of_slices_that_are_split_unevenly`. What is looked up may be
  split too, as the rows of an embedding, but over no axis of ids or rows: `jnp.diagonal(x)`. Test: `test_diagonal`.
  What is read in its whole size is not looked up, though ids may say where it begins.
  """
  op, (table, ids, rows) = lookup.site.op, lookup.compatible
  numbers = stablehlo.GatherDimensionNumbers(op.attributes['dimension_numbers'])
  is_read_whole = [n == size for n, size in zip(integers(op, 'slice_sizes'), lookup.site.shapes[0])]
  looked_up = [dim for dim in numbers.start_index_map if not is_read_whole[dim]]
  conflicting = [dim for dim in looked_up if axes_of([table[dim]]) & axes_of((*ids, *rows))]
  return if_changed(lookup, (whole(table, conflicting), ids, rows))


def keeps_ids(lookup: Instance) -> bool:
  """Whether a lookup that is right might not be if XLA split its ids in another way.

  Test: `test_lookup_with_ids_that_are_split_twice`.
  """
  return bool(axes_of(lookup.splits[0]) and axes_of(lookup.splits[IDS]))


def guard_slice(dynamic: Instance) -> None:
  """Clamps where a slice begins along split dimensions, as the operation would; behind a barrier, or XLA undoes it.

  XLA reads or writes past the end of a device's part instead. On a mesh a 2: a slice of 2 of 3 entries over 'a' that
  begins at 3. Test: `test_dynamic_slices_that_begin_past_the_end`.
  """
  op, shapes = dynamic.site.op, dynamic.site.shapes
  reads = op.name == 'stablehlo.dynamic_slice'
  first, sizes = (1, shapes[-1]) if reads else (2, shapes[1])
  for dim, (whole_size, size) in enumerate(zip(shapes[0], sizes)):
    is_split = any(split[dim] for split in (dynamic.splits[0], dynamic.splits[-1]))
    if is_split and size != whole_size and dynamic.site.mend(f'clamped start in dimension {dim}'):
      begin = op.operands[first + dim]
      with ir.InsertionPoint(op), op.location:
        clamped = stablehlo.ClampOp(
          make_constant(begin.type, 0), begin, make_constant(begin.type, whole_size - size)
        ).result
        op.operands[first + dim] = stablehlo.OptimizationBarrierOp([clamped]).results[0]


def guard_static_slice(static: Instance) -> tuple[Split, ...]:
  """Splits an array and its slice alike, and not at all along dimensions of which every second or third entry is read.

  Where these are split, XLA makes slices of a wrong size, which do not compile, or are those of another device. On a
  mesh a 2: `x[:, 1::3]` of two columns, the result over (None, 'a'); on a mesh a 3, `x[::3]` of 6 rows. Test:
  `test_slices_with_strides`.
  """
  strided = [dim for dim, stride in enumerate(integers(static.site.op, 'strides')) if stride > 1]
  return tuple(whole(split, strided) for split in static.compatible)


def is_cut_where_split(static: Instance) -> bool:
  """Whether a slice that is right might not be if XLA split its result in another way.

  Test: `test_slices_beside_slices_of_no_entry`.
  """
  before, after = static.site.shapes
  return any(axes and n != m for axes, n, m in zip(static.splits[0], before, after))


def guard_scatter(scatter: Instance) -> tuple[Split, ...] | None:
  """Each device writes its updates into its part of the table: ids are split as updates, slices as the table.

  XLA is right where all of these are so, and wrong in thousands of other ways, of which some tests are:

  * The table is split in another way than the result. `test_scatter_of_one_row_into_an_uneven_table`
  * An axis splits a dimension of the slices and another one of the table, or ids in another way than their updates.
    `test_scatters_that_enumeration_found`, `test_scatter_of_ids_that_are_split_otherwise_than_their_updates`
  * The entries of one id are on several devices.

  Slices that are neither one entry nor a whole dimension, and rows into which one update is written, are whole:
  `jax.vmap(lax.dynamic_update_slice)(x, u, i)`, the result [1, 3] over (None, 'a') on a mesh a 2;
  `table.at[ids].add(x)` of 4 rows over an axis of 3; and past the end of rows that divide. Tests:
  `test_slices_are_scattered`, `test_scatter_of_one_row_into_an_uneven_table`, `test_scatter_of_one_row_past_the_end`.

  Where a dimension of the ids is split unevenly, XLA pads it, and writes the padding's update, which may be anything,
  to row 0. On a mesh a 2 x b 2: the gradient of `jnp.take(table, ids, axis=0)` with 3 ids over 'a'. Updates that are
  added are masked, which costs nothing; others are gathered. Test: `test_gradient_of_a_lookup_of_uneven_ids`.

  Unsigned ids that are split unevenly, as in the gradient of `jnp.sort`, abort the process. Test:
  `test_gradient_of_a_sort`.
  """
  if len(scatter.site.op.operands) != 3:  # A scatter of several arrays, which JAX does not make.
    return tuple(whole(split, range(len(split))) for split in scatter.splits)
  _sign_ids(scatter)
  after = _local(scatter)
  uneven = _uneven_updates(scatter, after)
  if uneven and not _adds(scatter.site.op):
    table, ids, updates, _ = after
    numbers = _numbers(scatter)
    batch = dict(zip(numbers.scatter_indices_batching_dims, numbers.input_batching_dims))
    table = whole(table, [batch[dim] for dim in uneven.values() if dim in batch])
    after = (table, whole(ids, uneven.values()), whole(updates, uneven), table)
  elif after == scatter.splits:
    _mask_updates(scatter, uneven)
  return after


def _numbers(scatter: Instance) -> stablehlo.ScatterDimensionNumbers:
  return stablehlo.ScatterDimensionNumbers(scatter.site.op.attributes['scatter_dimension_numbers'])


def _local(scatter: Instance) -> tuple[Split, ...]:
  """Splits of a scatter that is local to each device, but for sums; what is written in part is whole."""
  numbers = _numbers(scatter)
  _, ids, updates, table = scatter.compatible
  skipped = {*numbers.inserted_window_dims, *numbers.input_batching_dims}
  window = dict(zip([dim for dim in range(len(table)) if dim not in skipped], numbers.update_window_dims))
  shapes = scatter.site.shapes
  parts = [dim for dim, of_updates in window.items() if shapes[ROWS][of_updates] != shapes[0][dim]]
  if math.prod(n for dim, n in enumerate(shapes[ROWS]) if dim not in {*numbers.update_window_dims}) == 1:
    parts += [dim for dim in numbers.scattered_dims_to_operand_dims if dim not in parts]
  # XLA knows what the position in a dimension of one entry is, so a mask of its padding would not be one.
  pairs = _scatter_pairs(scatter)
  single = [dim for dim in pairs if shapes[ROWS][dim] == 1]
  batch = dict(zip(numbers.scatter_indices_batching_dims, numbers.input_batching_dims))
  table = whole(table, [*parts, *(batch[pairs[dim]] for dim in single if pairs[dim] in batch)])
  updates = whole(updates, [*(window[dim] for dim in parts if dim in window), *single])
  return table, _split_like_rows(ids, updates, pairs), updates, table


def _uneven_updates(scatter: Instance, splits: Sequence[Split]) -> dict[int, int]:
  """The dimensions of updates, and of ids, that do not divide by the axes that split either."""
  ids, updates, sizes = splits[IDS], splits[ROWS], scatter.site.shapes[ROWS]
  return {i: j for i, j in _scatter_pairs(scatter).items() if _is_uneven(sizes[i], updates[i], ids[j])}


def _pairs(lookup: Instance, slices: Iterable[int], vector: int) -> dict[int, int]:
  """The dimensions of rows, read or written, but for those of a slice; and of each the dimension of the ids.

  Args:
    lookup: a gather, or a scatter.
    slices: the dimensions of a slice.
    vector: the dimension of the ids that holds the entries of one.
  """
  slices = {*slices}
  of_rows = [dim for dim in range(len(lookup.splits[ROWS])) if dim not in slices]
  return dict(zip(of_rows, [dim for dim in range(len(lookup.splits[IDS])) if dim != vector]))


def _scatter_pairs(scatter: Instance) -> dict[int, int]:
  numbers = _numbers(scatter)
  return _pairs(scatter, numbers.update_window_dims, numbers.index_vector_dim)


def _split_like_rows(ids: Split, rows: Split, pairs: Mapping[int, int]) -> Split:
  """Ids that are split as their rows."""
  of_ids = {j: rows[i] for i, j in pairs.items()}
  return tuple(of_ids.get(dim, ()) for dim in range(len(ids)))


def _is_uneven(size: int, *entries: tuple[Axis, ...]) -> bool:
  """Whether a dimension does not divide by some of the axes that split it in different arrays."""
  return any(size % num_parts(axes) for axes in entries)


def _sign_ids(lookup: Instance) -> None:
  """Makes unsigned ids signed where an array is split unevenly: XLA pads ids with -1, and aborts if it cannot."""
  op = lookup.site.op
  ids = op.operands[IDS].type
  arrays = zip(lookup.site.shapes, lookup.splits)
  uneven = any(_is_uneven(size, axes) for shape, split in arrays for size, axes in zip(shape, split))
  if uneven and ir.IntegerType(ids.element_type).is_unsigned:
    signed = ir.IntegerType.get_signless(ir.IntegerType(ids.element_type).width)
    lookup.site.mend('signed ids')
    with ir.InsertionPoint(op), op.location:
      op.operands[IDS] = stablehlo.ConvertOp(ir.RankedTensorType.get(ids.shape, signed), op.operands[IDS]).result


def _adds(scatter: ir.Operation) -> bool:
  return [op.operation.name for op in scatter.regions[0].blocks[0].operations] == ['stablehlo.add', 'stablehlo.return']


def _mask_updates(scatter: Instance, dims: Iterable[int]) -> None:
  """Zeroes the updates past the end of some dimensions.

  The mask is true of all entries that exist; the barrier keeps XLA from finding that out before it partitions.
  """
  op = scatter.site.op
  updates = op.operands[ROWS]
  shape, int32 = scatter.site.shapes[ROWS], ir.IntegerType.get_signless(32)
  with ir.InsertionPoint(op), op.location:
    for dim in dims:
      if not scatter.site.mend(f'masked padding of dimension {dim}'):
        continue
      of_ints = ir.RankedTensorType.get(shape, int32)
      position = stablehlo.IotaOp(of_ints, dim).result
      size = stablehlo.ConstantOp(ir.DenseElementsAttr.get(np.array(shape[dim], np.int32))).result  # type: ignore[call-overload]
      end = stablehlo.BroadcastInDimOp(of_ints, stablehlo.OptimizationBarrierOp([size]).results[0], []).result
      exists = stablehlo.CompareOp(position, end, stablehlo.ComparisonDirectionAttr.get('LT')).result
      updates = stablehlo.SelectOp(exists, updates, make_constant(updates.type, 0)).result
  op.operands[ROWS] = updates
