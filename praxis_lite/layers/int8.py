"""Products of matrices with operands in int8: each row of the inputs has a scale, computed from its current values.

    q(x) = round(x / s_x),  s_x = max |x| / 127      of each row; in the same way s_w of each output of the weight
    y    = s_x s_w (q(x) . q(w))                     summed in int32, up to 2^17 products at a time
    dx   = g . (s_w q(w))^T,  dw = (s_x q(x))^T . g  in the dtype of x: as if nothing were rounded (straight-through)

A product of normally distributed entries is off by 1 % of its own size. Weights that are stored in integers with a
scale for each output keep these integers. I are the dimensions of inputs, O those of outputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

_LARGEST = 127
# int32 holds the sum of this many products of an integer from -128 to 127 and one from -127 to 127.
_MOST_SUMMED = 1 << 17
T = TypeVar('T')


class Int8Rows(NamedTuple):
  """An array in int8, and the scales of its rows, which have size 1 along dimensions whose entries share a scale."""

  values: jax.Array
  scale: jax.Array


def quantize_rows(x: jax.Array, axes: tuple[int, ...]) -> Int8Rows:
  """Returns x in int8; entries along `axes` share a scale. A row with NaN has the scale NaN."""
  wide = x.astype(jnp.float32)
  most = jnp.max(jnp.abs(wide), axis=axes, keepdims=True, initial=0)
  scale = jnp.where(most == 0, 1.0, most / _LARGEST)
  return Int8Rows(jnp.round(wide / scale).astype(jnp.int8), scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def int8_tensordot(x: jax.Array, w: jax.Array, axes: int) -> jax.Array:
  """Returns `jnp.tensordot(x, w, axes)` in the dtype of x; see the top of this file."""
  return _forward(x, w, axes)[0]


def _forward(
  x: jax.Array, w: jax.Array, axes: int
) -> tuple[jax.Array, tuple[Int8Rows, Int8Rows, jax.Array, jax.Array]]:
  of_x, of_w = quantize_rows(x, _last(x, axes)), quantize_rows(w, tuple(range(axes)))
  y = _scale_rows(tensordot_of_integers(of_x.values, of_w.values, axes), of_x, axes)
  y *= of_w.scale.reshape(w.shape[axes:])
  return y.astype(x.dtype), (of_x, of_w, jnp.zeros(0, x.dtype), jnp.zeros(0, w.dtype))


def _backward(
  axes: int, residuals: tuple[Int8Rows, Int8Rows, jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
  of_x, of_w, like_x, like_w = residuals
  x, w = ((of.values * of.scale).astype(g.dtype) for of in (of_x, of_w))
  rows = tuple(range(x.ndim - axes))
  dx = jax.lax.dot_general(g, w, ((tuple(range(len(rows), g.ndim)), tuple(range(axes, w.ndim))), ((), ())))
  return dx.astype(like_x.dtype), jnp.tensordot(x, g, axes=(rows, rows)).astype(like_w.dtype)


int8_tensordot.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def multiply_rows_in_int8(
  x: jax.Array, weight: T, axes: int, multiply: Callable[[jax.Array, T], jax.Array]
) -> jax.Array:
  """Returns `multiply(x, weight)` with x rounded to int8, and the gradients of `multiply` without rounding.

  Args:
    x: [..., *I].
    weight: a tree of arrays.
    axes: number of dimensions I, whose entries share a scale.
    multiply: a function that is linear in x and returns [..., *O]; it also takes x in integers, and then returns
      float32.
  """
  of_x = quantize_rows(x, _last(x, axes))
  return _scale_rows(multiply(of_x.values, weight), of_x, axes).astype(x.dtype)


multiply_rows_in_int8.defvjp(
  lambda x, weight, axes, multiply: (multiply_rows_in_int8(x, weight, axes, multiply), (x, weight)),
  lambda axes, multiply, inputs, g: jax.vjp(multiply, *inputs)[1](g),
)


def tensordot_of_integers(x: jax.Array, w: jax.Array, axes: int) -> jax.Array:
  """Returns `jnp.tensordot(x, w, axes)` in float32, for arrays in int8; entries of x are at least -127."""
  multiply = functools.partial(jnp.tensordot, preferred_element_type=jnp.int32)
  size = math.prod(w.shape[:axes])
  if size <= _MOST_SUMMED:
    return multiply(x, w, axes).astype(jnp.float32)
  x, w = x.reshape(*x.shape[: x.ndim - axes], size), w.reshape(size, *w.shape[axes:])
  parts = [slice(i, i + _MOST_SUMMED) for i in range(0, size, _MOST_SUMMED)]
  return functools.reduce(jnp.add, [multiply(x[..., part], w[part], 1).astype(jnp.float32) for part in parts])


def _last(x: jax.Array, axes: int) -> tuple[int, ...]:
  return tuple(range(x.ndim - axes, x.ndim))


def _scale_rows(y: jax.Array, of_x: Int8Rows, axes: int) -> jax.Array:
  """Returns y [..., *O] times the scales [..., *1] of x."""
  rows = of_x.scale.shape[: of_x.scale.ndim - axes]
  return y * of_x.scale.reshape(*rows, *(1,) * (y.ndim - len(rows)))
