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
from praxis_lite.models.decoding.processors import (
  exclude_early_stops,
  exclude_ngrams,
  penalize_counts,
  penalize_repetition,
)

LOGITS = np.array([0.3, 2.0, -1.0, 1.2, 2.0, 0.0], np.float32)
DRAWS = 20000


def truncated(logits, temperature, top_k, top_p, min_p=None, typical_p=None, top_n_sigma=None):
  """The smallest allowed sets by definition: tokens by falling probability, lower ids first among equals."""
  if top_n_sigma is not None:
    logits = np.where(logits >= logits.max() - top_n_sigma * logits.std(), logits, -np.inf)
  probs = np.exp(logits / temperature)
  probs /= probs.sum()
  order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
  kept = order[:top_k] if top_k else order
  if top_p is not None:
    total = sum(probs[i] for i in kept)
    n = next(n for n in range(1, len(kept) + 1) if sum(probs[i] for i in kept[:n]) / total >= top_p - 1e-7)
    kept = kept[:n]
  kept = [i for i in kept if probs[i] > 0 and probs[i] >= (min_p or 0) * probs.max() - 1e-12]
  if typical_p is not None:
    p = probs[kept] / probs[kept].sum()
    surprise = np.abs(-np.log(p) + np.sum(p * np.log(p)))
    nearest = np.argsort(surprise, kind='stable')
    n = next(n for n in range(1, len(p) + 1) if p[nearest[:n]].sum() >= typical_p - 1e-7)
    kept = [kept[i] for i in nearest[:n]]
  expected = np.zeros(len(probs))
  expected[kept] = probs[kept]
  return expected / expected.sum()


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'temperature, top_k, top_p, min_p',
  [
    *itertools.product([1.0, 0.5], [None, 1, 3, 9], [None, 0.2, 0.85, 1.0], [None]),
    *[
      (1.0, None, None, 0.0),
      (1.0, 0, None, None),
      (1.0, 0, 0.85, None),
      (1.0, None, None, 0.2),
      (2.0, None, None, 0.2),
      (1.0, 3, 0.9, 0.5),
      (1.0, None, 0.85, 1.0),
    ],
  ],
)
def test_tokens_are_drawn_from_the_truncated_distribution(temperature, top_k, top_p, min_p):
  keys = jax.random.split(jax.random.key(0), DRAWS)
  logits = jnp.broadcast_to(LOGITS, (DRAWS, 6))
  # Not under jit: the operations are compiled once for all cases.
  drawn = sample_tokens(logits, keys, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
  frequencies = np.bincount(drawn, minlength=6) / DRAWS
  expected = truncated(LOGITS.astype(np.float64), temperature, top_k, top_p, min_p)
  assert set(np.flatnonzero(frequencies)) <= set(np.flatnonzero(expected))
  # Five standard deviations of a frequency at most.
  np.testing.assert_allclose(frequencies, expected, atol=5 * 0.5 / np.sqrt(DRAWS))


@pytest.mark.parametrize(
  'fields',
  [
    {'typical_p': 0.2},
    {'typical_p': 0.7},
    {'typical_p': 1.0},
    {'typical_p': 0.5, 'temperature': 0.5},
    {'typical_p': 0.6, 'top_k': 4, 'min_p': 0.1},
    {'top_n_sigma': 0.5},
    {'top_n_sigma': 1.0, 'temperature': 3.0},
    {'top_n_sigma': 9.0},
    {'top_n_sigma': 1.5, 'top_p': 0.8},
  ],
  ids=str,
)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_typical_tokens_and_those_within_sigmas(fields, dtype):
  keys, logits = jax.random.split(jax.random.key(0), DRAWS), jnp.asarray(LOGITS, dtype)
  drawn = sample_tokens(jnp.broadcast_to(logits, (DRAWS, 6)), keys, **fields)
  frequencies = np.bincount(drawn, minlength=6) / DRAWS
  expected = truncated(np.asarray(logits, np.float64), **{'temperature': 1.0, 'top_k': None, 'top_p': None, **fields})
  assert set(np.flatnonzero(frequencies)) == set(np.flatnonzero(expected))
  np.testing.assert_allclose(frequencies, expected, atol=5 * 0.5 / np.sqrt(DRAWS))


def test_impossible_tokens_count_for_neither():
  keys = jax.random.split(jax.random.key(0), 500)
  logits = np.array([-np.inf, 1.0, 0.9, -3.0, -np.inf, -np.inf])
  drawn = sample_tokens(jnp.broadcast_to(logits, (500, 6)), keys, typical_p=0.9, top_n_sigma=1.0)
  assert set(np.asarray(drawn).tolist()) == {1, 2}  # The deviation of all six would be infinite.


def repeated(row, size):
  """The tokens that would end a group of `size` tokens that is in the row already, by definition."""
  groups = {tuple(row[i : i + size]) for i in range(len(row) - size + 1)}
  return [t for t in range(6) if len(row) + 1 >= size and (*row[len(row) - size + 1 :], t) in groups]


@pytest.mark.parametrize('size', [1, 2, 3, 5])
def test_what_repeats_a_row_is_less_probable_or_excluded(size):
  rng = np.random.default_rng(size)
  lengths = np.array([0, 1, 2, 4, 9, 12])
  ids = rng.integers(0, 4, (6, 12)).astype(np.int32)
  ids[np.arange(12) >= lengths[:, None]] = 5  # Arbitrary: it must have no effect.
  logits = rng.normal(size=(6, 6)).astype(np.float32)
  penalized = penalize_repetition(logits, ids, lengths, 1.5)
  excluded = exclude_ngrams(logits, ids, lengths, size)
  for row, length in enumerate(lengths):
    text = ids[row, :length].tolist()
    expected = [x if t not in text else x / 1.5 if x > 0 else x * 1.5 for t, x in enumerate(logits[row])]
    np.testing.assert_allclose(penalized[row], expected, rtol=1e-6)
    expected = np.where(np.isin(np.arange(6), repeated(text, size)), -np.inf, logits[row])
    np.testing.assert_array_equal(excluded[row], expected)
  np.testing.assert_array_equal(exclude_ngrams(logits, ids, lengths, 13), logits)


def test_counts_are_those_of_the_continuation():
  rng = np.random.default_rng(0)
  ids, logits = rng.integers(0, 4, (5, 9)).astype(np.int32), rng.normal(size=(5, 6)).astype(np.float32)
  lengths, prompts = np.array([0, 3, 9, 9, 5]), np.array([0, 3, 0, 4, 2])
  found = penalize_counts(logits, ids, lengths, prompt_lengths_B=prompts, presence=0.7, frequency=0.2)
  for row in range(5):
    counts = np.bincount(ids[row, prompts[row] : lengths[row]], minlength=6)
    np.testing.assert_allclose(found[row], logits[row] - 0.2 * counts - 0.7 * (counts > 0), rtol=1e-6)


def test_stop_tokens_are_excluded_until_there_are_enough_tokens():
  ids, logits = np.zeros((4, 9), np.int32), np.zeros((4, 6), np.float32)
  lengths, prompts = np.array([2, 3, 4, 5]), np.array([2, 2, 2, 5])
  found = exclude_early_stops(logits, ids, lengths, prompt_lengths_B=prompts, stop_ids=(1, 5), least=2)
  assert np.isneginf(found).sum(1).tolist() == [2, 2, 0, 2] and np.isneginf(found[0, [1, 5]]).all()
  assert np.isfinite(exclude_early_stops(logits, ids, lengths, prompt_lengths_B=prompts, stop_ids=(), least=2)).all()


def test_repetitions_are_those_of_transformers():
  torch = pytest.importorskip('torch', reason='needs PyTorch: pip install praxis_lite[hf-oracle]')
  theirs = pytest.importorskip('transformers', reason='needs transformers: pip install praxis_lite[hf-oracle]')
  rng = np.random.default_rng(0)
  ids, logits = rng.integers(0, 6, (5, 12)).astype(np.int32), rng.normal(size=(5, 6)).astype(np.float32)
  lengths, inputs = np.full(5, 12), (torch.tensor(ids, dtype=torch.long), torch.tensor(logits))
  expected = theirs.RepetitionPenaltyLogitsProcessor(1.3)(*inputs)
  np.testing.assert_allclose(penalize_repetition(logits, ids, lengths, 1.3), expected, rtol=1e-6)
  for size in (1, 2, 3):
    expected = theirs.NoRepeatNGramLogitsProcessor(size)(*inputs)
    np.testing.assert_array_equal(exclude_ngrams(logits, ids, lengths, size), expected)
  expected = theirs.MinPLogitsWarper(0.3)(*inputs).isfinite()
  keys = jax.random.split(jax.random.key(0), 2000)
  for mass in (0.3, 0.8):
    expected_typical = theirs.TypicalLogitsWarper(mass)(*inputs).isfinite()
    for row in range(5):
      drawn = sample_tokens(jnp.broadcast_to(logits[row], (2000, 6)), keys, typical_p=mass)
      assert set(np.asarray(drawn).tolist()) == set(np.flatnonzero(expected_typical[row]).tolist())
  for row in range(5):
    drawn = sample_tokens(jnp.broadcast_to(logits[row], (2000, 6)), keys, min_p=0.3)
    assert set(np.asarray(drawn).tolist()) == set(np.flatnonzero(expected[row]).tolist())


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
