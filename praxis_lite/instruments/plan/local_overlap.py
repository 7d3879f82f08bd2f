"""Guesses which collectives of a lowered program XLA can overlap with work, and which all-reduces it joins.

Work means operations that take long: products, loops and library calls. In an iteration of a loop, two kinds of
collectives can overlap with work. XLA can start a collective early if no work of the iteration computes its operand,
such as the weights of a layer. It can end a collective late if neither work of the iteration nor the next iteration
needs its result, such as a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

from praxis_lite.common.jax_internals.mlir import ir
from praxis_lite.instruments.plan.local_memory import COLLECTIVES, LOOPS, MAPPED, PRODUCTS

_WORK = PRODUCTS | (LOOPS - {MAPPED}) | {'stablehlo.custom_call', 'stablehlo.convolution'}


def overlappable_collectives(body: ir.Block) -> set[ir.Operation]:
  """Returns the collectives in the body of a loop, outside inner loops, that may overlap with its work."""
  state = changing_state(body)
  made, needed = {argument for argument, _ in state}, {passed for _, passed in state}
  _spread(body, made)
  _spread(body, needed, backward=True)
  return {op for op in _collectives(body) if op.operands[0] not in made or op.results[0] not in needed}


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
  """Whether a collective is an all-reduce in a sum of all-reduces, except the last. XLA reduces the sum instead."""
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
  """Adds to `reached` the results of work and of operations that read values in it.

  If `backward`, adds the operands of work and of operations whose results are in `reached`.
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
