"""Averages whose width is a share of a run, also of other widths, after the run, are sums over its steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_multi_learner_runs import rule, two_rates
from tiny_runs import tiny_run

import praxis_lite
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.runs import run_train
from praxis_lite.training.learning.power_averages import (
  combine_averages,
  exponent_of,
  start_averages,
  update_averages,
)


def test_exponents_have_the_relative_widths_of_the_paper():
  assert [round(exponent_of(width), 2) for width in (0.05, 0.1)] == [16.97, 6.94]
  t = np.linspace(0, 1, 200_001)
  for width in (0.05, 0.2):
    density = (g := exponent_of(width) + 1) * t ** (g - 1)
    density /= density.sum()
    assert np.sqrt((density * t**2).sum() - (density * t).sum() ** 2) == pytest.approx(width, rel=1e-3)


def averages_of(values, width):
  def step(averages, x):
    averages = update_averages(averages, {'w': x[1]}, (width,), x[0])
    return averages, averages['0']['w']

  start = start_averages({'w': jnp.zeros(())}, (width,))
  numbered = (jnp.arange(len(values)), jnp.float32(values))
  return np.asarray(jax.lax.scan(step, start, numbered)[1], np.float64)


def test_an_average_of_another_width_is_a_sum_of_those_in_checkpoints():
  """Of a walk, at its end and before it: much nearer than the averages that it is made of."""
  values = np.cumsum(np.random.default_rng(0).standard_normal(400))
  kept = {width: averages_of(values, width) for width in (0.05, 0.1)}
  for step in (400, 320):
    known = [(at, width) for width in kept for at in range(20, step + 1, 20)]
    for width in (0.05, 0.07, 0.15, 0.2):
      factors, missed = combine_averages(known, width, step)
      assert missed < 0.06
      made = sum(f * kept[each][at - 1] for f, (at, each) in zip(factors, known))
      true = averages_of(values[:step], width)[-1]
      assert abs(made - true) < 0.02 * np.ptp(values), (step, width)


@pytest.mark.parametrize('count', [1, 2, 3])
def test_constant_variables_are_their_own_average(count):
  """The factors sum to 1, however few averages there are, and whatever they miss."""
  known = [(9 - 3 * i, width) for i in range(count) for width in (0.05, 0.1)]
  found = {width: combine_averages(known, width, 9) for width in (0.02, 0.05, 0.07, 0.15, 0.28)}
  for factors, _ in found.values():
    assert factors.sum() == pytest.approx(1.0, abs=1e-12)
  # In integrals over time: the weights of the width, and of the sum.
  t = (np.arange(100_000) + 0.5) * 9 / 100_000
  weights = lambda at, width: (g := exponent_of(width) + 1) * np.where(t < at, t, 0.0) ** (g - 1) / at**g  # noqa: E731
  for width, (factors, missed) in found.items():
    rest = weights(9, width) - sum(f * weights(*each) for f, each in zip(factors, known))
    expected = np.linalg.norm(rest) / np.linalg.norm(weights(9, width))
    assert missed == pytest.approx(expected, abs=2e-3), width
  assert found[0.05][1] < 1e-6 and found[0.28][1] > 0.5


@pytest.mark.slow
def test_a_loaded_run_takes_an_average_of_any_width(tmp_path):
  config = tiny_run(3, num_train_steps=9, save_interval_steps=1, max_to_keep=20, learner={'power_averages': (0.1, 0.2)})
  run_train(config, tmp_path)
  run = praxis_lite.open_run(tmp_path)
  saved = {step: run.load(step=step).variables for step in range(1, 10)}
  for width in (0.1, 0.2):
    for name in ('w', 'v'):
      terms, g = [np.float64(saved[step][name]) for step in range(1, 10)], exponent_of(width)
      expected = terms[0]
      for t, term in enumerate(terms[1:], 2):
        expected = expected + (1 - (1 - 1 / t) ** (g + 1)) * (term - expected)
      np.testing.assert_allclose(run.load(power_average=width).variables[name], expected, rtol=2e-4, atol=1e-5)
  other = run.load(power_average=0.15, mesh=(2,)).variables
  assert not np.allclose(other['w'], saved[9]['w'])
  for bad in (0.0, 0.5):
    with pytest.raises(ConfigError, match=r'load\(power_average=...\): expected relative widths'):
      run.load(power_average=bad)
  with pytest.raises(UserError, match=r'load\(ema=True, power_average=0\.1\): .* choose one'):
    run.load(ema=True, power_average=0.1)
  message = (
    r'load\(power_average=0\.28\): averages of widths 0\.1, 0\.2 in 3 checkpoints up to step 3 make it only up to '
  )
  with pytest.raises(UserError, match=message + r'an error of 26% of its weights, and 20% are the limit'):
    run.load(step=3, power_average=0.28)
  with pytest.raises(ConfigError, match=r'power_averages: expected different widths'):
    run_train(tiny_run(learner={'power_averages': (0.1, 0.1)}), tmp_path / 'other')


@pytest.mark.slow
def test_a_learning_rate_of_zero_leaves_an_average_what_the_weights_are(tmp_path):
  learner = {'power_averages': (0.05, 0.1), 'learning_rate': 0.0}
  run_train(tiny_run(num_train_steps=3, save_interval_steps=1, max_to_keep=3, learner=learner), tmp_path)
  run = praxis_lite.open_run(tmp_path)
  for step in (1, 2, 3):
    for width in (0.07, 0.15) if step == 3 else (0.07,):
      for name, x in run.load(step=step, power_average=width).variables.items():
        np.testing.assert_allclose(x, run.load(step=step).variables[name], rtol=1e-6)


def test_rules_have_averages_of_their_own_and_other_variables_stay(tmp_path):
  first = rule('first', 'w', optax.adam)
  first.learner.power_averages = (0.2,)
  config = two_rates(1, first, rule('rest', None, optax.lion), num_train_steps=4)
  result = run_train(config, tmp_path / 'run')
  run = praxis_lite.open_run(tmp_path / 'run')
  averaged, last = run.load(power_average=0.2).variables, run.load(ema=False).variables
  assert np.array_equal(averaged['v'], last['v']) and not np.array_equal(averaged['w'], last['w'])
  kept = result.state.opt_states['first']['averages']['0']['w']
  np.testing.assert_allclose(averaged['w'], np.asarray(kept)[: len(last['w'])], rtol=1e-5)
  run_train(tiny_run(num_train_steps=1), tmp_path / 'none')
  with pytest.raises(UserError, match='no checkpoint up to step 1 has averages'):
    praxis_lite.open_run(tmp_path / 'none').load(power_average=0.1)
