"""Weights in 4 bits, with a scale for each 32 values (MXFP4, Open Compute Project, 2023), as in GPT-OSS.

A weight [E, D, F] is stored as two tensors of bytes:

    NAME_blocks  [E, F, D / 32, 16]   two values in a byte, the first one in the lower half
    NAME_scales  [E, F, D / 32]       the exponent of a power of two, plus 127

E is the number of experts, D of input dims, F of output dims, and G = D / 32.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from praxis_lite.bridges.hf.files import DerivedTensor, StoredTensor, Tensor
from praxis_lite.common.errors import CheckpointError

_BLOCK = 32
_DTYPE = np.dtype(ml_dtypes.bfloat16)  # Represents all values of the format exactly.
_POSITIVE = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)


def _shape(blocks: StoredTensor) -> tuple[int, ...]:
  E, F, count, _ = blocks.shape
  return E, count * _BLOCK, F


def _read(blocks: StoredTensor, scales: StoredTensor, index: tuple[slice, ...]) -> np.ndarray:
  """Returns a part of a weight [E, D, F]; reads the whole blocks that contain it."""
  E, D, F = (slice(*i.indices(size)[:2]) for i, size in zip(index, _shape(blocks)))
  of_blocks = E, F, slice(D.start // _BLOCK, -(-D.stop // _BLOCK))
  pairs_EFGb, scales_EFG = blocks.read_bytes(of_blocks), scales.read_bytes(of_blocks)
  values = _VALUES[np.stack([pairs_EFGb & 15, pairs_EFGb >> 4], axis=-1)].reshape(*scales_EFG.shape, _BLOCK)
  values = np.ldexp(values, scales_EFG[..., None].astype(np.int32) - 127).astype(_DTYPE)
  values_EFD = values.reshape(*values.shape[:2], values.shape[2] * _BLOCK)
  start = D.start % _BLOCK
  return np.ascontiguousarray(np.swapaxes(values_EFD[..., start : start + D.stop - D.start], 1, 2))


def join_scales(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
  """Returns the tensors of a checkpoint; joins blocks with their scales.

  Raises:
    CheckpointError: there are blocks without scales of the same shape.
  """
  found: dict[str, Tensor] = {}
  for name, tensor in tensors.items():
    base, _, part = name.rpartition('_')
    if part == 'blocks':
      scales = tensors.get(f'{base}_scales')
      is_packed = len(tensor.shape) == 4 and tensor.shape[3] == _BLOCK // 2
      if scales is None or not is_packed or scales.shape != tensor.shape[:3] or {tensor.kind, scales.kind} != {'U8'}:
        raise CheckpointError(
          f'{tensor.file}: {name} has shape {list(tensor.shape)}; expected bytes [E, F, D / 32, 16], and {base}_scales '
          'with bytes [E, F, D / 32] beside them'
        )
      read = functools.partial(_read, tensor, scales)
      found[base] = DerivedTensor(base, tensor.file, _shape(tensor), _DTYPE, read)
    elif part != 'scales' or f'{base}_blocks' not in tensors:
      found[name] = tensor
  return found
