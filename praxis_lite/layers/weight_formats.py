"""Formats of weights in few bits: integers, the 16 values of NF4, and small floats, with scales, as pure functions.

    integers    w ~ s q            q in -2^(b-1) ... 2^(b-1) - 1, s = max |w| / (2^(b-1) - 0.49)
                w ~ s (q - z)      q, z in 0 ... 2^b - 1, s = (max(w, 0) - min(w, 0)) / (2^b - 1)      not symmetric
    NF4         w ~ s c[q]         c: 16 quantiles of a normal distribution, s = max |w|      (Dettmers et al., 2023)
    mxfp8       w ~ s q            q in e4m3, s = 2^(floor(log2 max |w|) - 8)     of 32 inputs  (OCP Microscaling, 2023)
    nvfp4       w ~ t s q          q in e2m1, s = max |w| / (6 t) in e4m3         of 16 inputs  (NVIDIA, 2025)
                                   t = max |w| / (6 * 448), of the whole weight

e4m3 are floats of 8 bits, up to 448, and e2m1 are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Both are rounded to
the nearest value, and to the even one of two equally near; larger weights get the largest value. Exponents of mxfp8 are
at least -126, and s of nvfp4 is at least 2^-9, so that no scale is 0.

Other scales belong to an output, or to an output and a group of inputs. They are stored rounded up. Rounding is then
off by at most 0.51 s; for NF4, by at most 0.152 s; at the ends of a range that is not symmetric, by at most s. The
term 0.49 keeps the largest |w| / s away from the middle between two integers, where the result would depend on the
device. Values of fewer than 8 bits are packed into bytes, along the last input dimension, with the first value in the
lowest bits. Bits that fill up the last byte are zero.

With `kept=(n, m)`, of each m neighbouring inputs of an output, the n with the largest |w| are kept, and the others are
set to 0 before rounding (structured sparsity; Mishra et al., 2021). Of equal ones, the first are kept. The last group
may be smaller. The format 'float' only does this: kept weights are not rounded.

    values  [*stack, *J, ceil(I b / 8), *O]     int8 for symmetric integers of 8 bits, otherwise uint8
    scale   [*stack, *J, ceil(I / g), *O]       for groups of g inputs
            [*stack, *1, 1, *O]                 for a whole output
                                                uint8 for mxfp8 (the exponent + 127) and nvfp4 (the bits of e4m3)
    zero    shaped like scale, uint8            if not symmetric
    tensor  [*stack, *1, 1, *1]                 t of nvfp4, float32

I the last dimension of the inputs, J their other dimensions, O outputs, g inputs of a group, b bits.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from praxis_lite.layers.int8 import tensordot_of_integers

# Dettmers et al., 2023, appendix E: quantiles of a normal distribution, scaled to [-1, 1], with an exact zero.
NF4 = (
  *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
  *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
  *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST_E4M3 = 448.0
BITS = {'int8': 8, 'int4': 4, 'int2': 2, 'nf4': 4, 'mxfp8': 8, 'nvfp4': 4}
BLOCKS = {'mxfp8': 32, 'nvfp4': 16}
"""Formats that define how many inputs share a scale, and how scales are stored."""
VALUES, SCALE, ZERO, TENSOR = 'values', 'scale', 'zero', 'tensor'
# (weight, scale of each entry, zero point of each entry or None) -> the values of all entries, as they are stored.
Chooser = Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]


@dataclasses.dataclass(frozen=True)
class WeightFormat:
  """How a weight [*stack, *J, I, *O] is stored; see the top of this file."""

  name: str  # A key of `BITS`.
  num_inputs: int = 1  # The number of dimensions *J and I.
  num_outputs: int = 1  # The number of dimensions *O.
  group_size: int | None = None  # g; None gives each output one scale for all of its inputs.
  symmetric: bool = True  # Whether integers have no zero points; NF4 never has any.
  # p; of the weights w of a scale, p percent have a |w| that the scale covers, and larger ones are clipped; 100 covers
  # all. Without symmetry, the scale covers the range between the percentiles 100 - p and p of w.
  percentile: float = 100.0
  scale_dtype: DTypeLike = 'float32'  # Storage dtype of scales, to which they are rounded up before values are rounded.
  kept: tuple[int, int] | None = None  # (n, m); None keeps all.
  mask_stays: bool = False  # Whether, in training, weights that are not kept get no gradient, so that zeros stay 0.

  @property
  def bits(self) -> int:
    return BITS[self.name]

  @property
  def is_integer(self) -> bool:
    return self.name.startswith('int')

  @property
  def has_zeros(self) -> bool:
    """Whether there are zero points."""
    return self.is_integer and not self.symmetric

  @property
  def has_tensor_scale(self) -> bool:
    """Whether there is a scale for the whole weight."""
    return self.name == 'nvfp4'

  @property
  def stored_scale_dtype(self) -> np.dtype:
    return np.dtype(np.uint8 if self.name in BLOCKS else self.scale_dtype)

  @property
  def values_dtype(self) -> np.dtype:
    return np.dtype(np.int8 if self.name == 'int8' and self.symmetric else np.uint8)

  def group_axis(self, rank: int) -> int:
    """Returns which dimension of a weight of this rank is I."""
    return rank - self.num_outputs - 1

  def values_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the values of a weight of this shape."""
    axis = self.group_axis(len(shape))
    return (*shape[:axis], -(-shape[axis] * self.bits // 8), *shape[axis + 1 :])

  def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the scales, and of the zero points, of a weight of this shape."""
    axis = self.group_axis(len(shape))
    if self.group_size is not None:
      return (*shape[:axis], -(-shape[axis] // self.group_size), *shape[axis + 1 :])
    first = axis + 1 - self.num_inputs
    return (*shape[:first], *(1,) * self.num_inputs, *shape[axis + 1 :])

  def input_scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of one scale for each input of a weight of this shape: with 1 for each dimension of outputs."""
    return (*shape[: len(shape) - self.num_outputs], *(1,) * self.num_outputs)

  def tensor_scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of one scale for each weight in a stack or among experts, where all of them have this shape."""
    own = self.num_inputs + self.num_outputs
    return (*shape[: len(shape) - own], *(1,) * own)

  # ---------------------------------------------------------------- from a weight, and to it

  def quantize(
    self, w: jax.Array, choose: Chooser | None = None, largest: jax.Array | None = None
  ) -> dict[str, jax.Array]:
    """Returns 'values', 'scale' and perhaps 'zero' and 'tensor' of a floating weight [*stack, *J, I, *O].

    Where all weights of a scale are 0, the scale is 1, or for mxfp8 and nvfp4 the smallest one.

    Args:
      w: the weight.
      choose: returns the values of all entries, given the weight in float32, and the scale and the zero point of each
        entry; None rounds each entry to the nearest value.
      largest: max |w| of the whole weight for nvfp4, if `w` has only some of its outputs; None takes that of `w`.
    """
    w = self.prune(w)
    groups = self._groups(w.astype(jnp.float32))
    low, high = self._range(groups)
    most, zero, tensor = 2**self.bits - 1, None, None
    if self.has_zeros:
      scale = self._usable(jnp.maximum(high, 0) - jnp.minimum(low, 0), most)
      zero = jnp.clip(jnp.round(-jnp.minimum(low, 0) / scale), 0, most)
      stored_scale = scale.astype(self.scale_dtype)
    elif self.name in BLOCKS:
      if self.has_tensor_scale:
        tensor = self._tensor_scale(w, largest)
      stored_scale = self._encode_scale(high, tensor)
      scale = self.decode_scale(stored_scale, tensor)
    else:
      scale = self._usable(high, 1.0 if self.name == 'nf4' else 2 ** (self.bits - 1) - 0.49)
      stored_scale = scale.astype(self.scale_dtype)
    if choose is None:
      q = self._join_groups(self.round_values(groups, scale, zero), w.shape)
    else:

      def entries(x: jax.Array) -> jax.Array:
        return self._join_groups(jnp.broadcast_to(x, groups.shape), w.shape)

      q = choose(w.astype(jnp.float32), entries(scale), None if zero is None else entries(zero))
    parts = {VALUES: self._pack(q), SCALE: stored_scale.reshape(self.scale_shape(w.shape))}
    if zero is not None:
      parts[ZERO] = zero.reshape(parts[SCALE].shape).astype(jnp.uint8)
    if tensor is not None:
      parts[TENSOR] = tensor.reshape(self.tensor_scale_shape(w.shape))
    return parts

  def round_values(self, w: jax.Array, scale: jax.Array, zero: jax.Array | None) -> jax.Array:
    """Returns the nearest values q, in their storage form, for float32 entries with these scales and zero points."""
    if zero is not None:
      return jnp.clip(jnp.round(w / scale) + zero, 0, 2**self.bits - 1)
    if self.name == 'nf4':
      middle = np.array([(a + b) / 2 for a, b in itertools.pairwise(NF4)], np.float32)
      return jnp.searchsorted(middle, w / scale, method='compare_all')
    if self.name == 'mxfp8':
      return jax.lax.bitcast_convert_type(_to_e4m3(w / scale), jnp.uint8)
    if self.name == 'nvfp4':
      return _e2m1_codes(w / scale)
    half = 2 ** (self.bits - 1)
    return jnp.clip(jnp.round(w / scale), -half, half - 1) + self._stored_zero

  def restore_values(self, q: jax.Array, scale: jax.Array, zero: jax.Array | None) -> jax.Array:
    """Returns the float32 entries that stored values q represent; the inverse of `round_values`, up to rounding."""
    if self.name == 'nf4':
      return _look_up(NF4, q) * scale
    if self.name == 'mxfp8':
      return jax.lax.bitcast_convert_type(q.astype(jnp.uint8), jnp.float8_e4m3fn).astype(jnp.float32) * scale
    if self.name == 'nvfp4':
      return _look_up((*_E2M1, *(-x for x in _E2M1)), q) * scale
    return (q.astype(jnp.float32) - (self._stored_zero if zero is None else zero.astype(jnp.float32))) * scale

  @property
  def _stored_zero(self) -> int:
    """The stored value that stands for 0, in formats without zero points."""
    return 0 if self.bits == 8 else 2 ** (self.bits - 1)

  def dequantize(self, parts: Mapping[str, jax.Array], num_last: int, dtype: DTypeLike | None = None) -> jax.Array:
    """Returns the weight [*stack, *J, I, *O], given what `quantize` has returned, and I.

    It is computed in float32, and then cast to `dtype`, if that is not None.
    """
    zero = self._spread(parts[ZERO], num_last) if self.has_zeros else None
    scale = self._spread(self.decode_scale(parts[SCALE], parts.get(TENSOR)), num_last)
    return self.restore_values(self._unpack(parts[VALUES], num_last), scale, zero).astype(dtype or jnp.float32)

  @property
  def scales_outputs(self) -> bool:
    """Whether a weight is integers times one scale per output, so that `multiply` is possible."""
    return self.is_integer and self.symmetric and self.group_size is None

  def multiply(self, x: jax.Array, parts: Mapping[str, jax.Array], num_last: int) -> jax.Array:
    """Returns x [..., *J, I] times the weight [*J, I, *O], [..., *O]; only if `scales_outputs`.

    The integers are multiplied, and then the results are scaled. XLA casts integers inside of a product, so the weight
    is never in memory as floats. Values that share a byte are multiplied one after the other. If x is floats, the
    result has their dtype; if it is int8, the result is in float32. `parts` have no *stack, and `num_last` is I.
    """
    stored, in_byte = parts[VALUES], 8 // self.bits
    num_bytes = stored.shape[self.num_inputs - 1]
    missing = num_bytes * in_byte - num_last
    if missing:
      x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    x_by_byte = x.reshape(*x.shape[:-1], num_bytes, in_byte)
    multiply: Callable[..., jax.Array] = tensordot_of_integers
    if x.dtype != jnp.int8:  # Before they are scaled, sums may be too large for float16.
      sums = jnp.float32 if x.dtype == jnp.float16 else None
      multiply = functools.partial(jnp.tensordot, preferred_element_type=sums)
    y: jax.Array | float = 0
    for i in range(in_byte):
      q = (
        stored if in_byte == 1 else self._to_signed((stored >> jnp.uint8(i * self.bits)) & jnp.uint8(2**self.bits - 1))
      )
      y += multiply(x_by_byte[..., i], q.astype(x.dtype), self.num_inputs)
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.dtype(jnp.float32)
    wide = jnp.promote_types(dtype, jnp.float32)
    scale = parts[SCALE].reshape(parts[SCALE].shape[self.num_inputs :]).astype(wide)
    return (jnp.asarray(y).astype(wide) * scale).astype(dtype)

  def _to_signed(self, q: jax.Array) -> jax.Array:
    """Returns stored values, 0 ... 2^b - 1 for b bits, as int8 values q, -2^(b-1) ... 2^(b-1) - 1."""
    return q.astype(jnp.int8) - jnp.int8(2 ** (self.bits - 1))

  def spread(self, parts: Mapping[str, jax.Array], num_last: int) -> dict[str, jax.Array]:
    """Returns 'integers', 'scale' and perhaps 'zero' for each entry of a weight; see `QuantizedWeight.spread`."""
    q, half = self._unpack(parts[VALUES], num_last), 2 ** (self.bits - 1)
    signed = q if q.dtype == jnp.int8 else (q.astype(jnp.int32) - half).astype(jnp.int8)
    found = {'integers': signed, SCALE: self._spread(parts[SCALE].astype(jnp.float32), num_last)}
    if self.has_zeros:
      found[ZERO] = self._spread((parts[ZERO].astype(jnp.int32) - half).astype(jnp.int8), num_last)
    return {kind: jnp.broadcast_to(x, q.shape) for kind, x in found.items()}

  def round_weight(self, w: jax.Array) -> jax.Array:
    """Returns the weight rounded, in its own dtype; the gradient goes to w unchanged (straight-through).

    See Bengio et al., 2013. With `mask_stays`, weights that are not kept get no gradient.
    """
    if self.name == 'float':
      rounded = self.prune(w)
    else:
      rounded = self.dequantize(self.quantize(w), w.shape[self.group_axis(w.ndim)], w.dtype)
    trained = self.prune(w) if self.mask_stays else w
    return trained + jax.lax.stop_gradient(rounded - trained)

  def prune(self, w: jax.Array) -> jax.Array:
    """Returns a weight with zeros in place of the entries that the format does not keep."""
    return w if self.kept is None else jnp.where(self.find_kept(w), w, 0)

  def find_kept(self, w: jax.Array) -> jax.Array:
    """Returns bool in the shape of a weight: the entries that the format keeps, which must not keep all."""
    assert self.kept is not None
    n, m = self.kept
    axis, size = self.group_axis(w.ndim), w.shape[self.group_axis(w.ndim)]
    magnitude = jnp.abs(jax.lax.stop_gradient(w).astype(jnp.float32))
    filled = jnp.pad(magnitude, [(0, -size % m if dim == axis else 0) for dim in range(w.ndim)], constant_values=-1)
    groups = filled.reshape(*w.shape[:axis], -1, m, *w.shape[axis + 1 :])
    rank = jnp.argsort(jnp.argsort(-groups, axis=axis + 1, stable=True), axis=axis + 1)
    return jax.lax.slice_in_dim((rank < n).reshape(filled.shape), 0, size, axis=axis)

  # ---------------------------------------------------------------- groups

  def _group_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a weight with its groups as a dimension before I."""
    axis = self.group_axis(len(shape))
    size = shape[axis] if self.group_size is None else self.group_size
    return (*shape[:axis], -(-shape[axis] // size), size, *shape[axis + 1 :])

  def _groups(self, w: jax.Array) -> jax.Array:
    """Returns a weight reshaped to `_group_shape`; NaN fills up the last group."""
    shape = self._group_shape(w.shape)
    axis = self.group_axis(w.ndim)
    missing = shape[axis] * shape[axis + 1] - w.shape[axis]
    if missing:
      w = jnp.pad(w, [(0, missing if dim == axis else 0) for dim in range(w.ndim)], constant_values=jnp.nan)
    return w.reshape(shape)

  def _join_groups(self, groups: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    axis = self.group_axis(len(shape))
    whole = groups.reshape(*shape[:axis], -1, *shape[axis + 1 :])
    return jax.lax.slice_in_dim(whole, 0, shape[axis], axis=axis)

  def _range(self, groups: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the range of the entries w that each scale covers, or of |w| without zero points; see `percentile`."""
    last = groups.ndim - self.num_outputs - 1
    first = last if self.group_size is not None else last - self.num_inputs
    axes = tuple(range(first, last + 1))
    x = groups if self.has_zeros else jnp.abs(groups)
    if self.percentile == 100:
      return jnp.nanmin(x, axes, keepdims=True), jnp.nanmax(x, axes, keepdims=True)
    ends = jnp.array([100 - self.percentile, self.percentile])
    low, high = jnp.nanpercentile(x, ends, axes, keepdims=True)
    return low, high

  def _usable(self, span: jax.Array, steps: float) -> jax.Array:
    """Returns the scale span / steps, rounded up to `scale_dtype` so that it covers the span; 1 where the span is 0."""
    exact = jax.lax.stop_gradient(span / steps)
    # Without the barrier, XLA may leave out a cast to fewer bits and back.
    scale = jax.lax.optimization_barrier(exact.astype(self.scale_dtype))
    # Read as integers, a positive float and the next larger one differ by 1.
    bits = jax.lax.bitcast_convert_type(scale, f'uint{8 * scale.dtype.itemsize}')
    above = jax.lax.bitcast_convert_type(bits + 1, scale.dtype)
    scale = jnp.where(scale.astype(jnp.float32) < exact, above, scale)
    return jnp.where(scale > 0, scale, 1).astype(jnp.float32)

  def _tensor_scale(self, w: jax.Array, largest: jax.Array | None) -> jax.Array:
    """Returns t of nvfp4, which broadcasts with the groups of w."""
    if largest is None:
      own = tuple(range(w.ndim - self.num_inputs - self.num_outputs, w.ndim))
      largest = jnp.max(jnp.abs(w.astype(jnp.float32)), own, keepdims=True)
    largest = jnp.expand_dims(jax.lax.stop_gradient(largest), self.group_axis(w.ndim))
    return jnp.where(largest > 0, largest / (_E2M1[-1] * _LARGEST_E4M3), 1)

  def _encode_scale(self, largest: jax.Array, tensor: jax.Array | None) -> jax.Array:
    """Returns the stored scales of blocks, uint8, given max |w| of each."""
    largest = jax.lax.stop_gradient(largest)
    if tensor is None:  # The exponent of a float32 is in 8 of its bits, with 127 added.
      exponent = (jax.lax.bitcast_convert_type(largest, jnp.uint32) >> 23).astype(jnp.int32)
      return jnp.maximum(exponent - 8, 1).astype(jnp.uint8)
    scale = _to_e4m3(largest / _E2M1[-1] / tensor)
    return jnp.maximum(jax.lax.bitcast_convert_type(scale, jnp.uint8), 1)

  def decode_scale(self, stored: jax.Array, tensor: jax.Array | None) -> jax.Array:
    """Returns scales in float32, as they are stored or, for mxfp8 and nvfp4, from their bits."""
    if self.name not in BLOCKS:
      return stored.astype(jnp.float32)
    if tensor is None:
      return jax.lax.bitcast_convert_type(stored.astype(jnp.uint32) << 23, jnp.float32)
    return jax.lax.bitcast_convert_type(stored, jnp.float8_e4m3fn).astype(jnp.float32) * tensor

  def _spread(self, scale: jax.Array, num_last: int) -> jax.Array:
    """Returns scales [..., groups, *O] such that they broadcast with weights [..., I, *O]; I is `num_last`."""
    axis = self.group_axis(scale.ndim)
    if self.group_size is None or scale.shape[axis] == 1:
      return scale
    wide = jnp.repeat(scale, self.group_size, axis=axis)
    return jax.lax.slice_in_dim(wide, 0, num_last, axis=axis)

  # ---------------------------------------------------------------- bytes

  def _pack(self, q: jax.Array) -> jax.Array:
    """Returns stored values [..., I, *O] packed into bytes, [..., ceil(I b / 8), *O]."""
    q, in_byte = q.astype(self.values_dtype), 8 // self.bits
    if in_byte == 1:
      return q
    axis = self.group_axis(q.ndim)
    missing = -q.shape[axis] % in_byte
    q = jnp.pad(q, [(0, missing if dim == axis else 0) for dim in range(q.ndim)])
    q = q.reshape(*q.shape[:axis], -1, in_byte, *q.shape[axis + 1 :])
    return jnp.sum(q << self._shifts(q.ndim), axis=axis + 1, dtype=jnp.uint8)

  def _unpack(self, stored: jax.Array, num_last: int) -> jax.Array:
    """Unpacks bytes: returns the stored values, [..., I, *O], where I is `num_last`; the inverse of `_pack`."""
    in_byte = 8 // self.bits
    if in_byte == 1:
      return stored
    axis = self.group_axis(stored.ndim)
    q = (jnp.expand_dims(stored, axis + 1) >> self._shifts(stored.ndim + 1)) & jnp.uint8(2**self.bits - 1)
    q = q.reshape(*stored.shape[:axis], -1, *stored.shape[axis + 1 :])
    return jax.lax.slice_in_dim(q, 0, num_last, axis=axis)

  def _shifts(self, rank: int) -> np.ndarray:
    """Returns the position of the lowest bit of each value in a byte, as an array of this rank."""
    shifts = np.arange(0, 8, self.bits, dtype=np.uint8)
    return shifts.reshape(*(1,) * self.group_axis(rank), -1, *(1,) * self.num_outputs)


quantize = jax.jit(WeightFormat.quantize, static_argnums=0)
"""`WeightFormat.quantize`, compiled once for all weights of a shape."""


def _look_up(values: tuple[float, ...], q: jax.Array) -> jax.Array:
  """Returns values[q], float32."""
  return jnp.asarray(values, jnp.float32).at[q].get(mode='promise_in_bounds')


def _to_e4m3(x: jax.Array) -> jax.Array:
  return jnp.clip(x, -_LARGEST_E4M3, _LARGEST_E4M3).astype(jnp.float8_e4m3fn)


def _e2m1_codes(x: jax.Array) -> jax.Array:
  """Returns the 4 bits of the nearest e2m1: a sign, then the number of its magnitude."""
  size = jnp.minimum(jnp.abs(x), _E2M1[-1])
  step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
  index = jnp.searchsorted(jnp.asarray(_E2M1), jnp.round(size / step) * step, method='compare_all')
  return jnp.where(x < 0, 8 + index, index)
