"""Guesses which results of a lowered program XLA stores and which it fuses, and how many bytes are moved.

stored    results of products, collectives, loops and similar operations; values that these need as whole arrays; sums;
          and values with several readers, if storing them moves no more bytes than computing them for each reader
fused     all other values: they are computed where they are read, so their inputs stay in memory until then
view      values in the memory of another value: reshapes, values that a loop passes on, in-place updates of a slice,
          and a product whose only reader casts it to a smaller dtype, because XLA writes it in that dtype

A fusion writes its result into an array that it reads, if this has the same dtype and shape and is not read again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from praxis_lite.common.jax_internals.mlir import ir
from praxis_lite.sharding.propagation import count_parts, operation_name, split_of

PRODUCTS = {'stablehlo.dot_general', 'chlo.ragged_dot'}
STARTED = {'sdy.all_gather', 'sdy.all_reduce', 'sdy.reduce_scatter', 'sdy.all_to_all', 'sdy.collective_permute'}
COLLECTIVES = STARTED | {name.replace('sdy.', 'stablehlo.') for name in STARTED}
MAPPED = 'sdy.manual_computation'  # The body of a `shard_map`.
LOOPS = {'stablehlo.while', 'stablehlo.case', 'stablehlo.if', MAPPED}
RETURNS = {'func.return', 'stablehlo.return', 'sdy.return'}
_READS_FUSED = {'stablehlo.gather', 'stablehlo.scatter', 'stablehlo.concatenate'}
_STORED = PRODUCTS | COLLECTIVES | LOOPS | _READS_FUSED
_STORED |= {'stablehlo.convolution', 'stablehlo.sort', 'stablehlo.custom_call'}
# Operations whose results are stored, but which move the same bytes as a fusion: their inputs and their results.
_FUSIONS = {'stablehlo.concatenate', 'stablehlo.sort'}
# Stored operations that, on GPUs, may write into the array that they read.
_IN_PLACE = {'sdy.all_reduce', 'stablehlo.all_reduce'}
_VIEWS = {'stablehlo.reshape', 'stablehlo.transpose', 'stablehlo.optimization_barrier', 'sdy.all_slice'}
_VIEWS |= {'sdy.sharding_constraint', 'stablehlo.bitcast_convert', 'stablehlo.reduce_precision'}
_SLICES = {'stablehlo.slice', 'stablehlo.dynamic_slice'}


class Sizes:
  """Computes the bytes of the part of a value on each device of a mesh."""

  def __init__(self, mesh: Mapping[str, int]):
    self.mesh = mesh

  def shape(self, value: ir.Value) -> tuple[int, ...]:
    return tuple(-(-n // count_parts(axes)) for n, axes in zip(value.type.shape, split_of(value, self.mesh)))

  def bytes(self, value: ir.Value) -> int:
    """Returns the bytes of the part on each device; 0 if the value is not an array."""
    if not isinstance(value.type, ir.RankedTensorType):
      return 0
    bits = getattr(value.type.element_type, 'width', 32)
    return math.prod(self.shape(value)) * max(bits // 8, 1)

  def text(self, value: ir.Value) -> str:
    """Returns the dtype and the shape of the part on each device, such as 'bf16[4, 128]'."""
    return f'{hlo_dtype_name(value)}{list(self.shape(value))}'


def hlo_dtype_name(value: ir.Value) -> str:
  """Returns the HLO name of the dtype of a value."""
  text = str(value.type.element_type).lower()
  return {'i8': 's8', 'i16': 's16', 'i32': 's32', 'ui8': 'u8', 'i1': 'pred'}.get(text, text)


@dataclasses.dataclass(eq=False)
class Buffer:
  """The memory of a stored value."""

  name: str  # Of the operation that makes the value, or that fills it part by part; see `LocalOperation`.
  shape: str  # Dtype and shape on each device.
  bytes: int
  defined: int  # The position in the block of the operation that makes it.
  last_use: int  # The position of the last operation that reads it.
  loop: str = ''  # The name of the loop that fills it part by part; '' if no loop does.


class Peak(NamedTuple):
  """The largest number of bytes that are live at a time, and the buffers that are live then."""

  bytes: int = 0
  buffers: tuple[Buffer, ...] = ()


_NOTHING = Peak()


@dataclasses.dataclass(frozen=True)
class _Value:
  """The buffers that must stay in memory until a value is read; and for each array, how many bytes of it are read to
  compute the value.
  """

  held: tuple[Buffer, ...] = ()
  read: Mapping[ir.Value, int] = dataclasses.field(default_factory=dict)

  @property
  def moved(self) -> int:
    return sum(self.read.values())


class BlockMemory:
  """Follows the memory of the values in one block of a program with propagated shardings.

  `within` has the names of the loops around the block. With `fills_in_place`, operations write the parts of an array
  directly into it. `on_tpu`, products read a slice of an array directly, without a copy, and a sum is whole before each
  device takes its part of it.
  """

  def __init__(
    self, block: ir.Block, sizes: Sizes, within: str = '', fills_in_place: bool = False, on_tpu: bool = False
  ):
    self._sizes, self._within, self._fills_in_place = sizes, within, fills_in_place
    self._on_tpu = on_tpu
    self._values: dict[ir.Value, _Value] = {}
    for argument in block.arguments:
      self.add_argument(argument)
    self._buffers: list[Buffer] = []
    self._inside: dict[int, Peak] = {}
    self._reused: dict[Buffer, Buffer] = {}  # Arrays that a fusion reads and may write into, and its result.
    self._at = -1
    self._together: set[frozenset[ir.Value]] = set()
    *_, last = block.operations
    self._returned = set(last.operation.operands)

  def add(self, op: ir.Operation, inside: Peak = _NOTHING) -> int:
    """Adds the next operation; `inside` is the peak of live bytes in its regions.

    Returns the bytes that it moves if it becomes a fusion; 0 if it does not.
    """
    self._at += 1
    self._inside[self._at] = inside
    used = [self._values.get(operand, _Value()) for operand in op.operands]
    for buffer in (buffer for value in used for buffer in value.held):
      buffer.last_use = self._at
    if op.name in RETURNS:
      return 0
    moved = 0
    for number, result in enumerate(op.results):
      self._values[result], by_fusion = self._result(op, number, result, used)
      moved += by_fusion
    if op.name == 'stablehlo.while':
      self._label_filled(op)
    return moved

  def add_argument(self, value: ir.Value) -> None:
    """Records that `value` comes from outside the block, so that its memory is not counted here."""
    self._values[value] = _Value(read={value: self._sizes.bytes(value)})

  def same(self, result: ir.Value, other: ir.Value) -> None:
    """Records that `result` is the same value as `other`."""
    self._values[result] = self._values[other]

  def peak(self) -> Peak:
    """Returns the peak of the block, without its arguments."""
    change = [0] * (self._at + 3)
    ends = {b: b.last_use + 1 for b in self._buffers}
    for buffer, result in self._reused.items():
      ends[buffer] -= buffer.last_use == result.defined
    for buffer, end in ends.items():
      change[buffer.defined] += buffer.bytes
      change[end] -= buffer.bytes
    live = np.cumsum(change)
    at, inside = max(self._inside.items(), key=lambda item: int(live[item[0]]) + item[1].bytes)
    own = tuple(buffer for buffer, end in ends.items() if buffer.defined <= at < end)
    return Peak(int(live[at]) + inside.bytes, own + inside.buffers)

  def _label_filled(self, loop: ir.Operation) -> None:
    """Gives each buffer that a loop fills part by part the name of the operation that fills it."""
    *_, last = loop.regions[1].blocks[0].operations
    name = f'{self._within}/{operation_name(loop)}'
    for result, passed in zip(loop.results, last.operation.operands):
      held = self._values[result].held
      if len(held) == 1 and getattr(passed.owner, 'name', '') == 'stablehlo.dynamic_update_slice':
        held[0].name, held[0].loop = f'{name}/{operation_name(passed.owner)}', name

  def _result(self, op: ir.Operation, number: int, result: ir.Value, used: list[_Value]) -> tuple[_Value, int]:
    """Returns the memory that a result needs, and the bytes that a fusion moves to compute it; 0 if no fusion does."""
    size = self._sizes.bytes(result)
    if op.name == 'stablehlo.while' and not _is_copied(op, number):
      return _Value(used[number].held, {result: size}), 0
    if op.name in _VIEWS or _is_written_by_product(op):
      return used[number if number < len(used) else 0], 0
    if op.name == 'stablehlo.dynamic_update_slice':
      moved = 0 if self._fills_in_place else used[1].moved + self._sizes.bytes(op.operands[1])
      return _Value(used[0].held, {result: size}), moved
    if op.name in _SLICES:
      fused = _Value(used[0].held, {result: size})
    else:
      fused = _Value(
        tuple({id(b): b for value in used for b in value.held}.values()),
        {array: count for value in used for array, count in value.read.items()},
      )
    stored = op.name in _STORED
    if not stored and not self._is_stored(op, result, fused.moved, size):
      return fused, 0
    moved = 0 if stored and op.name not in _FUSIONS else self._bytes_read(fused.read) + size
    if result in self._returned:  # The caller of the block counts the memory of the block's results.
      return _Value((), {result: size}), moved
    name = f'{self._within}/{operation_name(op)}'
    written = _only_cast(op) or (None if self._on_tpu else _only_slice(op))
    stored_as = result if written is None else written.results[0]
    size = self._sizes.bytes(stored_as)
    made = Buffer(name, self._sizes.text(stored_as) if size else '', size, self._at, self._at)
    self._buffers.append(made)
    if not stored or (op.name in _IN_PLACE and not self._on_tpu):
      last = next((b for b in fused.held if b.shape == made.shape), None)
      if last is not None:
        self._reused[last] = made
    return _Value((made,), {result: size}), moved

  def _bytes_read(self, read: Mapping[ir.Value, int]) -> int:
    """Returns the bytes that computing a result reads; 0 if XLA fuses this with another result of the same arrays."""
    large = frozenset(array for array, size in read.items() if size >= max(read.values()) / 8)
    if large in self._together:
      return 0
    self._together.add(large)
    return sum(read.values())

  def _is_stored(self, op: ir.Operation, result: ir.Value, moved: int, size: int) -> bool:
    """Whether a result that could be fused is stored; `moved` is the number of bytes that computing it reads."""
    readers = list(_readers(result))
    if op.name == 'stablehlo.reduce' or result in self._returned:
      return True
    if self._on_tpu and op.name in _SLICES and all(reader.name in PRODUCTS for reader in readers):
      return False
    if any(reader.name in _STORED - _READS_FUSED for reader in readers):
      return True
    return len(readers) > 1 and len(readers) * moved >= moved + size + len(readers) * size


def _readers(value: ir.Value) -> Iterator[ir.Operation]:
  """Yields the operations that read a value, directly or through views of it."""
  for use in value.uses:
    user = use.owner.operation
    if user.name in _VIEWS and user.results:
      yield from _readers(user.results[use.operand_number])
    else:
      yield user


def _only_cast(product: ir.Operation) -> ir.Operation | None:
  """Returns the only reader of a product if this is a cast to a smaller dtype; None otherwise."""
  if product.name not in PRODUCTS:
    return None
  readers = list(_readers(product.results[0]))
  if len(readers) != 1 or readers[0].name != 'stablehlo.convert':
    return None
  before, after = (value.type.element_type for value in (product.results[0], readers[0].results[0]))
  return readers[0] if getattr(after, 'width', 32) < getattr(before, 'width', 32) else None


def _only_slice(reduction: ir.Operation) -> ir.Operation | None:
  """Returns the only reader of an all-reduce if this takes each device's part of the sum; None otherwise."""
  if reduction.name != 'sdy.all_reduce':
    return None
  users = [use.owner.operation for use in reduction.results[0].uses]
  return users[0] if len(users) == 1 and users[0].name == 'sdy.all_slice' else None


def _is_written_by_product(op: ir.Operation) -> bool:
  """Whether an operation is the cast that `_only_cast` returns for a product."""
  if op.name != 'stablehlo.convert':
    return False
  value = op.operands[0]
  while not isinstance(value.owner, ir.Block) and value.owner.name in _VIEWS:
    value = value.owner.operands[0]
  cast = None if isinstance(value.owner, ir.Block) else _only_cast(value.owner.operation)
  return cast is not None and cast == op


def _is_copied(loop: ir.Operation, number: int) -> bool:
  """Whether a loop copies an operand, because several buffers that the loop fills start as the same constant."""
  operands = list(loop.operands)
  return operands[number] in operands[:number] and 'broadcast_in_dim' in getattr(operands[number].owner, 'name', '')
