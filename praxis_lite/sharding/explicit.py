"""Building blocks for programs in `jax.shard_map`, in which communication is explicit.

Split parameters: each device holds a part of a parameter, and gathers it where it is used, as in fully sharded data
parallelism (ZeRO, stage 3; Rajbhandari et al., 2020).

    forward    all_gather            part [D / n, F]   -> whole [D, F]
    backward   mean reduce-scatter   gradient [D, F]   -> its mean over the n devices, part [D / n, F]

Split linear maps (Megatron-LM, Shoeybi et al., 2019). A column-parallel map, an elementwise function and a row-parallel
map together need one all-reduce forward and one backward.

    column parallel   w [I, O / n]   whole x -> part of y; backward, an all-reduce of the gradient of x
    row parallel      w [I / n, O]   part of x -> whole y; forward, an all-reduce of y

A dimension that does not divide evenly is padded with zeros at its end. The padded dimension is cut into the parts, and
a gathered array is cut to the true size. I input dims, O output dims.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from praxis_lite.common.errors import ShardingError
from praxis_lite.common.jax_internals.programs import program_in
from praxis_lite.common.trees import NestedDict
from praxis_lite.sharding.padding import pad_to
from praxis_lite.sharding.specs import axes_to_entry, complete_spec, spec_axes

P = ParamSpec('P')
ResultT = TypeVar('ResultT')


def also_named(**names: str) -> Callable[[Callable[P, ResultT]], Callable[P, ResultT]]:
  """Decorates a function to accept other projects' names of its arguments: `also_named(axis_name='axis')`.

  A call that gives both names of an argument raises ShardingError.
  """

  def rename(fn: Callable[P, ResultT]) -> Callable[P, ResultT]:
    own = tuple(inspect.signature(fn).parameters)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> ResultT:
      for theirs in [name for name in kwargs if name in names]:
        ours = names[theirs]
        if ours in kwargs or ours in own[: len(args)]:
          raise ShardingError(f'{fn.__name__}: {theirs} and {ours} are two names for one argument; give one of them')
        kwargs[ours] = kwargs.pop(theirs)
      return fn(*args, **kwargs)

    return call

  return rename


@also_named(rng='key', axis_name='axis')
def fold_rng_over_axis(key: jax.Array, axis: str | Sequence[str]) -> jax.Array:
  """Inside `shard_map`: returns `key` folded with the device's index along `axis`.

  Devices with different indices along the axis then draw different numbers, as for different rows of a batch. Devices
  with the same index draw the same numbers.

  Args:
    key: a PRNG key, the same on all devices.
    axis: a mesh axis, or several, which are combined with the first one slowest; without axes, `key` is unchanged.
  """
  axes = to_axes(axis)
  return jax.random.fold_in(key, jax.lax.axis_index(axes)) if axes else key


T = TypeVar('T')
MeshAxes = tuple[str, ...]


class Module(Protocol):
  """Parameters and a pure function of them, such as a `Layer`."""

  def init(self, key: jax.Array, /) -> NestedDict: ...
  def apply(self, params: NestedDict, /, *args: Any, **kwargs: Any) -> object: ...


def gather_array_with_mean_grads(
  x: jax.Array,
  axis: str | MeshAxes | int = 0,
  dim: int | str | MeshAxes = 0,
  size: int | None = None,
  dtype: DTypeLike | None = None,
  *,
  axis_name: str | MeshAxes | None = None,
) -> jax.Array:
  """Inside `shard_map`: gathers the parts of an array; its gradient is averaged and scattered back.

  If the second argument is a number, the arguments are (x, dimension, mesh axis), as in other projects.

  Args:
    x: this device's part.
    axis, dim: the mesh axis, or several, and the dimension that is split over them.
    size: the true size of the dimension, if the parts add up to more.
    dtype: the dtype to which the part is cast before it is sent. The gradient is averaged in the dtype of `x`.
    axis_name: the mesh axis, or several, if `axis` is the dimension.

  Raises:
    ShardingError: the arguments do not give one mesh axis (or tuple of axes) and one dimension.
  """
  given = (axis, dim) if axis_name is None else (axis, axis_name)
  over, split = reversed(given) if isinstance(axis, int) else given
  if isinstance(over, int) or not isinstance(split, int):
    raise ShardingError(
      f'gather_array_with_mean_grads: expected one mesh axis and one dimension, got axis={axis!r}, dim={dim!r}, '
      f'axis_name={axis_name!r}'
    )
  return _gather(x, over, split % x.ndim, size, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(x: jax.Array, axis: str | MeshAxes, dim: int, size: int | None, dtype: DTypeLike | None) -> jax.Array:
  x = x if dtype is None else x.astype(dtype)
  with jax.named_scope('gather_array_with_mean_grads'):
    whole = jax.lax.all_gather(x, axis, axis=dim, tiled=True)
  return whole if size is None else jax.lax.slice_in_dim(whole, 0, size, axis=dim)


def _gather_fwd(
  x: jax.Array, axis: str | MeshAxes, dim: int, size: int | None, dtype: DTypeLike | None
) -> tuple[jax.Array, jax.Array]:
  # Residuals must be arrays, so an empty array carries the dtype.
  return _gather(x, axis, dim, size, dtype), jnp.zeros((0, x.shape[dim]), x.dtype)


def _gather_bwd(
  axis: str | MeshAxes, dim: int, size: int | None, dtype: DTypeLike | None, like: jax.Array, gradient: jax.Array
) -> tuple[jax.Array]:
  devices = jax.lax.axis_size(axis)
  gradient = gradient.astype(like.dtype)
  padded = list(gradient.shape)
  padded[dim] = like.shape[1] * devices
  with jax.named_scope('scatter_mean_grads'):
    scattered = jax.lax.psum_scatter(pad_to(gradient, tuple(padded)), axis, scatter_dimension=dim, tiled=True)
  return (scattered / devices,)


_gather.defvjp(_gather_fwd, _gather_bwd)


@dataclasses.dataclass(frozen=True)
class ShardedParam:
  """This device's part of a parameter: a tree node whose only leaf is the part, so scans and updates see the part.

  Dimensions are counted from the end, so that a scan may cut a stack of parameters into layers and gather each.
  """

  value: jax.Array  # The part.
  axes: tuple[MeshAxes, ...]  # For each dimension, the mesh axes that split it, () if it is whole.
  shape: tuple[int, ...]  # The true size of each dimension.

  def gather(self, dtype: DTypeLike | None = None) -> jax.Array:
    """Returns the whole parameter, in `dtype` if given. In the backward pass, its gradient is averaged over `axes` and
    scattered.
    """
    return cast(jax.Array, self.gather_over(None, dtype))

  def gather_over(self, over: MeshAxes | None, dtype: DTypeLike | None = None) -> jax.Array | ShardedParam:
    """Gathers the parameter over the axes `over` (None: all); gradients are averaged over these axes, and scattered.

    If other axes split the parameter too, returns a `ShardedParam`. `dtype` is the dtype to which the part is cast
    before it is sent. If several axes split the same dimension, it can be gathered over the last ones of them; other
    choices raise ShardingError.
    """
    x, left = self.value, list(self.axes)
    for i, (axes, size) in enumerate(zip(self.axes, self.shape)):
      gathered = axes if over is None else tuple(a for a in axes if a in over)
      left[i] = axes[: len(axes) - len(gathered)]
      if (*left[i], *gathered) != axes:
        raise ShardingError(
          f'dimension {i} of a parameter of shape {self.shape} is split over {axes}: it can be gathered over the last '
          f'of these, {axes[-1]!r}, or over all of them, not over {gathered} alone'
        )
      if gathered:
        dim = i - len(self.axes) + x.ndim
        padded = not left[i] and x.shape[dim] * jax.lax.axis_size(gathered) != size
        x = gather_array_with_mean_grads(x, gathered, dim, size if padded else None, dtype)
    x = x if dtype is None else x.astype(dtype)
    return ShardedParam(x, tuple(left), self.shape) if any(left) else x

  @property
  def spec(self) -> PartitionSpec:
    """The spec of the dimensions that `axes` covers."""
    return PartitionSpec(*(axes_to_entry(axes) for axes in self.axes))


jax.tree_util.register_dataclass(ShardedParam, data_fields=['value'], meta_fields=['axes', 'shape'])


def _is_sharded(x: object) -> bool:
  return isinstance(x, ShardedParam)


@also_named(axis_name='axis', min_weight_size='min_size')
def shard_params(params: T, axis: str | Sequence[str], min_size: int = 2**18) -> T:
  """Inside `shard_map`: returns the tree with only this device's part of each large parameter.

  A parameter is split along its largest dimension that the number of devices divides, the last one if several are
  equally large. If there is none, the parameter is split along its largest dimension, which is padded. A parameter that
  is already split over another axis is split along a dimension that is still whole; if it has none, it is unchanged.

  Args:
    params: tree of whole arrays, the same on all devices along the axis, or of `ShardedParam`s.
    axis: mesh axis, or several.
    min_size: parameters of up to this number of elements are not split.

  Raises:
    ShardingError: a parameter is already split over the axis.
  """
  axes = to_axes(axis)
  devices = jax.lax.axis_size(axes)

  def shard(param: jax.Array | ShardedParam) -> jax.Array | ShardedParam:
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
    return ShardedParam(take_own_part(x, PartitionSpec(*(None,) * dim, axes)), split, boxed.shape)

  with jax.named_scope('shard_params'):
    return jax.tree.map(shard, params, is_leaf=_is_sharded)


@also_named(axis_name='axis')
def gather_params(params: T, axis: str | Sequence[str] | None = None, dtype: DTypeLike | None = None) -> T:
  """Inside `shard_map`: returns a tree with each `ShardedParam` gathered, and other leaves unchanged.

  Args:
    params: as returned by `shard_params`.
    axis: mesh axis, or several, to gather over; splits over other axes remain. None means all axes.
    dtype: see `ShardedParam.gather`.
  """
  over = None if axis is None else to_axes(axis)
  with jax.named_scope('gather_params'):
    return jax.tree.map(lambda p: p.gather_over(over, dtype) if _is_sharded(p) else p, params, is_leaf=_is_sharded)


@dataclasses.dataclass(frozen=True)
class ShardedModule:
  """The result of `shard_module_params`. It is a module too, so its parameters may also be split over another axis."""

  module: Module
  axis: str | Sequence[str]
  min_size: int

  def init(self, key: jax.Array) -> NestedDict:
    """Inside `shard_map`: returns this device's parts of initial values; `key` is the same on all devices."""
    return shard_params(self.module.init(key), self.axis, self.min_size)

  def apply(self, params: NestedDict, *args: Any, **kwargs: Any) -> Any:
    """Inside `shard_map`: calls the module's `apply` with the parameters gathered over the axis."""
    return self.module.apply(gather_params(params, self.axis), *args, **kwargs)


@also_named(axis_name='axis', min_weight_size='min_size')
def shard_module_params(module: Module, axis: str | Sequence[str], min_size: int = 2**18) -> ShardedModule:
  """Wraps a layer, or any object with pure `init(key)` and `apply(params, ...)`, so that its parameters are split."""
  return ShardedModule(module, axis, min_size)


def take_own_part(x: jax.Array, spec: PartitionSpec) -> jax.Array:
  """Inside `shard_map`: returns this device's part of an array that all devices hold whole, padded if necessary."""
  for dim, entry in enumerate(complete_spec(spec, x.ndim)):
    axes = spec_axes(entry)
    if axes:
      devices = jax.lax.axis_size(axes)
      part = -(-x.shape[dim] // devices)
      padded = pad_to(x, (*x.shape[:dim], part * devices, *x.shape[dim + 1 :]))
      x = jax.lax.dynamic_slice_in_dim(padded, jax.lax.axis_index(axes) * part, part, axis=dim)
  return x


def save_all_but_gathered(primitive: Primitive, *_: object, **params: Any) -> bool:
  """A policy of `jax.checkpoint`: gathers of the forward pass are repeated in the backward pass."""
  # To a policy, a function with a gradient rule of its own is one operation. So gathers are found by what is in it.
  inner = program_in(params) if primitive.name == 'custom_vjp_call' else None
  return inner is None or all(equation.primitive.name != 'all_gather' for equation in inner.eqns)


def to_axes(axis: str | Sequence[str]) -> MeshAxes:
  """Returns one mesh axis or several as a tuple."""
  return (axis,) if isinstance(axis, str) else tuple(axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def copy_to_parts(x: jax.Array, axis: str) -> jax.Array:
  """Inside `shard_map`: returns x, which is equal on all devices along `axis`; its gradient is summed over these."""
  del axis
  return x


copy_to_parts.defvjp(lambda x, axis: (x, None), lambda axis, _, gradient: (jax.lax.psum(gradient, axis),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_of_parts(x: jax.Array, axis: str) -> jax.Array:
  """Inside `shard_map`: returns the sum over the devices along the axis; each summand gets the sum's gradient."""
  return jax.lax.psum(x, axis)


sum_of_parts.defvjp(lambda x, axis: (jax.lax.psum(x, axis), None), lambda axis, _, gradient: (gradient,))


def column_parallel_linear(x: jax.Array, w_IO: jax.Array, axis: str, b_O: jax.Array | None = None) -> jax.Array:
  """Inside `shard_map`: returns this device's columns [..., O / n] of x w + b.

  Args:
    x: [..., I], the same on all devices along the axis.
    w_IO, b_O: this device's columns, [I, O / n], and its part of the bias, [O / n].
    axis: mesh axis that splits O.
  """
  y = copy_to_parts(x, axis) @ w_IO
  return y if b_O is None else y + b_O


def row_parallel_linear(x: jax.Array, w_IO: jax.Array, axis: str, b_O: jax.Array | None = None) -> jax.Array:
  """Inside `shard_map`: returns x w + b, [..., O], the same on all devices along the axis.

  Args:
    x: this device's part, [..., I / n].
    w_IO, b_O: this device's rows, [I / n, O], and the whole bias, [O].
    axis: mesh axis that splits I.
  """
  y = sum_of_parts(x @ w_IO, axis)
  return y if b_O is None else y + b_O
