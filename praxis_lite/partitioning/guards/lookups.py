"""Gathers and slices, which read parts of an array, and scatters, which write them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from praxis_lite.jax_internals.mlir import ir, stablehlo
from praxis_lite.partitioning.guards.arrays import IDS, ROWS, axes_of, filled, if_changed, integers, split_over, whole
from praxis_lite.partitioning.propagation import Axis, Instance, Split, num_parts


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
        clamped = stablehlo.ClampOp(filled(begin.type, 0), begin, filled(begin.type, whole_size - size)).result
        op.operands[first + dim] = stablehlo.OptimizationBarrierOp([clamped]).results[0]


def guard_scatter(scatter: Instance) -> tuple[Split, ...] | None:
  """Keeps what XLA pads out of the result where updates are not split evenly.

  Where a dimension of the ids is split unevenly, XLA pads it, and its partitioned scatter (the gradient of a lookup)
  writes the padding's update, which may be anything, to row 0. On a mesh a 2 x b 2: the gradient of
  `jnp.take(table, ids, axis=0)` with 3 ids over 'a'. Updates that are added are masked, which costs nothing; others are
  gathered. Test: `test_gradient_of_a_lookup_of_uneven_ids`. Ids are split as their updates first, or the padding would
  come after the mask. Test: `test_scatter_of_ids_that_are_split_otherwise_than_their_updates`.

  It is also wrong where the table is split in another way than the result, and where one row is written into a table
  with split rows, which are gathered: `table.at[ids].add(x)` of 4 rows over an axis of 3, the result replicated, or
  not; and past the end of rows that divide. Tests: `test_scatter_of_one_row_into_an_uneven_table`,
  `test_scatter_of_one_row_past_the_end`.

  Where an axis splits a dimension of the slices and another one of the table, or ids in another way than their
  updates, rows are written to other places, or not at all. Test: `test_scatters_that_enumeration_found`.

  Dimensions along which slices are written that are neither one entry nor all are gathered too. On a mesh a 2:
  `jax.vmap(lax.dynamic_update_slice)(x, u, i)`, the result [1, 3] over (None, 'a'). Test: `test_slices_are_scattered`.

  Unsigned ids that are split unevenly, as in the gradient of `jnp.sort`, abort the process. Test:
  `test_gradient_of_a_sort`.
  """
  if len(scatter.site.op.operands) != 3:  # A scatter of several arrays, which JAX does not make.
    return None
  _sign_ids(scatter)
  if scatter.splits[0] != scatter.splits[-1]:
    return (scatter.splits[-1], *scatter.splits[1:])
  if (by_slices := _written_slices(scatter)) is not None:
    return by_slices
  if (alike := _as_table_and_updates(scatter)) is not None:
    return alike
  uneven = _uneven_updates(scatter)
  if not uneven:
    return None
  if (apart := _ids_as_updates(scatter)) is not None:
    return apart
  if _adds(scatter.site.op):
    _mask_updates(scatter, uneven)
    return None
  after = [*scatter.splits]
  after[ROWS], after[IDS] = whole(after[ROWS], uneven), whole(after[IDS], uneven.values())
  return (*after,)


def _numbers(scatter: Instance) -> stablehlo.ScatterDimensionNumbers:
  return stablehlo.ScatterDimensionNumbers(scatter.site.op.attributes['scatter_dimension_numbers'])


def _written_slices(scatter: Instance) -> tuple[Split, ...] | None:
  """Splits in which no part of a dimension that is written by slices is split."""
  numbers = _numbers(scatter)
  skipped = {*numbers.inserted_window_dims, *numbers.input_batching_dims}
  table, updates = scatter.site.shapes[0], scatter.site.shapes[ROWS]
  window = dict(zip([dim for dim in range(len(table)) if dim not in skipped], numbers.update_window_dims))
  parts = [dim for dim, of_updates in window.items() if updates[of_updates] != table[dim]]
  if math.prod(n for dim, n in enumerate(updates) if dim not in {*numbers.update_window_dims}) == 1:
    parts += [dim for dim in numbers.scattered_dims_to_operand_dims if dim not in parts]
  after = [*scatter.splits]
  after[0], after[-1] = whole(after[0], parts), whole(after[-1], parts)
  after[ROWS] = whole(after[ROWS], [window[dim] for dim in parts if dim in window])
  return if_changed(scatter, after)


def _as_table_and_updates(scatter: Instance) -> tuple[Split, ...] | None:
  """Splits of slices as those of the table, where an axis splits something else of it, and of ids as the updates."""
  table, ids, updates, _ = scatter.splits
  numbers, used = _numbers(scatter), axes_of(table)
  skipped = {*numbers.inserted_window_dims, *numbers.input_batching_dims}
  window = dict(zip(numbers.update_window_dims, [dim for dim in range(len(table)) if dim not in skipped]))
  for dim, of_table in window.items():
    if updates[dim] != table[of_table] and used.intersection(updates[dim]):
      updates = split_over(updates, dim, table[of_table])
  return if_changed(scatter, (table, _as_rows(ids, updates, _scattered(scatter)), updates, table))


def _ids_as_updates(scatter: Instance) -> tuple[Split, ...] | None:
  """Splits of ids as those of their updates, and of a table whose rows are split over none of these axes."""
  table, ids, updates, _ = scatter.splits
  numbers = _numbers(scatter)
  ids = _as_rows(ids, updates, _scattered(scatter))
  over = axes_of(ids)
  rows = [dim for dim in numbers.scattered_dims_to_operand_dims if over.intersection(table[dim])]
  return if_changed(scatter, (whole(table, rows), ids, updates, whole(table, rows)))


def _uneven_updates(scatter: Instance) -> dict[int, int]:
  """The dimensions of updates, and of ids, that do not divide by the axes that split either."""
  ids, updates, sizes = scatter.splits[IDS], scatter.splits[ROWS], scatter.site.shapes[ROWS]
  return {i: j for i, j in _scattered(scatter).items() if _is_uneven(sizes[i], updates[i], ids[j])}


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


def _scattered(scatter: Instance) -> dict[int, int]:
  numbers = _numbers(scatter)
  return _pairs(scatter, numbers.update_window_dims, numbers.index_vector_dim)


def _as_rows(ids: Split, rows: Split, pairs: Mapping[int, int]) -> Split:
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
      updates = stablehlo.SelectOp(exists, updates, filled(updates.type, 0)).result
  op.operands[ROWS] = updates
