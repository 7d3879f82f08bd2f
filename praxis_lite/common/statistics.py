"""Statistics of arrays, from sums and extremes that combine exactly over rows, microbatches, devices and batches.

    rms        root mean square                    max_abs    largest magnitude
    mean       mean                                frac_zero  fraction of entries that are zero
    std        standard deviation                  dead       fraction of units, entries of the last dimension, that
    min, max   smallest and largest value                     are zero in all rows and tokens
    hist       histogram

Devices compute parts, which are sums and extremes. `PartKind` says how parts combine. The host computes the statistics
from them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

STATISTICS = ('rms', 'mean', 'std', 'min', 'max', 'max_abs', 'frac_zero', 'dead', 'hist')
HISTOGRAM = 'hist'

# Bins of histograms: for each sign, 2 for each power of 2 from 2^-40 to 2^40, and one for zeros in the middle.
_LOWEST, _HIGHEST, _PARTS = -40, 40, 2
_BINS_OF_SIGN = (_HIGHEST - _LOWEST) * _PARTS
_MOST_COUNTED = 2**31 - 1  # The most entries that an int32 can count.


class PartKind(enum.StrEnum):
  """The ways in which parts of a statistic combine."""

  SUM = 'sum'
  MAX = 'max'
  MIN = 'min'
  MOMENTS = 'moments'  # [..., 3]: the number of entries, their mean, and the sum of squared distances to the mean.

  def combine(self, x: jax.Array) -> jax.Array:
    """Returns parts combined over the first axis; sums keep their dtype."""
    if self is PartKind.MOMENTS:
      return _combine_moments(x, lambda each: jnp.sum(each, 0))
    if self is PartKind.SUM:
      return jnp.sum(x, 0, dtype=x.dtype)
    return jnp.max(x, 0) if self is PartKind.MAX else jnp.min(x, 0)

  def combine_devices(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Inside `shard_map`: returns parts combined over the devices along some axes."""
    if self is PartKind.MOMENTS:
      return _combine_moments(x, lambda each: jax.lax.psum(each, axes))
    if self is PartKind.SUM:
      return jax.lax.psum(x, axes)
    return jax.lax.pmax(x, axes) if self is PartKind.MAX else jax.lax.pmin(x, axes)

  def neutral(self, x: jax.Array) -> jax.Array:
    """Returns an array with the shape and dtype of x; combining parts with it does not change them."""
    return jnp.full_like(x, {PartKind.MAX: -jnp.inf, PartKind.MIN: jnp.inf}.get(self, 0))

  def combine_on_host(self, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns parts combined on the host, in float64."""
    stacked = np.stack([np.asarray(x, np.float64) for x in parts])
    if self is PartKind.MOMENTS:
      return np.asarray(_combine_moments(stacked, lambda each: each.sum(0), np))
    if self is PartKind.SUM:
      return np.asarray(stacked.sum(0))
    return np.asarray(stacked.max(0) if self is PartKind.MAX else stacked.min(0))


def _combine_moments(x: Any, total: Callable[[Any], Any], xp: Any = jnp) -> Any:
  """Returns the moments, [..., 3], of all parts in x together (Chan et al., 1979); `total` sums over the parts."""
  n, mean, squares = x[..., 0], x[..., 1], x[..., 2]
  of_all = total(n)
  center = total(n * mean) / xp.maximum(of_all, 1)
  return xp.stack([of_all, center, total(squares + n * xp.square(mean - center))], -1)


# The parts that each statistic needs, besides the number of entries, `n`.
_NEEDS: Mapping[str, tuple[str, ...]] = {
  'rms': ('squares',),
  'mean': ('sum',),
  'std': ('moments',),
  'min': ('min',),
  'max': ('max',),
  'max_abs': ('max_abs',),
  'frac_zero': ('zeros',),
  'dead': ('units',),
  'hist': ('bins',),
}
# How the parts that need one pass are computed: a function of each value, the operation that combines two results, and
# the neutral element of this operation.
_REDUCTIONS: Mapping[str, tuple[Callable[[jax.Array], jax.Array], Callable[..., jax.Array], float]] = {
  'sum': (lambda x: x, jax.lax.add, 0.0),
  'squares': (jnp.square, jax.lax.add, 0.0),
  'min': (lambda x: x, jax.lax.min, np.inf),
  'max': (lambda x: x, jax.lax.max, -np.inf),
  'max_abs': (jnp.abs, jax.lax.max, 0.0),
  'zeros': (lambda x: (x == 0).astype(jnp.float32), jax.lax.add, 0.0),
}
_KINDS = {'min': PartKind.MIN, 'max': PartKind.MAX, 'max_abs': PartKind.MAX, 'units': PartKind.MAX}
_KINDS['moments'] = PartKind.MOMENTS


def kind_of_part(part: str) -> PartKind:
  """Returns how parts with this name combine."""
  return _KINDS.get(part, PartKind.SUM)


def compute_parts(
  x: jax.Array, real: jax.Array | None, statistics: Sequence[str], first: int = 0
) -> dict[str, jax.Array]:
  """Returns the parts that some statistics need, by name, in float32; for a histogram, counts [bins].

  Args:
    x: floating, any shape. A scalar, or each of the scalars of a stack of layers, counts as an array with one unit.
    real: bool, broadcast to x: False for entries that do not count, whose values are arbitrary; None means that all
      count.
    statistics: names in `STATISTICS`.
    first: the number of leading dimensions, such as layers, that are kept. Each of their indices has statistics of its
      own, and the shapes of the parts begin with these dimensions.
  """
  if x.ndim == first:
    x = x[..., None]
    real = None if real is None else real[..., None]
  real = jnp.ones((1,) * x.ndim, bool) if real is None else real.reshape((1,) * (x.ndim - real.ndim) + real.shape)
  axes = tuple(range(first, x.ndim))
  # Along the last dimensions, either all entries of a row count or none does. So rows are reduced before they are
  # masked, which is faster.
  rows = next((axis + 1 for axis in reversed(axes) if real.shape[axis] != 1), first)
  needed = dict.fromkeys(part for name in statistics for part in _NEEDS[name])
  reduced = [part for part in needed if part in _REDUCTIONS]
  parts = {'n': _count(real, x.shape, axes)}
  parts |= dict(zip(reduced, _single_pass_parts(reduced, x, real, axes, tuple(range(rows, x.ndim)))))
  return parts | {part: _part(part, x.astype(jnp.float32), real, axes) for part in needed if part not in reduced}


def _count(real: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> jax.Array:
  """Returns how many entries of an array of this shape count, summed over `axes`."""
  copies = math.prod(size for axis, size in enumerate(shape) if axis in axes and real.shape[axis] == 1)
  counted = jnp.sum(real, axes, dtype=jnp.float32) * copies
  return jnp.broadcast_to(counted, shape[: axes[0]])


def _single_pass_parts(
  parts: Sequence[str], x: jax.Array, real: jax.Array, axes: tuple[int, ...], inner: tuple[int, ...]
) -> list[jax.Array]:
  """Returns parts over `axes`; `real` is constant along `inner`, the last axes."""

  def together(parts: Sequence[str], x: jax.Array, real: jax.Array) -> list[jax.Array]:
    made, combine, starts = zip(*(_REDUCTIONS[part] for part in parts))

    def combine_all(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
      return tuple(combine_one(*pair) for combine_one, pair in zip(combine, zip(a, b)))

    def reduce_all(arrays: Sequence[jax.Array], over: tuple[int, ...]) -> list[jax.Array]:
      return list(jax.lax.reduce(tuple(arrays), tuple(map(jnp.float32, starts)), combine_all, over))

    by_row, mask = reduce_all([entries(x) for entries in made], inner), jnp.squeeze(real, inner)
    kept = [jnp.where(mask, row, start) for row, start in zip(by_row, starts)]
    return reduce_all(kept, axes[: len(axes) - len(inner)])

  def one_pass(x: jax.Array, real: jax.Array) -> list[jax.Array]:
    return together(parts, _stored_as_float32(x), real)

  def one_by_one(x: jax.Array, real: jax.Array) -> list[jax.Array]:
    return [value for part in parts for value in together([part], x.astype(jnp.float32), real)]

  # On GPUs, XLA would read x once for each part. On CPUs, it vectorizes only reductions of a single array.
  return list(jax.lax.platform_dependent(x, real, cuda=one_pass, rocm=one_pass, default=one_by_one)) if parts else []


def _stored_as_float32(x: jax.Array) -> jax.Array:
  """Returns x in float32, by a shift of its bits. XLA might remove a cast, together with an earlier one to bfloat16."""
  if x.dtype != jnp.bfloat16:
    return x.astype(jnp.float32)
  bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _part(part: str, x: jax.Array, real: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """Returns a part of statistics over `axes`; it is one that a single pass over x cannot compute."""
  first, is_real = axes[0], jnp.broadcast_to(real, x.shape)
  x = jnp.where(is_real, x, 0)
  if part == 'units':
    return jnp.max(jnp.abs(x), axes[:-1], initial=0)
  if part == 'moments':
    return _moments(x, is_real, axes)
  count, rows = _count_bins, first
  while np.prod(x.shape[rows:], dtype=np.int64) > _MOST_COUNTED:
    rows += 1
  for _ in range(rows):
    count = jax.vmap(count)
  return jnp.sum(count(x, is_real.astype(jnp.int32)), tuple(range(first, rows)))


def _moments(x: jax.Array, real: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """Returns moments [..., 3], see `PartKind`; x is 0 where it does not count."""
  n = jnp.sum(real, axes, keepdims=True, dtype=jnp.float32)
  mean = jnp.sum(x, axes, keepdims=True) / jnp.maximum(n, 1)
  away = jnp.where(real, x - mean, 0)
  # The mean is rounded, so the mean distance from it is not exactly 0; this corrects both mean and squares.
  left = jnp.sum(away, axes, keepdims=True) / jnp.maximum(n, 1)
  squares = jnp.sum(jnp.square(away), axes, keepdims=True) - n * jnp.square(left)
  return jnp.stack([jnp.squeeze(each, axes) for each in (n, mean + left, squares)], -1)


def _count_bins(x: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns the number of entries in each bin, float32 [bins]; `weights` are 1 for entries that count, else 0."""
  # The first bit of the mantissa cuts each power of 2 into two bins.
  bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32) >> 22
  bin_of_sign = jnp.clip(bits - (127 + _LOWEST) * _PARTS, 0, _BINS_OF_SIGN - 1)
  index = jnp.where(x == 0, _BINS_OF_SIGN, _BINS_OF_SIGN + jnp.where(x < 0, -1 - bin_of_sign, 1 + bin_of_sign))
  counts = jnp.zeros(2 * _BINS_OF_SIGN + 1, jnp.int32).at[index.ravel()].add(weights.ravel())
  return counts.astype(jnp.float32)


def bin_edges() -> np.ndarray:
  """Returns the right edges of a histogram's bins, float64 [bins], in ascending order; the middle bin counts zeros."""
  exponents = np.arange(_LOWEST, _HIGHEST)
  powers = np.stack([2.0**exponents, 1.5 * 2.0**exponents], 1).ravel()  # The left edges of positive bins.
  positive = np.append(powers[1:], 2.0**_HIGHEST)
  return np.concatenate([-powers[::-1], [np.nextafter(powers[0], 0)], positive])


def to_statistics(parts: Mapping[str, np.ndarray], statistics: Sequence[str]) -> dict[str, np.ndarray]:
  """Returns statistics by name, from combined parts on the host; NaN if no entries count."""
  wide = {name: np.asarray(x, np.float64) for name, x in parts.items()}
  n = wide['n']
  with np.errstate(invalid='ignore', divide='ignore'):
    made: dict[str, np.ndarray] = {}
    for name in statistics:
      match name:
        case 'rms':
          made[name] = np.sqrt(wide['squares'] / n)
        case 'mean':
          made[name] = wide['sum'] / n
        case 'std':
          made[name] = np.sqrt(np.maximum(wide['moments'][..., 2], 0) / n)
        case 'frac_zero':
          made[name] = wide['zeros'] / n
        case 'dead':
          made[name] = np.where(n > 0, np.mean(wide['units'] == 0, axis=-1), np.nan)
        case 'hist':
          made[name] = wide['bins']
        case _:
          made[name] = np.where(n > 0, wide[name], np.nan)
  return made
