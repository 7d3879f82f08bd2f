"""The guard of calls of LAPACK, which factorize matrices on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from praxis_lite.common.jax_internals.flags import jaxlib_release
from praxis_lite.common.jax_internals.mlir import ir, stablehlo
from praxis_lite.sharding.guards.arrays import make_constant, zeros
from praxis_lite.sharding.propagation import ArraySplit, Instance, Site, callee, count_parts, functions_of, operations

CALL, _FRONTEND = 'stablehlo.custom_call', 'mhlo.frontend_attributes'


def guard_lapack(call: Instance) -> tuple[ArraySplit, ...] | None:
  """Returns a split for each array: all split the batch dimensions in the same way, evenly, and no other dimension.

  Returns None if the call is not of LAPACK.
  """
  if not is_lapack(call.site.op):
    return None
  number = len(_batch_shape(call.site.op))
  sizes = call.site.shapes[0][:number]
  batches = (split[:number] for split in (*call.splits[len(call.site.op.operands) :], *call.splits))
  batch = next((split for split in batches if any(split)), ((),) * number)
  batch = tuple(axes if n % count_parts(axes) == 0 else () for n, axes in zip(sizes, batch))
  return tuple((*batch, *((),) * (len(shape) - number)) for shape in call.site.shapes)


def is_lapack(op: ir.Operation) -> bool:
  """Whether an operation calls LAPACK."""
  return op.name == CALL and ir.StringAttr(op.attributes['call_target_name']).value.startswith('lapack_')


def call_one_matrix_at_a_time(
  module: ir.Operation, instances: Iterable[Instance], num_devices: int
) -> list[ir.Operation]:
  """Replaces calls for batches of matrices by loops over the matrices; returns the calls that were replaced.

  In JAX 0.10.0 to 0.11.1, a call for several matrices runs in a thread of the CPU's pool. It hands the matrices to
  other threads of that pool, and waits for them. If as many calls run at once as the pool has threads, all of them wait
  forever. The calls may come from several devices, or from one program. Calls for one matrix do not wait. Test:
  `test_calls_of_lapack_are_for_one_matrix`.

  `instances` are the operations of the lowered program with their splits on a mesh of `num_devices`.
  """
  if jaxlib_release() >= _MENDED:
    return []
  # A batch size of an exported program may be unknown; it then is a negative number.
  calls = [
    op for op in operations(module, {CALL}) if is_lapack(op) and math.prod(max(n, 0) for n in _batch_shape(op)) > 1
  ]
  if not calls:
    return []
  splits: dict[ir.Operation, set[tuple[ArraySplit, ...]]] = {}
  sites = {instance.site.op: instance.site for instance in instances}
  for instance in instances:
    splits.setdefault(instance.site.op, set()).add(instance.splits)
  if num_devices == 1 and _num_runs(module, {*calls}) < 2:
    return []
  replaced = []
  for call in calls:
    shape, ways = _batch_shape(call), splits.get(call, set())
    batch = next(iter(ways))[0][: len(shape)] if len(ways) == 1 else ((),) * len(shape)
    if any(n != count_parts(axes) for n, axes in zip(shape, batch)):
      _loop(call, batch, sites.get(call))
      replaced.append(call)
  return replaced


# The first release of JAX in which a call for several matrices computes them one after another.
_MENDED = (0, 11, 2)


def _batch_shape(call: ir.Operation) -> tuple[int, ...]:
  """Returns the batch dimensions of the first operand of a call."""
  number = 0
  if _FRONTEND in call.attributes and 'num_batch_dims' in (given := ir.DictAttr(call.attributes[_FRONTEND])):
    number = int(ir.StringAttr(given['num_batch_dims']).value)
  return (*call.operands[0].type.shape[:number],)


def _num_runs(root: ir.Operation, calls: set[ir.Operation]) -> int:
  """Returns how many of `calls` one run of the main function executes, including those in called functions."""
  functions = functions_of(root)

  def runs(function: ir.Operation) -> int:
    inside = operations(function, {CALL, 'func.call'})
    return sum(op in calls if op.name == CALL else runs(functions[callee(op)]) for op in inside)

  return runs(functions['main'])


def _loop(call: ir.Operation, batch: ArraySplit, site: Site | None) -> None:
  """Replaces a call by a loop of calls. In each iteration, each device computes with one of its matrices.

  For this, each batch dimension becomes two: the devices that split it, and the matrices of one device.
  """
  shape = _batch_shape(call)
  parts = [count_parts(axes) for axes in batch]
  each = [n // k for n, k in zip(shape, parts)]
  loops = [n for pair in zip(parts, each) for n in pair]

  def constrain(value: ir.Value, entries: ArraySplit) -> ir.Value:
    rest = ((),) * (value.type.rank - len(entries))
    return value if site is None else site.insert_constraint(value, (*entries, *rest)).result

  def reshape(value: ir.Value, dims: Sequence[int], old: int, entries: ArraySplit) -> ir.Value:
    of_type = ir.RankedTensorType.get([*dims, *value.type.shape[old:]], value.type.element_type)
    return constrain(stablehlo.ReshapeOp(of_type, value).result, entries)

  apart = tuple(entry for axes in batch for entry in (axes, ()))
  number = len(call.operands)
  with ir.InsertionPoint(call), call.location:
    int32 = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
    carried = [
      make_constant(int32, 0),
      *(reshape(constrain(x, batch), loops, len(shape), apart) for x in call.operands),
    ]
    for x in call.results:
      whole = ir.RankedTensorType.get([*loops, *x.type.shape[len(shape) :]], x.type.element_type)
      carried.append(constrain(zeros(whole), apart))
    loop = stablehlo.WhileOp([x.type for x in carried], carried)
    for region in loop.regions:
      region.blocks.append(*(x.type for x in carried), arg_locs=[call.location] * len(carried))
    with ir.InsertionPoint(loop.regions[0].blocks[0]):
      turn = loop.regions[0].blocks[0].arguments[0]
      less = stablehlo.ComparisonDirectionAttr.get('LT')
      stablehlo.ReturnOp([stablehlo.CompareOp(turn, make_constant(int32, math.prod(each)), less).result])
    with ir.InsertionPoint(loop.regions[1].blocks[0]):
      turn, *arrays = loop.regions[1].blocks[0].arguments
      begin: list[ir.Value] = []
      left = turn
      for n in reversed(each):
        begin = [make_constant(int32, 0), stablehlo.RemOp(left, make_constant(int32, n)).result, *begin]
        left = stablehlo.DivOp(left, make_constant(int32, n)).result
      one = [n for k in parts for n in (k, 1)]
      of_turn = []
      for x in arrays[:number]:
        read = stablehlo.dynamic_slice(x, _full_index(begin, x, int32), [*one, *x.type.shape[len(one) :]])
        of_turn.append(reshape(read, parts, len(one), batch))
      results = _call_for_batch(call, of_turn, parts)
      written = [
        stablehlo.DynamicUpdateSliceOp(
          x, reshape(constrain(result, batch), one, len(parts), apart), _full_index(begin, x, int32)
        ).result
        for x, result in zip(arrays[number:], results)
      ]
      stablehlo.ReturnOp([stablehlo.AddOp(turn, make_constant(int32, 1)).result, *arrays[:number], *written])
    found = [reshape(x, shape, len(loops), batch) for x in [*loop.results][1 + number :]]
  for old, new in zip([*call.results], found):
    old.replace_all_uses_with(new)
  call.erase()


def _full_index(begin: Sequence[ir.Value], array: ir.Value, int32: ir.RankedTensorType) -> list[ir.Value]:
  return [*begin, *(make_constant(int32, 0) for _ in range(array.type.rank - len(begin)))]


def _call_for_batch(call: ir.Operation, operands: Sequence[ir.Value], batch: Sequence[int]) -> list[ir.Value]:
  """Inserts a copy of a call for other operands, whose batch dimensions are `batch`; returns its results."""
  types = [ir.RankedTensorType.get([*batch, *x.type.shape[len(batch) :]], x.type.element_type) for x in call.results]
  names = [named if isinstance(named, str) else named.name for named in call.attributes]  # Strings up to jaxlib 0.10.2.
  attributes = {name: call.attributes[name] for name in names if name != 'sdy.sharding_rule'}
  return [*ir.Operation.create(CALL, results=types, operands=[*operands], attributes=attributes).results]
