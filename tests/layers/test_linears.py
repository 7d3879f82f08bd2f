"""Linear and feed-forward layers, activations and dropout, against their formulas."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import (
  ACTIVATIONS,
  Activation,
  Bias,
  Dropout,
  FeedForward,
  GatedFeedForward,
  Linear,
  get_activation,
)
from praxis_lite.sharding.weights import WeightHParamsCollection

B, T, D, F = 2, 3, 4, 6
KEY = jax.random.key(0)


def x_BTD():
  return np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)


def run(cls, x, **fields):
  layer = Config(cls, **fields).instantiate()
  rng = np.random.default_rng(1)
  variables = jax.tree.map(lambda w: rng.standard_normal(w.shape).astype(np.float32), layer.abstract_init())
  return variables, layer.apply(variables, x, do_eval=True)[0]


# ---------------------------------------------------------------- linear, bias


@pytest.mark.parametrize('use_bias', [True, False])
def test_linear(use_bias):
  v, y = run(Linear, x_BTD(), input_dims=D, output_dims=F, use_bias=use_bias)
  np.testing.assert_allclose(y, x_BTD() @ v['w'] + v.get('b', 0), rtol=1e-4)
  assert set(v) == ({'w', 'b'} if use_bias else {'w'})


def test_bias():
  v, y = run(Bias, x_BTD(), dims=D)
  np.testing.assert_allclose(y, x_BTD() + v['b'], rtol=1e-6)


def test_biases_begin_at_zero_are_not_regularized_and_split_as_the_output():
  config = Config(Linear, input_dims=D, output_dims=F, use_bias=True)
  config.weight_split_dims_mapping.wt = ('data', 'mdl')
  layer = config.instantiate()
  weights = layer.abstract_init()
  assert weights['b'].tensor_split_dims_mapping == ('mdl',)
  assert weights['b'].collections == {WeightHParamsCollection.SKIP_REGULARIZATION}
  assert not weights['w'].collections
  np.testing.assert_array_equal(layer.init(KEY)['b'], np.zeros(F))


def test_linear_computes_in_its_compute_dtype():
  layer = Config(Linear, input_dims=D, output_dims=F, use_bias=True, fprop_dtype=jnp.bfloat16).instantiate()
  y, _ = layer.apply(layer.init(KEY), x_BTD())
  assert y.dtype == jnp.bfloat16


# ---------------------------------------------------------------- feed-forward


def gelu(x):
  return np.vectorize(lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2))))(x)


def silu(x):
  return x / (1 + np.exp(-x))


def test_feed_forward():
  v, y = run(FeedForward, x_BTD(), input_dims=D, hidden_dims=F, activation='gelu')
  hidden = gelu(x_BTD() @ v['up']['w'] + v['up']['b'])
  np.testing.assert_allclose(y, hidden @ v['down']['w'] + v['down']['b'], atol=1e-4)


def test_gated_feed_forward():
  v, y = run(GatedFeedForward, x_BTD(), input_dims=D, hidden_dims=F)
  assert jax.tree.map(np.shape, v) == {'gate': {'w': (D, F)}, 'up': {'w': (D, F)}, 'down': {'w': (F, D)}}
  hidden = silu(x_BTD() @ v['gate']['w']) * (x_BTD() @ v['up']['w'])
  np.testing.assert_allclose(y, hidden @ v['down']['w'], atol=1e-4)


def test_the_way_out_is_split_as_the_way_in_unless_it_says_otherwise():
  config = Config(GatedFeedForward, input_dims=D, hidden_dims=F)
  config.weight_split_dims_mapping.wt = ('data', 'mdl')
  weights = config.instantiate().abstract_init()
  splits = {name: weights[name]['w'].tensor_split_dims_mapping for name in weights}
  assert splits == {'gate': ('data', 'mdl'), 'up': ('data', 'mdl'), 'down': ('mdl', 'data')}
  config.weight_split_dims_mapping.down = (None, 'mdl')
  assert config.instantiate().abstract_init()['down']['w'].tensor_split_dims_mapping == (None, 'mdl')


def test_dropout_falls_on_the_hidden_layer():
  """Where all hidden entries but a few are dropped, the output is what these few make of it."""
  layer = Config(FeedForward, input_dims=1, hidden_dims=50, activation='identity', use_bias=False).set(
    dropout_tpl=Config(Dropout, rate=0.9)
  )
  variables = {'up': {'w': np.ones((1, 50), np.float32)}, 'down': {'w': np.ones((50, 1), np.float32)}}
  y, _ = layer.instantiate().apply(variables, np.ones((200, 1), np.float32), key=KEY)
  kept = np.asarray(y).ravel() / 10  # Each kept entry counts 1 / (1 - rate).
  np.testing.assert_allclose(kept, np.round(kept), atol=1e-4)
  assert kept.mean() == pytest.approx(5, abs=0.6)


# ---------------------------------------------------------------- activations

REFERENCES = {
  'identity': lambda x: x,
  'relu': lambda x: np.maximum(x, 0),
  'relu6': lambda x: np.clip(x, 0, 6),
  'squared_relu': lambda x: np.maximum(x, 0) ** 2,
  'cubed_relu': lambda x: np.maximum(x, 0) ** 3,
  'leaky_relu': lambda x: np.where(x > 0, x, 0.01 * x),
  'elu': lambda x: np.where(x > 0, x, np.expm1(x)),
  'gelu': gelu,
  'gelu_tanh': lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
  'gelu_sigmoid': lambda x: x / (1 + np.exp(-1.702 * x)),
  'silu': silu,
  'sigmoid': lambda x: 1 / (1 + np.exp(-x)),
  'tanh': np.tanh,
  'softplus': lambda x: np.log1p(np.exp(x)),
  'exp': np.exp,
}


@pytest.mark.parametrize('name', ACTIVATIONS)
def test_activation(name):
  x = np.linspace(-8, 8, 101)
  np.testing.assert_allclose(get_activation(name)(jnp.float32(x)), REFERENCES[name](x), rtol=1e-4, atol=1e-5)


def test_an_activation_is_a_layer_too():
  v, y = run(Activation, x_BTD(), activation='cubed_relu')
  np.testing.assert_allclose(y, np.maximum(x_BTD(), 0) ** 3, rtol=1e-5)
  assert v == {}


@pytest.mark.parametrize('cls', [FeedForward, GatedFeedForward])
def test_unknown_activation_is_refused_when_the_layer_is_built(cls):
  with pytest.raises(ConfigError, match=r"activation: unknown activation 'sliu'\. Did you mean 'silu'\?"):
    Config(cls, input_dims=D, hidden_dims=F, activation='sliu').instantiate()
  with pytest.raises(ConfigError, match=r"^Activation\.activation: unknown activation 'sliu'"):
    Config(Activation, activation='sliu').instantiate()


# ---------------------------------------------------------------- dropout


def drop(x, key=KEY, do_eval=False, **fields):
  return np.asarray(Config(Dropout, **fields).instantiate().apply({}, x, key=key, do_eval=do_eval)[0])


def test_dropout_keeps_the_mean_and_scales_what_it_keeps():
  y = drop(np.full((400, 50), 2.0, np.float32), rate=0.3)
  assert set(np.unique(y)) == {np.float32(0), np.float32(2) / np.float32(0.7)}
  assert (y == 0).mean() == pytest.approx(0.3, abs=0.015)
  assert y.mean() == pytest.approx(2, abs=0.05)


def test_dropout_draws_anew_with_each_key_only():
  x = np.ones((20, 20), np.float32)
  np.testing.assert_array_equal(drop(x, rate=0.5), drop(x, rate=0.5))
  assert not np.array_equal(drop(x, rate=0.5), drop(x, rate=0.5, key=jax.random.key(1)))


@pytest.mark.parametrize('fields, do_eval', [({'rate': 0.5}, True), ({'rate': 0.0}, False)])
def test_dropout_does_nothing_in_evaluation_or_at_rate_zero_and_needs_no_key(fields, do_eval):
  np.testing.assert_array_equal(drop(x_BTD(), key=None, do_eval=do_eval, **fields), x_BTD())


def test_broadcast_dims_are_dropped_together():
  y = drop(np.ones((30, 7, 20), np.float32), rate=0.5, broadcast_dims=(1,))
  np.testing.assert_array_equal(y, np.broadcast_to(y[:, :1], y.shape))
  assert 0.4 < (y[:, 0] == 0).mean() < 0.6
  np.testing.assert_array_equal(y, drop(np.ones((30, 7, 20), np.float32), rate=0.5, broadcast_dims=(-2,)))


def test_dropout_keeps_the_dtype():
  layer = Config(Dropout, rate=0.5).instantiate()
  assert layer.apply({}, jnp.ones(3, jnp.bfloat16), key=KEY)[0].dtype == jnp.bfloat16


@pytest.mark.parametrize('rate', [1.0, -0.1, 1.5])
def test_impossible_rate_is_refused(rate):
  with pytest.raises(ConfigError, match=rf'rate: expected at least 0 and less than 1, got {rate}'):
    Config(Dropout, rate=rate).instantiate()
