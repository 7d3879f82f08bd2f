"""Reads compiled programs: XLA's HLO text as instructions, with the trip counts of the loops that contain them.

program = parse(step.compiled)
for instruction, times in program.executed_instructions(): ...
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

KINDS = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute', 'collective-broadcast')

_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{$')
_INSTRUCTION = re.compile(
  r'^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(([^()]*(?:\((?:[^()]|\([^()]*\))*\)[^()]*)*)\)(.*)$'
)
_CONTINUED = re.compile(r'\n(?="|\}\})')  # The metadata of a TPU kernel continues on further lines.
_OPERAND = re.compile(r'%([\w.\-]+)')
_CALLED = re.compile(
  r'(?:calls|called_computations|to_apply|body|condition|branch_computations|true_computation|false_computation)'
  r'=\{?([^,}]+(?:, %[^,}]+)*)'
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r'\b(pred|bf16|[suf]\d+\w*|c\d+|token)\[([\d,]*)\](?:\{([^}]*)\})?')
_SHAPE_TOKEN = re.compile(r'[()]|' + _ARRAY.pattern)
_SPACE = re.compile(r'S\((\d+)\)')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CHANNEL = re.compile(r'channel_id=(\d+)')
_IOTA_GROUPS = re.compile(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?')
_MESH_GROUPS = re.compile(r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}')
# HLO writes a part of an axis as 'name':(m)n: n is its size, and m is the size of all parts before it.
_MESH_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_LISTED_GROUPS = re.compile(r'(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}')


# ---------------------------------------------------------------- programs


@dataclasses.dataclass(frozen=True, slots=True)
class HloArray:
  """An array of a program on one device. `space` is the number of the memory that holds it; 0 is main memory."""

  dtype: str
  dims: tuple[int, ...]
  space: int = 0

  @property
  def size(self) -> int:
    return math.prod(self.dims)

  @property
  def bytes(self) -> int:
    if self.dtype == 'token':
      return 0
    bits = 8 if self.dtype == 'pred' else int(re.sub(r'\D*(\d+).*', r'\1', self.dtype))
    return self.size * bits // 8


ResultShape = HloArray | tuple['ResultShape', ...]


def arrays_of(shape: ResultShape) -> list[HloArray]:
  """Returns the arrays of a shape, which may be a tuple of tuples."""
  return [shape] if isinstance(shape, HloArray) else [array for part in shape for array in arrays_of(part)]


class Instruction:
  """An instruction of a computation.

  Attributes:
    name, opcode: the name and the opcode in the text.
    operands: names of instructions of the same computation.
    literal: the text between the parentheses: the value of a constant, or the number of a parameter.
    attributes: the text after the operands.
    is_root: whether it is the result of its computation.
  """

  __slots__ = ('__dict__', '_result', 'attributes', 'is_root', 'literal', 'name', 'opcode')

  def __init__(self, name: str, result: str, opcode: str, literal: str, attributes: str, is_root: bool):
    self.name, self.opcode, self.literal, self.attributes, self.is_root = name, opcode, literal, attributes, is_root
    self._result = result

  @functools.cached_property
  def operands(self) -> tuple[str, ...]:
    return tuple(_OPERAND.findall(self.literal))

  @functools.cached_property
  def shape(self) -> ResultShape:
    """The shape of its result."""
    return _shape(self._result)

  @functools.cached_property
  def arrays(self) -> list[HloArray]:
    return arrays_of(self.shape)

  @property
  def layout(self) -> str:
    """The order of the dims of its result in memory, the fastest first, such as '1,0'; '' if the text gives none."""
    return _first(r'\{([\d,]+)', self._result)

  @property
  def op_name(self) -> str:
    """JAX's name of the operation: scopes and primitive; '' if it has none."""
    return _first(_OP_NAME, self.attributes)

  @property
  def collective(self) -> str:
    """The kind of collective, from `KINDS`; '' if this is not a collective, or only the end of one."""
    kind = self.opcode.removesuffix('-start')
    return kind if kind in KINDS else ''

  @property
  def collective_result(self) -> list[HloArray]:
    """The results of a collective, without the operands that an asynchronous start also returns."""
    if self.opcode.endswith('-start') and self.opcode != 'all-reduce-start' and not isinstance(self.shape, HloArray):
      return arrays_of(self.shape[1])
    return self.arrays

  @property
  def called_computations(self) -> list[str]:
    """Names of the computations that it runs, except those that it applies to each element; [] for collectives."""
    if self.collective or self.opcode in _APPLIES_TO_ELEMENTS or self.opcode.endswith(('-done', '-update')):
      return []
    groups = _CALLED.findall(self.attributes)
    return [name.strip().lstrip('%') for group in groups for name in group.split(',')]

  def attribute(self, name: str) -> str:
    """Returns the value of an attribute: one word, or the text in braces. Returns '' if there is no such attribute."""
    return _first(rf'\b{name}=(\{{[^}}]*\}}|[^,\s]+)', self.attributes).strip('{}')

  def integers(self, name: str) -> list[int]:
    """Returns the integers of an attribute such as `dimensions={0,2}`."""
    return _integers(self.attribute(name))


# Instructions whose computation works on scalars, such as a sum or a comparison.
_APPLIES_TO_ELEMENTS = ('reduce', 'reduce-window', 'scatter', 'sort', 'map', 'select-and-scatter', 'reduce-scatter')


class Computation:
  """A list of instructions, in execution order if the program is scheduled."""

  def __init__(self, name: str):
    self.name = name
    self.instructions: list[Instruction] = []

  @functools.cached_property
  def by_name(self) -> dict[str, Instruction]:
    return {i.name: i for i in self.instructions}

  @functools.cached_property
  def root(self) -> Instruction:
    return next((i for i in self.instructions if i.is_root), self.instructions[-1])

  @functools.cached_property
  def parameters(self) -> dict[int, Instruction]:
    return {int(i.literal): i for i in self.instructions if i.opcode == 'parameter'}

  @functools.cached_property
  def users(self) -> dict[str, list[Instruction]]:
    """The instructions that use each result, by its name."""
    found: dict[str, list[Instruction]] = {}
    for instruction in self.instructions:
      for name in dict.fromkeys(instruction.operands):
        found.setdefault(name, []).append(instruction)
    return found

  @functools.cached_property
  def custom_calls(self) -> set[str]:
    """The targets of its custom calls."""
    calls = (i for i in self.instructions if i.opcode == 'custom-call')
    return {i.attribute('custom_call_target').strip('"') for i in calls}

  def operands(self, instruction: Instruction) -> list[Instruction]:
    """Returns the instructions whose results are the operands of an instruction."""
    return [self.by_name[name] for name in instruction.operands if name in self.by_name]


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
  """A compiled program on one device.

  Attributes:
    computations, entry: the computations by name, and the one that runs first.
    num_devices: devices that run it together.
  """

  computations: Mapping[str, Computation]
  entry: Computation
  num_devices: int = 1

  def called_computations(self, instruction: Instruction) -> list[Computation]:
    """Returns the computations that an instruction runs."""
    return [self.computations[name] for name in instruction.called_computations if name in self.computations]

  def origin(self, instruction: Instruction, computation: Computation) -> Instruction:
    """Returns the instruction that computes a value, behind bitcasts and in-place copies of TPU fusions."""
    while self.is_view(instruction) and (operands := computation.operands(instruction)):
      instruction = operands[0]
    return instruction

  def is_view(self, instruction: Instruction) -> bool:
    """Whether an instruction is another name for its operand."""
    if instruction.opcode == 'fusion' and 'output_to_operand_aliasing={{}: (0,' in instruction.attributes:
      return all(called.root.opcode == 'copy' for called in self.called_computations(instruction))
    return instruction.opcode == 'bitcast'

  def trip_count(self, loop: Instruction, computation: Computation) -> int | None:
    """Returns how often the body of a `while` runs; None if the program does not say.

    XLA records the count on GPU and CPU. On TPU, it follows from a condition such as `counter < constant`, the initial
    value of the counter, and what the body adds to it.
    """
    if known := _TRIP_COUNT.search(loop.attributes):
      return int(known[1])
    name = loop.attribute('condition').lstrip('%')
    compared = _comparison(self, self.computations[name]) if name in self.computations else None
    if compared is None:
      return None
    index, bound = compared
    operand = next(iter(computation.operands(loop)), None)
    start = 0
    if operand is not None and operand.opcode == 'tuple' and index < len(operand.operands):
      start = _constant(computation.by_name.get(operand.operands[index]), computation) or 0
    body = self.computations.get(loop.attribute('body').lstrip('%'))
    step = (body and _increment(self, body, index)) or 1
    return max(-(-(bound - start) // step), 0)

  @functools.cached_property
  def _started_in_fusions(self) -> set[str]:
    """Channels of the collectives that TPU fusions start. Other fusions continue and end these collectives."""
    starts = (c for c in self.computations.values() if 'AsyncCollectiveStart' in c.custom_calls)
    return {channel_of(i) for c in starts for i in c.instructions if i.collective}

  def is_carried_on(self, collective: Instruction, fused: Computation) -> bool:
    """Whether a collective in the computation of a fusion continues one that another fusion started."""
    return 'AsyncCollectiveStart' not in fused.custom_calls and channel_of(collective) in self._started_in_fusions

  def executed_instructions(self) -> Iterator[tuple[Instruction, int]]:
    """Yields each instruction that runs, and how often; for a conditional, the instructions of all branches.

    A loop with an unknown trip count counts as one iteration. A collective that spans several fusions counts where it
    starts.
    """
    yield from self._executed_in(self.entry, 1, set(), fused=False)

  def _executed_in(
    self, computation: Computation, times: int, started: set[str], fused: bool
  ) -> Iterator[tuple[Instruction, int]]:
    for instruction in computation.instructions:
      if instruction.collective and (channel := channel_of(instruction)):
        # Only inside fusions does a channel identify one collective.
        if fused and (channel in started or self.is_carried_on(instruction, computation)):
          continue
        started.add(channel)
      yield instruction, times
      trips = (self.trip_count(instruction, computation) or 1) if instruction.opcode == 'while' else 1
      for called in self.called_computations(instruction):
        fusion = instruction.opcode == 'fusion'
        yield from self._executed_in(called, times * trips, started if fusion else set(), fusion)


def parse(compiled: jax.stages.Compiled | str) -> CompiledProgram:
  """Parses a compiled program, or one given as HLO text.

  Raises:
    ValueError: the text has no entry computation.
  """
  text = compiled if isinstance(compiled, str) else compiled.as_text() or ''
  computations: dict[str, Computation] = {}
  entry, current = None, Computation('')
  for line in _CONTINUED.sub('', text).splitlines():
    if found := _INSTRUCTION.match(line):
      root, name, result, opcode, literal, attributes = found.groups()
      if opcode in ('fusion-start', 'fusion-done'):
        result, opcode = _strip_streams(result, opcode)
      current.instructions.append(Instruction(name, result, opcode, literal, attributes, bool(root)))
    elif header := _COMPUTATION.match(line):
      current = computations.setdefault(header[2], Computation(header[2]))
      entry = current if header[1] else entry
  if entry is None:
    raise ValueError('not HLO text: there is no ENTRY computation')
  head = text[: text.find('\n')]
  counts = [re.search(rf'{name}=(\d+)', head) for name in ('replica_count', 'num_partitions')]
  return CompiledProgram(computations, entry, math.prod(int(n[1]) for n in counts if n))


def _strip_streams(result: str, opcode: str) -> tuple[str, str]:
  """Returns (result, opcode) for the start or the end of an asynchronous fusion, as if it were a plain fusion.

  XLA for GPUs runs some fusions on separate streams, `((operands), result, u32[]) fusion-start(...)`. They compete for
  memory bandwidth with the operations that run at the same time, so plans assume that this saves no time.
  """
  if opcode == 'fusion-done':
    return result, 'bitcast'
  parts, depth = [''], 0  # The elements of the tuple.
  for character in result.strip()[1:-1]:
    depth += (character in '({[') - (character in ')}]')
    if character == ',' and not depth:
      parts.append('')
    else:
      parts[-1] += character
  return parts[1].strip(), 'fusion'


def channel_of(instruction: Instruction) -> str:
  """Returns the channel of a collective, which is the same in all its parts; '' if it has none."""
  return _first(_CHANNEL, instruction.attributes)


def _first(pattern: str | re.Pattern[str], text: str) -> str:
  """Returns the first group of the first match; '' if there is none."""
  found = re.search(pattern, text)
  return found[1] if found else ''


def _integers(text: str) -> list[int]:
  return [int(n) for n in text.split(',') if n]


def device_groups(instruction: Instruction, num_devices: int) -> tuple[tuple[int, ...], ...]:
  """Returns the groups of devices of a collective, or for a permute the pairs (from, to) of devices.

  If the instruction names no groups, there is one group of all devices.
  """
  if iota := _IOTA_GROUPS.search(instruction.attributes):
    shape, dims = _integers(iota[1]), _integers(iota[2])
    return tuple(map(tuple, _device_ids(dims, iota[3]).reshape(shape[0], -1).tolist()))
  if named := _MESH_GROUPS.search(instruction.attributes):
    return _mesh_groups(*named.groups())
  listed = _LISTED_GROUPS.search(instruction.attributes)
  found = re.findall(r'\{([\d,]+)\}', listed[1]) if listed else []
  return tuple(tuple(_integers(group)) for group in found) or (tuple(range(num_devices)),)


def _device_ids(dims: Sequence[int], transposed: str | None) -> np.ndarray:
  """Returns the device ids 0, 1, ... in the shape `dims`, transposed by a text such as '1,0'."""
  ids = np.arange(math.prod(dims)).reshape(dims)
  return ids.transpose(_integers(transposed)) if transposed else ids


def _mesh_groups(axes: str, order: str | None, over: str) -> tuple[tuple[int, ...], ...]:
  """Returns the groups over mesh axes, such as "'a','b':(1)2", of a mesh such as "'a'=2,'b'=4".

  `order` says in which order the devices are in the mesh, such as '[4,2]T(1,0)' or '0,4,1,5'.
  """
  sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
  if order and (iota := re.match(r'\[([\d,]+)\](?:T\(([\d,]+)\))?', order)):
    ids = _device_ids(_integers(iota[1]), iota[2]).reshape(-1)
  else:
    ids = np.array(_integers(order)) if order else np.arange(math.prod(sizes.values()))
  shape, taken = list[int](), list[int]()
  parts = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in _MESH_AXIS.findall(over)}
  for name, size in sizes.items():
    before, part = parts.get(name, (1, 1))
    taken += [len(shape) + 1] if name in parts else []
    shape += [before, part, size // before // part]
  ids = np.moveaxis(ids.reshape(shape), taken, range(-len(taken), 0))
  return tuple(map(tuple, ids.reshape(-1, math.prod(shape[i] for i in taken)).tolist()))


def _shape(text: str) -> ResultShape:
  stack: list[list[ResultShape]] = [[]]
  for token in _SHAPE_TOKEN.finditer(text):
    if token[0] == '(':
      stack.append([])
    elif token[0] == ')':
      parts = tuple(stack.pop())
      stack[-1].append(parts)
    else:
      space = _SPACE.search(token[3] or '')
      dims = tuple(_integers(token[2]))
      stack[-1].append(HloArray(token[1], dims, int(space[1]) if space else 0))
  return stack[0][0] if stack[0] else ()


def _comparison(program: CompiledProgram, condition: Computation) -> tuple[int, int] | None:
  """Returns (index, bound) for a condition `state[index] < bound`, or one with <= or != instead; None for others."""
  root, compared = condition.root, condition
  given = condition.operands(root)
  if root.opcode == 'fusion' and (called := program.called_computations(root)):
    compared, root = called[0], called[0].root
  if root.opcode != 'compare' or root.attribute('direction') not in ('LT', 'LE', 'NE'):
    return None
  sides = compared.operands(root)
  if compared is not condition:
    sides = [given[int(s.literal)] if s.opcode == 'parameter' else s for s in sides]
  owners = [condition if s.name in condition.by_name else compared for s in sides]
  bound = _constant(sides[1], owners[1]) if len(sides) == 2 else None
  if bound is None or sides[0].opcode != 'get-tuple-element':
    return None
  return int(sides[0].attribute('index')), bound + (root.attribute('direction') == 'LE')


def _increment(program: CompiledProgram, body: Computation, index: int) -> int | None:
  """Returns the constant that a loop's body adds to an element of its state; None if it does something else."""
  results = body.operands(body.root)
  result, computation = results[index] if index < len(results) else body.root, body
  if result.opcode == 'get-tuple-element' and (operands := body.operands(result)) and operands[0].opcode == 'fusion':
    part, result = int(result.attribute('index')), operands[0]
    called = program.called_computations(result)
    computation = called[0] if called else body
    result = computation.operands(computation.root)[part]
  elif result.opcode == 'fusion' and (called := program.called_computations(result)):
    computation, result = called[0], called[0].root
  if result.opcode != 'add':
    return None
  constants = [_constant(operand, computation) for operand in computation.operands(result)]
  return next((constant for constant in constants if constant), None)


def _constant(instruction: Instruction | None, computation: Computation) -> int | None:
  """Returns the value of an integer constant, or of a copy of one; None for other instructions."""
  while instruction is not None and instruction.opcode in ('copy', 'bitcast', 'convert'):
    instruction = next(iter(computation.operands(instruction)), None)
  if instruction is None or instruction.opcode != 'constant':
    return None
  return int(instruction.literal) if re.fullmatch(r'-?\d+', instruction.literal) else None
