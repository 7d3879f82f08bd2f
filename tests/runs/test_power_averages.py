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
      factors = combine_averages(known, width, step)
      made = sum(f * kept[each][at - 1] for f, (at, each) in zip(factors, known))
      true = averages_of(values[:step], width)[-1]
      assert abs(made - true) < 0.02 * np.ptp(values), (step, width)


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
  with pytest.raises(ConfigError, match=r'power_averages: expected different widths'):
    run_train(tiny_run(learner={'power_averages': (0.1, 0.1)}), tmp_path / 'other')


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
