"""A chain of layers is its layers, called one after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.layers import Activation, BatchNorm, Dropout, Linear, Repeat, Sequential, StackingOverTime
from praxis_lite.layers.base import Layer

X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)


class Pair(Layer):
  """Returns its arguments in a tuple, or in a dict."""

  as_dict: bool = False

  def __call__(self, x, y=0.0):
    return {'y': x + 1, 'x': y} if self.as_dict else (x + 1, y)


class Difference(Layer):
  def __call__(self, x, y, *, scale=1.0):
    return (x - y) * scale


def chain(*configs, **fields):
  return Config(Sequential, layers_tpl=configs, **fields).instantiate()


def test_a_chain_computes_what_its_layers_do_in_turn():
  layer = chain(
    Config(Linear, input_dims=6, output_dims=5, use_bias=True),
    Config(Activation, activation='relu'),
    Config(Linear, input_dims=5, output_dims=3),
  )
  variables = layer.init(jax.random.key(0))
  assert jax.tree.map(np.shape, variables) == {'layers_0': {'w': (6, 5), 'b': (5,)}, 'layers_2': {'w': (5, 3)}}
  y, _ = layer.apply(variables, X)
  expected = np.maximum(X @ variables['layers_0']['w'], 0) @ variables['layers_2']['w']
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_a_single_layer_is_a_chain():
  np.testing.assert_array_equal(chain(Config(Activation, activation='identity')).apply({}, X)[0], X)


@pytest.mark.parametrize('as_dict', [False, True])
def test_the_entries_of_a_tuple_or_dict_are_the_next_arguments(as_dict):
  y, _ = chain(Config(Pair, as_dict=as_dict), Config(Difference)).apply({}, X, 3.0)
  np.testing.assert_allclose(y, 3.0 - (X + 1) if as_dict else X + 1 - 3.0, rtol=1e-6)


def test_named_arguments_go_to_the_layers_that_take_them():
  """Here, `weights` is an argument of the norm alone, and `scale` one of the difference."""
  layer = chain(Config(BatchNorm, dims=6), Config(Pair), Config(Difference))
  weights = np.array([1.0, 0.0, 0.0, 1.0], np.float32)
  y, _ = layer.apply(layer.init(jax.random.key(0)), X, weights=weights, scale=2.0)
  alone = Config(BatchNorm, dims=6).instantiate()
  norm, _ = alone.apply(alone.init(jax.random.key(0)), X, weights)
  np.testing.assert_allclose(y, 2 * (norm + 1), rtol=1e-5, atol=1e-6)
  with pytest.raises(ConfigError, match="Sequential: none of its layers takes an argument named 'weight'"):
    layer.apply(layer.init(jax.random.key(0)), X, weight=weights)


def test_side_outputs_keys_and_modes_are_those_of_the_layers():
  layer = chain(Config(BatchNorm, dims=6), Config(Dropout, rate=0.5), Config(Dropout, rate=0.5))
  variables = layer.init(jax.random.key(0))
  y, side = layer.apply(variables, jnp.ones((400, 6)) * jnp.arange(6.0), key=jax.random.key(1))
  assert side.updates.keys() == {'layers_0'}
  y, _ = layer.apply(
    variables | {'layers_0': variables['layers_0'] | {'bias': np.ones(6, np.float32)}}, X * 0, key=jax.random.key(1)
  )
  assert set(np.unique(y)) == {0.0, 4.0}  # The masks of the two layers differ.
  np.testing.assert_array_equal(layer.apply(variables, X * 0, do_eval=True)[0], X * 0)


def test_a_chain_can_be_repeated_and_nested():
  linear = Config(Linear, input_dims=6, output_dims=6)
  inner = Config(Sequential, layers_tpl=(linear, Config(Activation, activation='tanh')))
  layer = Config(Repeat, layers_tpl=Config(Sequential, layers_tpl=(inner, linear)), num_layers=3).instantiate()
  variables = layer.init(jax.random.key(0))
  first, second = variables['layers']['layers_0']['layers_0']['w'], variables['layers']['layers_1']['w']
  assert first.shape == (3, 6, 6)
  expected = X
  for i in range(3):
    expected = np.tanh(expected @ first[i]) @ second[i]
  np.testing.assert_allclose(layer.apply(variables, X)[0], expected, rtol=1e-4, atol=1e-5)


def test_mistakes_are_named():
  with pytest.raises(ConfigError, match=r'Sequential\.layers_tpl: expected the config of at least one layer'):
    chain()
  with pytest.raises(ConfigError, match=r'layers_1: create_child takes the Config of a layer'):
    chain(Config(Activation, activation='relu'), Activation)
  with pytest.raises((TypeError, UserError), match='positional argument'):
    chain(Config(StackingOverTime), Config(Activation, activation='relu')).apply({}, X[None])
