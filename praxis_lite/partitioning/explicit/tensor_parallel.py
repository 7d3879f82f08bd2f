"""Linear maps split over a mesh axis inside `shard_map`, after Megatron-LM (Shoeybi et al., 2019).

    column parallel   w [I, O / n]: whole x -> part of y; forward none, backward all-reduce of the gradient of x
    row parallel      w [I / n, O]: part of x -> whole y; forward all-reduce of y, backward none

A column parallel map, what is elementwise, and a row parallel map together take one all-reduce forward and one
backward. I input dims, O output dims.
"""

from __future__ import annotations

import functools

import jax


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def copy_to_parts(x: jax.Array, axis: str) -> jax.Array:
  """Inside `shard_map`: the array as it is, which all devices along the axis hold; its gradient is their sum."""
  del axis
  return x


copy_to_parts.defvjp(lambda x, axis: (x, None), lambda axis, _, gradient: (jax.lax.psum(gradient, axis),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_of_parts(x: jax.Array, axis: str) -> jax.Array:
  """Inside `shard_map`: the sum over the devices along the axis; its gradient is that of each summand."""
  return jax.lax.psum(x, axis)


sum_of_parts.defvjp(lambda x, axis: (jax.lax.psum(x, axis), None), lambda axis, _, gradient: (gradient,))


def column_parallel_linear(x: jax.Array, w_IO: jax.Array, axis: str, b_O: jax.Array | None = None) -> jax.Array:
  """Inside `shard_map`: returns this device's columns [..., O / n] of x w + b.

  Args:
    x: [..., I], the same on all devices along the axis.
    w_IO: this device's columns, [I, O / n].
    axis: mesh axis that splits O.
    b_O: this device's part of the bias, [O / n].
  """
  y = copy_to_parts(x, axis) @ w_IO
  return y if b_O is None else y + b_O


def row_parallel_linear(x: jax.Array, w_IO: jax.Array, axis: str, b_O: jax.Array | None = None) -> jax.Array:
  """Inside `shard_map`: returns x w + b, [..., O], the same on all devices along the axis.

  Args:
    x: this device's part, [..., I / n].
    w_IO: this device's rows, [I / n, O].
    axis: mesh axis that splits I.
    b_O: the whole bias, [O].
  """
  y = sum_of_parts(x @ w_IO, axis)
  return y if b_O is None else y + b_O


def is_manual(axis: str) -> bool:
  """Whether the code runs inside a `shard_map` over this axis."""
  mesh = jax.sharding.get_abstract_mesh()
  kinds = dict(zip(mesh.axis_names, mesh.axis_types))
  return kinds.get(axis) == jax.sharding.AxisType.Manual
