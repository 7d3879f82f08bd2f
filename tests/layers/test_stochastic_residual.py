"""Stochastic depth: whole rows lose a residual branch in training, and only there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import RepeatedTransformer, StackedTransformer, StochasticResidual, TransformerBlock

KEY = jax.random.key(0)


def add(x, branch, key=KEY, do_eval=False, **fields):
  layer = Config(StochasticResidual, **fields).instantiate()
  return np.asarray(layer.apply({}, x, branch, key=key, do_eval=do_eval)[0])


def test_rows_keep_their_branch_whole_and_scaled_or_lose_it():
  x, branch = np.full((1000, 2, 3), 5.0, np.float32), np.ones((1000, 2, 3), np.float32)
  y = add(x, branch, rate=0.2)
  np.testing.assert_array_equal(y, np.broadcast_to(y[:, :1, :1], y.shape))
  assert set(np.unique(y)) == {5.0, 6.25}
  assert (y[:, 0, 0] == 5).mean() == pytest.approx(0.2, abs=0.04)
  assert y.mean() == pytest.approx(6, abs=0.05)


@pytest.mark.parametrize('weight', [1.0, 0.5])
@pytest.mark.parametrize('fields, do_eval', [({'rate': 0.9}, True), ({'rate': 0.0}, False), ({}, False)], ids=str)
def test_evaluation_and_rate_zero_add_the_branch_and_need_no_key(fields, do_eval, weight):
  rng = np.random.default_rng(0)
  x, branch = rng.standard_normal((2, 3, 4)).astype(np.float32), rng.standard_normal((2, 3, 4)).astype(np.float32)
  y = add(x, branch, key=None, do_eval=do_eval, residual_weight=weight, **fields)
  np.testing.assert_allclose(y, x + weight * branch, rtol=1e-6)


@pytest.mark.parametrize('shape', [(5,), (1, 3), (4, 2, 2, 3)], ids=str)
def test_arrays_of_any_rank(shape):
  y = add(np.zeros(shape, np.float32), np.ones(shape, np.float32), rate=0.5)
  assert y.shape == shape
  assert set(np.unique(y)) <= {0.0, 2.0}


def test_a_dropped_row_has_no_gradient_even_if_its_branch_is_not_finite():
  layer = Config(StochasticResidual, rate=0.5).instantiate()
  x, branch = np.zeros((8, 2), np.float32), np.full((8, 2), np.inf, np.float32)
  y, _ = layer.apply({}, x, branch, key=KEY)
  kept = np.isinf(np.asarray(y)[:, 0])
  assert 0 < kept.sum() < 8
  grad = jax.grad(lambda branch: jnp.sum(layer.apply({}, x, branch, key=KEY)[0]))(jnp.ones((8, 2)))
  np.testing.assert_array_equal(grad, np.where(kept[:, None], [2.0, 2.0], 0))


def test_it_keeps_the_dtype_and_draws_anew_with_each_key():
  x = np.zeros((64, 1), np.float32)
  layer = Config(StochasticResidual, rate=0.5).instantiate()
  assert layer.apply({}, jnp.bfloat16(x), jnp.bfloat16(x), key=KEY)[0].dtype == jnp.bfloat16
  assert (add(x, x + 1, rate=0.5) != add(x, x + 1, rate=0.5, key=jax.random.key(1))).any()


@pytest.mark.parametrize('rate', [1.0, -0.1])
def test_impossible_rate_is_refused(rate):
  with pytest.raises(ConfigError, match=rf'StochasticResidual\.rate: expected at least 0 and less than 1, got {rate}'):
    Config(StochasticResidual, rate=rate).instantiate()


# ---------------------------------------------------------------- in a transformer


def stack(cls, **residual):
  block = Config(TransformerBlock, input_dims=4, hidden_dims=5, num_heads=2)
  block.residual_tpl = Config(StochasticResidual, **residual) if residual else None
  return Config(cls, layers_tpl=block, num_layers=3).instantiate()


@pytest.mark.slow
def test_a_transformer_whose_branches_are_dropped():
  """At a rate near 1, rows pass unchanged; in evaluation, and with a rate of 0, nothing changes."""
  x = np.random.default_rng(0).standard_normal((6, 3, 4)).astype(np.float32)
  plain, deep, half = (stack(StackedTransformer, **f) for f in ({}, {'rate': 0.999}, {'residual_weight': 0.5}))
  variables = plain.init(KEY)

  @jax.jit
  def results(v):
    at_eval = [layer.apply(v, x, do_eval=True)[0] for layer in (plain, deep, half)]
    return deep.apply(v, x, key=KEY)[0], *at_eval

  dropped, expected, at_eval, halved = results(variables)
  np.testing.assert_allclose(dropped, x, rtol=1e-6)
  np.testing.assert_allclose(at_eval, expected, rtol=1e-6)
  assert np.abs(halved - expected).max() > 1e-3


def test_repeated_layers_drop_different_rows():
  """Of 3 layers with 2 branches each, few rows keep all."""
  x = np.random.default_rng(0).standard_normal((200, 1, 4)).astype(np.float32)
  layer = stack(RepeatedTransformer, rate=0.5)
  y, _ = jax.jit(layer.apply)(layer.init(KEY), x, key=KEY)
  unchanged = (np.asarray(y) == x).all(axis=(1, 2)).mean()
  assert unchanged == pytest.approx(0.5**6, abs=0.03)
