"""Products of matrices with operands in int8: each row of the inputs has a scale, computed from its current values.

Inputs may also have a given range, whose end replaces max |x|; larger inputs are then clipped.

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
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

_LARGEST = 127
# int32 holds the sum of this many products of an integer from -128 to 127 and one from -127 to 127.
MOST_SUMMED = 1 << 17
T = TypeVar('T')


class RowProduct(Protocol):
  """Multiplies the rows of each expert by its weights."""

  def __call__(self, rows: jax.Array, weights: jax.Array, biases: jax.Array | None = None) -> jax.Array:
    """Returns [..., O] for rows [..., I], weights [E, I, O] and biases [E, O], if given.

    If both rows and weights are int8, the result is int32.
    """

  def spread(self, x_EO: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the entries of each row's expert, which broadcast with the results for these rows."""


class Int8Rows(NamedTuple):
  """An array in int8, and the scales of its rows: an array of size 1 along dimensions whose entries share a scale."""

  values: jax.Array
  scale: jax.Array


def quantize_rows(
  x: jax.Array, axes: tuple[int, ...], most: jax.Array | None = None, mesh_axes: tuple[str, ...] = ()
) -> Int8Rows:
  """Returns x in int8; entries along `axes` share a scale. A row with NaN has the scale NaN.

  `most` is a scalar, the |x| that 127 stands for; None takes the largest |x| of each row. Inside `shard_map`, the parts
  of a row on devices along `mesh_axes` share a scale, too.
  """
  wide = x.astype(jnp.float32)
  if most is None:
    most = jnp.max(jnp.abs(wide), axis=axes, keepdims=True, initial=0)
    most = jax.lax.pmax(most, mesh_axes) if mesh_axes else most
  else:
    wide = jnp.clip(wide, -most, most)
    most = jnp.where(jnp.any(jnp.isnan(wide), axis=axes, keepdims=True), jnp.nan, most)
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
  x: jax.Array, weight: T, axes: int, multiply: Callable[[jax.Array, T], jax.Array], most: jax.Array | None = None
) -> jax.Array:
  """Returns `multiply(x, weight)` with x rounded to int8, and the gradients of `multiply` without rounding.

  Args:
    x: [..., *I].
    weight: a tree of arrays.
    axes: number of dimensions I, whose entries share a scale.
    multiply: a function that is linear in x and returns [..., *O]; it also takes x in integers, and then returns
      float32.
    most: see `quantize_rows`.
  """
  of_x = quantize_rows(x, _last(x, axes), most)
  return _scale_rows(multiply(of_x.values, weight), of_x, axes).astype(x.dtype)


multiply_rows_in_int8.defvjp(
  lambda x, weight, axes, multiply, most: (multiply_rows_in_int8(x, weight, axes, multiply, most), (x, weight)),
  lambda axes, multiply, inputs, g: (*jax.vjp(multiply, *inputs)[1](g), None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def multiply_experts_in_int8(
  rows: jax.Array, weights: jax.Array, biases: jax.Array | None, product: RowProduct, mesh_axes: tuple[str, ...]
) -> jax.Array:
  """Returns `product(rows, weights, biases)`, [..., O], with int8 operands, and gradients as in `int8_tensordot`.

  Args:
    rows: [..., I].
    weights: [E, I, O].
    biases: [E, O]; None adds none.
    product: a tree of arrays, such as the sizes of groups of rows, that can be called.
    mesh_axes: inside `shard_map`, axes that split I.
  """
  return _forward_experts(rows, weights, biases, product, mesh_axes)[0]


_ExpertResiduals = tuple[Int8Rows, Int8Rows, jax.Array | None, RowProduct, jax.Array, jax.Array]


def _forward_experts(
  rows: jax.Array, weights: jax.Array, biases: jax.Array | None, product: RowProduct, mesh_axes: tuple[str, ...]
) -> tuple[jax.Array, _ExpertResiduals]:
  of_x = quantize_rows(rows, (rows.ndim - 1,), mesh_axes=mesh_axes)
  of_w = quantize_rows(weights, (1,), mesh_axes=mesh_axes)
  y = product(of_x.values, of_w.values) * of_x.scale * product.spread(of_w.scale[:, 0], rows)
  if biases is not None:
    y += product.spread(biases, rows)
  return y.astype(rows.dtype), (of_x, of_w, biases, product, jnp.zeros(0, rows.dtype), jnp.zeros(0, weights.dtype))


def _backward_experts(
  mesh_axes: tuple[str, ...], residuals: _ExpertResiduals, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None, None]:
  of_x, of_w, biases, product, like_x, like_w = residuals
  x, w = ((of.values * of.scale).astype(g.dtype) for of in (of_x, of_w))
  dx, dw, db = jax.vjp(product, x, w, biases)[1](g)
  return dx.astype(like_x.dtype), dw.astype(like_w.dtype), db, None


multiply_experts_in_int8.defvjp(_forward_experts, _backward_experts)


def tensordot_of_integers(x: jax.Array, w: jax.Array, axes: int) -> jax.Array:
  """Returns `jnp.tensordot(x, w, axes)` in float32, for arrays in int8; entries of x are at least -127."""
  multiply = functools.partial(jnp.tensordot, preferred_element_type=jnp.int32)
  size = math.prod(w.shape[:axes])
  if size <= MOST_SUMMED:
    return multiply(x, w, axes).astype(jnp.float32)
  x, w = x.reshape(*x.shape[: x.ndim - axes], size), w.reshape(size, *w.shape[axes:])
  parts = [slice(i, i + MOST_SUMMED) for i in range(0, size, MOST_SUMMED)]
  return functools.reduce(jnp.add, [multiply(x[..., part], w[part], 1).astype(jnp.float32) for part in parts])


def _last(x: jax.Array, axes: int) -> tuple[int, ...]:
  return tuple(range(x.ndim - axes, x.ndim))


def _scale_rows(y: jax.Array, of_x: Int8Rows, axes: int) -> jax.Array:
  """Returns y [..., *O] times the scales [..., *1] of x."""
  rows = of_x.scale.shape[: of_x.scale.ndim - axes]
  return y * of_x.scale.reshape(*rows, *(1,) * (y.ndim - len(rows)))
