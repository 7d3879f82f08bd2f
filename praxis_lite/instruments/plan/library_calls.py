"""Reads the FLOPs of a library call, the fused attention of cuDNN, from its description in a program."""

from __future__ import annotations

import math

_FUSED_ATTENTION = '__cudnn$fmha'


def is_fused_attention(target: str) -> bool:
  """Whether a custom call with this target is cuDNN's fused attention, forward or backward."""
  return target.startswith(_FUSED_ATTENTION)


def fused_attention_flops(target: str, config: object, dims_per_head: int) -> float:
  """Returns the FLOPs of the products in a call of fused attention.

  The forward pass has two products of queries x keys x dims. The backward pass has five, because it computes the logits
  again. A causal mask halves the FLOPs.

  Args:
    target: target of the custom call.
    config: its decoded `backend_config`.
    dims_per_head: the last dimension of the queries.
  """
  logits = value_in(config, 'intermediate_tensor_shape')
  sizes = [int(n) for n in logits.get('dimensions', ())] if isinstance(logits, dict) else []
  products = 5 if 'Backward' in target else 2
  seen = 0.5 if 'CAUSAL' in str(value_in(config, 'mask_type')) else 1.0
  return 2.0 * products * seen * math.prod(sizes) * dims_per_head if sizes else 0.0


def value_in(config: object, name: str) -> object:
  """Returns the value of a name at any depth of a nested dict; None if the name is missing."""
  if not isinstance(config, dict):
    return None
  if name in config:
    return config[name]
  return next((value for inner in config.values() if (value := value_in(inner, name)) is not None), None)
