"""Weighted averages over batches on the host."""

from __future__ import annotations

import fractions

import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.runs.records.metrics import MetricsAverage, mean_values


def test_batches_of_unequal_weight_average_as_one_batch():
  rng = np.random.default_rng(0)
  values, weights = rng.random(50).astype(np.float32), rng.integers(0, 9, 50).astype(np.float32)
  average = MetricsAverage()
  for value, weight in zip(values, weights):
    average.add({'loss': (jnp.float32(value), jnp.float32(weight))})
  exact = sum(fractions.Fraction(float(v)) * int(w) for v, w in zip(values, weights)) / int(weights.sum())
  assert average.means()['loss'] == pytest.approx(float(exact), rel=1e-14)
  assert average.weights()['loss'] == weights.sum()


def test_sums_keep_what_float32_would_lose():
  average = MetricsAverage()
  average.add({'loss': (np.float32(1), np.float32(2**24))})
  for _ in range(64):
    average.add({'loss': (np.float32(0), np.float32(1))})
  assert average.weights()['loss'] == 2**24 + 64
  assert average.means()['loss'] == pytest.approx(2**24 / (2**24 + 64), rel=1e-15)


def test_a_value_of_zero_weight_does_not_count_even_if_it_is_nan():
  average = MetricsAverage()
  average.add({'loss': (np.nan, 0.0)})
  average.add({'loss': (2.0, 3.0)})
  assert average.means()['loss'] == 2.0


def test_without_any_weight_the_mean_is_nan():
  average = MetricsAverage()
  average.add({'loss': (1.0, 0.0)})
  assert np.isnan(average.means()['loss'])


def test_arrays_over_layers_are_averaged_by_element():
  average = MetricsAverage()
  average.add({'aux': (np.array([1.0, 10.0]), 1.0)})
  average.add({'aux': (np.array([3.0, 30.0]), 3.0)})
  np.testing.assert_allclose(average.means()['aux'], [2.5, 25.0])


def test_bfloat16_values_of_one_step_become_float64():
  values = mean_values({'loss': (jnp.bfloat16(1.5), jnp.bfloat16(2))})
  assert type(values['loss']) is float and values['loss'] == 1.5


def test_a_step_leaves_out_metrics_without_any_weight_except_the_loss():
  zero, some = np.zeros(2), np.array([0.0, 1.0])
  values = mean_values(
    {'loss': (0.0, 0.0), 'margin': (0.0, jnp.float32(0)), 'a': (zero, zero), 'b': (zero, some), 'c': (0.0, 1)}
  )
  assert values.keys() == {'loss', 'b', 'c'}
