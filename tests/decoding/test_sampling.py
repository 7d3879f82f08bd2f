"""Frequencies of drawn tokens against distributions computed one token at a time in NumPy."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.decoding import sample_tokens

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


def test_rows_draw_with_their_own_keys():
  keys = jax.random.split(jax.random.key(1), 64)
  logits = jnp.zeros((64, 50))
  ids = sample_tokens(logits, keys)
  assert len(set(ids.tolist())) > 20
  np.testing.assert_array_equal(sample_tokens(logits[::-1], keys[::-1]), ids[::-1])
