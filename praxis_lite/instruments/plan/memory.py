"""What fills the memory of each device during a step: the state, which is exact, and what the compiler adds.

    peak = arguments + outputs + temporaries - outputs in the memory of donated arguments

XLA's `memory_analysis` reports these sizes. What the temporaries contain is an estimate from the schedule: the results
that are live when memory use is highest. Buffers that a loop fills layer by layer are saved activations in the
forward pass and gradients in the backward pass.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from praxis_lite.common.trees import NestedDict, leaves_by_path, path_name
from praxis_lite.instruments.plan.cost import name_of
from praxis_lite.instruments.plan.hlo import CompiledProgram, Computation, HloArray, Instruction, ResultShape
from praxis_lite.instruments.plan.layer_names import LayerNames
from praxis_lite.sharding.host_memory import is_on_host
from praxis_lite.sharding.slots import owner_of
from praxis_lite.training.partitioned_step import PartitionedStep
from praxis_lite.training.partitioned_task import PartitionedTask


@dataclasses.dataclass(frozen=True)
class Buffers:
  """Buffers of one shape, such as 'bf16[4, 512, 128]', that one operation makes: their number and total bytes."""

  operation: str
  shape: str
  count: int
  bytes: int


@dataclasses.dataclass(frozen=True)
class Live:
  """Temporaries of one layer, phase and kind that are live at the peak.

  Attributes:
    kind: 'saved activations', 'gradients' or 'temporaries'.
    layer, phase: see `Operation`.
    bytes: total bytes on each device.
    largest: shape of the largest buffer, such as 'bf16[4, 512, 128]'.
    buffers: the buffers, largest first.
  """

  kind: str
  layer: str
  phase: str
  bytes: int
  largest: str
  buffers: tuple[Buffers, ...] = ()


@dataclasses.dataclass(frozen=True)
class StateArray:
  """An array among the arguments of a step.

  Attributes:
    kind: 'parameters', 'optimizer slots', 'moving averages' or 'inputs'.
    layer: path of its layer; for a slot, path of the layer of its variable.
    name: name in its layer; for a slot, the name of its variable, then that of the slot.
    shape, bytes: shape and bytes of the part on each device.
  """

  kind: str
  layer: str
  name: str
  shape: str
  bytes: int


@dataclasses.dataclass(frozen=True)
class StateBytes:
  """The arrays among a step's arguments, and their bytes on each device: exact, with padding."""

  parameters: int
  slots: int
  averages: int
  inputs: int
  arrays: tuple[StateArray, ...] = ()

  @property
  def total(self) -> int:
    return self.parameters + self.slots + self.averages + self.inputs


@dataclasses.dataclass(frozen=True)
class Memory:
  """The memory of a step on each device, in bytes.

  Attributes:
    capacity: memory of a device.
    state: memory of the arguments.
    arguments, outputs, aliased, temporaries, code: reported by the compiler; aliased outputs reuse donated arguments.
    live: an estimate of the temporaries at their peak, largest first.
    over_time: an estimate, for each instruction, of the live temporaries of its computation when it runs, in bytes. For
      the body of a loop, this does not include the live temporaries of the computation around the loop.
  """

  capacity: int
  state: StateBytes
  arguments: int
  outputs: int
  aliased: int
  temporaries: int
  code: int = 0
  live: tuple[Live, ...] = ()
  over_time: Mapping[str, int] = dataclasses.field(default_factory=dict)

  @property
  def peak(self) -> int:
    return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

  @property
  def room(self) -> int:
    """The bytes of a device that remain free; negative if the step does not fit."""
    return self.capacity - self.peak

  def bytes_by_kind(self) -> dict[str, int]:
    """Bytes at the peak by kind. 'other' is what the schedule does not explain; it may be negative."""
    state = self.state
    inputs = self.arguments - state.total + state.inputs  # The compiler drops inputs that the step does not use.
    parts = dict(zip(_KINDS, (state.parameters, state.slots, state.averages, inputs)))
    parts |= {'saved activations': 0, 'gradients': 0, 'temporaries': 0, 'program': self.code}
    for live in self.live:
      parts[live.kind] += live.bytes
    return {name: size for name, size in parts.items() if size} | {'other': self.peak - sum(parts.values())}


_KINDS = ('parameters', 'optimizer slots', 'moving averages', 'inputs')


def state_bytes(task: PartitionedTask) -> StateBytes:
  """Returns the bytes of a train step's arguments on each device, without arrays in host memory."""
  state, _, inputs = task.train_step.arguments
  return _bytes_of(state.mdl_vars, state.opt_states, state.ema_vars, inputs)


def inference_bytes(step: PartitionedStep) -> StateBytes:
  """Like `state_bytes`, for a step without a train state, such as `decode_step`."""
  variables, _, _, inputs = step.arguments
  return _bytes_of(variables, {}, {}, inputs)


def _bytes_of(mdl_vars: NestedDict, slots: NestedDict, averages: NestedDict, inputs: NestedDict) -> StateBytes:
  variables = leaves_by_path(mdl_vars)
  arrays = []
  for kind, tree in zip(_KINDS, (mdl_vars, slots, averages, inputs)):
    for path, struct in leaves_by_path(tree).items():
      owner = path if kind == 'parameters' else owner_of(path, variables)
      *layer, name = owner or path[-1:]
      if owner and owner != path:
        before, _, after = path_name(path).partition(f'.{path_name(owner)}')
        name += f' · {before.rpartition(".")[2]}{after}'
      part = f'{_hlo_name(struct.dtype)}{list(struct.sharding.shard_shape(struct.shape))}'
      if size := bytes_on_each(struct):
        arrays.append(StateArray(kind, path_name(tuple(layer)), name, part, size))
  by_kind = [sum(a.bytes for a in arrays if a.kind == kind) for kind in _KINDS]
  return StateBytes(by_kind[0], by_kind[1], by_kind[2], by_kind[3], tuple(arrays))


def bytes_on_each(tree: Any) -> int:
  """Returns the bytes on each device of a tree of shapes with shardings, without arrays in host memory."""
  total = 0
  for struct in jax.tree.leaves(tree):
    if not is_on_host(struct.sharding):
      itemsize = 4 if jax.numpy.issubdtype(struct.dtype, jax.dtypes.extended) else struct.dtype.itemsize
      total += math.prod(struct.sharding.shard_shape(struct.shape)) * itemsize
  return total


def _hlo_name(dtype: Any) -> str:
  """Returns XLA's name of a dtype, such as 'bf16' or 's32'; 'key' for random keys."""
  if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
    return 'key'
  return dtype.name.replace('float', 'f').replace('uint', 'u').replace('int', 's')


# ---------------------------------------------------------------- liveness


@dataclasses.dataclass
class _Buffer:
  """The memory of an instruction's result, labeled with that instruction or with the operation that fills it."""

  array: HloArray
  defined: int
  op_name: str
  kind: str = 'temporaries'
  last_use: int = -1
  given: bool = False  # Whether it is an argument, a result or a constant, which are no temporaries.
  operands: tuple[_Buffer, ...] = ()  # The operands of equal size; a fusion may overwrite one of them.

  @property
  def shape(self) -> str:
    return f'{self.array.dtype}{list(self.array.dims)}'


_Held = _Buffer | tuple['_Held', ...]
# A loop over layers fills buffers: what they contain, by the phase of the loop. A loop that recomputes fills none.
FILLED_IN = {'forward': 'saved activations', 'backward': 'gradients'}
_SAME = ('bitcast', 'optimization-barrier', 'copy-done', 'while')


def live_memory(program: CompiledProgram, names: LayerNames) -> tuple[tuple[Live, ...], dict[str, int]]:
  """Returns `Memory.live` and `Memory.over_time` of a scheduled program."""
  liveness = _Liveness(program)
  at_peak = [LiveBuffer(b.kind, b.op_name, b.shape, b.array.bytes) for b in liveness.peak(program.entry)[1]]
  over_time = {
    instruction.name: size
    for computation, sizes in liveness.live.items()
    for instruction, size in zip(program.computations[computation].instructions, sizes)
    if size
  }
  return group_by_layer(at_peak, names), over_time


class LiveBuffer(NamedTuple):
  """A buffer that is live at the peak: its kind as in `Live`, the name of its operation, its shape and bytes."""

  kind: str
  op_name: str
  shape: str
  bytes: int


def group_by_layer(buffers: Iterable[LiveBuffer], names: LayerNames) -> tuple[Live, ...]:
  """Groups buffers by kind, layer and phase; the group with most bytes comes first."""
  groups: dict[tuple[str, str, str], list[LiveBuffer]] = {}
  for buffer in buffers:
    if buffer.bytes:
      key = buffer.kind, names.layer(buffer.op_name), names.phase(buffer.op_name)
      groups.setdefault(key, []).append(buffer)
  found = []
  for key, among in groups.items():
    counts = collections.Counter((_operation(b.op_name), b.shape, b.bytes) for b in among)
    alike = [Buffers(name, shape, count, count * size) for (name, shape, size), count in counts.items()]
    largest = max(among, key=lambda buffer: buffer.bytes).shape
    alike = sorted(alike, key=lambda b: -b.bytes)
    found.append(Live(*key, sum(b.bytes for b in among), largest, tuple(alike)))
  return tuple(sorted(found, key=lambda live: -live.bytes))


def _operation(op_name: str) -> str:
  """Returns 'dot_general' for 'jit(step)/lm/ff/dot_general', and 'copy of lm' for "state.mdl_vars[\\'lm\\']"."""
  if keys := re.findall(r"\[\\?'(\w+)", op_name):
    return f'copy of {".".join(keys)}'
  return op_name.rpartition('/')[2].rstrip(')')


class _Liveness:
  def __init__(self, program: CompiledProgram):
    self._program = program
    self.peak = functools.cache(self._find_peak)
    self.live: dict[str, list[int]] = {}  # For each computation, the live bytes at each instruction.

  def _find_peak(self, computation: Computation) -> tuple[int, list[_Buffer]]:
    """Returns the peak bytes of a computation, without its arguments, and the buffers that are live then."""
    held: dict[str, _Held] = {}
    buffers: list[_Buffer] = []
    inside: dict[int, tuple[int, list[_Buffer]]] = {}
    for at, instruction in enumerate(computation.instructions):
      used = [held[name] for name in instruction.operands if name in held]
      for buffer in _flat(used):
        buffer.last_use = at
      held[instruction.name] = self._result(instruction, computation, used, at, buffers)
      if instruction.opcode in ('while', 'conditional', 'call'):
        below = [self.peak(called) for called in self._program.called_computations(instruction)]
        inside[at] = max(below, key=lambda peak: peak[0], default=(0, []))
    for buffer in _flat([held[computation.root.name]]):
      buffer.last_use = len(computation.instructions)
      buffer.given |= True  # The memory of results counts in the caller.
    own = [b for b in buffers if not b.given and b.array.space == 0]
    for buffer in own:
      over = (b for b in buffer.operands if b.last_use == buffer.defined and not b.given and b.array.space == 0)
      if (operand := next(over, None)) is not None:
        operand.last_use -= 1
    live = self.live[computation.name] = _live(own, len(computation.instructions))
    totals = [size + inside.get(at, (0, []))[0] for at, size in enumerate(live)]
    most = max(totals, default=0)
    when = totals.index(most) if totals else 0
    at_peak = [b for b in own if b.defined <= when <= max(b.last_use, b.defined)]
    return most, at_peak + inside.get(when, (0, []))[1]

  def _result(
    self, instruction: Instruction, computation: Computation, used: list[_Held], at: int, buffers: list[_Buffer]
  ) -> _Held:
    """Returns the memory of an instruction's result: a new buffer, or the memory of its operands."""
    opcode = instruction.opcode
    if opcode == 'tuple':
      return tuple(used)
    if opcode == 'get-tuple-element' and used and isinstance(used[0], tuple):
      return used[0][int(instruction.attribute('index'))]
    if opcode == 'while' and used:
      self._tell_loop(instruction, used[0])
    if opcode in _SAME and used:
      return used[0]
    if opcode.endswith('-done') and used:
      return used[0][1] if isinstance(used[0], tuple) and len(used[0]) > 1 else used[0]
    if (position := _updated_in_place(instruction, self._program)) is not None and position < len(used):
      return used[position]

    def new(shape: ResultShape) -> _Held:
      if not isinstance(shape, HloArray):
        return tuple(map(new, shape))
      buffer = _Buffer(shape, at, name_of(instruction, computation), given=opcode in ('parameter', 'constant', 'iota'))
      if opcode == 'fusion':
        buffer.operands = tuple(b for b in _flat(used) if b.array.bytes == shape.bytes)
      buffers.append(buffer)
      return buffer

    if opcode.endswith('-start') and not isinstance(instruction.shape, HloArray) and len(used) == 1:
      return (used[0], *map(new, instruction.shape[1:]))  # The result is a tuple that begins with the operand.
    return new(instruction.shape)

  def _tell_loop(self, loop: Instruction, carried: _Held) -> None:
    """Finds the buffers that a loop fills part by part; sets for each its kind, and which operation fills it."""
    body = self._program.computations.get(loop.attribute('body').lstrip('%'))
    if body is None or not isinstance(carried, tuple):
      return
    for element, held in zip(body.operands(body.root), carried):
      if isinstance(held, _Buffer) and _updated_in_place(element, self._program) is not None:
        held.op_name = name_of(element, body) or loop.op_name
        held.kind = FILLED_IN.get(_phase_of(loop, body), held.kind)


def _phase_of(loop: Instruction, body: Computation) -> str:
  """Returns the phase of a loop; if XLA dropped its name, a phase of its body, preferably 'backward'; '' if none."""
  if loop.op_name:
    return LayerNames.phase(loop.op_name)
  phases = {LayerNames.phase(instruction.op_name) for instruction in body.instructions}
  return next((phase for phase in ('backward', 'recomputed', 'forward') if phase in phases), '')


def _updated_in_place(instruction: Instruction, program: CompiledProgram) -> int | None:
  """Returns the index of the operand whose memory the result reuses; None if the result is in new memory."""
  if instruction.opcode == 'dynamic-update-slice':
    return 0
  called = program.called_computations(instruction) if instruction.opcode == 'fusion' else []
  if not called:
    return None
  inside = called[0]
  root = program.origin(inside.root, inside)
  if root.opcode != 'dynamic-update-slice':
    return None
  operand = program.origin(inside.operands(root)[0], inside)
  return int(operand.literal) if operand.opcode == 'parameter' else None


def _flat(held: list[_Held] | tuple[_Held, ...]) -> Iterator[_Buffer]:
  for part in held:
    if isinstance(part, _Buffer):
      yield part
    else:
      yield from _flat(part)


def _live(buffers: list[_Buffer], steps: int) -> list[int]:
  """Returns, for each instruction, the total bytes of live buffers."""
  change = [0] * (steps + 1)
  for buffer in buffers:
    change[buffer.defined] += buffer.array.bytes
    change[min(max(buffer.last_use, buffer.defined) + 1, steps)] -= buffer.array.bytes
  return list(itertools.accumulate(change[:steps]))
