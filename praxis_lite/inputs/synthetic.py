"""Synthetic inputs: any number of computed examples, without files, for tests, benchmarks and first steps.

Example i depends only on (seed, i). `SyntheticInput` makes arrays of any shapes. `SyntheticLMInput` and
`SyntheticClassifierInput` make batches that a language model or classifier can learn, so that a test sees the loss
fall.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import numpy as np

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.errors import ConfigError, DataError, check_choice
from praxis_lite.inputs.random_access import RandomAccessInput, uniform
from praxis_lite.inputs.rows import (
  Feature,
  Rows,
  Struct,
  build_features,
  canonical_rows,
  fit_dtype,
  rows_of_tokens,
  token_struct,
)


class RandomFeature(Feature):
  """An array of independent uniform values in [low, high): integers, floats or booleans, depending on its dtype."""

  low: float = 0
  high: float = 1

  def values(self, seeds: tuple[int, ...], indices: np.ndarray) -> np.ndarray:
    """Returns the values of these examples, [n, *shape]."""
    size = int(np.prod(self.shape))
    u = uniform(seeds, indices[:, None] * max(size, 1) + np.arange(size))
    dtype = np.dtype(self.dtype)
    x = self.low + u * (self.high - self.low)
    if dtype.kind == 'b':
      x = np.floor(2 * u)
    elif dtype.kind in 'iu':
      x = np.floor(x).astype(np.int64)
    elif not np.isfinite(x).all():
      raise DataError(f'{_describe(self)}: values from {self.low} to {self.high} cannot be drawn in float64')
    x = x.astype(dtype) if dtype.kind == 'b' else fit_dtype(x, dtype, _describe(self))
    return x.reshape(len(indices), *self.shape)


class ConstantFeature(Feature):
  """An array with the same value everywhere."""

  value: float = 0

  def values(self, seeds: tuple[int, ...], indices: np.ndarray) -> np.ndarray:
    """Returns the values of these examples, [n, *shape]."""
    is_whole = np.dtype(self.dtype).kind in 'biu' and float(self.value).is_integer()
    value = fit_dtype(np.asarray(int(self.value) if is_whole else self.value), self.dtype, _describe(self))
    return np.full((len(indices), *self.shape), value)


def _describe(feature: Feature) -> str:
  return f'{type(feature).__name__} of {feature.dtype}'


class _Synthetic(RandomAccessInput):
  """An input with any number of examples in an epoch."""

  num_synthetic_examples: int = 1024

  def __post_init__(self) -> None:
    super().__post_init__()
    self.check_at_least(num_synthetic_examples=1)

  @property
  def num_examples(self) -> int:
    return self.num_synthetic_examples

  def identity(self) -> dict[str, Any]:
    return {**super().identity(), 'seed': self.seed}  # examples depend on the seed even without shuffling

  def _uniform(self, stream: str, indices: np.ndarray, size: int) -> np.ndarray:
    """Returns `size` random numbers in [0, 1) for each of these examples, [n, size], from the named stream."""
    return uniform((self.seed, zlib.crc32(stream.encode())), indices[:, None] * size + np.arange(size))


class SyntheticInput(_Synthetic):
  """Random or constant arrays. `features` maps names to configs of `RandomFeature` or `ConstantFeature`."""

  features: dict[str, Config | Feature] = REQUIRED

  def __post_init__(self) -> None:
    super().__post_init__()
    self._features: dict[str, RandomFeature | ConstantFeature] = {}
    for key, feature in build_features(self.features, f'{self.label}.features').items():
      if not isinstance(feature, (RandomFeature, ConstantFeature)):
        raise ConfigError(f'{self.label}.features[{key!r}]: expected a RandomFeature or ConstantFeature')
      self._features[key] = feature

  def example_struct(self) -> Struct:
    return {k: f.struct() for k, f in self._features.items()}

  def rows(self, indices: np.ndarray) -> Rows:
    made = {k: f.values((self.seed, zlib.crc32(k.encode())), indices) for k, f in self._features.items()}
    return canonical_rows(made, self.label)


class SyntheticLMInput(_Synthetic):
  """Rows of tokens for a language model.

  Attributes:
    seq_len: T.
    vocab_size: V; ids are 1, ..., V - 1, because 0 is padding.
    pattern: with 'count', each token is the previous one plus 1, wrapping around, from a random start, and the loss can
      reach 0 without attention. With 'sum', each token is the sum of the two before it, modulo V - 1; without attention
      to an earlier token, the loss stays at ln(V - 1). With 'copy', the second half repeats the first, and with
      attention the loss can reach half of ln(V - 1). With 'random', nothing can be learned, and the loss stays at
      ln(V - 1).
  """

  seq_len: int = REQUIRED
  vocab_size: int = REQUIRED
  pattern: str = 'count'

  def __post_init__(self) -> None:
    super().__post_init__()
    check_choice(f'{self.label}.pattern', self.pattern, ('count', 'sum', 'copy', 'random'))
    self.check_at_least(vocab_size=2, seq_len=1)

  def example_struct(self) -> Struct:
    return token_struct(self.seq_len)

  def rows(self, indices: np.ndarray) -> Rows:
    length = self.seq_len + 1
    u = self._uniform('ids', indices, length)
    tokens = np.floor(u * (self.vocab_size - 1)).astype(np.int32)
    if self.pattern == 'count':
      tokens = (tokens[:, :1] + np.arange(length, dtype=np.int32)) % (self.vocab_size - 1)
    elif self.pattern == 'sum':
      for i in range(2, length):
        tokens[:, i] = (tokens[:, i - 1] + tokens[:, i - 2]) % (self.vocab_size - 1)
    elif self.pattern == 'copy':
      tokens = np.tile(tokens[:, : -(-length // 2)], 2)[:, :length]
    tokens += 1
    return rows_of_tokens(tokens)


class SyntheticClassifierInput(_Synthetic):
  """Images of a few classes: each class is a fixed random image, and an example is that image plus uniform noise.

  Attributes:
    image_shape: [H, W, C], or any other shape.
    num_classes: labels are 0, ..., num_classes - 1.
    noise: half the width of the noise; the class images are in [0, 1).
  """

  image_shape: tuple[int, ...] = REQUIRED
  num_classes: int = REQUIRED
  noise: float = 0.5

  def example_struct(self) -> Struct:
    return {
      'image': jax.ShapeDtypeStruct(tuple(self.image_shape), np.float32),
      'label': jax.ShapeDtypeStruct((), np.int32),
      'weights': jax.ShapeDtypeStruct((), np.float32),
    }

  def rows(self, indices: np.ndarray) -> Rows:
    size = int(np.prod(self.image_shape))
    label = np.floor(self._uniform('label', indices, 1)[:, 0] * self.num_classes).astype(np.int32)
    # The classes look the same for any seed, so training and evaluation may use different seeds.
    clean = uniform((self.num_classes,), label[:, None].astype(np.int64) * size + np.arange(size))
    noise = (2 * self._uniform('noise', indices, size) - 1) * self.noise
    image = (clean + noise).astype(np.float32).reshape(len(indices), *self.image_shape)
    return {'image': image, 'label': label, 'weights': np.ones(len(indices), np.float32)}
