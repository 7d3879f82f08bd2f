"""Frequencies of drawn tokens against distributions computed one token at a time in NumPy."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.models.decoding import Sampler, sample_tokens

LOGITS = np.array([0.3, 2.0, -1.0, 1.2, 2.0, 0.0], np.float32)
DRAWS = 20000


def truncated(logits, temperature, top_k, top_p):
  """The smallest allowed sets by definition: tokens by falling probability, lower ids first among equals."""
  probs = np.exp(logits / temperature)
  probs /= probs.sum()
  order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
  kept = order[:top_k] if top_k else order
  if top_p is not None:
    total = sum(probs[i] for i in kept)
    n = next(n for n in range(1, len(kept) + 1) if sum(probs[i] for i in kept[:n]) / total >= top_p - 1e-7)
    kept = kept[:n]
  expected = np.zeros(len(probs))
  expected[kept] = probs[kept]
  return expected / expected.sum()


@pytest.mark.parametrize(
  'temperature, top_k, top_p', list(itertools.product([1.0, 0.5], [None, 1, 3, 9], [None, 0.2, 0.85, 1.0]))
)
def test_tokens_are_drawn_from_the_truncated_distribution(temperature, top_k, top_p):
  keys = jax.random.split(jax.random.key(0), DRAWS)
  logits = jnp.broadcast_to(LOGITS, (DRAWS, 6))
  # Not under jit: the operations are compiled once for all cases.
  drawn = sample_tokens(logits, keys, temperature=temperature, top_k=top_k, top_p=top_p)
  frequencies = np.bincount(drawn, minlength=6) / DRAWS
  expected = truncated(LOGITS.astype(np.float64), temperature, top_k, top_p)
  assert set(np.flatnonzero(frequencies)) <= set(np.flatnonzero(expected))
  # Five standard deviations of a frequency at most.
  np.testing.assert_allclose(frequencies, expected, atol=5 * 0.5 / np.sqrt(DRAWS))


def test_zero_temperature_takes_the_most_probable():
  keys = jax.random.split(jax.random.key(0), 2)
  ids = sample_tokens(jnp.stack([LOGITS, -LOGITS]), keys, temperature=0.0, top_k=3)
  np.testing.assert_array_equal(ids, [1, 2])
  assert ids.dtype == jnp.int32


# Half of float16's largest, and float32 beyond what 1 / temperature can be multiplied by.
ROWS = {
  'usual': LOGITS + np.array([0, 0.5, 0, 0, 0, 0], np.float32),
  'huge': np.array([-6e4, 3e4, 2.9e4, 6e4, 5e4, 0], np.float32),
  'impossible tokens': np.array([-np.inf, 0.5, -np.inf, 0.25, 1.5, -np.inf], np.float32),
}


@pytest.mark.parametrize('name', ROWS)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('top_k, top_p', [(None, None), (3, None), (None, 0.9), (2, 1.0)])
def test_the_coldest_temperatures_take_the_most_probable(name, dtype, top_k, top_p):
  logits = jnp.broadcast_to(jnp.asarray(ROWS[name], dtype), (64, 6))
  most = np.full(64, ROWS[name].argmax())
  keys = jax.random.split(jax.random.key(2), 64)
  for temperature in (1e-20, 2e-38, 1.1754944e-38, 1e-38, 1e-39, 1e-45, 5e-324, 0.0, np.float32(1e-39), 0):
    drawn = sample_tokens(logits, keys, temperature=temperature, top_k=top_k, top_p=top_p)
    np.testing.assert_array_equal(drawn, most, err_msg=str(temperature))


def test_logits_beyond_float32_at_a_temperature_are_told_apart():
  logits = jnp.broadcast_to(jnp.array([3e38, 2.9e38, -3e38]), (64, 3))
  keys = jax.random.split(jax.random.key(3), 64)
  np.testing.assert_array_equal(sample_tokens(logits, keys, temperature=0.5), 0)


@pytest.mark.parametrize('temperature', [1e38, 1e39, 1e300, float('inf')])
def test_the_hottest_temperatures_draw_all_that_is_possible_alike(temperature):
  keys = jax.random.split(jax.random.key(4), 3000)
  logits = jnp.broadcast_to(jnp.array([-jnp.inf, 0.0, 5.0, -3.0]), (3000, 4))
  counts = np.bincount(sample_tokens(logits, keys, temperature=temperature), minlength=4)
  np.testing.assert_allclose(counts / 3000, [0, 1 / 3, 1 / 3, 1 / 3], atol=0.05)


@pytest.mark.parametrize('temperature', [-1.0, -1e-39, float('nan'), float('-inf')])
def test_impossible_temperatures_are_refused(temperature):
  keys = jax.random.split(jax.random.key(5), 1)
  with pytest.raises(ConfigError, match=r'^Sampler.temperature: expected at least 0, got (-|nan)'):
    sample_tokens(jnp.zeros((1, 3)), keys, temperature=temperature)
  with pytest.raises(ConfigError, match=r'Sampler.temperature: expected at least 0, got (-|nan)'):
    Config(Sampler, temperature=temperature).instantiate()


def test_rows_draw_with_their_own_keys():
  keys = jax.random.split(jax.random.key(1), 64)
  logits = jnp.zeros((64, 50))
  ids = sample_tokens(logits, keys)
  assert len(set(ids.tolist())) > 20
  np.testing.assert_array_equal(sample_tokens(logits[::-1], keys[::-1]), ids[::-1])
