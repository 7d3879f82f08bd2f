"""Guards of gathers and slices, which read parts of an array, and of scatters, which write parts."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from praxis_lite.common.jax_internals.mlir import ir, stablehlo
from praxis_lite.sharding.guards.arrays import IDS, ROWS, axes_of, if_changed, integers, make_constant, whole
from praxis_lite.sharding.propagation import ArraySplit, Axis, Instance, count_parts


def guard_lookup(lookup: Instance) -> tuple[ArraySplit, ...] | None:
  """Makes a lookup local: ids are split like the rows that they read, and slices like the table.

  Then each device looks up its rows in its part of the table. XLA fails to compile other lookups, or computes them
  wrongly. Example: on a mesh a 2 x b 2, `jnp.take(table, ids, axis=0)`, both table and ids over (None, 'a'). Tests:
  `test_lookup_with_table_and_ids_over_the_same_axis`, `test_lookup_with_ids_that_are_split_twice`,
  `test_lookup_of_slices_that_are_split_unevenly`.

  The dimension that is looked up, such as the rows of an embedding, may be split over axes that split neither ids nor
  rows. Otherwise it is gathered, as for `jnp.diagonal(x)`. Test: `test_diagonal`. A dimension that is read as a whole
  does not count as looked up, even if ids say where the read begins.

  For a few sharded ids, in a table whose rows and other dimensions are sharded too, XLA adds up the rows of other
  devices. Example: on a mesh a 2 x b 3 x c 2, `jnp.take(table, ids, axis=0)` of 6 ids over 'c', the table [24, 12] over
  ('b', 'a'). So each device looks up all of these ids. Test: `test_lookup_of_a_few_ids_over_three_axes`.

  For a sharded batch of lookups inside `shard_map`, in tables whose rows are sharded too, XLA aborts the process, so
  the tables are gathered. Test: `test_lookups_of_a_batch_in_shard_map`.
  """
  op, (table, ids, rows) = lookup.site.op, lookup.compatible
  numbers = stablehlo.GatherDimensionNumbers(op.attributes['dimension_numbers'])
  is_read_whole = [n == size for n, size in zip(integers(op, 'slice_sizes'), lookup.site.shapes[0])]
  looked_up = [dim for dim in numbers.start_index_map if not is_read_whole[dim]]
  table = whole(table, [dim for dim in looked_up if axes_of([table[dim]]) & axes_of((*ids, *rows))])
  pairs = _pairs(lookup, numbers.offset_dims, numbers.index_vector_dim)
  others = [split for dim, split in enumerate(table) if dim not in looked_up]
  if lookup.site.is_mapped and axes_of(table[dim] for dim in numbers.operand_batching_dims):
    table = whole(table, looked_up)
  batch = {*numbers.start_indices_batching_dims}
  free = {of_rows: of_ids for of_rows, of_ids in pairs.items() if of_ids not in batch}
  num_ids, num_rows = (
    math.prod(lookup.site.shapes[array][dim] for dim in dims) for array, dims in ((ROWS, free), (0, looked_up))
  )
  if axes_of(others) and axes_of(table[dim] for dim in looked_up) and are_few(num_ids, num_rows):
    ids, rows = whole(ids, free.values()), whole(rows, free)
  return if_changed(lookup, (table, ids, rows))


def are_few(num_ids: int, num_rows: int) -> bool:
  """Whether ids are so few that XLA might look them up in each part of a table, and add up the results.

  The table has `num_rows` rows. This was seen for up to 7/8 as many ids. The largest number of ids for which it happens
  grows with the axis that splits the rows; see section 28 of docs/xla-partitioner-faults.md. The factor of 2 leaves
  room for what was not tried.
  """
  return num_ids <= 2 * num_rows


def arrays_to_pin(lookup: Instance) -> Iterable[int]:
  """Returns the arrays of a correct lookup whose splits must stay: with other splits, XLA might compute it wrongly.

  * Ids, if they and the table are split. Test: `test_lookup_with_ids_that_are_split_twice`.
  * All arrays of a sharded batch of lookups, and of any sharded lookup inside `shard_map`. There, XLA splits the rows
    of each table over free axes, or splits ids and slices over the same axis; then it aborts the process. Tests:
    `test_lookups_of_a_batch_in_shard_map`, `test_lookup_in_shard_map_of_arrays_that_are_split`.
  """
  table, ids = lookup.splits[0], lookup.splits[IDS]
  numbers = stablehlo.GatherDimensionNumbers(lookup.site.op.attributes['dimension_numbers'])
  is_split_in_shard_map = lookup.site.is_mapped and any(map(axes_of, lookup.splits))
  if is_split_in_shard_map or any(table[dim] for dim in numbers.operand_batching_dims):
    return range(len(lookup.splits))
  return [IDS] if axes_of(table) and axes_of(ids) else []


def arrays_of_scatter_to_pin(scatter: Instance) -> Iterable[int]:
  """Returns the arrays whose splits must stay: ids and updates if the table is split, but a dim of the updates is not.

  XLA may split the updates over an unused axis. If they do not divide evenly, it writes padding to row 0. Example: on a
  mesh 2 x 2, the gradient of `lax.top_k(jnp.abs(x), 3)` with 3 entries over 'a'. Test:
  `test_gradient_of_the_largest_of_all`.
  """
  sizes, updates = scatter.site.shapes[ROWS], scatter.splits[ROWS]
  has_whole = any(sizes[dim] > 1 and not updates[dim] for dim in _scatter_pairs(scatter))
  return [IDS, ROWS] if axes_of(scatter.splits[0]) and has_whole else []


def guard_slice(dynamic: Instance) -> None:
  """Clamps the start of a slice along split dimensions, as the operation itself should.

  XLA reads or writes past the end of a device's part instead. Example: on a mesh a 2, a slice of 2 of 3 entries over
  'a' that begins at 3. A barrier keeps XLA from removing the clamp. Test:
  `test_dynamic_slices_that_begin_past_the_end`.
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


def guard_static_slice(static: Instance) -> tuple[ArraySplit, ...]:
  """Splits an array and its slice alike, and does not split dimensions that are sliced with a stride.

  If such a dimension is split, XLA makes slices of a wrong size, which do not compile, or returns entries of another
  device. Examples: on a mesh a 2, `x[:, 1::3]` where x has two columns, if the result is split over (None, 'a'); on a
  mesh a 3, `x[::3]` where x has 6 rows. Test: `test_slices_with_strides`.
  """
  strided = [dim for dim, stride in enumerate(integers(static.site.op, 'strides')) if stride > 1]
  return tuple(whole(split, strided) for split in static.compatible)


def is_cut_where_split(static: Instance) -> bool:
  """Whether a correct slice could become wrong if XLA split its result in another way.

  Test: `test_slices_beside_slices_of_no_entry`.
  """
  before, after = static.site.shapes
  return any(axes and n != m for axes, n, m in zip(static.splits[0], before, after))


def guard_scatter(scatter: Instance) -> tuple[ArraySplit, ...] | None:
  """Makes a scatter local: ids are split like their updates, and slices like the table.

  Then each device writes its updates into its part of the table, which XLA computes correctly. It computes thousands of
  other combinations of splits wrongly, for example:

  * The table and the result are split in different ways. Test: `test_scatter_of_one_row_into_an_uneven_table`.
  * An axis splits a dimension of the slices and another dimension of the table, or ids and updates are split in
    different ways. Tests: `test_scatters_that_enumeration_found`,
    `test_scatter_of_ids_that_are_split_otherwise_than_their_updates`.
  * The entries of one id are on several devices.

  Two kinds of dimensions of the table are gathered. The first are those written in slices of several entries, but not
  all: `jax.vmap(lax.dynamic_update_slice)(x, u, i)`, the result [1, 3] over (None, 'a') on a mesh a 2. The second are
  the rows, if there is only one update: `table.at[ids].add(x)` of 4 rows over an axis of 3, or past the end of rows
  that divide evenly. Tests: `test_slices_are_scattered`, `test_scatter_of_one_row_into_an_uneven_table`,
  `test_scatter_of_one_row_past_the_end`.

  If a dimension of the ids is split unevenly, XLA pads it, and writes the arbitrary update of the padding to row 0.
  Example: on a mesh a 2 x b 2, the gradient of `jnp.take(table, ids, axis=0)` with 3 ids over 'a'. If updates are
  added, the padding is masked, which costs nothing; otherwise, updates are gathered. Test:
  `test_gradient_of_a_lookup_of_uneven_ids`.

  Unsigned ids that are split unevenly, as in the gradient of `jnp.sort`, abort the process, so they are made signed.
  Test: `test_gradient_of_a_sort`.
  """
  if len(scatter.site.op.operands) != 3:  # A scatter of several arrays, which JAX does not make.
    return tuple(whole(split, range(len(split))) for split in scatter.splits)
  _sign_ids(scatter)
  after = _local(scatter)
  (table, ids, updates, _), sizes = after, scatter.site.shapes[ROWS]
  # {dimension of the updates: dimension of the ids} for corresponding dimensions that axes split unevenly.
  uneven = {i: j for i, j in _scatter_pairs(scatter).items() if _is_uneven(sizes[i], updates[i], ids[j])}
  combines = [op.operation.name for op in scatter.site.op.regions[0].blocks[0].operations]
  if uneven and combines != ['stablehlo.add', 'stablehlo.return']:
    numbers = _numbers(scatter)
    batch = dict(zip(numbers.scatter_indices_batching_dims, numbers.input_batching_dims))
    table = whole(table, [batch[dim] for dim in uneven.values() if dim in batch])
    after = (table, whole(ids, uneven.values()), whole(updates, uneven), table)
  elif after == scatter.splits:
    _mask_updates(scatter, uneven)
  return after


def _numbers(scatter: Instance) -> stablehlo.ScatterDimensionNumbers:
  return stablehlo.ScatterDimensionNumbers(scatter.site.op.attributes['scatter_dimension_numbers'])


def _local(scatter: Instance) -> tuple[ArraySplit, ...]:
  """Returns splits with which devices exchange nothing but sums; dimensions that are written in parts stay whole."""
  numbers = _numbers(scatter)
  _, ids, updates, table = scatter.compatible
  skipped = {*numbers.inserted_window_dims, *numbers.input_batching_dims}
  window = dict(zip([dim for dim in range(len(table)) if dim not in skipped], numbers.update_window_dims))
  shapes = scatter.site.shapes
  parts = [dim for dim, of_updates in window.items() if shapes[ROWS][of_updates] != shapes[0][dim]]
  if math.prod(n for dim, n in enumerate(shapes[ROWS]) if dim not in {*numbers.update_window_dims}) == 1:
    parts += [dim for dim in numbers.scattered_dims_to_operand_dims if dim not in parts]
  # In a dimension of one entry, XLA knows the position to be 0, and would remove a mask of the padding.
  pairs = _scatter_pairs(scatter)
  single = [dim for dim in pairs if shapes[ROWS][dim] == 1]
  batch = dict(zip(numbers.scatter_indices_batching_dims, numbers.input_batching_dims))
  table = whole(table, [*parts, *(batch[pairs[dim]] for dim in single if pairs[dim] in batch)])
  updates = whole(updates, [*(window[dim] for dim in parts if dim in window), *single])
  of_ids = {j: updates[i] for i, j in pairs.items()}  # Ids are split like their updates.
  return table, tuple(of_ids.get(dim, ()) for dim in range(len(ids))), updates, table


def _pairs(lookup: Instance, slices: Iterable[int], vector: int) -> dict[int, int]:
  """Returns {dimension of the rows: corresponding dimension of the ids}.

  This leaves out `slices`, which are dimensions of the rows, and `vector`, the dimension of the ids that holds one id.
  """
  slices = {*slices}
  of_rows = [dim for dim in range(len(lookup.splits[ROWS])) if dim not in slices]
  return dict(zip(of_rows, [dim for dim in range(len(lookup.splits[IDS])) if dim != vector]))


def _scatter_pairs(scatter: Instance) -> dict[int, int]:
  numbers = _numbers(scatter)
  return _pairs(scatter, numbers.update_window_dims, numbers.index_vector_dim)


def _is_uneven(size: int, *entries: tuple[Axis, ...]) -> bool:
  return any(size % count_parts(axes) for axes in entries)


def _sign_ids(lookup: Instance) -> None:
  """Makes unsigned ids signed if an array is split unevenly: XLA pads ids with -1, and aborts if they are unsigned."""
  op = lookup.site.op
  ids = op.operands[IDS].type
  arrays = zip(lookup.site.shapes, lookup.splits)
  uneven = any(_is_uneven(size, axes) for shape, split in arrays for size, axes in zip(shape, split))
  if uneven and ir.IntegerType(ids.element_type).is_unsigned:
    signed = ir.IntegerType.get_signless(ir.IntegerType(ids.element_type).width)
    lookup.site.mend('signed ids')
    with ir.InsertionPoint(op), op.location:
      op.operands[IDS] = stablehlo.ConvertOp(ir.RankedTensorType.get(ids.shape, signed), op.operands[IDS]).result


def _mask_updates(scatter: Instance, dims: Iterable[int]) -> None:
  """Sets updates in the padding of some dimensions to zero.

  The mask is true for all entries before padding. A barrier hides this from XLA until the program is partitioned.
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
