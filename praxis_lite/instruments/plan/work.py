"""Counts the work of an instruction in a compiled program: FLOPs of products, and bytes moved in main memory."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterable, Sequence

import numpy as np

from praxis_lite.instruments.plan.hlo import CompiledProgram, Computation, HloArray, Instruction, arrays_of
from praxis_lite.instruments.plan.layer_names import HiddenWork
from praxis_lite.instruments.plan.library_calls import (
  estimated_cost,
  fused_attention_flops,
  grouped_product_flops,
  is_attention_kernel,
  is_fused_attention,
  is_grouped_kernel,
  named_attention_flops,
  value_in,
)
from praxis_lite.instruments.plan.targets import Target

# ---------------------------------------------------------------- FLOPs


@dataclasses.dataclass(frozen=True)
class CountedProduct:
  """A matrix product, convolution or attention: its FLOPs, the dtype of its operands, and the name of its operation."""

  flops: float
  dtype: str
  op_name: str
  attention_dims: int = 0  # Dims per head of attention in a fused kernel; 0 for other products.


def products_of(
  instruction: Instruction, computation: Computation, program: CompiledProgram, hidden: HiddenWork
) -> Iterable[CountedProduct]:
  """Yields the products that an instruction computes, including those inside a fusion.

  If the program does not show the FLOPs of a custom call, the layer of the call gives them.
  """
  if instruction.opcode == 'fusion':
    for called in program.called_computations(instruction):
      for inner in called.instructions:
        yield from products_of(inner, called, program, hidden)
  elif instruction.opcode in _FLOPS:
    operands = [operand.arrays[0] for operand in computation.operands(instruction) if operand.arrays]
    flops = _FLOPS[instruction.opcode](instruction, operands)
    if not flops and instruction.opcode == 'custom-call':
      flops = hidden.call_flops(instruction.op_name, _target(instruction), [operand.dims for operand in operands])
    if flops:
      algorithm = re.search(r'algorithm=dot_(bf16|f16|f8\w*?)_', instruction.attributes)
      is_attention = is_attention_kernel(_target(instruction), instruction.op_name)
      if is_attention:  # The first operands may be tables of integers.
        operands = [operand for operand in operands if operand.dtype.startswith(('f', 'bf'))]
      dtype = algorithm[1] if algorithm else operands[0].dtype if operands else 'f32'
      dims = operands[0].dims[-1] if is_attention else 0
      yield CountedProduct(flops, dtype, instruction.op_name, dims)


def _dot_flops(instruction: Instruction, operands: Sequence[HloArray]) -> float:
  summed = math.prod(operands[0].dims[d] for d in instruction.integers('lhs_contracting_dims'))
  return 2.0 * instruction.arrays[0].size * summed


def _ragged_dot_flops(instruction: Instruction, operands: Sequence[HloArray]) -> float:
  """Returns the FLOPs of a ragged dot. If the summed dimension is ragged, each group sums only its own part."""
  summed = instruction.integers('lhs_contracting_dims')
  groups = operands[2].dims[-1] if set(instruction.integers('lhs_ragged_dims')) & set(summed) else 1
  return 2.0 * instruction.arrays[0].size * math.prod(operands[0].dims[d] for d in summed) / groups


def _convolution_flops(instruction: Instruction, operands: Sequence[HloArray]) -> float:
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', instruction.attributes)
  if labels is None or len(operands) < 2:
    return 0.0
  window = dict(re.findall(r'(\w+)=([\dx_\-]+)', instruction.attribute('window')))
  strides, gaps, kernel_gaps = (
    tuple(map(int, window[name].split('x'))) if name in window else ()
    for name in ('stride', 'lhs_dilate', 'rhs_dilate')
  )
  return convolution_flops(
    labels.groups(),
    (operands[0].dims, operands[1].dims, instruction.arrays[0].dims),
    strides=strides,
    pads=tuple(int(pad.split('_')[0]) for pad in window['pad'].split('x')) if 'pad' in window else (),
    gaps=gaps,
    kernel_gaps=kernel_gaps,
  )


def convolution_flops(
  labels: Sequence[str],
  shapes: Sequence[Sequence[int]],
  *,
  strides: Sequence[int] = (),
  pads: Sequence[int] = (),
  gaps: Sequence[int] = (),
  kernel_gaps: Sequence[int] = (),
  whole: Sequence[Sequence[int]] = (),
) -> float:
  """Returns the FLOPs of a convolution. Products with padding, or with gaps between dilated elements, do not count.

  Args:
    labels: the dimensions of image, kernel and result, such as ('b01f', '01io', 'b01f').
    shapes: the shapes of image, kernel and result.
    strides, pads, gaps, kernel_gaps: for each spatial dimension, the stride, the padding before the image, and the
      dilation of image and kernel; () means 1, or no padding.
    whole: shapes of the arrays before they were split, if spatial dimensions may be split. Only the first and the last
      part have padding, so each part counts its share of all products.
  """
  (lhs, rhs, out), (_, kernel, result) = labels, shapes
  met = 1.0
  for dim in range(len(lhs) - 2):
    at = str(dim)
    stride, spread, apart = (numbers[dim] if numbers else 1 for numbers in (strides, gaps, kernel_gaps))
    places = lhs.index(at), rhs.index(at), out.index(at)
    image_size, kernel_size, result_size = (shape[place] for shape, place in zip(whole or shapes, places))
    met *= _met(image_size, result_size, kernel_size, stride, pads[dim] if pads else 0, spread, apart)
    met *= kernel[places[1]] * result[places[2]] / max(kernel_size * result_size, 1)
  features = kernel[rhs.index('i')] * kernel[rhs.index('o')]
  return 2.0 * result[out.index('b')] * features * met


@functools.cache
def _met(image: int, out: int, kernel: int, stride: int, pad: int, spread: int, apart: int) -> int:
  """Returns how many pairs (output, kernel position) in one dimension read an element of the image, not padding."""
  last = (image - 1) * spread
  if spread == 1:  # For outputs `first` to `end`, this kernel position reads the image.
    shift = pad - np.arange(kernel) * apart
    first, end = -(-shift // stride), (last + shift) // stride
    return int(np.maximum(np.minimum(end, out - 1) - np.maximum(first, 0) + 1, 0).sum())
  at = np.arange(out) * stride - pad
  ats = (at + k * apart for k in range(kernel))
  return sum(int(((x >= 0) & (x <= last) & (x % spread == 0)).sum()) for x in ats)


def _custom_call_flops(instruction: Instruction, operands: Sequence[HloArray]) -> float:
  """Returns the FLOPs of a call of cuBLAS or cuDNN, of a grouped product, or of a kernel with a cost estimate."""
  target = _target(instruction)
  config = _backend_config(instruction)
  if target.startswith('__cublas$'):
    numbers = value_in(config, 'dot_dimension_numbers')
    dims = [int(d) for d in numbers.get('lhs_contracting_dimensions', ())] if isinstance(numbers, dict) else []
    return 2.0 * instruction.arrays[0].size * math.prod(operands[0].dims[d] for d in dims) if dims else 0.0
  if is_fused_attention(target):
    return fused_attention_flops(target, config, operands[0].dims[-1])
  if known := estimated_cost(config)[0] or named_attention_flops(instruction.op_name):
    return known
  return grouped_product_flops(instruction.op_name, operands[0].dims, instruction.arrays[0].dims) if operands else 0.0


def _target(instruction: Instruction) -> str:
  return instruction.attribute('custom_call_target').strip('"')


def _backend_config(instruction: Instruction) -> object:
  found = instruction.attributes.find('backend_config={')
  if found < 0:
    return {}
  try:
    return json.JSONDecoder().raw_decode(instruction.attributes, found + len('backend_config='))[0]
  except ValueError:
    return {}


_FLOPS = {
  'dot': _dot_flops,
  'ragged-dot': _ragged_dot_flops,
  'convolution': _convolution_flops,
  'custom-call': _custom_call_flops,
}


def operation_seconds(target: Target, products: Iterable[CountedProduct], moved: float) -> float:
  """Returns the time of an operation: the longest of its compute time, its memory time and the minimal time."""
  efficiency = target.efficiency
  computes = 0.0
  for product in products:
    if product.attention_dims:
      share = target.attention_share(product.attention_dims)
    else:
      share = efficiency.compute * (target.grouped_share if is_grouped_kernel(product.op_name) else 1.0)
    computes += product.flops / (target.peak(product.dtype) * share)
  return max(computes, moved / (target.device_bandwidth * efficiency.memory), efficiency.seconds_per_operation)


# ---------------------------------------------------------------- bytes

# Instructions that move no memory.
_FREE = {'parameter', 'constant', 'iota', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'add-dependency'}
_FREE |= {'domain', 'partition-id', 'replica-id', 'optimization-barrier'}
_FREE |= {'call', 'while', 'conditional', 'async-update'}
_SLICES = ('slice', 'dynamic-slice', 'gather')


def bytes_of(instruction: Instruction, computation: Computation, program: CompiledProgram) -> float:
  """Returns the bytes of main memory that an instruction reads and writes."""
  if instruction.opcode in _FREE or instruction.opcode.endswith('-done'):
    return 0.0
  operands = computation.operands(instruction)
  if instruction.opcode == 'fusion' and (called := program.called_computations(instruction)):
    return _fusion_bytes(called[0], operands, program)
  if instruction.opcode.endswith('-start') and not isinstance(instruction.shape, HloArray):  # (to, from, context)
    return float(sum(array.bytes for part in instruction.shape[:2] for array in arrays_of(part) if array.space == 0))
  result = _memory_bytes(instruction)
  if instruction.opcode in _SLICES:
    return 2.0 * result
  if instruction.opcode == 'dynamic-update-slice' and len(operands) > 1:
    return 2.0 * _memory_bytes(operands[1])
  if instruction.opcode == 'scatter' and len(operands) > 2:
    return 3.0 * _memory_bytes(operands[2])
  # A kernel may read an operand several times, or only a part of it.
  estimated = estimated_cost(_backend_config(instruction))[1] if instruction.opcode == 'custom-call' else 0.0
  return estimated or float(result + sum(map(_memory_bytes, operands)))


def _fusion_bytes(inside: Computation, operands: Sequence[Instruction], program: CompiledProgram) -> float:
  total = 0.0
  for number, parameter in inside.parameters.items():
    given = operands[number] if number < len(operands) else parameter
    total += _read(parameter, _memory_bytes(given), inside, program)
  root = inside.root
  results = inside.operands(root) if root.opcode == 'tuple' else [root]
  return total + sum(_bytes_written(result, inside, program) for result in results)


def _read(parameter: Instruction, whole: float, inside: Computation, program: CompiledProgram) -> float:
  """Returns the bytes that a fusion, with its inner fusions, reads from a parameter of `whole` bytes."""
  parts = 0.0
  for user in _uses(parameter.name, inside, program):
    given = [program.origin(operand, inside) is parameter for operand in inside.operands(user)]
    called = program.called_computations(user) if user.opcode == 'fusion' else []
    if called:
      inner = (called[0].parameters[number] for number, is_given in enumerate(given) if is_given)
      parts += sum(_read(one, whole, called[0], program) for one in inner)
    elif user.opcode in _SLICES and given[0]:
      parts += sum(a.bytes for a in user.arrays)
    elif not (user.opcode == 'dynamic-update-slice' and given[0]):  # An in-place update does not read its target.
      parts += whole
  return min(parts, whole)


def _uses(name: str, inside: Computation, program: CompiledProgram) -> list[Instruction]:
  """Returns the instructions that use a value, directly or through views of it, without duplicates."""
  found: dict[str, Instruction] = {}
  for user in inside.users.get(name, ()):
    found |= {i.name: i for i in (_uses(user.name, inside, program) if program.is_view(user) else [user])}
  return list(found.values())


def _bytes_written(result: Instruction, inside: Computation, program: CompiledProgram) -> float:
  """Returns the bytes that a fusion writes for a result; for an in-place update, only the updated part."""
  result = program.origin(result, inside)
  if result.opcode == 'fusion' and (called := program.called_computations(result)) and called[0].root.opcode != 'tuple':
    return _bytes_written(called[0].root, called[0], program)
  update = inside.operands(result)[1:2] if result.opcode == 'dynamic-update-slice' else []
  return _memory_bytes(update[0]) if update else _memory_bytes(result)


def _memory_bytes(instruction: Instruction) -> int:
  return sum(array.bytes for array in arrays_of(instruction.shape) if array.space == 0)
