"""What each device does in a lowered program: its products, collectives and live arrays, before XLA compiles it.

Shardy propagates the shardings of a lowered step and makes each communication an operation, in a second for a model of
any size. Arrays are then read in the sizes that one device has of them, loops with their trip counts. What XLA does
later is not seen: what it fuses is guessed, what it combines, reorders and overlaps is not known.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxlib.mlir import ir

from praxis_lite.partitioning.library_calls import fused_attention_flops, is_fused_attention
from praxis_lite.partitioning.propagation import (
  functions_of,
  mesh_axes,
  num_parts,
  operations,
  split_of,
  with_collectives,
)

# A custom call of a function that the compiler splits by a rule of its own; see `lower_without_devices`.
SPLIT_BY_RULE = 'praxis_lite.split_by_rule'


@dataclasses.dataclass(frozen=True)
class LocalProduct:
  """A matrix product, or attention by a fused kernel, on one device.

  Attributes:
    name: as JAX names the operation, after that of the loops that it is in.
    count: executions in a step.
    flops, bytes: of one execution; bytes of operands and results.
    dtype: of the operands, as HLO spells it.
    is_attention: whether it is all of attention, by a fused kernel.
  """

  name: str
  count: int
  flops: float
  bytes: float
  dtype: str
  is_attention: bool = False


@dataclasses.dataclass(frozen=True)
class LocalCollective:
  """A collective.

  Attributes:
    name, count: as of a product.
    kind: as in `partitioning.hlo.KINDS`.
    axes: mesh axes that it communicates over; () if `groups` says it.
    groups: the devices of each group, or pairs of a collective-permute, where the program says them; else ().
    operand_bytes, result_bytes: on one device.
    dtype: of what is communicated.
  """

  name: str
  count: int
  kind: str
  axes: tuple[str, ...]
  groups: tuple[tuple[int, ...], ...]
  operand_bytes: int
  result_bytes: int
  dtype: str


@dataclasses.dataclass(frozen=True)
class LocalProgram:
  """What one device does.

  Attributes:
    products, collectives: in the order of the program.
    temporaries: the most bytes that are live beside arguments and results.
  """

  products: tuple[LocalProduct, ...]
  collectives: tuple[LocalCollective, ...]
  temporaries: int


def local_program(lowered: jax.stages.Lowered) -> LocalProgram:
  """Reads a lowered program of a mesh, which may be without devices."""
  module = lowered.compiler_ir('stablehlo')
  assert module is not None
  root = with_collectives(module)  # Its parts are gone with it.
  functions = functions_of(root)
  reader = _Reader(mesh_axes(module), functions)
  temporaries = reader.read(functions['main'].regions[0].blocks[0], 1, '')
  return LocalProgram(tuple(reader.products), tuple(reader.collectives), temporaries)


# ---------------------------------------------------------------- reading

_PRODUCTS = {'stablehlo.dot_general', 'chlo.ragged_dot'}
_STARTED = {'sdy.all_gather', 'sdy.all_reduce', 'sdy.reduce_scatter', 'sdy.all_to_all', 'sdy.collective_permute'}
_COLLECTIVES = _STARTED | {name.replace('sdy.', 'stablehlo.') for name in _STARTED}
_LOOPS = {'stablehlo.while', 'stablehlo.case', 'stablehlo.if', 'sdy.manual_computation'}
# The results of these are in memory of their own; those of others are fused, unless these read them.
_IN_MEMORY = (
  _PRODUCTS
  | _COLLECTIVES
  | _LOOPS
  | {f'stablehlo.{name}' for name in ('convolution', 'gather', 'scatter', 'concatenate', 'sort', 'custom_call')}
)
_READS_FUSED = {'stablehlo.gather', 'stablehlo.scatter', 'stablehlo.concatenate'}
# The same memory, seen in another way.
_VIEWS = {'stablehlo.reshape', 'stablehlo.transpose', 'stablehlo.optimization_barrier', 'sdy.all_slice'}
_VIEWS |= {'sdy.sharding_constraint', 'stablehlo.bitcast_convert'}
_RETURNS = {'func.return', 'stablehlo.return', 'sdy.return'}


@dataclasses.dataclass
class _Buffer:
  bytes: int
  defined: int
  last_use: int


_Held = tuple[_Buffer, ...]


class _Reader:
  def __init__(self, sizes: Mapping[str, int], functions: Mapping[str, ir.Operation]):
    self._sizes, self._functions = sizes, functions
    self.products: list[LocalProduct] = []
    self.collectives: list[LocalCollective] = []

  def read(self, block: ir.Block, count: int, within: str) -> int:
    """Adds what a block does, `count` times, and returns the most bytes that are live beside what it is given."""
    held: dict[ir.Value, _Held] = {}
    buffers: list[_Buffer] = []
    inside: dict[int, int] = {}
    communicated: dict[object, ir.Value] = {}
    ops = [op.operation for op in block.operations]
    returned = set(ops[-1].operands)
    for at, op in enumerate(ops):
      used = [held.get(operand, ()) for operand in op.operands]
      for buffer in (b for each in used for b in each):
        buffer.last_use = at
      if op.name in _RETURNS:
        continue
      if op.name in _LOOPS:
        inside[at] = self._read_inside(op, count, within)
      elif op.name in _PRODUCTS:
        self.products.append(self._product(op, count, within))
      elif op.name == 'stablehlo.custom_call':
        self.products += self._attention(op, count, within)
      elif op.name in _STARTED:  # XLA has one for all uses of the same array, split in the same way.
        (result,) = op.results
        key = (op.name, op.operands[0], split_of(result, self._sizes))
        if key in communicated:
          held[result] = held[communicated[key]]
          continue
        communicated[key] = result
      if op.name in _COLLECTIVES:
        self.collectives += self._collective(op, count, within)
      for i, result in enumerate(op.results):
        held[result] = self._held(op, i, result, used, at, buffers, returned)
    change = [0] * (len(ops) + 2)
    for buffer in buffers:
      change[buffer.defined] += buffer.bytes
      change[buffer.last_use + 1] -= buffer.bytes
    live = np.cumsum(change)
    return max((int(live[at]) + inside.get(at, 0) for at in range(len(ops))), default=0)

  def _held(
    self,
    op: ir.Operation,
    number: int,
    result: ir.Value,
    used: Sequence[_Held],
    at: int,
    buffers: list[_Buffer],
    returned: set[ir.Value],
  ) -> _Held:
    """The memory that has to stay for a result to be read."""
    if op.name == 'stablehlo.while' and not _is_copied(op, number):
      return used[number]
    if op.name in _VIEWS:
      return used[number if number < len(used) else 0]
    if op.name == 'stablehlo.dynamic_update_slice':
      return used[0]
    if op.name in _IN_MEMORY or self._is_read_whole(result):
      if result in returned:  # The caller has a place for it.
        return ()
      buffers.append(_Buffer(self._bytes(result), at, at))
      return (buffers[-1],)
    return tuple({id(b): b for each in used for b in each}.values())

  @staticmethod
  def _is_read_whole(result: ir.Value) -> bool:
    """Whether something reads a result that no other operation is fused into."""
    return any(use.owner.operation.name in _IN_MEMORY - _READS_FUSED for use in result.uses)

  def _read_inside(self, op: ir.Operation, count: int, within: str) -> int:
    """Adds what the regions of an operation do; of several branches, all that is in them."""
    name = f'{within}/{_name(op)}' if op.name != 'sdy.manual_computation' else within
    if op.name == 'stablehlo.while':
      return self.read(op.regions[1].blocks[0], count * _trip_count(op), name)
    return max(self.read(region.blocks[0], count, name) for region in op.regions)

  def _product(self, op: ir.Operation, count: int, within: str) -> LocalProduct:
    left, result = op.operands[0], op.results[0]
    shape = self._shape(left)
    numbers = str(
      op.attributes['dot_dimension_numbers' if 'dot_general' in op.name else 'ragged_dot_dimension_numbers']
    )
    contracted = re.search(r'lhs_contracting_dimensions = \[([\d, ]*)\]', numbers)
    dims = [int(d) for d in contracted[1].split(',') if d.strip()] if contracted else []
    flops = 2.0 * math.prod(self._shape(result)) * math.prod(shape[d] for d in dims)
    moved = sum(map(self._bytes, (*op.operands[:2], result)))
    return LocalProduct(f'{within}/{_name(op)}', count, flops, float(moved), _dtype(left))

  def _attention(self, op: ir.Operation, count: int, within: str) -> list[LocalProduct]:
    """The fused attention that a custom call with a rule of its own calls: its batch and heads may be split."""
    if ir.StringAttr(op.attributes['call_target_name']).value != SPLIT_BY_RULE:
      return []
    (called,) = ir.ArrayAttr(op.attributes['called_computations'])
    inside = operations(self._functions[ir.FlatSymbolRefAttr(called).value], {'stablehlo.custom_call'})
    query = op.operands[0]
    share = math.prod(self._shape(query)) / math.prod(query.type.shape)
    moved = sum(map(self._bytes, (*op.operands, *op.results)))
    found = []
    for kernel in inside:
      target = ir.StringAttr(kernel.attributes['call_target_name']).value
      if is_fused_attention(target):
        config = json.loads(ir.StringAttr(kernel.attributes['backend_config']).value)
        flops = share * fused_attention_flops(target, config, query.type.shape[-1])
        found.append(LocalProduct(f'{within}/{_name(op)}', count, flops, float(moved), _dtype(query), True))
    return found

  def _collective(self, op: ir.Operation, count: int, within: str) -> list[LocalCollective]:
    """None, where nothing moves."""
    operand, result = op.operands[0], op.results[0]
    users = [use.owner.operation for use in result.uses]
    kind = op.name.partition('.')[2].replace('_', '-')
    sent, received = self._bytes(operand), self._bytes(result)
    axes: tuple[str, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    if op.name.startswith('sdy.'):
      axes = self._axes(op, kind)
      if kind == 'all-reduce' and len(users) == 1 and users[0].name == 'sdy.all_slice':
        kind, received = 'reduce-scatter', self._bytes(users[0].results[0])
    else:
      name = 'source_target_pairs' if kind == 'collective-permute' else 'replica_groups'
      groups = tuple(map(tuple, np.array(ir.DenseIntElementsAttr(op.attributes[name])).tolist()))
    if not axes and not groups:
      return []
    # What JAX traced as a function of its own, such as a lookup, has the name of that function alone.
    name = f'{within}/{next((name for name in map(_name, (op, *users)) if "/" in name), _name(op))}'
    return [LocalCollective(name, count, kind, axes, groups, sent, received, _dtype(result))]

  def _axes(self, op: ir.Operation, kind: str) -> tuple[str, ...]:
    if kind == 'all-reduce':
      named = re.findall(r'"([^"]+)"', str(op.attributes['reduction_axes']))
      return tuple(axis for axis in self._sizes if axis in named)
    before, after = (
      {axis.name: dim for dim, axes in enumerate(split_of(value, self._sizes)) for axis in axes}
      for value in (op.operands[0], op.results[0])
    )
    if kind == 'collective-permute':
      orders = [[a.name for axes in split_of(v, self._sizes) for a in axes] for v in (op.operands[0], op.results[0])]
      return tuple(
        axis for axis in self._sizes if axis in {a for pair in zip(*orders) if len({*pair}) > 1 for a in pair}
      )
    return tuple(axis for axis in self._sizes if before.get(axis) != after.get(axis))

  def _shape(self, value: ir.Value) -> tuple[int, ...]:
    """The part of an array that a device has."""
    return tuple(-(-n // num_parts(axes)) for n, axes in zip(value.type.shape, split_of(value, self._sizes)))

  def _bytes(self, value: ir.Value) -> int:
    if not isinstance(value.type, ir.RankedTensorType):
      return 0
    return math.prod(self._shape(value)) * _itemsize(value)


def _is_copied(loop: ir.Operation, number: int) -> bool:
  """Whether a loop needs a copy of what it is given: several buffers that it fills may begin as one constant."""
  operands = list(loop.operands)
  return operands[number] in operands[:number] and 'broadcast_in_dim' in getattr(operands[number].owner, 'name', '')


def _itemsize(value: ir.Value) -> int:
  element = value.type.element_type
  bits = getattr(element, 'width', 32)
  return max(bits // 8, 1)


def _dtype(value: ir.Value) -> str:
  """As HLO spells it."""
  text = str(value.type.element_type).lower()
  return {'i8': 's8', 'i16': 's16', 'i32': 's32', 'ui8': 'u8', 'i1': 'pred'}.get(text, text)


def _name(op: ir.Operation) -> str:
  return str(op.location).partition('"')[2].partition('"')[0]


def _trip_count(loop: ir.Operation) -> int:
  """How often a loop of `lax.scan` runs, which counts up to a constant from zero; 1 if it is another one."""
  for op in loop.regions[0].blocks[0].operations:
    if op.operation.name == 'stablehlo.compare':
      limit = op.operation.operands[1].owner
      if isinstance(limit, ir.Block) or 'value' not in limit.operation.attributes:
        return 1
      return int(np.array(ir.DenseIntElementsAttr(limit.operation.attributes['value'])).flat[0])
  return 1
