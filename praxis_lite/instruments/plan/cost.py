"""The cost of a compiled step on each device: operations, bytes of memory, communication and time.

The cost of an instruction is multiplied by the trip counts of the loops that contain it:

    FLOPs        counted for dot, ragged-dot, convolution, and library calls for products and attention: two for each
                 pair of elements that are multiplied; other instructions are limited by memory and count 0
    bytes        operands and results in main memory; slices and in-place updates, inside fusions too, count only
                 the part that they touch
    seconds      the longer of compute time and memory time, at the efficiency of the target, but at least
                 `seconds_per_operation`
    collectives  see `links.py`

Instructions run in the order of the schedule. A collective overlaps with the instructions between its start and its
end; its time beyond theirs is exposed. Collectives wait for each other, except shifts in opposite directions on a
torus: these use separate links.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence

import numpy as np

from praxis_lite.instruments.plan.hlo import CompiledProgram, Computation, Instruction, channel_of, device_groups
from praxis_lite.instruments.plan.layer_names import HiddenWork, LayerNames
from praxis_lite.instruments.plan.links import Links
from praxis_lite.instruments.plan.targets import Target
from praxis_lite.instruments.plan.work import bytes_of, operation_seconds, products_of


@dataclasses.dataclass(frozen=True)
class Operation:
  """An instruction that each device runs, or a fusion of several instructions.

  Attributes:
    name, opcode: its name and opcode in the program.
    layer: path of its layer; '' if it belongs to no layer.
    phase: 'forward', 'backward', 'recomputed' (rematerialized in the backward pass) or 'update'.
    count: executions in a step.
    flops, bytes, seconds: cost of one execution.
  """

  name: str
  opcode: str
  layer: str
  phase: str
  count: float
  flops: float
  bytes: float
  seconds: float

  def limit(self, target: Target) -> str:
    """What limits the operation: 'compute', 'memory', or 'overhead' (the minimal time of any operation)."""
    at_memory = self.bytes / (target.device_bandwidth * target.efficiency.memory)
    if self.seconds > max(at_memory, target.efficiency.seconds_per_operation):
      return 'compute'
    return 'memory' if self.seconds <= at_memory else 'overhead'


class Reason(enum.StrEnum):
  """Why a step has a collective. The reasons after `OTHER` are surprises."""

  GRADIENT = 'gradient reduction'
  WEIGHT = 'gather of a fully sharded weight'
  TENSOR = 'tensor parallel'
  SEQUENCE = 'sequence parallel'
  EXCHANGE = 'exchange that a layer declares'
  INPUTS = 'inputs of the step'
  SUMS = 'losses and statistics'
  OTHER = 'exchange written in the layer'
  WEIGHT_SUMMED = 'weight gathered by an all-reduce'
  WEIGHT_MOVED = 'weight gathered over an axis that does not split the batch'
  ACTIVATION_MOVED = 'activation resharded'
  PARTIAL_SUMS = 'activation summed over an axis of the batch'
  STATE_MOVED = 'state of the optimizer resharded'
  REPLICATED = 'the same computed on several devices'
  REMATERIALIZED = 'involuntary full rematerialization'

  @property
  def expected(self) -> bool:
    """Whether the communication or work follows from what the config and the layers declare; else it is a surprise."""
    return list(Reason).index(self) <= list(Reason).index(Reason.OTHER)


@dataclasses.dataclass(frozen=True)
class Cause:
  """Why a step communicates something, or computes it more than once.

  Attributes:
    reason: the kind of cause.
    layers: paths of the layers involved.
    fields: the config fields that cause it; for a surprise, the suspect field, then the fields that contradict it.
    remedy: for a surprise, what to change; '' if unknown.
    what: for a surprise, what happens; for communication that a layer declares, its purpose.
  """

  reason: Reason
  layers: tuple[str, ...] = ()
  fields: tuple[str, ...] = ()
  remedy: str = ''
  what: str = ''

  @property
  def expected(self) -> bool:
    return self.reason.expected

  def __str__(self) -> str:
    return self.what if self.reason is Reason.EXCHANGE else str(self.reason)


@dataclasses.dataclass(frozen=True)
class Communication:
  """A collective of a step.

  Attributes:
    name, phase, count: see `Operation`.
    kind: the kind of collective, one of `hlo.KINDS`.
    layer: path of its layer; if XLA combined collectives of several layers, the path of their common parent.
    dtype: dtype of the first array.
    axes: mesh axes that it communicates over.
    group_size: number of devices in a group.
    result_bytes: bytes of the result on one device.
    fast_bytes, network_bytes: what a device sends over fast links, and between domains of fast links.
    seconds, exposed: time of one execution, and the part of it in which nothing else runs.
    cause: why the step has it; None if no cause was looked for.
  """

  name: str
  kind: str
  layer: str
  phase: str
  count: float
  dtype: str
  axes: tuple[str, ...]
  group_size: int
  result_bytes: float
  fast_bytes: float
  network_bytes: float
  seconds: float
  exposed: float
  cause: Cause | None = None

  @property
  def expected(self) -> bool:
    """Whether this collective follows from what the config and the layers declare; True if its cause is not known."""
    return self.cause is None or self.cause.expected

  @property
  def sent_bytes(self) -> float:
    """The bytes that a device sends in one execution."""
    return self.fast_bytes + self.network_bytes


@dataclasses.dataclass(frozen=True)
class Span:
  """When an operation, a collective or a loop runs.

  Attributes:
    name: name of the `Operation`, the `Communication` or the loop.
    start, end: seconds since the start of the step, or of the iteration of the loop that contains it.
    rounds: number of iterations of a loop, which may be a mean over devices; 0 if it is not a loop.
    inside: the spans of one iteration.
  """

  name: str
  start: float
  end: float
  rounds: float = 0
  inside: tuple[Span, ...] = ()


@dataclasses.dataclass(frozen=True)
class Cost:
  """The cost of one run of a program.

  Attributes:
    operations, collectives: its operations and collectives, in the order of the schedule.
    seconds: time of a step.
    unknown_loops: loops whose trip count the program does not say, by layer, or by name if they belong to no layer.
      Each counts as one iteration.
    schedule: when each operation and collective runs; empty if no compiler made a schedule.
  """

  operations: tuple[Operation, ...]
  collectives: tuple[Communication, ...]
  seconds: float
  unknown_loops: tuple[str, ...] = ()
  schedule: tuple[Span, ...] = ()

  @property
  def flops(self) -> float:
    return sum(op.count * op.flops for op in self.operations)

  @property
  def bytes(self) -> float:
    return sum(op.count * op.bytes for op in self.operations)

  @property
  def communicated_bytes(self) -> float:
    return sum(c.count * (c.fast_bytes + c.network_bytes) for c in self.collectives)

  @property
  def exposed_seconds(self) -> float:
    return sum(c.count * c.exposed for c in self.collectives)

  def seconds_by_limit(self, target: Target) -> dict[str, float]:
    """Seconds of a step by what limits them: 'compute', 'memory', 'overhead' (many small operations), 'communication'.

    Asynchronous copies count as 'memory', even if they are overlapped.
    """
    limits = dict.fromkeys(('compute', 'memory', 'overhead', 'communication'), 0.0)
    for op in self.operations:
      limits[op.limit(target)] += op.count * op.seconds
    limits['communication'] = self.exposed_seconds
    return limits


def cost_of(
  program: CompiledProgram,
  target: Target,
  links: Links,
  *,
  mesh: Mapping[str, int] | None = None,
  layers: LayerNames | None = None,
  hidden: HiddenWork | None = None,
) -> Cost:
  """Returns the cost of a compiled step on the chips of `target`.

  `mesh` has the size of each mesh axis; the program numbers its devices in the order of these axes. `layers` finds the
  layer of an operation, and `hidden` finds work that the program does not show.
  """
  model = _CostModel(program, target, links, mesh or {}, layers or LayerNames(()), hidden or HiddenWork())
  step = model.timeline(program.entry)
  work = tuple(step.operations), tuple(step.collectives)
  return Cost(*work, step.seconds, tuple(model.unknown_loops), tuple(step.spans))


# ---------------------------------------------------------------- schedule


_DIRECTIONS = ('up', 'down')


@dataclasses.dataclass
class _Timeline:
  """The operations and collectives that a computation runs, and its time."""

  operations: list[Operation] = dataclasses.field(default_factory=list)
  collectives: list[Communication] = dataclasses.field(default_factory=list)
  spans: list[Span] = dataclasses.field(default_factory=list)
  seconds: float = 0.0

  def append(self, other: _Timeline) -> None:
    """Adds a timeline that runs after this one."""
    begins = self.seconds
    self.spans += [dataclasses.replace(s, start=begins + s.start, end=begins + s.end) for s in other.spans]
    self._count(other, 1)

  def repeat(self, other: _Timeline, times: float, name: str) -> None:
    """Adds the iterations of a loop."""
    ends = self.seconds + other.seconds * times
    if times and other.spans:
      self.spans.append(Span(name, self.seconds, ends, times, tuple(other.spans)))
    self._count(other, times)

  def _count(self, other: _Timeline, times: float) -> None:
    self.operations += [dataclasses.replace(op, count=op.count * times) for op in other.operations]
    self.collectives += [dataclasses.replace(c, count=c.count * times) for c in other.collectives]
    self.seconds += other.seconds * times


@dataclasses.dataclass(eq=False)
class _CostModel:
  program: CompiledProgram
  target: Target
  links: Links
  mesh: Mapping[str, int]
  names: LayerNames
  hidden: HiddenWork

  def __post_init__(self) -> None:
    self._done: dict[str, _Timeline] = {}
    self._within: dict[str, str] = {}
    self.unknown_loops: list[str] = []

  def timeline(self, computation: Computation, within: str = '') -> _Timeline:
    """Returns the timeline of one run of a computation; `within` is the name of the loop around it."""
    if computation.name not in self._done:
      self._within[computation.name] = within
      self._done[computation.name] = self._run(computation)
    return self._done[computation.name]

  def _run(self, computation: Computation) -> _Timeline:
    line, copies_free, free_from = _Timeline(), 0.0, dict.fromkeys(_DIRECTIONS, 0.0)
    started, copying = dict[str, tuple[int, float]](), dict[str, float]()

    def start(key: str, instruction: Instruction, where: Computation, overlapped: bool) -> None:
      collective, taken = self._communication(instruction, where), self._directions(instruction)
      begins = max(line.seconds, *(free_from[direction] for direction in taken))
      ends = begins + collective.seconds
      free_from.update(dict.fromkeys(taken, ends))
      line.collectives.append(collective)
      line.spans.append(Span(collective.name, begins, ends))
      started[key] = (len(line.collectives) - 1, ends)
      if not overlapped:
        finish(key)

    def finish(key: str) -> None:
      if key in copying:
        line.seconds = max(line.seconds, copying.pop(key))
      if key in started:
        index, ends = started.pop(key)
        waits = max(ends - line.seconds, 0.0)
        line.collectives[index] = dataclasses.replace(line.collectives[index], exposed=waits)
        line.seconds += waits

    for instruction in computation.instructions:
      operand = next(iter(instruction.operands), '')
      inside = self._collectives_inside(instruction) if instruction.opcode in ('fusion', 'async-start') else []
      if instruction.collective:
        overlapped = instruction.opcode.endswith('-start') and '"is_sync":true' not in instruction.attributes
        start(instruction.name, instruction, computation, overlapped)
      elif instruction.opcode == 'async-update':
        if operand in started:
          started[instruction.name] = started.pop(operand)
      elif instruction.opcode.endswith('-done'):
        finish(operand)
      elif instruction.opcode in ('copy-start', 'slice-start', 'dynamic-slice-start'):
        begins = max(copies_free, line.seconds)
        copies_free = begins + self._compute(instruction, computation, line, begins)
        copying[instruction.name] = copies_free
      elif instruction.opcode == 'async-start' and inside:
        start(instruction.name, *inside[0], overlapped=True)
      elif inside and instruction.opcode == 'fusion':  # TPU: fusions start, continue and end collectives.
        line.seconds += self._compute(instruction, computation, line)
        marks = {target for _, called in inside for target in called.custom_calls}
        for found, where in inside:
          key = f'channel {channel_of(found)}'
          if 'AsyncCollectiveDone' in marks:
            finish(key)
          elif 'AsyncCollectiveStart' in marks:
            start(key, found, where, overlapped=True)
          elif key not in started and not self.program.is_carried_on(found, where):
            start(found.name, found, where, overlapped=False)
      elif instruction.opcode == 'while':
        self._run_loop(instruction, computation, line)
      elif instruction.opcode in ('conditional', 'call'):
        self._run_called(instruction, computation, line)
      else:
        line.seconds += self._compute(instruction, computation, line)
    for key in list(started):
      finish(key)
    return line

  def _run_loop(self, loop: Instruction, computation: Computation, line: _Timeline) -> None:
    """Adds the iterations of a loop."""
    within = loop.op_name or self._within[computation.name]
    trips: float | None = self.program.trip_count(loop, computation)
    if trips is None:
      trips = self.hidden.loop_trips(within)
    if trips is None:
      self.unknown_loops.append(self.names.layer(within) or loop.name)
    one_round = _Timeline()
    for called in self.program.called_computations(loop):
      one_round.append(self.timeline(called, within))
    line.repeat(one_round, 1 if trips is None else trips, loop.name)

  def _run_called(self, instruction: Instruction, computation: Computation, line: _Timeline) -> None:
    """Adds the computations that a call runs, or the longest branch of a conditional."""
    within = self._within[computation.name]
    called = [self.timeline(each, within) for each in self.program.called_computations(instruction)]
    if instruction.opcode == 'conditional':
      called = [max(called, key=lambda branch: branch.seconds, default=_Timeline())]
    for each in called:
      line.append(each)

  def _compute(
    self, instruction: Instruction, computation: Computation, line: _Timeline, begins: float | None = None
  ) -> float:
    """Adds an operation to `line`, and returns its seconds. It begins at `begins`; None is the end of `line` so far."""
    products = list(products_of(instruction, computation, self.program, self.hidden))
    moved = bytes_of(instruction, computation, self.program)
    if not products and not moved:
      return 0.0
    seconds = operation_seconds(self.target, products, moved)
    # XLA names a fusion after its last operation. The name of its most expensive product tells more about it.
    name = max(products, key=lambda p: p.flops).op_name if products else ''
    name = name or self._name(instruction, computation)
    flops = sum(p.flops for p in products)
    begins = line.seconds if begins is None else begins
    line.spans.append(Span(instruction.name, begins, begins + seconds))
    of = self.names.layer(name), self.names.phase(name)
    line.operations.append(Operation(instruction.name, instruction.opcode, *of, 1, flops, moved, seconds))
    return seconds

  def _name(self, instruction: Instruction, computation: Computation) -> str:
    """Returns the name of an operation. If XLA dropped it, returns the name of an operand, or else that of the loop.

    The name of an operand is used only if the operand is in the same loop.
    """
    name, loop = name_of(instruction, computation), self._within.get(computation.name, '')
    of_loop = not loop or name.startswith(loop.rpartition('/')[0])
    return name if instruction.op_name or of_loop else loop

  def _collectives_inside(self, instruction: Instruction) -> list[tuple[Instruction, Computation]]:
    """Returns the collectives in the computations that an instruction runs."""
    found = []
    for called in self.program.called_computations(instruction):
      for inner in called.instructions:
        found += [(inner, called)] if inner.collective else self._collectives_inside(inner)
    return found

  def _communication(self, instruction: Instruction, computation: Computation) -> Communication:
    groups = device_groups(instruction, self.program.num_devices)
    result = instruction.collective_result
    operands = sum(a.bytes for operand in computation.operands(instruction) for a in operand.arrays)
    size = sum(a.bytes for a in result)
    traffic = self.links.traffic(instruction.collective, groups, operands or size, size)
    name = self._name(instruction, computation)
    return Communication(
      *(instruction.name, instruction.collective, self.names.layer(name), self.names.phase(name), 1),
      *(result[0].dtype if result else '', axes_between(groups, self.mesh), len(groups[0]), size),
      *(traffic.fast_bytes, traffic.network_bytes, traffic.seconds, traffic.seconds),
    )

  def _directions(self, instruction: Instruction) -> tuple[str, ...]:
    """Returns the torus directions whose links a collective uses; a shift uses only one."""
    if instruction.collective != 'collective-permute' or not self.target.torus:
      return _DIRECTIONS
    up = [pair[0] < pair[1] for pair in device_groups(instruction, self.program.num_devices) if len(pair) > 1]
    return _DIRECTIONS[:1] if sum(up) * 2 >= len(up) else _DIRECTIONS[1:]


def axes_between(groups: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the mesh axes along which the members of groups of devices differ; () if the mesh lacks a device."""
  sizes = tuple(mesh.values())
  if max(map(max, groups), default=0) >= math.prod(sizes) or not sizes:
    return ()
  differ = np.zeros(len(sizes), bool)
  for group in groups:
    at = np.stack(np.unravel_index(list(group), sizes))
    differ |= (at != at[:, :1]).any(axis=1)
  return tuple(name for name, is_used in zip(mesh, differ) if is_used)


def name_of(instruction: Instruction, computation: Computation) -> str:
  """Returns the name of an operation; if XLA dropped it, the name of its first operand that has one."""
  for _ in range(4):
    operands = computation.operands(instruction)
    if instruction.op_name or not operands:
      break
    instruction = operands[0]
  return instruction.op_name
