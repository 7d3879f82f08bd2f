"""The product of inputs with the weight of a layer, computed as its field `matmul` says.

    'fprop'    in the dtype of the computation
    'fp8'      with operands in 8-bit floating point; see `fp8.py`
    'int8'     with operands in int8; see `int8.py`

A quantized weight with one scale per output is never dequantized: its integers are multiplied, and the results are
scaled. Other quantized weights are dequantized just before the product. I are dimensions of inputs, O of outputs.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import export

from praxis_lite.layers.base import Layer
from praxis_lite.layers.fp8 import check_fp8, fp8_tensordot
from praxis_lite.layers.int8 import int8_tensordot, multiply_rows_in_int8
from praxis_lite.sharding.mesh import memory_of_single_gpu

MATMULS = ('fprop', 'fp8', 'int8')
_LEAST_PRODUCT, _ROWS_AT_ONCE = 10_000_000, 16  # See `_tensordot`.


def multiply_by_w(layer: Layer, x: jax.Array, axes: int, kind: str) -> jax.Array:
  """In a call: returns x [..., *I] times the weight `w` of a layer, [*I, *O], as [..., *O] in `fprop_dtype`.

  `axes` is the number of dimensions I; the layer's field `matmul` is `kind`.
  """
  x = x.astype(layer.fprop_dtype)
  stored = layer._stored.get('w')
  if kind == 'fp8' or stored is None or stored.multiply is None:
    return matmul(x, layer.theta.w, axes, kind, f'{layer.path_name}.matmul')
  parts = layer._read_parts('w')
  x = stored.scale_inputs(x, parts)
  if kind == 'fprop':
    return stored.multiply(x, parts)
  return multiply_rows_in_int8(x, parts, axes, stored.multiply, stored.input_range(parts))


def matmul(x: jax.Array, w: jax.Array, axes: int, kind: str, path: str) -> jax.Array:
  """Returns `jnp.tensordot(x, w, axes)` in the dtype of x, computed as `kind` says; the field `path` sets `kind`."""
  if kind == 'fprop':
    return x @ w if axes == 1 and w.ndim == 2 else _tensordot(x, w, axes)
  if kind == 'fp8':
    check_fp8(path)
    return fp8_tensordot(x, w, axes)
  return int8_tensordot(x, w, axes)


def _tensordot(x: jax.Array, w: jax.Array, axes: int) -> jax.Array:
  """Returns `jnp.tensordot(x, w, axes)`; on one GPU, if x has only a few rows, appends rows of zeros to it.

  XLA for GPUs turns products of fewer multiplications than `_LEAST_PRODUCT` into sums. If a sum is over several
  dimensions of a weight, as in the output projection of attention to one token, XLA first writes all its terms to
  memory. Further rows cost no time: a matrix unit multiplies `_ROWS_AT_ONCE` rows in the time of one.
  """
  lead, needed = x.shape[:-axes], -(-_LEAST_PRODUCT // max(1, w.size))
  if axes == 1 or needed > _ROWS_AT_ONCE or any(map(export.is_symbolic_dim, lead)) or not memory_of_single_gpu():
    return jnp.tensordot(x, w, axes=axes)
  rows = math.prod(lead)
  if not 0 < rows < needed:
    return jnp.tensordot(x, w, axes=axes)
  few = x.reshape(rows, *x.shape[-axes:])
  filled = jnp.pad(few, ((0, needed - rows), *[(0, 0)] * axes))
  return jnp.tensordot(filled, w, axes=axes)[:rows].reshape(*lead, *w.shape[axes:])
