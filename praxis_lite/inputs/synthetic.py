"""Synthetic inputs: made-up examples for tests, benchmarks and first steps. No files, no memory, any size.

Example i is a function of (seed, i) alone. `SyntheticInput` makes any shapes; `SyntheticLMInput` and
`SyntheticClassifierInput` make batches that a language model or classifier can learn from, so that a test sees a loss
fall.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import numpy as np

from praxis_lite.config import REQUIRED
from praxis_lite.errors import ConfigError
from praxis_lite.inputs.features import Feature, build_features
from praxis_lite.inputs.random_access import RandomAccessInput
from praxis_lite.inputs.random_bits import random_bits, uniform
from praxis_lite.inputs.rows import Rows, Struct, canonical_rows


class RandomFeature(Feature):
  """An array of independent uniform values in [low, high): integers, floats or booleans, by its dtype."""

  low: float = 0
  high: float = 1

  def values(self, seeds: tuple[int, ...], indices: np.ndarray) -> np.ndarray:
    """Returns the values of these examples, [n, *shape]."""
    size = int(np.prod(self.shape))
    u = uniform(random_bits(seeds, indices[:, None] * max(size, 1) + np.arange(size)))
    dtype = np.dtype(self.dtype)
    x = self.low + u * (self.high - self.low)
    if dtype.kind == 'b':
      x = np.floor(2 * u)
    elif dtype.kind in 'iu':
      x = np.floor(x)
    return x.astype(dtype).reshape(len(indices), *self.shape)


class ConstantFeature(Feature):
  """An array with the same value everywhere."""

  value: float = 0

  def values(self, seeds: tuple[int, ...], indices: np.ndarray) -> np.ndarray:
    """Returns the values of these examples, [n, *shape]."""
    del seeds
    return np.full((len(indices), *self.shape), self.value, self.dtype)


class _Synthetic(RandomAccessInput):
  """An input with a number of examples to choose.

  Attributes:
    num_synthetic_examples: examples in an epoch.
  """

  num_synthetic_examples: int = 1024

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.num_synthetic_examples < 1:
      raise ConfigError(f'{self.label}.num_synthetic_examples: expected at least 1, got {self.num_synthetic_examples}')

  @property
  def num_examples(self) -> int:
    return self.num_synthetic_examples

  def identity(self) -> dict[str, Any]:
    return {**super().identity(), 'seed': self.seed}  # the examples depend on it, whatever their order

  def _uniform(self, stream: str, indices: np.ndarray, size: int) -> np.ndarray:
    """Returns [n, size] numbers in [0, 1) that belong to these examples."""
    counters = indices[:, None] * size + np.arange(size)
    return uniform(random_bits((self.seed, zlib.crc32(stream.encode())), counters))


class SyntheticInput(_Synthetic):
  """Random or constant arrays of given shapes.

  Attributes:
    features: by name, configs of `RandomFeature` or `ConstantFeature`.
  """

  features: dict[str, Any] = REQUIRED

  def __post_init__(self) -> None:
    super().__post_init__()
    self._features = build_features(self.features, f'{self.label}.features')
    for key, feature in self._features.items():
      if not isinstance(feature, (RandomFeature, ConstantFeature)):
        raise ConfigError(f'{self.label}.features[{key!r}]: expected a RandomFeature or ConstantFeature')

  def example_struct(self) -> Struct:
    return {k: f.struct() for k, f in self._features.items()}

  def rows(self, indices: np.ndarray) -> Rows:
    made = {
      k: f.values((self.seed, zlib.crc32(k.encode())), indices)
      for k, f in self._features.items()
      if isinstance(f, (RandomFeature, ConstantFeature))
    }
    return canonical_rows(made, self.label)


class SyntheticLMInput(_Synthetic):
  """Rows of tokens for a language model.

  Attributes:
    seq_len: T.
    vocab_size: V; ids are 1, ..., V - 1, as 0 is padding.
    pattern: 'count': each token is the one before plus 1, wrapping around, from a random start: the loss can go to 0,
      and the current token is all a model needs. 'copy': the second half repeats the first: the loss can go to half of
      ln(V - 1), by attention. 'random': nothing to learn; the loss stays at ln(V - 1).
  """

  seq_len: int = REQUIRED
  vocab_size: int = REQUIRED
  pattern: str = 'count'

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.pattern not in ('count', 'copy', 'random'):
      raise ConfigError(f"{self.label}.pattern: expected 'count', 'copy' or 'random', got {self.pattern!r}")
    for name, least in (('vocab_size', 2), ('seq_len', 1)):
      if getattr(self, name) < least:
        raise ConfigError(f'{self.label}.{name}: expected at least {least}, got {getattr(self, name)}')

  def example_struct(self) -> Struct:
    names = ['ids', 'labels', 'segment_ids', 'segment_pos']
    struct = {k: jax.ShapeDtypeStruct((self.seq_len,), np.dtype('int32')) for k in names}
    struct['weights'] = jax.ShapeDtypeStruct((self.seq_len,), np.dtype('float32'))
    return struct

  def rows(self, indices: np.ndarray) -> Rows:
    length = self.seq_len + 1
    u = self._uniform('ids', indices, length)
    tokens = np.floor(u * (self.vocab_size - 1)).astype(np.int32)
    if self.pattern == 'count':
      tokens = (tokens[:, :1] + np.arange(length, dtype=np.int32)) % (self.vocab_size - 1)
    elif self.pattern == 'copy':
      tokens = np.tile(tokens[:, : -(-length // 2)], 2)[:, :length]
    tokens += 1
    shape = (len(indices), self.seq_len)
    return {
      'ids': tokens[:, :-1],
      'labels': tokens[:, 1:],
      'weights': np.ones(shape, np.float32),
      'segment_ids': np.ones(shape, np.int32),
      'segment_pos': np.broadcast_to(np.arange(self.seq_len, dtype=np.int32), shape).copy(),
    }


class SyntheticClassifierInput(_Synthetic):
  """Images of a few classes: each class is a fixed random image, and an example is that image plus uniform noise.

  Attributes:
    image_shape: [H, W, C], or any other shape.
    num_classes: labels are 0, ..., num_classes - 1.
    noise: half the width of the noise, where the class images are in [0, 1).
  """

  image_shape: tuple[int, ...] = REQUIRED
  num_classes: int = REQUIRED
  noise: float = 0.5

  def example_struct(self) -> Struct:
    return {
      'image': jax.ShapeDtypeStruct(tuple(self.image_shape), np.dtype('float32')),
      'label': jax.ShapeDtypeStruct((), np.dtype('int32')),
      'weights': jax.ShapeDtypeStruct((), np.dtype('float32')),
    }

  def rows(self, indices: np.ndarray) -> Rows:
    size = int(np.prod(self.image_shape))
    label = np.floor(self._uniform('label', indices, 1)[:, 0] * self.num_classes).astype(np.int32)
    # The classes look the same whatever the seed, so that training and evaluation may have different ones.
    clean = uniform(random_bits((self.num_classes,), label[:, None].astype(np.int64) * size + np.arange(size)))
    noise = (2 * self._uniform('noise', indices, size) - 1) * self.noise
    image = (clean + noise).astype(np.float32).reshape(len(indices), *self.image_shape)
    return {'image': image, 'label': label, 'weights': np.ones(len(indices), np.float32)}
