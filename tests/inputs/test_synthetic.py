"""Synthetic inputs: the structure a model can learn is really there."""

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs import (
  ConstantFeature,
  Feature,
  RandomFeature,
  SyntheticClassifierInput,
  SyntheticInput,
  SyntheticLMInput,
)
from praxis_lite.inputs.random_access import random_bits, uniform


def test_random_bits_are_uniform_and_independent_of_how_they_are_asked_for():
  u = uniform((3, 1), np.arange(100_000))
  assert 0 <= u.min() < u.max() < 1
  counts = np.histogram(u, bins=50, range=(0, 1))[0]
  # Chi-squared of 49 degrees of freedom: mean 49, standard deviation 10.
  assert ((counts - 2000) ** 2 / 2000).sum() < 100
  assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 0.02
  np.testing.assert_array_equal(uniform((3, 1), np.array([[7], [99]])), u[[[7], [99]]])
  assert abs(np.corrcoef(u, uniform((4, 1), np.arange(100_000)))[0, 1]) < 0.02


def test_random_bits_are_those_of_splitmix64():
  # The published generator in plain integers: state += gamma, then the finalizer.
  seed = int(np.random.SeedSequence((5,)).generate_state(1, np.uint64)[0])
  mask = 2**64 - 1

  def splitmix(state):
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)

  expected = [splitmix((seed + i * 0x9E3779B97F4A7C15) & mask) for i in range(5)]
  assert [int(b) for b in random_bits((5,), np.arange(5))] == expected


def test_features_have_their_shape_dtype_and_range():
  features = {
    'ids': Config(RandomFeature, shape=(300,), dtype='int32', low=3, high=7),
    'image': Config(RandomFeature, shape=(20, 20, 1), low=-1, high=2),
    'flag': Config(RandomFeature, dtype='bool'),
    'scale': Config(ConstantFeature, shape=(2,), value=0.5),
    'weights': Config(ConstantFeature, shape=(300,), value=1),
  }
  batch = Config(SyntheticInput, features=features, batch_size=32).instantiate().get_next()
  assert set(np.unique(batch['ids'])) == {3, 4, 5, 6}
  assert batch['image'].shape == (32, 20, 20, 1)
  assert -1 <= batch['image'].min() < -0.9 < 1.9 < batch['image'].max() < 2
  assert set(batch['flag'].tolist()) == {True, False}
  assert (batch['scale'] == 0.5).all()
  assert batch['weights'].shape == (32, 300)


def _tokens(pattern):
  config = Config(SyntheticLMInput, seq_len=10, vocab_size=7, pattern=pattern, batch_size=64)
  batch = config.instantiate().get_next()
  np.testing.assert_array_equal(batch['ids'][:, 1:], batch['labels'][:, :-1])
  tokens = np.concatenate([batch['ids'], batch['labels'][:, -1:]], axis=1)
  assert set(np.unique(tokens)) == {1, 2, 3, 4, 5, 6}
  return tokens


def test_count_goes_up_by_one_and_wraps_around():
  tokens = _tokens('count')
  np.testing.assert_array_equal(tokens[:, 1:], tokens[:, :-1] % 6 + 1)


def test_sum_adds_the_two_tokens_before():
  digits = _tokens('sum') - 1
  np.testing.assert_array_equal(digits[:, 2:], (digits[:, 1:-1] + digits[:, :-2]) % 6)
  assert len(np.unique(digits[:, :2], axis=0)) > 25


def test_copy_repeats_the_first_half():
  tokens = _tokens('copy')
  np.testing.assert_array_equal(tokens[:, 6:], tokens[:, :5])
  assert len(np.unique(tokens[:, :6], axis=0)) > 60


def test_random_rows_differ():
  assert len(np.unique(_tokens('random'), axis=0)) == 64


def test_the_nearest_class_image_tells_the_label():
  config = Config(SyntheticClassifierInput, image_shape=(4, 4), num_classes=5, noise=0.3, batch_size=64)
  train, other = (config.instantiate(seed=s).get_next() for s in (0, 1))
  assert set(train['label'].tolist()) == set(range(5))
  means = np.stack([train['image'][train['label'] == c].mean(axis=0) for c in range(5)])
  distances = ((other['image'][:, None] - means) ** 2).sum(axis=(2, 3))
  np.testing.assert_array_equal(distances.argmin(axis=1), other['label'])


@pytest.mark.parametrize(
  'features, message',
  [
    ({}, 'expected a dict of Feature configs'),
    ({'x': 3}, r"\['x'\]: expected the config of a Feature, got 3"),
    ({'x': Config(Feature)}, r"\['x'\]: expected a RandomFeature or ConstantFeature"),
    ({'x': Config(RandomFeature, dtype='string')}, r"\['x'\]\.dtype: 'string' is not a numeric dtype"),
    ({'x': Config(RandomFeature, shape=(2, -1))}, r"\['x'\]\.shape: expected sizes that are not negative"),
  ],
)
def test_bad_features_are_named(features, message):
  with pytest.raises(ConfigError, match='features' + message if message[0] == '\\' else message):
    SyntheticInput(features=features, batch_size=2)


def test_bad_fields_are_named():
  with pytest.raises(ConfigError, match="pattern: expected 'count', 'sum', 'copy' or 'random', got 'counts'"):
    SyntheticLMInput(seq_len=4, vocab_size=9, pattern='counts', batch_size=2)
  with pytest.raises(ConfigError, match='vocab_size: expected an integer of at least 2, got 1'):
    SyntheticLMInput(seq_len=4, vocab_size=1, batch_size=2)
  with pytest.raises(ConfigError, match='num_synthetic_examples'):
    SyntheticLMInput(seq_len=4, vocab_size=9, num_synthetic_examples=0, batch_size=2)
