"""The guard of slices of slices that begin past the end, which XLA computes wrongly even on one device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from praxis_lite.common.jax_internals.mlir import ir, stablehlo
from praxis_lite.sharding.guards.arrays import GATHER, IDS, integers, make_constant

SLICE, UPDATE = 'stablehlo.dynamic_slice', 'stablehlo.dynamic_update_slice'
KINDS = (SLICE, UPDATE, GATHER)
_RESHAPE = 'stablehlo.reshape'
_ANY = 2**64  # Larger than any id.


def clamp_starts(slices: Iterable[ir.Operation]) -> list[ir.Operation]:
  """Clamps the starts of slices, of the kinds in `KINDS`, as the operation itself does, and returns the changed slices.

  XLA merges a slice of a slice into one that begins at the sum of both starts, and forgets that each start was clamped.
  Example: `lax.dynamic_slice(lax.dynamic_slice(x, (i,), (4,)), (j,), (2,))` of 5 entries with i = 3. On a mesh, the
  outer slice may be a device's part of the result. The same holds for an update of an update, as in the gradient of
  such slices. A scan has many slices and updates of one entry; these are clamped only if they are inside another one.
  A barrier keeps XLA from removing the clamp. Tests: `test_slices_of_slices`, `test_updates_in_updates`,
  `test_slices_of_a_batch_that_are_split`.
  """
  changed = []
  for op in slices:
    table = op.operands[0].type.shape
    sizes = op.operands[1].type.shape if op.name == UPDATE else integers(op, 'slice_sizes')
    fewest = 0 if _is_inside_another(op) else 1
    partial = [dim for dim, (n, size) in enumerate(zip(table, sizes)) if fewest < size < n]
    clamped = [False]
    if op.name != GATHER:
      first = 2 if op.name == UPDATE else 1
      clamped = [_clamp_start(op, first + dim, [table[dim] - sizes[dim]]) for dim in partial]
    else:
      numbers = stablehlo.GatherDimensionNumbers(op.attributes['dimension_numbers'])
      looked_up = numbers.start_index_map
      if {*partial} & {*looked_up}:
        dynamic = op.operands[0].type.is_dynamic_dim  # As in a program exported for any batch size.
        last = [_ANY if dynamic(dim) else table[dim] - sizes[dim] for dim in looked_up]
        clamped = [_clamp_start(op, IDS, last, numbers.index_vector_dim)]
    if any(clamped):
      changed.append(op)
  return changed


def _is_inside_another(op: ir.Operation) -> bool:
  """Whether `op` is a slice of a slice's result, or an update whose result another update changes.

  There may be reshapes between the two operations.
  """
  if op.name == UPDATE:
    return any(use.owner.name == UPDATE and use.operand_number == 1 for use in _uses(op.results[0]))
  value = op.operands[0]
  while not isinstance(value.owner, ir.Block) and value.owner.name == _RESHAPE:
    value = value.owner.operands[0]
  return not isinstance(value.owner, ir.Block) and value.owner.name in (SLICE, GATHER)


def _uses(value: ir.Value) -> Iterator[ir.OpOperand]:
  """Yields the uses of a value, and the uses of its reshapes."""
  for use in value.uses:
    yield from _uses(use.owner.results[0]) if use.owner.name == _RESHAPE else [use]


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
