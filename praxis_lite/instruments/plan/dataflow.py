"""Traces values of a program back to its arguments, through casts, slices, transposes, fusions and loops.

Only operations that move, select or cast elements are followed. The result of any other operation, such as a product,
comes from no argument. So gathered weights can be distinguished from gathered activations, however XLA transforms them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from praxis_lite.instruments.plan.hlo import CompiledProgram, Computation, Instruction

# Operations whose result consists of elements of their first operand.
_KEEPS = {'bitcast', 'bitcast-convert', 'convert', 'copy', 'reshape', 'transpose', 'slice', 'dynamic-slice', 'pad'}
_KEEPS |= {'optimization-barrier', 'copy-start', 'copy-done', 'slice-start', 'slice-done', 'domain', 'reverse'}
_KEEPS |= {'all-gather', 'all-gather-start', 'all-gather-done', 'dynamic-slice-start', 'dynamic-slice-done'}
_KEEPS |= {'collective-permute', 'collective-permute-start', 'collective-permute-done'}
_PASSED_ON = {'fusion', 'call', 'async-start', 'async-update', 'async-done'}

# By opcode: the index of an operand that may contain only padding. XLA gathers uneven parts as a sum of padded arrays.
_FILLERS = {'dynamic-update-slice': 0, 'select': 2}

Index = tuple[int, ...]  # The index of an element of a nested tuple.


class Dataflow:
  """The origins of the values of a program."""

  def __init__(self, program: CompiledProgram):
    self._program = program
    self._callers: dict[str, tuple[Instruction, Computation]] = {}
    for computation in program.computations.values():
      for instruction in computation.instructions:
        for called in program.called_computations(instruction):
          self._callers.setdefault(called.name, (instruction, computation))

  def collectives(self) -> Iterator[tuple[Instruction, Computation]]:
    """Yields each collective and the computation that contains it; if it spans several fusions, each of its parts."""
    for computation in self._program.computations.values():
      yield from ((instruction, computation) for instruction in computation.instructions if instruction.collective)

  def arguments(self, instruction: Instruction, computation: Computation) -> list[str]:
    """Returns the path of the argument that each operand comes from (see `argument_path`); '' if it is computed."""
    return [self.argument(operand, computation) for operand in computation.operands(instruction)]

  def argument(self, instruction: Instruction, computation: Computation, index: Index = ()) -> str:
    """Returns the path of the argument that a value, or its element at `index`, comes from; '' if it is computed."""
    origin, computation = self._origin(instruction, computation, index)
    filler = _FILLERS.get(origin.opcode)
    if filler is not None and self._is_fill(computation.operands(origin)[filler], computation):
      return self.argument(computation.operands(origin)[1], computation)
    if origin.opcode == 'concatenate':  # XLA joined small collectives; the first of them stands for all.
      parts = [self.argument(operand, computation) for operand in computation.operands(origin)]
      return parts[0] if all(parts) else ''
    is_argument = origin.opcode == 'parameter' and computation is self._program.entry
    return argument_path(origin.op_name) if is_argument else ''

  def _is_fill(self, instruction: Instruction, computation: Computation) -> bool:
    """Whether an array is a constant repeated for all elements."""
    return self._origin(instruction, computation)[0].opcode in ('broadcast', 'constant')

  def _origin(
    self, instruction: Instruction, computation: Computation, index: Index = ()
  ) -> tuple[Instruction, Computation]:
    """Goes back from `instruction` to the nearest one that computes its value; returns it and its computation."""
    for _ in range(200):  # Bounds the search, in case of a cycle.
      opcode, operands = instruction.opcode, computation.operands(instruction)
      if opcode == 'parameter':
        if computation is self._program.entry or computation.name not in self._callers:
          break
        caller, around = self._callers[computation.name]
        given, is_loop = around.operands(caller), caller.opcode == 'while'
        number = 0 if is_loop else int(instruction.literal)
        if number >= len(given) or (is_loop and index and not self._carries(computation, index[0])):
          break
        instruction, computation = given[number], around
      elif opcode == 'get-tuple-element' and operands:
        instruction, index = operands[0], (int(instruction.attribute('index')), *index)
      elif opcode == 'tuple' and index and index[0] < len(operands):
        instruction, index = operands[index[0]], index[1:]
      elif opcode == 'while' and operands and index:
        body = self._program.computations.get(instruction.attribute('body').lstrip('%'))
        if body is None or not self._carries(body, index[0]):
          break
        instruction = operands[0]
      elif opcode in _PASSED_ON and (called := self._program.called_computations(instruction)):
        instruction, computation = called[0].root, called[0]
      elif opcode in _PASSED_ON and operands:
        instruction = operands[0]
      elif opcode in _KEEPS and operands:
        index = () if opcode.endswith(('-start', '-done')) else index
        instruction = operands[0]
      else:
        break
    return instruction, computation

  def _carries(self, body: Computation, element: int) -> bool:
    """Whether the body of a loop passes an element of its state on unchanged."""
    root = body.root
    if root.opcode != 'tuple' or element >= len(root.operands):
      return False
    result = body.operands(root)[element]
    while result.opcode in ('copy', 'bitcast', 'optimization-barrier') and (operands := body.operands(result)):
      result = operands[0]
    if result.opcode != 'get-tuple-element' or int(result.attribute('index')) != element:
      return False
    return body.operands(result)[0].opcode == 'parameter'


def argument_path(op_name: str) -> str:
  """Returns 'mdl_vars.lm.out.w' for "state.mdl_vars['lm']['out']['w']", as JAX names an argument of a step."""
  name = op_name.replace('\\', '').removeprefix('state.')
  return '.'.join(re.findall(r"[^\[\]'.]+", name))
