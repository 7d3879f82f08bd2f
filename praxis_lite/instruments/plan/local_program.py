"""Reads the work of each device from a lowered program: its products, collectives and live arrays.

Shardy propagates the shardings of a lowered step and makes each communication an operation; this takes a second for a
model of any size. The reader then counts arrays by their size on one device, and loops by their trip counts. It does
not see what XLA does later: it guesses fusions, and does not know what XLA combines and reorders.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from praxis_lite.common.jax_internals.mlir import collective_groups, ir
from praxis_lite.instruments.plan.layer_names import HiddenWork
from praxis_lite.instruments.plan.library_calls import (
  estimated_cost,
  fused_attention_flops,
  grouped_product_flops,
  is_attention_kernel,
  is_fused_attention,
  named_attention_flops,
)
from praxis_lite.instruments.plan.local_memory import (
  COLLECTIVES,
  LOOPS,
  PRODUCTS,
  STARTED,
  BlockMemory,
  Buffer,
  Peak,
  Sizes,
  hlo_dtype_name,
)
from praxis_lite.instruments.plan.local_overlap import (
  Overlapping,
  changing_state,
  is_joined,
  order_on_gpus,
  overlapping_collectives,
  pipelined_collectives,
)
from praxis_lite.instruments.plan.work import convolution_flops
from praxis_lite.sharding.propagation import (
  count_parts,
  functions_of,
  make_collectives_explicit,
  mesh_axes,
  operation_name,
  operations,
  split_of,
)

# The target of a custom call that the compiler splits by a special rule; see `lower_without_devices`.
SPLIT_BY_RULE = 'praxis_lite.split_by_rule'
# Marks a loop that the compiled program unrolls, so that it does not copy the results of iterations into one array.
UNROLLED = 'praxis_lite.unrolled'


@dataclasses.dataclass(frozen=True)
class LocalOperation:
  """The work of an operation on one device: a product, a convolution, a fused attention or a fusion.

  A fusion is a guess: XLA may fuse other operations.
  """

  name: str  # The names of the loops that contain it, then the name that JAX gives the operation.
  count: float  # Executions in a step.
  bytes: int  # Read and written by one execution.
  flops: float = 0.0  # Of one execution; 0 for a fusion.
  dtype: str = ''  # HLO name of the dtype of a product's operands; '' for a fusion.
  attention_dims: int = 0  # Dims per head of attention in a fused kernel; 0 for other operations.
  loop: int = 0  # Number of the innermost loop around it; 0 outside loops.


@dataclasses.dataclass(frozen=True)
class LocalCollective:
  """A collective of a lowered program; see `LocalOperation` for `name`, `count` and `loop`. Sizes are on one device."""

  name: str
  count: float
  kind: str  # One of `hlo.KINDS`.
  axes: tuple[str, ...]  # Mesh axes that it communicates over; () if the program has `groups` instead.
  groups: tuple[tuple[int, ...], ...]  # The devices of each group, or the pairs of a collective-permute.
  operand_bytes: int
  result_bytes: int
  dtype: str
  loop: int = 0
  is_beside_work: bool = False  # Whether it can overlap with the work of its loop; see `local_overlap.py`.


@dataclasses.dataclass(frozen=True)
class LocalProgram:
  """The work of one device in a step, read from a lowered program.

  Attributes:
    products, fusions, collectives: its operations of these kinds, in order.
    peak: the largest number of live bytes, and their buffers, without arguments and results.
    unknown_loops: names of loops whose trip count the program does not say; each counts as one iteration.
  """

  products: tuple[LocalOperation, ...]
  fusions: tuple[LocalOperation, ...]
  collectives: tuple[LocalCollective, ...]
  peak: Peak
  unknown_loops: tuple[str, ...] = ()


def local_program(
  lowered: jax.stages.Lowered, hidden: HiddenWork | None = None, *, on_tpu: bool = False
) -> LocalProgram:
  """Reads a program that was lowered for a mesh, with or without devices.

  `hidden` is the work of layers that the program does not show. With `on_tpu`, `jax.lax.ragged_dot` is a kernel, and
  products read a layer's weights directly from the stack of all layers. Other compilers multiply every row by the
  weights of every group, and first copy the weights from the stack.
  """
  module = lowered.compiler_ir('stablehlo')
  assert module is not None
  root = make_collectives_explicit(module)  # Keep a reference: the operations in it do not outlive it.
  functions = functions_of(root)
  reader = _Reader(Sizes(mesh_axes(module)), functions, hidden or HiddenWork(), on_tpu)
  peak = reader.read(functions['main'].regions[0].blocks[0], 1, '')
  return LocalProgram(
    tuple(reader.products), tuple(reader.fusions), tuple(reader.collectives), peak, tuple(reader.unknown_loops)
  )


# ---------------------------------------------------------------- reading


class _Reader:
  def __init__(self, sizes: Sizes, functions: Mapping[str, ir.Operation], hidden: HiddenWork, on_tpu: bool = False):
    self._sizes, self._functions, self._hidden, self._on_tpu = sizes, functions, hidden, on_tpu
    self.products: list[LocalOperation] = []
    self.fusions: list[LocalOperation] = []
    self.collectives: list[LocalCollective] = []
    self.unknown_loops: list[str] = []
    self._beside: set[ir.Operation] = set()
    self._loop, self._loops = 0, 0
    self._gathered_before: set[ir.Operation] = set()
    # A flag in `xla_flags.DEFAULTS` merges two iterations, so values passed from the first to the second are live, too.
    self._merges_iterations = not on_tpu and math.prod(sizes.mesh.values()) > 1

  def read(
    self,
    block: ir.Block,
    count: float,
    within: str,
    *,
    fills_in_place: bool = False,
    order: Sequence[ir.Operation] = (),
  ) -> Peak:
    """Adds the work of a block that runs `count` times. Returns the block's peak of live bytes, without arguments.

    `order` are its operations in the order in which they run, if this is not the order of the block.
    """
    memory = BlockMemory(block, self._sizes, within, fills_in_place, self._on_tpu)
    communicated: dict[object, ir.Value] = {}
    for op in order or [op.operation for op in block.operations]:
      inside = Peak()
      if op.name in LOOPS:
        inside = self._read_inside(op, count, within)
      elif op.name in PRODUCTS:
        self.products.append(self._product(op, count, within))
      elif op.name == 'stablehlo.convolution':
        self.products.append(self._convolution(op, count, within))
      elif op.name == 'stablehlo.custom_call':
        self.products += self._custom_call(op, count, within)
      elif op.name in STARTED:  # If several users need an array in the same split, XLA runs only one collective.
        key = (op.name, op.operands[0], split_of(op.results[0], self._sizes.mesh))
        if key in communicated:
          memory.same(op.results[0], communicated[key])
          continue
        communicated[key] = op.results[0]
      if op.name in COLLECTIVES:
        self.collectives += self._collective(op, count, within)
      if op in self._gathered_before:
        memory.add_argument(op.results[0])
      elif is_joined(op) and not self._on_tpu:
        memory.same(op.results[0], op.operands[0])
      elif moved := memory.add(op, inside):
        self.fusions.append(LocalOperation(f'{within}/{operation_name(op)}', count, moved, loop=self._loop))
    return memory.peak()

  def _read_inside(self, op: ir.Operation, count: float, within: str) -> Peak:
    """Adds the work of an operation's regions; for a conditional, of all branches."""
    name = f'{within}/{operation_name(op)}'
    if op.name == 'stablehlo.while':
      return self._read_loop(op, count, name)
    return max((self.read(region.blocks[0], count, name) for region in op.regions), key=lambda peak: peak.bytes)

  def _read_loop(self, op: ir.Operation, count: float, name: str) -> Peak:
    """Adds the work of a loop's body; see `read`. `name` has the names of the loops around the body."""
    outside, body = self._loop, op.regions[1].blocks[0]
    self._loops += 1
    self._loop = self._loops
    overlapping = overlapping_collectives(body)
    self._beside |= overlapping.all
    trips: float | None = _trip_count(op)
    if trips is None:
      trips = self._hidden.loop_trips(name)
    if trips is None:
      self.unknown_loops.append(name.strip('/'))
    order: list[ir.Operation] = []
    carried: dict[ir.Value, str] = {}  # Values that XLA keeps between iterations, with their names.
    if self._merges_iterations and UNROLLED not in op.attributes and (trips or 0) > 1:
      order = order_on_gpus(body, overlapping, self._sizes)
      carried = {value: name for _, value in changing_state(body)} | self._pipelined_values(overlapping, name)
    times = count * (1 if trips is None else trips)
    live = self.read(body, times, name, fills_in_place=UNROLLED in op.attributes, order=order)
    self._loop = outside
    between = [Buffer(by, self._sizes.text(value), self._sizes.bytes(value), 0, 0) for value, by in carried.items()]
    return Peak(live.bytes + sum(buffer.bytes for buffer in between), (*live.buffers, *between))

  def _pipelined_values(self, overlapping: Overlapping, within: str) -> dict[ir.Value, str]:
    """Returns what XLA gathers in the iteration before, and what it reduces in the next one, with the names."""
    gathers, reductions = pipelined_collectives(overlapping)
    self._gathered_before |= gathers
    # XLA gathers an array once, even if it is needed twice, as weights are in the backward pass.
    once = {(op.operands[0], split_of(op.results[0], self._sizes.mesh)): op for op in gathers}
    moved = {op.results[0]: op for op in once.values()} | {op.operands[0]: op for op in reductions}
    return {value: f'{within}/{operation_name(op)}' for value, op in moved.items()}

  def _product(self, op: ir.Operation, count: float, within: str) -> LocalOperation:
    left, result = op.operands[0], op.results[0]
    shape = self._sizes.shape(left)
    numbers = op.attributes['dot_dimension_numbers' if 'dot_general' in op.name else 'ragged_dot_dimension_numbers']
    contracted = re.search(r'lhs_contracting_dimensions = \[([\d, ]*)\]', str(numbers))
    dims = [int(d) for d in contracted[1].split(',') if d.strip()] if contracted else []
    flops = 2.0 * math.prod(self._sizes.shape(result)) * math.prod(shape[d] for d in dims)
    if 'ragged' in op.name:
      groups = self._sizes.shape(op.operands[2])[-1]
      if len(self._sizes.shape(result)) > len(shape):  # The result has an entry for each group, a sum over its rows.
        flops /= groups
      flops *= 1 if self._on_tpu else groups
    moved = sum(map(self._sizes.bytes, (*op.operands[:2], result)))
    return LocalOperation(f'{within}/{operation_name(op)}', count, moved, flops, hlo_dtype_name(left), loop=self._loop)

  def _convolution(self, op: ir.Operation, count: float, within: str) -> LocalOperation:
    arrays = (*op.operands[:2], op.results[0])
    labels = re.findall(r'\[([\w, ]+)\]', str(op.attributes['dimension_numbers']))

    def numbers(name: str) -> tuple[int, ...]:
      return tuple(ir.DenseI64ArrayAttr(op.attributes[name])) if name in op.attributes else ()

    pads = np.asarray(ir.DenseIntElementsAttr(op.attributes['padding'])) if 'padding' in op.attributes else np.zeros(0)
    flops = convolution_flops(
      [label.replace(', ', '') for label in labels],
      [self._sizes.shape(array) for array in arrays],
      strides=numbers('window_strides'),
      pads=tuple(int(pad) for pad in pads.ravel()[::2]),
      gaps=numbers('lhs_dilation'),
      kernel_gaps=numbers('rhs_dilation'),
      whole=[array.type.shape for array in arrays],
    )
    moved, dtype = sum(map(self._sizes.bytes, arrays)), hlo_dtype_name(op.operands[0])
    return LocalOperation(f'{within}/{operation_name(op)}', count, moved, flops, dtype, loop=self._loop)

  def _custom_call(self, op: ir.Operation, count: float, within: str) -> list[LocalOperation]:
    """Returns the work of a custom call; [] if nothing says how many FLOPs it takes.

    The call may be attention or a grouped product, or its author or layer gives an estimate.
    """
    target, name = ir.StringAttr(op.attributes['call_target_name']).value, f'{within}/{operation_name(op)}'
    if target == SPLIT_BY_RULE:
      return self._attention(op, count, within)
    flops, estimated = estimated_cost(_backend_config(op))
    shapes = [self._sizes.shape(operand) for operand in op.operands]
    flops = flops or named_attention_flops(name) or self._hidden.call_flops(name, target, shapes)
    if not flops and shapes and op.results:
      flops = grouped_product_flops(name, shapes[0], self._sizes.shape(op.results[0]))
    if not flops:
      return []
    operands, dims = list(zip(map(hlo_dtype_name, op.operands), shapes)), 0
    if is_attention_kernel(target, name):  # The first operands may be tables of integers.
      operands = [(dtype, shape) for dtype, shape in operands if dtype.startswith(('f', 'bf'))]
      dims = operands[0][1][-1]
    moved = int(estimated) or sum(map(self._sizes.bytes, (*op.operands, *op.results)))
    return [LocalOperation(name, count, moved, flops, operands[0][0], dims, self._loop)]

  def _attention(self, op: ir.Operation, count: float, within: str) -> list[LocalOperation]:
    """Returns the fused attention inside a custom call, which a sharding rule may split by batch and heads."""
    (called,) = ir.ArrayAttr(op.attributes['called_computations'])
    kernels = operations(self._functions[ir.FlatSymbolRefAttr(called).value], {'stablehlo.custom_call'})
    query, found = op.operands[0], []
    share, dims = math.prod(self._sizes.shape(query)) / math.prod(query.type.shape), query.type.shape[-1]
    moved, name = sum(map(self._sizes.bytes, (*op.operands, *op.results))), f'{within}/{operation_name(op)}'
    for kernel in kernels:
      target = ir.StringAttr(kernel.attributes['call_target_name']).value
      if is_fused_attention(target):
        flops = share * fused_attention_flops(target, _backend_config(kernel), dims)
        found.append(LocalOperation(name, count, moved, flops, hlo_dtype_name(query), dims, self._loop))
    return found

  def _collective(self, op: ir.Operation, count: float, within: str) -> list[LocalCollective]:
    """Returns a list of one collective; an empty list if the operation moves nothing between devices."""
    operand, result = op.operands[0], op.results[0]
    users = [use.owner.operation for use in result.uses]
    kind = op.name.partition('.')[2].replace('_', '-')
    sent, received = self._sizes.bytes(operand), self._sizes.bytes(result)
    axes: tuple[str, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    if op.name.startswith('sdy.'):
      axes = self._axes(op, kind)
      if kind == 'all-gather' and self._leaves_half_without(operand, result):
        kind, sent = 'all-reduce', received
      part = users[0].results[0] if len(users) == 1 and users[0].name == 'sdy.all_slice' else None
      if kind == 'all-reduce' and part is not None and not self._leaves_half_without(part, result):
        kind, received = 'reduce-scatter', self._sizes.bytes(part)
    else:
      groups = collective_groups(op, self._sizes.mesh)
    if is_joined(op) or (not axes and not groups):
      return []
    # Inside a function that JAX traced separately, such as a lookup, operations are named after the function only.
    name = f'{within}/{next((name for name in map(operation_name, (op, *users)) if "/" in name), operation_name(op))}'
    return [
      LocalCollective(
        name, count, kind, axes, groups, sent, received, hlo_dtype_name(result), self._loop, op in self._beside
      )
    ]

  def _leaves_half_without(self, split: ir.Value, whole: ir.Value) -> bool:
    """Whether at least half of the devices along a split dimension hold only padding.

    For such splits, XLA uses an all-reduce of the whole array instead of an all-gather or a reduce-scatter.
    """
    mesh = self._sizes.mesh
    return any(
      2 * size <= count_parts(own) // count_parts(kept)
      for size, own, kept in zip(self._sizes.shape(whole), split_of(split, mesh), split_of(whole, mesh))
    )

  def _axes(self, op: ir.Operation, kind: str) -> tuple[str, ...]:
    if kind == 'all-reduce':
      named = re.findall(r'"([^"]+)"', str(op.attributes['reduction_axes']))
      return tuple(axis for axis in self._sizes.mesh if axis in named)
    splits = [split_of(value, self._sizes.mesh) for value in (op.operands[0], op.results[0])]
    if kind == 'collective-permute':  # The axes that take the place of others, in the order of the dimensions.
      orders = [[axis.name for axes in split for axis in axes] for split in splits]
      moved = {axis for pair in zip(*orders) if pair[0] != pair[1] for axis in pair}
      return tuple(axis for axis in self._sizes.mesh if axis in moved)
    before, after = ({axis.name: dim for dim, axes in enumerate(split) for axis in axes} for split in splits)
    return tuple(axis for axis in self._sizes.mesh if before.get(axis) != after.get(axis))


def _backend_config(call: ir.Operation) -> object:
  """Returns the decoded `backend_config` of a custom call; {} if it has none."""
  if 'backend_config' not in call.attributes:
    return {}
  config = call.attributes['backend_config']
  try:
    return json.loads(ir.StringAttr(config).value) if isinstance(config, ir.StringAttr) else {}
  except ValueError:
    return {}


def _trip_count(loop: ir.Operation) -> int | None:
  """Returns the trip count of a loop of `lax.scan`, which counts from zero to a constant; None for other loops."""
  *_, end = loop.regions[0].blocks[0].operations
  condition = end.operation.operands[0].owner
  if isinstance(condition, ir.Block) or condition.name != 'stablehlo.compare':
    return None
  number, limit = condition.operands
  if not isinstance(number.type.element_type, ir.IntegerType) or isinstance(limit.owner, ir.Block):
    return None
  constant = limit.owner.operation.attributes
  return int(np.array(ir.DenseIntElementsAttr(constant['value'])).flat[0]) if 'value' in constant else None
