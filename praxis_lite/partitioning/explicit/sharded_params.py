"""Parameters that each device holds a part of, and gathers where it uses them: fully sharded data parallelism.

All of it is for use inside `jax.shard_map`, after Rajbhandari et al., 2020 (ZeRO, stage 3).

    forward    all_gather            part [D / n, F]     -> whole [D, F]
    backward   mean reduce-scatter   gradient [D, F]     -> its mean over the n devices, part [D / n, F]

A dimension that does not divide is padded with zeros at its end, as everywhere in this package: the parts are those of
the padded dimension, and what is gathered is cut to the true size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from praxis_lite.errors import ShardingError
from praxis_lite.partitioning.padding import num_parts, pad_to
from praxis_lite.partitioning.specs import axes_to_entry, complete_spec, spec_axes

Axes = tuple[str, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def gather_array_with_mean_grads(
  x: jax.Array, axis: str | Axes, dim: int = 0, size: int | None = None, dtype: DTypeLike | None = None
) -> jax.Array:
  """Inside `shard_map`: gathers the parts of an array; its gradient is averaged and scattered back.

  Args:
    x: this device's part.
    axis: the mesh axis, or several, that `dim` is split over.
    dim: the dimension.
    size: its true size, if the parts add up to more.
    dtype: what is gathered is cast to it before it is sent. The gradient is averaged in the dtype of `x`.
  """
  x = x if dtype is None else x.astype(dtype)
  whole = jax.lax.all_gather(x, axis, axis=dim, tiled=True)
  return whole if size is None else jax.lax.slice_in_dim(whole, 0, size, axis=dim)


def _gather_fwd(
  x: jax.Array, axis: str | Axes, dim: int, size: int | None, dtype: DTypeLike | None
) -> tuple[jax.Array, jax.Array]:
  # Residuals are arrays: an empty one carries the dtype.
  return gather_array_with_mean_grads(x, axis, dim, size, dtype), jnp.zeros((0, x.shape[dim]), x.dtype)


def _gather_bwd(
  axis: str | Axes, dim: int, size: int | None, dtype: DTypeLike | None, like: jax.Array, gradient: jax.Array
) -> tuple[jax.Array]:
  devices = jax.lax.axis_size(axis)
  gradient = gradient.astype(like.dtype)
  padded = list(gradient.shape)
  padded[dim] = like.shape[1] * devices
  scattered = jax.lax.psum_scatter(pad_to(gradient, tuple(padded)), axis, scatter_dimension=dim, tiled=True)
  return (scattered / devices,)


gather_array_with_mean_grads.defvjp(_gather_fwd, _gather_bwd)


@dataclasses.dataclass(frozen=True)
class ShardedParam:
  """This device's part of a parameter: a tree node with one leaf, the part, so that scans and updates go through it.

  Dimensions are counted from the last, so that a stack of parameters may be cut into its layers by a scan, and each be
  gathered by itself.

  Attributes:
    value: the part.
    axes: for each dimension, the mesh axes that split it; () where it is whole.
    shape: true sizes of the same dimensions.
  """

  value: jax.Array
  axes: tuple[Axes, ...]
  shape: tuple[int, ...]

  def gather(self, dtype: DTypeLike | None = None) -> jax.Array:
    """Returns the whole parameter, in `dtype` if it is given; gradients are averaged over the axes, and scattered."""
    x = self.value
    for i, (axes, size) in enumerate(zip(self.axes, self.shape)):
      if axes:
        dim = i - len(self.axes) + x.ndim
        padded = x.shape[dim] * jax.lax.axis_size(axes) != size
        x = gather_array_with_mean_grads(x, axes, dim, size if padded else None, dtype)
    return x if dtype is None else x.astype(dtype)

  @property
  def spec(self) -> PartitionSpec:
    """The spec of the dimensions that `axes` covers."""
    return PartitionSpec(*(axes_to_entry(axes) for axes in self.axes))


jax.tree_util.register_dataclass(ShardedParam, data_fields=['value'], meta_fields=['axes', 'shape'])


def shard_params(params: Any, axis: str | Sequence[str], min_size: int = 2**18) -> Any:
  """Inside `shard_map`: returns a tree in which each parameter above a size is this device's part of it.

  Each is split along its largest dimension that divides by the number of devices (of equal ones, the last), or else
  along its largest, which is padded. A parameter that is split over another axis already is split along a dimension
  that is free.

  Args:
    params: tree of whole arrays, the same on all devices along the axis, or of `ShardedParam`s.
    axis: mesh axis, or several.
    min_size: parameters of up to so many elements stay as they are.

  Raises:
    ShardingError: a parameter is split over the axis already.
  """
  axes = (axis,) if isinstance(axis, str) else tuple(axis)
  devices = jax.lax.axis_size(axes)

  def shard(param: Any) -> Any:
    boxed = param if isinstance(param, ShardedParam) else ShardedParam(param, ((),) * param.ndim, tuple(param.shape))
    taken = [a for entry in boxed.axes for a in entry]
    if set(taken) & set(axes):
      raise ShardingError(
        f'a parameter of shape {boxed.shape} is split over {tuple(taken)} already, not over {axes} too'
      )
    x = boxed.value
    free = [i for i, entry in enumerate(boxed.axes) if not entry]
    if x.size <= min_size or not free:
      return param
    divisible = [i for i in free if boxed.shape[i] % devices == 0]
    dim = max(divisible or free, key=lambda i: (boxed.shape[i], i))
    split = (*boxed.axes[:dim], axes, *boxed.axes[dim + 1 :])
    return ShardedParam(_own_part(x, axes, dim, devices), split, boxed.shape)

  return jax.tree.map(shard, params, is_leaf=_is_sharded)


def gather_params(params: Any, dtype: DTypeLike | None = None) -> Any:
  """Inside `shard_map`: returns a tree with each `ShardedParam` gathered, and all else as it is.

  Args:
    params: as `shard_params` returns it.
    dtype: see `ShardedParam.gather`.
  """
  return jax.tree.map(lambda p: p.gather(dtype) if _is_sharded(p) else p, params, is_leaf=_is_sharded)


def own_part(x: jax.Array, spec: PartitionSpec) -> jax.Array:
  """Inside `shard_map`: returns this device's part of an array that all devices hold whole, padded as need be."""
  for dim, entry in enumerate(complete_spec(spec, x.ndim)):
    axes = spec_axes(entry)
    if axes:
      x = _own_part(x, axes, dim, jax.lax.axis_size(axes))
  return x


def as_sharded(x: jax.Array, spec: PartitionSpec, shape: Sequence[int], prefix: int, mesh: Any) -> Any:
  """Inside `shard_map`: describes a stored part of an array, so that it can be gathered where it is used.

  Args:
    x: the part.
    spec: how the array is split.
    shape: its true shape.
    prefix: leading dimensions that repeating layers cut away. Where these are split, they are gathered here.
    mesh: sizes of the mesh axes; an axis of size 1 splits nothing.

  Returns:
    A `ShardedParam`, or the array itself where it is whole.
  """
  axes = tuple(tuple(spec_axes(e)) if num_parts(e, mesh) > 1 else () for e in complete_spec(spec, len(shape)))
  stack = ShardedParam(x, (*axes[:prefix], *((),) * (len(shape) - prefix)), tuple(shape))
  x = stack.gather() if any(axes[:prefix]) else x
  return ShardedParam(x, axes[prefix:], tuple(shape[prefix:])) if any(axes[prefix:]) else x


def regathered(fn: Callable[..., Any], *, in_scan: bool) -> Callable[..., Any]:
  """Returns `fn` so differentiated that what it gathers is not kept for the backward pass, but gathered again.

  Args:
    fn: a pure function of arrays. Where none of them is part of a `ShardedParam`, it is called as it is.
    in_scan: `fn` is the body of a scan. Elsewhere XLA must be kept from merging the second gather with the first.
  """
  again = jax.checkpoint(fn, policy=_save_all_but_gathered, prevent_cse=not in_scan)

  def call(*args: Any) -> Any:
    sharded = any(_is_sharded(x) for x in jax.tree.leaves(args, is_leaf=_is_sharded))
    return (again if sharded else fn)(*args)

  return call


def _save_all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
  # To a policy, a function with a gradient of its own is one operation: a gather is known by what is in it.
  inner = params.get('call_jaxpr') if primitive.name == 'custom_vjp_call' else None
  return inner is None or all(equation.primitive.name != 'all_gather' for equation in inner.eqns)


def _own_part(x: jax.Array, axes: Sequence[str], dim: int, devices: int) -> jax.Array:
  part = -(-x.shape[dim] // devices)
  padded = pad_to(x, (*x.shape[:dim], part * devices, *x.shape[dim + 1 :]))
  return jax.lax.dynamic_slice_in_dim(padded, jax.lax.axis_index(tuple(axes)) * part, part, axis=dim)


def _is_sharded(x: Any) -> bool:
  return isinstance(x, ShardedParam)
