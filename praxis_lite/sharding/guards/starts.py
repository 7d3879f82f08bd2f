"""The guard of slices of slices that begin past the end, which XLA computes wrongly on one device too."""

from __future__ import annotations

from collections.abc import Sequence

from praxis_lite.common.jax_internals.mlir import ir, stablehlo
from praxis_lite.sharding.guards.arrays import GATHER, IDS, integers, make_constant
from praxis_lite.sharding.propagation import operations

SLICE = 'stablehlo.dynamic_slice'
_ANY = 2**64  # Larger than any id.


def clamp_starts(module: ir.Operation) -> list[ir.Operation]:
  """Clamps the starts of slices of several entries, as the operation itself does, and returns the changed slices.

  XLA merges a slice of a slice into one that begins at the sum of both starts, and forgets that the inner start was
  clamped. Example: `lax.dynamic_slice(lax.dynamic_slice(x, (i,), (4,)), (j,), (2,))` of 5 entries with i = 3. On a
  mesh, the outer slice may be a device's part of the result. A barrier keeps XLA from removing the clamp. Tests:
  `test_slices_of_slices`, `test_slices_of_a_batch_that_are_split`.
  """
  changed = []
  for op in operations(module, {SLICE, GATHER}):
    table, sizes = op.operands[0].type.shape, integers(op, 'slice_sizes')
    partial = [dim for dim, (n, size) in enumerate(zip(table, sizes)) if 1 < size < n]
    clamped = [False]
    if op.name == SLICE:
      clamped = [_clamp_start(op, 1 + dim, [table[dim] - sizes[dim]]) for dim in partial]
    else:
      numbers = stablehlo.GatherDimensionNumbers(op.attributes['dimension_numbers'])
      looked_up = numbers.start_index_map
      if {*partial} & {*looked_up}:
        dynamic = op.operands[0].type.is_dynamic_dim  # As in an exported program of any batch size.
        last = [_ANY if dynamic(dim) else table[dim] - sizes[dim] for dim in looked_up]
        clamped = [_clamp_start(op, IDS, last, numbers.index_vector_dim)]
    if any(clamped):
      changed.append(op)
  return changed


def _clamp_start(op: ir.Operation, number: int, last: Sequence[int], vector: int = 0) -> bool:
  """Clamps an operand, which holds starts along dimension `vector`, between 0 and `last`.

  Returns False, and changes nothing, if the operand is a constant.
  """
  begin = op.operands[number]
  if not isinstance(begin.owner, ir.Block) and begin.owner.operation.name == 'stablehlo.constant':
    return False
  of_type = begin.type
  dtype = ir.IntegerType(of_type.element_type)
  most = 2 ** (dtype.width - (not dtype.is_unsigned)) - 1
  with ir.InsertionPoint(op), op.location:
    scalar = ir.RankedTensorType.get([], dtype)
    if len({*last}) == 1:
      end = make_constant(scalar, min(last[0], most))
    else:
      of_vector = ir.RankedTensorType.get([len(last)], dtype)
      values = [ir.IntegerAttr.get(dtype, min(n, most)) for n in last]
      ends = stablehlo.ConstantOp(ir.DenseElementsAttr.get(values, of_vector)).result
      end = _broadcast(ends, begin, vector)
    start = make_constant(scalar, 0)
    if end.type.rank:
      start = _broadcast(start, begin)
    clamped = stablehlo.ClampOp(start, begin, end).result
    op.operands[number] = stablehlo.OptimizationBarrierOp([clamped]).results[0]
  return True


def _broadcast(value: ir.Value, like: ir.Value, *dims: int) -> ir.Value:
  """Returns a value broadcast to the shape of `like`; its own dimensions become the dimensions `dims`."""
  if like.type.has_static_shape:
    return stablehlo.BroadcastInDimOp(like.type, value, [*dims]).result
  one = ir.RankedTensorType.get([1], ir.IntegerType.get_signless(32))
  sizes = [stablehlo.ReshapeOp(one, stablehlo.get_dimension_size(like, dim)).result for dim in range(like.type.rank)]
  return stablehlo.DynamicBroadcastInDimOp(like.type, value, stablehlo.concatenate(sizes, 0), [*dims]).result
