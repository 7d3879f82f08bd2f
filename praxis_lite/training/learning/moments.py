"""Stores the moments of an optimizer in 16 or 8 bits, so that they take less memory than the variables.

    float32     not compressed
    bfloat16    rounded; half of the memory
    int8        8-bit codes, and the maxima of rows and columns, which scale them; a quarter of the memory

A state array x with the shape of its variable is stored as codes c of the same shape, relative to

    scale[i, j] = min(max_j |x[i, j]|, max_i |x[i, j]|)

For more dimensions, the scale is the minimum over all of them (rank-1 normalization; Li et al., 2023). So an entry that
is much larger than the others does not make their codes coarser. If a dimension is split over devices, its maxima only
need small reductions. So codes are split like their variable, and a state does not depend on the mesh. With a scale for
each block of a fixed number of entries, a state would depend on the mesh, because blocks would cross the borders
between devices. Codes are denser near zero:

    x = sign(c) scale (c / 127)^2      of any sign
    x = scale (c / 255)^4              second moments (named nu), which are not negative, and stay above zero

Rounding is stochastic: up or down at random, without bias. Rounding to the nearest code would stop a moving average
with a decay of 0.999, because one step changes it by less than half of the distance between two codes. The random bits
are a hash of the value itself and the number of the step, so no PRNG key is needed. With int8, arrays of fewer than two
dimensions, such as those of biases, stay in float32. The square arrays of SOAP and Shampoo are not moments, and are not
compressed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from praxis_lite.common.trees import leaves_by_path
from praxis_lite.sharding.slots import owner_of
from praxis_lite.training.learning.owners import is_square_array

MOMENTS = ('float32', 'bfloat16', 'int8')
# Names of slots that are averages of squares, and so never negative.
_SQUARES = frozenset({'nu'})


class CompressedState(NamedTuple):
  """The number of updates, int32, and the state of an optimizer with its moments compressed.

  Each moment is replaced by a bfloat16 array, or by a tuple (codes, maxima along each dimension).
  """

  num_updates: jax.Array
  inner: Any


def compress_moments(
  optimizer: optax.GradientTransformationExtraArgs, moments: str
) -> optax.GradientTransformationExtraArgs:
  """Returns the optimizer, but with moments stored in one of the formats `MOMENTS`; it computes in the usual dtypes."""
  if moments == 'float32':
    return optimizer

  def codecs(params: Any) -> tuple[list[_Codec | None], Any]:
    """Returns the codec of each array of the state (None: the array is not compressed), and the state's structure."""
    variables = leaves_by_path(params)
    state = jax.eval_shape(optimizer.init, params)
    found = []
    for path, slot in leaves_by_path(state).items():
      owner = owner_of(path, variables)
      is_like_owner = owner is not None and slot.shape == variables[owner].shape and not is_square_array(path, owner)
      is_moment = is_like_owner and slot.dtype == jnp.float32
      found.append(_codec(moments, slot, bool(_SQUARES & {*path})) if is_moment else None)
    return found, jax.tree.structure(state)

  def encode(state: Any, count: jax.Array, found: list[_Codec | None], structure: Any) -> CompressedState:
    stored = [x if codec is None else codec.encode(x, count) for codec, x in zip(found, structure.flatten_up_to(state))]
    return CompressedState(count, jax.tree.unflatten(structure, stored))

  def init(params: Any) -> CompressedState:
    return encode(optimizer.init(params), jnp.zeros((), jnp.int32), *codecs(params))

  def update(updates: Any, state: CompressedState, params: Any = None, **extra: Any) -> tuple[Any, CompressedState]:
    found, structure = codecs(updates if params is None else params)
    stored = zip(found, structure.flatten_up_to(state.inner))
    whole = jax.tree.unflatten(structure, [x if codec is None else codec.decode(x) for codec, x in stored])
    updates, whole = optimizer.update(updates, whole, params, **extra)
    return updates, encode(whole, optax.safe_increment(state.num_updates), found, structure)

  return optax.GradientTransformationExtraArgs(init, update)


class _Codec(NamedTuple):
  encode: Callable[[jax.Array, jax.Array], Any]  # (array, number of updates) -> the stored form of the array
  decode: Callable[[Any], jax.Array]


def _codec(moments: str, slot: jax.ShapeDtypeStruct, is_square: bool) -> _Codec | None:
  if moments == 'bfloat16':
    return _Codec(round_to_bfloat16, lambda x: x.astype(jnp.float32))
  if slot.ndim < 2:
    return None
  power, most, dtype = (4, 255, jnp.uint8) if is_square else (2, 127, jnp.int8)
  return _Codec(
    functools.partial(_to_codes, power=power, most=most, dtype=dtype),
    functools.partial(_decode, power=power, most=most),
  )


def round_to_bfloat16(x: jax.Array, count: jax.Array) -> jax.Array:
  """Returns a float32 array in bfloat16, rounded stochastically; `count` is the number of the step."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  rounded = (bits + (_random_bits(x, count) >> 16)) & jnp.uint32(0xFFFF0000)
  up_or_down = jax.lax.bitcast_convert_type(rounded, jnp.float32)
  return jnp.where(jnp.isfinite(x), up_or_down, x).astype(jnp.bfloat16)


# With jit, this function is traced only once for each shape of moments. An optimizer has dozens of moments, and is
# itself traced several times.
@functools.partial(jax.jit, static_argnames=('power', 'most', 'dtype'))
def _to_codes(x: jax.Array, count: jax.Array, power: int, most: int, dtype: Any) -> tuple[jax.Array, ...]:
  size = jnp.abs(x)
  maxima = tuple(jnp.max(size, [d for d in range(x.ndim) if d != dim]) for dim in range(x.ndim))
  scale = _scale(maxima)
  relative = size / jnp.where(scale > 0, scale, 1.0)
  below = jnp.floor(most * jnp.sqrt(relative if power == 2 else jnp.sqrt(relative)))
  low, high = (below / most) ** power, ((below + 1) / most) ** power
  uniform = (_random_bits(x, count) >> 8).astype(jnp.float32) * 2.0**-24
  code = below + (uniform < (relative - low) / (high - low))
  if power == 4:  # Steps are divided by the root, so a positive second moment is not rounded to zero.
    code = jnp.maximum(code, jnp.where(size > 0, 1.0, 0.0))
  code = jnp.minimum(code, float(most))
  return ((code if power == 4 else jnp.sign(x) * code).astype(dtype), *maxima)


@functools.partial(jax.jit, static_argnames=('power', 'most'))
def _decode(stored: tuple[jax.Array, ...], power: int, most: int) -> jax.Array:
  codes, *maxima = stored
  relative = codes.astype(jnp.float32) / most
  return _scale(maxima) * (relative**power if power == 4 else relative * jnp.abs(relative))


def _scale(maxima: Any) -> jax.Array:
  """Returns, for each entry, the smallest of the maxima of the entry's row, column, and so on."""
  rank = len(maxima)
  along = [jnp.expand_dims(m, [d for d in range(rank) if d != dim]) for dim, m in enumerate(maxima)]
  return functools.reduce(jnp.minimum, along)


def _random_bits(x: jax.Array, count: jax.Array) -> jax.Array:
  """Returns 32 bits for each float32 entry: a hash of the entry and the step (multiply and xor-shift, twice).

  The last 8 bits of the entry are ignored, so that another summation order on a mesh changes few of the results.
  """
  bits = (jax.lax.bitcast_convert_type(x, jnp.uint32) >> 8) ^ (count.astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
  bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
  bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
  return bits ^ (bits >> 16)
