"""Linear layers with normalized weights, against NumPy's norms and singular values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.layers import Linear, Repeat, SpectralNormLinear, WeightNormalizedLinear
from praxis_lite.sharding.weights import WeightHParamsCollection

IN, OUT = 5, 4
X = np.random.default_rng(0).standard_normal((3, IN)).astype(np.float32)
W = (3 * np.random.default_rng(1).standard_normal((IN, OUT))).astype(np.float32)
B = np.arange(OUT, dtype=np.float32)
NORMALIZED = [WeightNormalizedLinear, SpectralNormLinear]


def linear(cls, **fields):
  return Config(cls, input_dims=IN, output_dims=OUT, use_bias=True, **fields).instantiate()


def test_weight_norm_gives_columns_their_lengths():
  g = np.array([1.0, -2.0, 0.5, 0.0], np.float32)
  y, _ = linear(WeightNormalizedLinear).apply({'w': W, 'g': g, 'b': B}, X)
  np.testing.assert_allclose(y, X @ (W / np.linalg.norm(W, axis=0) * g) + B, rtol=1e-4, atol=1e-5)


def test_spectral_norm_divides_by_the_largest_singular_value():
  layer = linear(SpectralNormLinear)
  variables = layer.init(jax.random.key(0)) | {'w': W, 'b': B}
  train = jax.jit(layer.apply)
  for _ in range(100):
    _, side = train(variables, X)
    variables |= side.updates
  expected = X @ (W / np.linalg.svd(W, compute_uv=False)[0]) + B
  for do_eval in (False, True):
    y, side = layer.apply(variables, X, do_eval=do_eval)
    np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-4)
  assert not side.updates, 'an evaluation changes nothing'
  np.testing.assert_allclose(np.linalg.norm(variables['u']), 1, rtol=1e-5)
  left = np.linalg.svd(W)[0][:, 0]
  assert abs(variables['u'] @ left) == pytest.approx(1, abs=1e-4)


def test_each_call_in_training_is_a_step_of_the_power_method():
  layer = linear(SpectralNormLinear)
  u = np.random.default_rng(2).standard_normal(IN).astype(np.float32)
  _, side = layer.apply({'w': W, 'b': B, 'u': u}, X)
  v = u @ W
  expected = W @ (v / np.linalg.norm(v))
  np.testing.assert_allclose(side.updates['u'], expected / np.linalg.norm(expected), rtol=1e-4)


@pytest.mark.parametrize('cls', NORMALIZED)
def test_the_length_of_a_weight_has_no_effect_so_its_gradient_is_orthogonal(cls):
  layer = linear(cls)
  variables = layer.init(jax.random.key(0)) | {'w': W}
  if cls is SpectralNormLinear:
    variables['u'] = np.linalg.svd(W)[0][:, 0]

  @jax.jit
  @jax.value_and_grad
  def loss(w):
    return jnp.sum(jnp.sin(layer.apply(variables | {'w': w}, X)[0]))

  value, grad = loss(W)
  assert float(value) == pytest.approx(float(loss(7 * W)[0]), abs=1e-4)
  assert np.abs(grad).max() > 1e-3
  assert float(np.sum(grad * W)) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize('cls', NORMALIZED)
def test_a_weight_of_zeros_stays_finite(cls):
  layer = linear(cls)
  variables = layer.init(jax.random.key(0)) | {'w': np.zeros((IN, OUT), np.float32)}
  y, grad = jax.value_and_grad(lambda w: layer.apply(variables | {'w': w}, X)[0].sum())(variables['w'])
  assert np.isfinite(y) and np.isfinite(grad).all()


@pytest.mark.parametrize('cls', NORMALIZED)
def test_variables_are_split_like_the_weight_and_not_regularized(cls):
  config = Config(cls, input_dims=IN, output_dims=OUT)
  config.weight_split_dims_mapping.wt = ('data', 'mdl')
  layer = config.instantiate()
  declared = layer.abstract_init()
  name, split = ('g', ('mdl',)) if cls is WeightNormalizedLinear else ('u', ('data',))
  assert declared[name].tensor_split_dims_mapping == split
  assert WeightHParamsCollection.SKIP_REGULARIZATION in declared[name].collections
  assert declared[name].trainable == (name == 'g')
  assert layer.init(jax.random.key(0))['w'].shape == (IN, OUT)
  assert isinstance(layer, Linear)


def test_repeated_layers_each_have_their_own_vector():
  tpl = Config(SpectralNormLinear, input_dims=IN, output_dims=IN)
  layer = Config(Repeat, layers_tpl=tpl, num_layers=3).instantiate()
  variables = layer.init(jax.random.key(0))
  _, side = layer.apply(variables, X)
  for i in range(3):
    one = tpl.instantiate()
    own = {name: value[i] for name, value in variables['layers'].items()}
    _, expected = one.apply(own, X)
    np.testing.assert_allclose(side.updates['layers']['u'][i], expected.updates['u'], rtol=1e-4, atol=1e-5)
