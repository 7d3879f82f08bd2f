"""Weights in 8 bits (E4M3), with a scale for each block, as in DeepSeek-V3 and R1, and in Qwen 3 "FP8".

A weight [O, I] is stored as two tensors, with blocks of usually 128 x 128 values:

    NAME              [O, I]                   8 bits
    NAME_scale_inv    [ceil(O / block), ceil(I / block)]    the factor of each block

O is the number of output dims, I of input dims.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from praxis_lite.bridges.hf.files import DerivedTensor, StoredTensor, Tensor
from praxis_lite.common.errors import CheckpointError

_SCALE = '_scale_inv'
# Weights are read in this dtype, to which the authors of DeepSeek-V3 convert them.
_DTYPE = np.dtype(ml_dtypes.bfloat16)


def block_of(quantization: object) -> tuple[int, int] | None:
  """Returns the shape of the blocks that a `quantization_config` of config.json sets; None for other formats."""
  if not isinstance(quantization, dict) or quantization.get('quant_method') != 'fp8':
    return None
  block = quantization.get('weight_block_size')
  if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
    return None
  return None if quantization.get('fmt', 'e4m3') != 'e4m3' else (block[0], block[1])


def _read(values: StoredTensor, scales: StoredTensor, block: tuple[int, int], index: tuple[slice, ...]) -> np.ndarray:
  """Returns a part of a weight [O, I]."""
  values_OI = values.read_bytes(index).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
  every = (*index, *[slice(None)] * (2 - len(index)))
  of_rows, of_columns = (np.arange(n)[i] // size for i, n, size in zip(every, values.shape, block))
  first = of_rows[:1].sum(), of_columns[:1].sum()
  needed = tuple(slice(start, 1 + max(at, default=start)) for start, at in zip(first, (of_rows, of_columns)))
  factors = scales.read(needed).astype(np.float32)
  return (values_OI * factors[np.ix_(of_rows - first[0], of_columns - first[1])]).astype(_DTYPE)


def join_block_scales(tensors: Mapping[str, StoredTensor], block: tuple[int, int]) -> dict[str, Tensor]:
  """Returns the tensors of a checkpoint; joins values in 8 bits with the scales of their blocks.

  Raises:
    CheckpointError: values in 8 bits have no scales of the right shape.
  """
  found: dict[str, Tensor] = {}
  for name, tensor in tensors.items():
    if tensor.kind == 'F8_E4M3':
      scales = tensors.get(name + _SCALE)
      expected = tuple(-(-size // b) for size, b in zip(tensor.shape, block))
      if scales is None or len(tensor.shape) != 2 or scales.shape != expected:
        raise CheckpointError(
          f'{tensor.file}: {name} has 8 bits and shape {list(tensor.shape)}; expected {name}{_SCALE} of shape '
          f'{list(expected)} beside it'
        )
      read = functools.partial(_read, tensor, scales, block)
      found[name] = DerivedTensor(name, tensor.file, tensor.shape, _DTYPE, read)
    elif not name.endswith(_SCALE) or name.removesuffix(_SCALE) not in tensors:
      found[name] = tensor
  return found
