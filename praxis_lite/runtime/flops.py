"""Counting the floating-point operations of a traced function: what its matrix products and convolutions need.

XLA's own count of a compiled program takes the body of a loop once, however often it runs, and skips the library
kernels that accelerators call; a model of scanned layers would look ten times too slow. So this counts in the jaxpr,
where loops have their lengths and products their shapes.

    dot_general             2 * batch * M * N * K
    conv_general_dilated    2 * output elements * kernel elements per output channel
    fused attention         4 * B * N * T * S * H, the two products it stands for
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.extend import core


def count_flops(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> float:
  """Returns the operations of one call; of the branches of a `cond` the most expensive, of a `while` one round."""
  inner = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
  return sum(_equation_flops(equation) for equation in inner.eqns)


def _equation_flops(equation: Any) -> float:
  name = equation.primitive.name
  if name == 'dot_general':
    return _dot_flops(equation)
  if name == 'conv_general_dilated':
    return _conv_flops(equation)
  if name.startswith('dot_product_attention_fwd'):
    return _attention_flops(equation)
  if name == 'cond':
    return max(count_flops(branch) for branch in equation.params['branches'])
  below = sum(count_flops(jaxpr) for jaxpr in _inner_jaxprs(equation.params))
  if name == 'scan':
    return below * equation.params['length']
  if name == 'shard_map':
    # Inside, shapes are those of one device.
    return below * equation.params['mesh'].size
  return below


def _inner_jaxprs(params: dict[str, Any]) -> list[Any]:
  return [v for v in jax.tree.leaves(params, is_leaf=_is_jaxpr) if _is_jaxpr(v)]


def _is_jaxpr(value: Any) -> bool:
  return isinstance(value, core.ClosedJaxpr | core.Jaxpr)


def _dot_flops(equation: Any) -> float:
  left, _ = (v.aval for v in equation.invars[:2])
  (contracting, _), _ = equation.params['dimension_numbers']
  return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left.shape[d] for d in contracting)


def _conv_flops(equation: Any) -> float:
  kernel = equation.invars[1].aval
  out_channels = kernel.shape[equation.params['dimension_numbers'].rhs_spec[0]]
  return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel.shape) / out_channels


def _attention_flops(equation: Any) -> float:
  query, key = (v.aval for v in equation.invars[:2])  # [B, T, N, H] and [B, S, K, H]
  batch, queries, heads, dims = query.shape
  return 4.0 * batch * heads * queries * key.shape[1] * dims
