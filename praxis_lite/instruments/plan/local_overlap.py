"""Guesses which collectives of a lowered program XLA can overlap with work, what it moves for that, and what it joins.

Work means operations that take long: products, loops and library calls. In an iteration of a loop, two kinds of
collectives can overlap with work. XLA can start a collective early if no work of the iteration computes its operand,
such as the weights of a layer. It can end a collective late if neither work of the iteration nor the next iteration
needs its result, such as a gradient.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from praxis_lite.common.jax_internals.mlir import ir
from praxis_lite.instruments.plan.local_memory import COLLECTIVES, LOOPS, MAPPED, PRODUCTS, Sizes

# Since JAX 0.11, XLA leaves collectives outside the bodies of `shard_map` in their iteration.
_MOVES_ALL = jax.__version_info__ < (0, 11)
_LARGE = 2**20  # Bytes of a collective beside which XLA places work.
_WORK = PRODUCTS | (LOOPS - {MAPPED}) | {'stablehlo.custom_call', 'stablehlo.convolution'}


class Overlapping(NamedTuple):
  """The collectives in the body of a loop, outside inner loops, that may overlap with its work."""

  early: set[ir.Operation]  # No work of the iteration computes the operand.
  late: set[ir.Operation]  # Nothing else in the iteration, and not the next iteration, needs the result.

  @property
  def all(self) -> set[ir.Operation]:
    return self.early | self.late


def overlapping_collectives(body: ir.Block) -> Overlapping:
  """Returns the collectives in the body of a loop that may overlap with its work."""
  state = changing_state(body)
  made, needed = {argument for argument, _ in state}, {passed for _, passed in state}
  _spread(body, made)
  _spread(body, needed, backward=True)
  collectives = list(_collectives(body))
  return Overlapping(
    {op for op in collectives if op.operands[0] not in made},
    {op for op in collectives if op.results[0] not in needed},
  )


def pipelined_collectives(overlapping: Overlapping) -> tuple[set[ir.Operation], set[ir.Operation]]:
  """Returns the gathers that XLA runs in the iteration before, and the reductions that it runs in the next one.

  Flags in `xla_flags.DEFAULTS` ask for this. Since JAX 0.11, XLA moves only reductions in the body of a `shard_map`.
  """
  gathers = {op for op in overlapping.early if op.name.endswith('all_gather') and _MOVES_ALL}
  reductions = {
    op
    for op in overlapping.late - overlapping.early
    if 'reduce' in op.name and not is_joined(op) and (_MOVES_ALL or op.name.startswith('stablehlo'))
  }
  return gathers, reductions


def order_on_gpus(body: ir.Block, overlapping: Overlapping, sizes: Sizes) -> list[ir.Operation]:
  """Returns the operations of a loop's body in the order in which XLA runs them on GPUs.

  XLA computes what only late collectives need, such as gradients of weights, beside the next collective on which work
  waits; if there is none, after all other work. Until then, the operands stay in memory.
  """
  *operations, end = (op.operation for op in body.operations)
  last = _only_for(overlapping.late, operations, {passed for _, passed in changing_state(body)})
  starts = [at for at, op in enumerate(operations) if op not in last and _is_waited_for(op, overlapping, sizes)]
  starts.append(len(operations))
  place = {op: (starts[bisect.bisect(starts, at)], 0) if op in last else (at, 1) for at, op in enumerate(operations)}
  return [*sorted(operations, key=lambda op: place[op]), end]


def _only_for(late: set[ir.Operation], operations: Sequence[ir.Operation], needed: set[ir.Value]) -> set[ir.Operation]:
  """Returns late collectives, the operations that only these need, and those that need these.

  The next iteration of the loop needs the values `needed`, and `operations` are in order.
  """
  free: set[ir.Operation] = set()
  for op in reversed(operations):
    if needed.isdisjoint(op.results):
      free.add(op)
    else:
      needed.update(op.operands)
  before, after = {op.operands[0] for op in late}, {op.results[0] for op in late}
  for op in reversed(operations):
    if op in free and not before.isdisjoint(op.results):
      before.update(op.operands)
  for op in operations:
    if op in free and not after.isdisjoint(op.operands):
      after.update(op.results)
  last: set[ir.Operation] = set()
  moved: set[ir.Value] = set()
  for op in operations:  # What reads a value that comes later comes later too.
    if op in free and not ((before | after).isdisjoint(op.results) and moved.isdisjoint(op.operands)):
      last.add(op)
      moved.update(op.results)
  return last


def _is_waited_for(op: ir.Operation, overlapping: Overlapping, sizes: Sizes) -> bool:
  """Whether an operation is or contains a large collective on which work waits."""
  inside = _collectives(op.regions[0].blocks[0]) if op.name == MAPPED else [op] if op.name in COLLECTIVES else ()
  return any(c not in overlapping.all and sizes.bytes(c.results[0]) >= _LARGE for c in inside)


def changing_state(body: ir.Block) -> list[tuple[ir.Value, ir.Value]]:
  """Returns pairs (argument, value that is passed on) of the state that changes between iterations of a loop.

  It leaves out counters and arrays that are filled part by part.
  """
  *_, last = body.operations
  return [
    (argument, passed)
    for argument, passed in zip(body.arguments, last.operation.operands)
    if passed != argument
    and passed.type.shape
    and getattr(passed.owner, 'name', '') != 'stablehlo.dynamic_update_slice'
  ]


def is_joined(op: ir.Operation) -> bool:
  """Whether a collective is one of several all-reduces that are added, but not the last: XLA reduces only the sum."""
  if op.name != 'sdy.all_reduce':
    return False
  axes = str(op.attributes['reduction_axes'])
  while (user := _only_user(op)) is not None and user.name == 'stablehlo.add':
    before, after = user.operands
    if before == op.results[0]:
      return _is_reduced(after, axes)
    if not _is_reduced(before, axes):
      break
    op = user
  return False


def _is_reduced(value: ir.Value, axes: str) -> bool:
  """Whether a value has only one user and is an all-reduce over `axes` or a sum of such all-reduces."""
  if isinstance(value.owner, ir.Block):
    return False
  op = value.owner.operation
  if _only_user(op) is None:
    return False
  if op.name == 'stablehlo.add':
    return all(_is_reduced(operand, axes) for operand in op.operands)
  return op.name == 'sdy.all_reduce' and str(op.attributes['reduction_axes']) == axes


def _only_user(op: ir.Operation) -> ir.Operation | None:
  """Returns the user of an operation's result; None unless the operation has one result with one user."""
  users = [use.owner.operation for use in op.results[0].uses] if len(op.results) == 1 else []
  return users[0] if len(users) == 1 else None


def _collectives(block: ir.Block) -> Iterator[ir.Operation]:
  for op in (op.operation for op in block.operations):
    if op.name in COLLECTIVES:
      yield op
    elif op.name == MAPPED:
      yield from _collectives(op.regions[0].blocks[0])


def _spread(block: ir.Block, reached: set[ir.Value], *, backward: bool = False) -> None:
  """Adds to `reached` the results of work, and the results of operations that read a value in `reached`.

  If `backward`, adds the operands of work, and the operands of operations with a result in `reached`.
  """
  operations = [op.operation for op in block.operations]
  for op in reversed(operations) if backward else operations:
    if op.name == MAPPED:
      inside = op.regions[0].blocks[0]
      *_, last = inside.operations
      entering, leaving = zip(op.operands, inside.arguments), zip(op.results, last.operation.operands)
      inward, outward = (leaving, entering) if backward else (entering, leaving)
      reached.update(inner for outer, inner in inward if outer in reached)
      _spread(inside, reached, backward=backward)
      reached.update(outer for outer, inner in outward if inner in reached)
      continue
    known, more = (op.results, op.operands) if backward else (op.operands, op.results)
    if op.name in _WORK or not reached.isdisjoint(known):
      reached.update(more)
