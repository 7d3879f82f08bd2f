"""Positions: sinusoidal and learned embeddings, rotary embeddings, and relative biases.

A position of -1 is padding: its result is finite and is not used.

B batch, T length, S length of the keys, D model dims, N heads, H dims per head, h = H / 2; R rows and C columns of
patches.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import REQUIRED, Config, Configurable, build_at, target, template
from praxis_lite.common.errors import ConfigError, check_range
from praxis_lite.common.figures import number_of
from praxis_lite.layers.base import Layer, WeightSplit
from praxis_lite.layers.base.facts import PositionGrid, TokenFlops
from praxis_lite.layers.embeddings import embedding_weight, lookup_rows
from praxis_lite.layers.position_limit import PositionLimit
from praxis_lite.sharding.weights import WeightHParams, WeightHParamsCollection


class SinusoidalPositions(Layer):
  """sin and cos of positions at wavelengths from 2 pi min_timescale to 2 pi max_timescale (Vaswani et al., 2017).

      y = [sin(pos / s_0), sin(pos / s_1), ..., cos(pos / s_0), cos(pos / s_1), ...],  s_i geometric

  The sines come first, then the cosines; the paper interleaves them. An odd D ends with a zero. Timescales m and M of
  Praxis correspond to 1 / m and M / m^2 here, because its rates begin at m.

  Attributes:
    dims: D.
    min_timescale, max_timescale: the first and the last s_i.
  """

  dims: int = REQUIRED
  min_timescale: float = 1.0
  max_timescale: float = 10_000.0

  def __call__(self, pos_BT: jax.Array) -> jax.Array:
    """Returns [B, T, D] for int32 positions [B, T]."""
    count = self.dims // 2
    growth = math.log(self.max_timescale / self.min_timescale) / max(count - 1, 1)
    rates = jnp.exp(-growth * jnp.arange(count, dtype=jnp.float32)) / self.min_timescale
    angle = pos_BT.astype(jnp.float32)[..., None] * rates
    y_BTD = jnp.concatenate([jnp.sin(angle), jnp.cos(angle), jnp.zeros((*pos_BT.shape, self.dims % 2))], axis=-1)
    return self.shard(y_BTD.astype(self.fprop_dtype))


class SinusoidalPositions2D(Layer):
  """Sinusoids of image patches (MAE): the first half of the dims encodes the row, the second half the column.

      y    = [half(row), half(column)],  half(p) = [sin(p r_0), sin(p r_1), ..., cos(p r_0), cos(p r_1), ...]
      r_i  = max_timescale^(-i / (D / 4))

  See He et al., 2022, and section D.4 of Dosovitskiy et al., 2021. For learned positions of a grid, use
  `LearnedPositions` at positions row * width + column.

  Attributes:
    dims: D, a multiple of 4.
    max_timescale: the wavelengths are from 2 pi to almost 2 pi max_timescale.
  """

  dims: int = REQUIRED
  max_timescale: float = 10_000.0

  def setup(self) -> None:
    if self.dims % 4:
      raise ConfigError(f'{self.path_name}.dims: expected a multiple of 4, got {self.dims}')

  def __call__(self, rows_BT: jax.Array, columns_BT: jax.Array) -> jax.Array:
    """Returns [B, T, D].

    Args:
      rows_BT, columns_BT: row and column of each patch; `grid_positions` returns them for a whole image. They may be
        fractions, such as distances from the middle.
    """
    count = self.dims // 4
    rates = self.max_timescale ** (-jnp.arange(count, dtype=jnp.float32) / count)
    angles = [pos_BT.astype(jnp.float32)[..., None] * rates for pos_BT in (rows_BT, columns_BT)]
    y_BTD = jnp.concatenate([f(angle) for angle in angles for f in (jnp.sin, jnp.cos)], axis=-1)
    return self.shard(y_BTD.astype(self.fprop_dtype))


def grid_positions(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the row and the column of each patch of an image, int32 [1, height * width], row by row."""
  rows, columns = np.indices((height, width), np.int32)
  return rows.reshape(1, -1), columns.reshape(1, -1)


class LearnedPositions(Layer):
  """y = w[pos].

  Attributes:
    max_len: number of positions.
    dims: D.
    skip_regularization: whether weight decay leaves the table out, as it leaves out biases.
    weight_split_dims_mapping: `wt`, [max_len, D].
  """

  length_fields: ClassVar[tuple[str, ...]] = ('max_len',)

  max_len: int = REQUIRED
  dims: int = REQUIRED
  skip_regularization: bool = False
  weight_split_dims_mapping: Config = template(WeightSplit)

  def setup(self) -> None:
    table = embedding_weight(self.max_len, self.dims, self.weight_split_dims_mapping.wt)
    if self.skip_regularization:
      table = dataclasses.replace(table, collections=frozenset({WeightHParamsCollection.SKIP_REGULARIZATION}))
    self.create_variable('w', table)

  def __call__(self, pos_BT: jax.Array) -> jax.Array:
    """Returns [B, T, D] for int32 positions [B, T].

    If positions are known only when the program runs, as inside `jax.jit`, those from `max_len` on give NaN.

    Raises:
      ConfigError: a position that is known is `max_len` or more.
    """
    if not isinstance(pos_BT, jax.core.Tracer):
      most = 1 + int(np.max(np.asarray(pos_BT), initial=-1))
      PositionLimit(f'{self.path_name}.max_len', self.max_len).check(most, 'the number of positions in pos_BT')
    return self.shard(lookup_rows(self.theta.w, jnp.maximum(pos_BT, 0)))

  def token_flops(self, length: int) -> TokenFlops:
    return TokenFlops()  # A lookup multiplies nothing.


def is_position_table(template: Config | None) -> bool:
  """Whether a template is for a table of learned positions, such as `LearnedPositions`; False for None."""
  kind = None if template is None else target(template)
  return isinstance(kind, type) and issubclass(kind, LearnedPositions)


def grid_of(count: int, like: PositionGrid) -> PositionGrid | None:
  """Returns the grid of a table with `count` positions; `like.others` of them belong to other tokens.

  The grid is a square if possible, otherwise it has the aspect ratio of `like`. Returns None if neither is possible.
  """
  patches = count - like.others
  side = math.isqrt(max(patches, 0))
  if side and side * side == patches:
    return PositionGrid(side, side, like.others)
  rows = math.isqrt(max(patches * like.rows // like.columns, 0))
  columns = rows * like.columns // like.rows
  if rows and rows * columns == patches and rows * like.columns == columns * like.rows:
    return PositionGrid(rows, columns, like.others)
  return None


def resample_positions(table: jax.Array, old: PositionGrid, new: PositionGrid) -> jax.Array:
  """Returns a table [others + R C, D] for the grid `new`, interpolated linearly along rows and columns.

  A smaller grid is antialiased: each entry averages several old ones. The `others` positions, which belong to no
  patch, do not change.
  """
  others, patches = table[: old.others], table[old.others :]
  grid_RCD = jnp.reshape(patches.astype(jnp.float32), (old.rows, old.columns, -1))
  shape = (new.rows, new.columns, grid_RCD.shape[-1])
  resized_RCD = jax.image.resize(grid_RCD, shape, method='linear', antialias=True)
  return jnp.concatenate([others, resized_RCD.reshape(-1, shape[-1]).astype(table.dtype)])


class LinearRotaryScaling(Configurable):
  """Divides rates by `factor`, which has the effect of dividing positions by it (Chen et al., 2023).

  Attributes:
    factor: ratio of the new context to the context of the original training.
  """

  factor: float = REQUIRED

  def __post_init__(self) -> None:
    check_range(f'{type(self).__name__}.factor', self.factor, above=0)
    check_range(f'{type(self).__name__}.original_max_len', getattr(self, 'original_max_len', None), least=1)

  @property
  def magnitude(self) -> float:
    """Rotated queries and keys are multiplied by this factor."""
    return 1.0

  def __call__(self, rates_h: np.ndarray) -> np.ndarray:
    """Returns the rates to use for the longer context, [h], given the original rates, [h]."""
    return rates_h / self.factor


class Llama3RotaryScaling(LinearRotaryScaling):
  """Divides slow rates by `factor`, keeps fast ones, and interpolates between, as in Llama 3.1.

      turns = original_max_len * rate / 2 pi                       turns of a pair within the original context
      kept  = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor), clipped to [0, 1]
      rate  = kept * rate + (1 - kept) * rate / factor

  Attributes:
    original_max_len: length of the context of the original training.
    low_freq_factor: pairs that turn less often than this are slow.
    high_freq_factor: pairs that turn more often than this are fast.
  """

  original_max_len: int = REQUIRED
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0

  def __post_init__(self) -> None:
    super().__post_init__()
    if not self.low_freq_factor < self.high_freq_factor:
      raise ConfigError(
        f'Llama3RotaryScaling: low_freq_factor, {self.low_freq_factor}, must be less than high_freq_factor, '
        f'{self.high_freq_factor}'
      )

  def __call__(self, rates_h: np.ndarray) -> np.ndarray:
    turns_h = self.original_max_len * rates_h / (2 * math.pi)
    kept_h = np.clip((turns_h - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
    return kept_h * rates_h + (1 - kept_h) * rates_h / self.factor


class YarnRotaryScaling(LinearRotaryScaling):
  """Keeps fast rates, divides slow ones by `factor`, interpolates between, and scales logits (YaRN, Peng et al., 2023).

      pair(turns) = h log(original_max_len / (2 pi turns)) / log(max_timescale)     turns within the original context
      kept_i      = (pair(beta_slow) - i) / (pair(beta_slow) - pair(beta_fast)), clipped to [0, 1]
      rate_i      = kept_i * rate_i + (1 - kept_i) * rate_i / factor

  Attributes:
    original_max_len: length of the context of the original training.
    beta_fast: pairs that turn more often than this keep their rates.
    beta_slow: pairs that turn less often than this are slow.
    attention_factor: factor of queries and of keys, so logits are multiplied by its square; None means
      0.1 log(factor) + 1, or 1 if `factor` is at most 1.
    truncate: whether the bounds of the interpolation are rounded outward to whole pairs, as in the authors' code.
  """

  original_max_len: int = REQUIRED
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None
  truncate: bool = True

  def __post_init__(self) -> None:
    super().__post_init__()
    if not self.beta_slow < self.beta_fast:
      raise ConfigError(
        f'YarnRotaryScaling: beta_slow, {self.beta_slow}, must be less than beta_fast, {self.beta_fast}'
      )

  @property
  def magnitude(self) -> float:
    if self.attention_factor is not None:
      return self.attention_factor
    return self.log_magnitude(self.factor)

  @staticmethod
  def log_magnitude(factor: float, slope: float = 1.0) -> float:
    """Returns 0.1 slope log(factor) + 1; 1 if `factor` is at most 1."""
    return 0.1 * slope * math.log(factor) + 1 if factor > 1 else 1.0

  def __call__(self, rates_h: np.ndarray) -> np.ndarray:
    half = len(rates_h)
    pairs_per_e = half if half < 2 else -1 / math.log(rates_h[1] / rates_h[0])  # h / log(max_timescale)
    fast, slow = (
      pairs_per_e * math.log(self.original_max_len / (2 * math.pi * turns))
      for turns in (self.beta_fast, self.beta_slow)
    )
    if self.truncate:
      fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, 2 * half - 1)
    kept_h = np.clip((slow - np.arange(half)) / max(slow - fast, 0.001), 0.0, 1.0)
    return kept_h * rates_h + (1 - kept_h) * rates_h / self.factor


class LongRotaryScaling(LinearRotaryScaling):
  """Divides each rate by a factor of its own, and scales logits (LongRoPE, Ding et al., 2024), as in Phi 3.5.

      rate_i = rate_i / factors_i,  factors = long_factors if is_long, and short_factors otherwise

  Attributes:
    original_max_len: length of the context of the original training.
    short_factors: a factor for each pair of dims, for contexts of at most `original_max_len` tokens.
    long_factors: the factors for longer contexts.
    is_long: whether contexts may be longer than `original_max_len`. transformers decides this by the longest row of
      each call. Here it is fixed, so keys in a cache stay right when a text grows.
    attention_factor: factor of queries and of keys; None means sqrt(1 + log(factor) / log(original_max_len)), or 1 if
      `factor` is at most 1.
  """

  original_max_len: int = REQUIRED
  short_factors: tuple[float, ...] = REQUIRED
  long_factors: tuple[float, ...] = REQUIRED
  is_long: bool = False
  attention_factor: float | None = None

  @property
  def magnitude(self) -> float:
    if self.attention_factor is not None:
      return self.attention_factor
    return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_len)) if self.factor > 1 else 1.0

  def __call__(self, rates_h: np.ndarray) -> np.ndarray:
    for name in ('short_factors', 'long_factors'):
      count = number_of(len(getattr(self, name)), 'factor')
      if len(getattr(self, name)) != len(rates_h):
        raise ConfigError(f'LongRotaryScaling.{name}: {count} for {number_of(len(rates_h), "pair")} of dims')
    return rates_h / np.asarray(self.long_factors if self.is_long else self.short_factors)


class RotaryPositions(Layer):
  """Rotates pairs of dims by angles that grow with the position, so q . k depends only on offsets (Su et al., 2021).

      [a, b] -> [a cos - b sin, b cos + a sin],  angle_i = pos / s_i
      s_i = min_timescale (max_timescale / min_timescale)^(i / h)

  The pairs are dims i and i + h, the two halves of a head, as in LLaMA; or neighbours, as in the paper.

  Attributes:
    dims: H, even.
    interleaved: whether the pairs are dims 2 i and 2 i + 1.
    min_timescale, max_timescale: s_0, and s_h in the formula above.
    scaling_tpl: template of a function of the rates 1 / s_i, for contexts longer than in the original training; None
      does not change them.
    activation_split_dims_mapping: `out`, [B, T, N, H].
  """

  dims: int = REQUIRED
  min_timescale: float = 1.0
  max_timescale: float = 10_000.0
  interleaved: bool = False
  scaling_tpl: Config | None = None

  def setup(self) -> None:
    if self.dims % 2:
      raise ConfigError(f'{self.path_name}.dims: rotary positions rotate pairs of dims, and {self.dims} is odd')
    self.scaling: LinearRotaryScaling | None = (
      None if self.scaling_tpl is None else build_at(f'{self.path_name}.scaling', self.scaling_tpl)
    )
    _ = self.rates_h  # Raises an error if the scaling is for other dims.

  @property
  def _turned(self) -> int:
    """The number of dims of a head that are rotated."""
    return self.dims

  @property
  def rates_h(self) -> np.ndarray:
    """The angle of each pair of dims at position 1, in radians, [h] float64."""
    half = self._turned // 2
    rates_h = (self.max_timescale / self.min_timescale) ** -(np.arange(half) / half) / self.min_timescale
    return rates_h if self.scaling is None else self.scaling(rates_h)

  def __call__(self, x_BTNH: jax.Array, pos_BT: jax.Array | None = None) -> jax.Array:
    """Returns `x_BTNH` rotated, in its dtype.

    Args:
      x_BTNH: queries or keys.
      pos_BT: int32 positions; None means 0, 1, 2, ...
    """
    if pos_BT is None:
      pos_BT = jnp.arange(x_BTNH.shape[1])[None]
    angle_BT1h = pos_BT.astype(jnp.float32)[..., None, None] * self.rates_h.astype(np.float32)
    sin_BT1h, cos_BT1h = jnp.sin(angle_BT1h), jnp.cos(angle_BT1h)
    if self.scaling is not None and self.scaling.magnitude != 1:
      sin_BT1h, cos_BT1h = self.scaling.magnitude * sin_BT1h, self.scaling.magnitude * cos_BT1h
    if self.interleaved:
      first, second = x_BTNH[..., ::2], x_BTNH[..., 1::2]
    else:
      first, second = jnp.split(x_BTNH, 2, axis=-1)
    rotated = [first * cos_BT1h - second * sin_BT1h, second * cos_BT1h + first * sin_BT1h]
    if self.interleaved:
      y_BTNH = jnp.stack(rotated, axis=-1).reshape(x_BTNH.shape)
    else:
      y_BTNH = jnp.concatenate(rotated, axis=-1)
    return self.shard(y_BTNH.astype(x_BTNH.dtype))


class RelativeBias(Layer):
  """A learned bias on attention logits for each head and bucket of offsets (T5, Raffel et al., 2020).

  Attributes:
    num_heads: N.
    num_buckets: number of buckets of offsets.
    max_distance: all offsets of at least this size share the last bucket.
    bidirectional: whether keys may come after the query; if so, half of the buckets are for such keys.
    weight_split_dims_mapping: `wt`, [num_buckets, N].
    activation_split_dims_mapping: `out`, [B, N, T, S].
  """

  num_heads: int = REQUIRED
  num_buckets: int = 32
  max_distance: int = 128
  bidirectional: bool = False
  weight_split_dims_mapping: Config = template(WeightSplit)

  def setup(self) -> None:
    exact = self.num_buckets // (4 if self.bidirectional else 2)
    if exact < 1 or self.max_distance <= exact:
      raise ConfigError(
        f'{self.path_name}: {self.num_buckets} num_buckets hold {exact} exact offsets; '
        f'at least 1 is needed, and max_distance, {self.max_distance}, must be greater'
      )
    wt = self.weight_split_dims_mapping.wt
    self.create_variable('w', WeightHParams((self.num_buckets, self.num_heads), tensor_split_dims_mapping=wt))

  def __call__(self, query_pos_BT: jax.Array, key_pos_BS: jax.Array) -> jax.Array:
    """Returns the biases [B, N, T, S] for int32 positions."""
    return self.shard(self.bias_fn(self.bias_params, query_pos_BT, key_pos_BS))

  @property
  def bias_fn(self) -> BucketedBias:
    """The bias as a function of `bias_params` and of positions, for attention that computes it block by block."""
    return BucketedBias(self.num_buckets, self.max_distance, self.bidirectional)

  @property
  def bias_params(self) -> jax.Array:
    """In a call: the table, [num_buckets, N]."""
    return self.theta.w


class BucketedBias(NamedTuple):
  """Looks up biases in a table [num_buckets, N] by offset; for the fields, see `RelativeBias`."""

  num_buckets: int
  max_distance: int
  bidirectional: bool

  def __call__(self, table: jax.Array, query_pos_BT: jax.Array, key_pos_BS: jax.Array) -> jax.Array:
    """Returns the biases [B, N, T, S] for int32 positions."""
    offset_BTS = key_pos_BS[:, None, :] - query_pos_BT[:, :, None]
    return jnp.moveaxis(lookup_rows(table, relative_position_bucket(offset_BTS, *self)), -1, 1)


def relative_position_bucket(offset: jax.Array, num_buckets: int, max_distance: int, bidirectional: bool) -> jax.Array:
  """Returns T5's bucket of each offset, key position - query position.

  If bidirectional, offsets up to 0 take the first half of all buckets, and those above 0 the second; otherwise offsets
  above 0 count as 0. On each side, a bucket in the first half holds one offset. Each other bucket holds a range of
  offsets; the ranges grow geometrically up to `max_distance`, and the last bucket also holds all larger offsets.
  """
  base = jnp.zeros_like(offset)
  if bidirectional:
    num_buckets //= 2
    base = jnp.where(offset > 0, num_buckets, 0)
    distance = jnp.abs(offset)
  else:
    distance = jnp.maximum(-offset, 0)
  exact = num_buckets // 2
  ratio = jnp.maximum(distance, 1).astype(jnp.float32) / exact
  far = exact + (jnp.log(ratio) / math.log(max_distance / exact) * (num_buckets - exact)).astype(jnp.int32)
  return base + jnp.where(distance < exact, distance, jnp.minimum(far, num_buckets - 1))
