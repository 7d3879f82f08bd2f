"""Products of matrices with operands in 8-bit floating point, scaled by their current values.

    q(x)  = round(x / s) in 8 bits,  s = max |x| / largest number of the format      one scale for an array
    y     = s_x s_w (q(x) . q(w))                                                     e4m3 by e4m3
    dx    = s_g s_w (q(g) . q(w)^T)                                                   e5m2 by e4m3
    dw    = s_x s_g (q(x)^T . q(g))                                                   e4m3 by e5m2

Each device sums in float32. Sums over devices are in the dtype of x, or in float32 if that is float16. After the
leading bit, e4m3 has 3 bits and e5m2 has 2, so the relative rounding error is up to 1/16 and 1/8. A product of normally
distributed entries is off by 4 % of its own size, and its gradients by 6 %. Computing a scale from the current values
takes one more pass over an array than using the values of earlier steps (delayed scaling), but needs no state.

GPUs of compute capability 8.9 and above support such products; elsewhere XLA computes them in a wider format.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from praxis_lite.common.accelerators import accelerator_of
from praxis_lite.common.errors import ConfigError
from praxis_lite.sharding.mesh import ask_device

_FORWARD, _BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2


def check_fp8(path: str) -> None:
  """Raises ConfigError, naming the field at `path`, on a GPU without products in 8-bit floating point."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  older = ask_device(_gpu_without_fp8) if device is not None and device.device_kind else ''
  if older:
    raise ConfigError(f"{path}: 'fp8' needs a GPU of compute capability 8.9 or more, and {older} is older")


def _gpu_without_fp8(kind: str) -> str:
  found = accelerator_of(kind)
  return '' if found is None or found.kind != 'gpu' or 'f8e4m3fn' in found.peaks else found.name


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def fp8_tensordot(x: jax.Array, w: jax.Array, axes: int) -> jax.Array:
  """Returns `jnp.tensordot(x, w, axes)` in the dtype of x; see the top of this file."""
  return _forward(x, w, axes)[0]


Quantized = tuple[jax.Array, jax.Array]  # Values in 8 bits, and their scale, a float32 scalar.
# x and w in 8 bits, and empty arrays that carry the dtypes of x and w.
_Residuals = tuple[Quantized, Quantized, jax.Array, jax.Array]


def _forward(x: jax.Array, w: jax.Array, axes: int) -> tuple[jax.Array, _Residuals]:
  of_x, of_w = _quantize(x, _FORWARD), _quantize(w, _FORWARD)
  rows = x.ndim - axes
  y = _dot(of_x, of_w, (tuple(range(rows, x.ndim)), tuple(range(axes))), x.dtype)
  return y, (of_x, of_w, jnp.zeros(0, x.dtype), jnp.zeros(0, w.dtype))


def _backward(axes: int, residuals: _Residuals, g: jax.Array) -> tuple[jax.Array, jax.Array]:
  of_x, of_w, like_x, like_w = residuals
  of_g = _quantize(g, _BACKWARD)
  rows, out = of_x[0].ndim - axes, of_w[0].ndim - axes
  dx = _dot(of_g, of_w, (tuple(range(rows, rows + out)), tuple(range(axes, axes + out))), like_x.dtype)
  dw = _dot(of_x, of_g, (tuple(range(rows)), tuple(range(rows))), like_w.dtype)
  return dx, dw


fp8_tensordot.defvjp(_forward, _backward)


def _quantize(x: jax.Array, dtype: DTypeLike) -> Quantized:
  largest = float(jnp.finfo(dtype).max)
  wide = x.astype(jnp.float32)
  most = jnp.max(jnp.abs(wide))
  least = float(jnp.finfo(jnp.float32).tiny)  # Devices may round smaller scales to zero.
  scale = jnp.where(most > 0, jnp.maximum(most / largest, least), 1.0)
  return jnp.clip(wide / scale, -largest, largest).astype(dtype), scale


def _dot(
  a: Quantized, b: Quantized, contracting: tuple[tuple[int, ...], tuple[int, ...]], dtype: DTypeLike
) -> jax.Array:
  # Devices add up their parts of a product in the product's dtype. Float16 has too small a range for this; bfloat16 has
  # the range of float32.
  summed = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
  product = jax.lax.dot_general(a[0], b[0], (contracting, ((), ())), preferred_element_type=summed)
  return (product * (a[1] * b[1])).astype(dtype)
