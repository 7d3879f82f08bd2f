"""Finds operations of a compiled step that take a slow path on its chips; see `slow_paths.py` for the traced step.

expanded gather       a gather or scatter that XLA turns into a loop
convolution           on a GPU, a convolution that cuDNN does not compute
transposed weight     a weight that each step copies with its dims in another order
"""

from __future__ import annotations

import collections

from praxis_lite.instruments.plan.cost import Cost
from praxis_lite.instruments.plan.dataflow import Dataflow
from praxis_lite.instruments.plan.hlo import CompiledProgram, Computation, Instruction
from praxis_lite.instruments.plan.layer_names import LayerNames
from praxis_lite.training.slow_paths import SlowPath

_LEAST = 0.01  # Findings that take less than this share of a step are left out.
_WEIGHTS = 'mdl_vars.'


def find_slow_operations(program: CompiledProgram, cost: Cost, names: LayerNames, kind: str) -> list[SlowPath]:
  """Returns the slow operations that take more than 1 % of a step's time, unordered; none if `kind` is 'cpu'."""
  flow, seconds = Dataflow(program), collections.defaultdict[str, float](float)
  for op in cost.operations:
    seconds[op.name] += op.count * op.seconds
  found = collections.defaultdict[tuple[str, str, str], float](float)
  for computation in program.computations.values() if kind != 'cpu' else ():
    for instruction in computation.instructions:
      if slow := _slow_path(instruction, computation, program, flow, kind):
        what, remedy = slow
        bodies = program.called_computations(instruction) if instruction.opcode == 'while' else []
        parts = [part for body in bodies for part in body.instructions] or [instruction]
        found[names.layer(instruction.op_name), what, remedy] += sum(seconds[part.name] for part in parts)
  return [SlowPath(layer, what, t, remedy) for (layer, what, remedy), t in found.items() if t > _LEAST * cost.seconds]


def _slow_path(
  instruction: Instruction, computation: Computation, program: CompiledProgram, flow: Dataflow, kind: str
) -> tuple[str, str] | None:
  """Returns why an instruction is slow, and the remedy; None if it takes no slow path."""
  primitive = instruction.op_name.rpartition('/')[2]
  if instruction.opcode == 'while' and primitive.startswith(('gather', 'scatter')):
    return f'XLA makes a loop of a {primitive}', "set lookup_style to 'matmul', or index one dimension at a time"
  if instruction.opcode == 'convolution' and kind == 'gpu':
    return 'a convolution is no call of cuDNN', 'set fprop_dtype to float16, bfloat16 or float32, and groups to 1'
  if _transposes(instruction, computation, program):
    argument = flow.argument(instruction, computation)
    if argument.startswith(_WEIGHTS):
      path = argument.removeprefix(_WEIGHTS)
      return f'each step transposes the weight {path}', 'declare its dims in the order in which products read them'
  return None


def _transposes(instruction: Instruction, computation: Computation, program: CompiledProgram) -> bool:
  """Whether an instruction, or one inside a fusion, changes the order in which the dims of an array are in memory."""
  if instruction.opcode == 'fusion':
    inside = (inner for called in program.called_computations(instruction) for inner in called.instructions)
    return any(inner.opcode == 'transpose' for inner in inside)
  if instruction.opcode == 'copy':
    return any(operand.layout != instruction.layout for operand in computation.operands(instruction))
  return instruction.opcode == 'transpose'
