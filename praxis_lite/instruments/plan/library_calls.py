"""Reads the work of library calls from a program: fused attention, and kernels for grouped products."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from praxis_lite.layers.tokamax_attention import ATTENTION_KERNEL, kernel_flops

_FUSED_ATTENTION = '__cudnn$fmha'
_SPLASH = 'splash_mha_'  # The beginning of the names of the attention kernels for TPUs.


def is_fused_attention(target: str) -> bool:
  """Whether a custom call with this target is cuDNN's fused attention, forward or backward."""
  return target.startswith(_FUSED_ATTENTION)


def is_attention_kernel(target: str, op_name: str) -> bool:
  """Whether a custom call is a fused kernel for the whole attention, on a GPU or a TPU."""
  return is_fused_attention(target) or _SPLASH in op_name or named_attention_flops(op_name) > 0


def estimated_cost(config: object) -> tuple[float, float]:
  """Returns the FLOPs, and the bytes read and written, that the author of a Pallas kernel estimates; 0 if unknown.

  Here and below, `config` is the decoded `backend_config` of the custom call.
  """
  estimate = value_in(config, 'cost_estimate')
  numbers = estimate if isinstance(estimate, dict) else {}
  return float(numbers.get('flops', 0)), float(numbers.get('bytes_accessed', 0))


def fused_attention_flops(target: str, config: object, dims_per_head: int) -> float:
  """Returns the FLOPs of the products in a call of fused attention.

  The forward pass has two products of queries x keys x dims. The backward pass has five, because it computes the logits
  again. A causal mask halves the FLOPs.
  """
  logits = value_in(config, 'intermediate_tensor_shape')
  sizes = [int(n) for n in logits.get('dimensions', ())] if isinstance(logits, dict) else []
  products = 5 if 'Backward' in target else 2
  seen = 0.5 if 'CAUSAL' in str(value_in(config, 'mask_type')) else 1.0
  return 2.0 * products * seen * math.prod(sizes) * dims_per_head if sizes else 0.0


def named_attention_flops(op_name: str) -> float:
  """Returns the FLOPs of a call of tokamax's attention, which are part of the call's name; 0 for other calls."""
  found = re.search(rf'jit\(({ATTENTION_KERNEL}\w+)\)', op_name)
  known = kernel_flops(found[1]) if found else None
  return known[0] if known else 0.0


def grouped_product_flops(op_name: str, left: Sequence[int], result: Sequence[int]) -> float:
  """Returns the FLOPs of a kernel for grouped products, if all rows belong to groups; 0 for other calls.

  The products are rows [M, K] x weights [G, K, N] = [M, N], and the gradient [M, K] x [M, N] = [G, K, N]; `left` and
  `result` are shapes on one device.
  """
  return 2.0 * math.prod(left) * result[-1] if _is_grouped(op_name) and len(left) == 2 else 0.0


def is_grouped_kernel(op_name: str) -> bool:
  """Whether an operation calls one of this package's kernels for grouped products."""
  return 'pallas_call' in op_name and _is_grouped(op_name)


def _is_grouped(op_name: str) -> bool:
  return any(f'jit({name})' in op_name for name in ('grouped_product', 'grouped_sum'))


def value_in(config: object, name: str) -> object:
  """Returns the value of a name at any depth of a nested dict; None if the name is missing."""
  if not isinstance(config, dict):
    return None
  if name in config:
    return config[name]
  return next((value for inner in config.values() if (value := value_in(inner, name)) is not None), None)
