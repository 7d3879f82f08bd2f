"""Normalizations against NumPy, in float64; BatchNorm's statistics against those of the examples that count."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import BatchNorm, GroupNorm, IdentityNorm, LayerNorm, RMSNorm, RMSNormNoScale
from praxis_lite.sharding.weights import WeightHParamsCollection

B, T, D = 4, 5, 6
EVERY_NORM = {'BatchNorm': BatchNorm, 'GroupNorm': GroupNorm, 'LayerNorm': LayerNorm, 'RMSNorm': RMSNorm}


def x_BTD(dtype=np.float32):
  return (3 * np.random.default_rng(0).standard_normal((B, T, D)) + 2).astype(dtype)


def scale_and_bias(names):
  rng = np.random.default_rng(1)
  return {name: rng.standard_normal(D).astype(np.float32) for name in names}


def apply(cls, variables, x, *args, do_eval=False, **fields):
  layer = Config(cls, dims=D, **fields).instantiate()
  return layer.apply(variables, x, *args, do_eval=do_eval)


def normalized(x, axes, epsilon):
  x = x.astype(np.float64)
  return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + epsilon)


def test_rms_norm():
  v, x = scale_and_bias(['scale']), x_BTD()
  expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 0.1) * v['scale']
  np.testing.assert_allclose(apply(RMSNorm, v, x, epsilon=0.1)[0], expected, rtol=1e-5)


def test_rms_norm_without_a_scale():
  x = x_BTD()
  expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 0.1)
  np.testing.assert_allclose(apply(RMSNormNoScale, {}, x, epsilon=0.1)[0], expected, rtol=1e-5)
  assert Config(RMSNormNoScale, dims=D).instantiate().abstract_init() == {}


def test_identity_norm_returns_its_input_in_the_dtype_of_the_computation():
  y, _ = apply(IdentityNorm, {}, x_BTD())
  np.testing.assert_array_equal(y, x_BTD())
  assert apply(IdentityNorm, {}, x_BTD(), fprop_dtype=jnp.bfloat16)[0].dtype == jnp.bfloat16


def test_zero_centered_rms_norm():
  v, x = scale_and_bias(['scale']), x_BTD()
  expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6) * (1 + v['scale'])
  np.testing.assert_allclose(apply(RMSNorm, v, x, zero_centered=True)[0], expected, rtol=1e-5)
  first = Config(RMSNorm, dims=D, zero_centered=True).instantiate().init(jax.random.key(0))
  np.testing.assert_array_equal(first['scale'], np.zeros(D))


@pytest.mark.parametrize('use_scale', [True, False])
@pytest.mark.parametrize('use_bias', [True, False])
def test_layer_norm(use_scale, use_bias):
  v = scale_and_bias(['scale'] * use_scale + ['bias'] * use_bias)
  y, _ = apply(LayerNorm, v, x_BTD(), epsilon=0.1, use_scale=use_scale, use_bias=use_bias)
  np.testing.assert_allclose(y, normalized(x_BTD(), -1, 0.1) * v.get('scale', 1) + v.get('bias', 0), atol=1e-5)
  layer = Config(LayerNorm, dims=D, use_scale=use_scale, use_bias=use_bias).instantiate()
  assert layer.abstract_init().keys() == v.keys()


@pytest.mark.parametrize('shape', [(B, D), (B, T, D), (B, 3, 2, D)])
@pytest.mark.parametrize('num_groups', [1, 2, 6])
def test_group_norm(shape, num_groups):
  x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
  v = scale_and_bias(['scale', 'bias'])
  grouped = x.reshape(B, -1, num_groups, D // num_groups)
  expected = normalized(grouped, (1, 3), 0.1).reshape(shape) * v['scale'] + v['bias']
  np.testing.assert_allclose(apply(GroupNorm, v, x, epsilon=0.1, num_groups=num_groups)[0], expected, atol=1e-5)


def test_groups_that_do_not_divide_are_refused():
  with pytest.raises(ConfigError, match='num_groups: 4 does not divide dims, 6'):
    Config(GroupNorm, dims=D, num_groups=4).instantiate()


@pytest.mark.parametrize('name', EVERY_NORM)
def test_weights_are_not_regularized_and_begin_as_the_identity(name):
  layer = Config(EVERY_NORM[name], dims=D, **({'num_groups': 2} if name == 'GroupNorm' else {})).instantiate()
  weights, values = layer.abstract_init(), layer.init(jax.random.key(0))
  assert all(WeightHParamsCollection.SKIP_REGULARIZATION in w.collections for w in weights.values())
  for key, value in values.items():
    np.testing.assert_array_equal(value, float(key in ('scale', 'moving_variance')), err_msg=key)


@pytest.mark.parametrize('name', ['LayerNorm', 'RMSNorm', 'GroupNorm'])
def test_statistics_of_bfloat16_are_in_float32(name):
  """A mean of 300 with a deviation of 2 is lost where sums of squares are in bfloat16."""
  fields = {'num_groups': 1} if name == 'GroupNorm' else {}
  dims = 64
  x = (300 + 2 * np.sign(np.random.default_rng(0).standard_normal((1, dims)))).astype(np.float32)
  cls = EVERY_NORM[name]
  layers = [Config(cls, dims=dims, fprop_dtype=d, **fields).instantiate() for d in (jnp.float32, jnp.bfloat16)]
  variables = layers[0].init(jax.random.key(0))
  expected, y = (layer.apply(variables, jnp.asarray(x, layer.fprop_dtype))[0] for layer in layers)
  assert y.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(y, np.float32), expected, atol=0.01)


# ---------------------------------------------------------------- BatchNorm


def batch_norm_variables():
  v = scale_and_bias(['scale', 'bias', 'moving_mean'])
  return {**v, 'moving_variance': np.linspace(0.5, 2, D).astype(np.float32)}


def test_batch_norm_trains_on_the_statistics_of_the_batch():
  v = batch_norm_variables()
  y, side = apply(BatchNorm, v, x_BTD(), epsilon=0.1, decay=0.9)
  np.testing.assert_allclose(y, normalized(x_BTD(), (0, 1), 0.1) * v['scale'] + v['bias'], atol=1e-5)
  x = x_BTD(np.float64)
  np.testing.assert_allclose(side.updates['moving_mean'], 0.9 * v['moving_mean'] + 0.1 * x.mean((0, 1)), rtol=1e-5)
  expected = 0.9 * v['moving_variance'] + 0.1 * x.var((0, 1))
  np.testing.assert_allclose(side.updates['moving_variance'], expected, rtol=1e-5)


def test_batch_norm_evaluates_with_moving_statistics_and_leaves_them():
  v = batch_norm_variables()
  y, side = apply(BatchNorm, v, x_BTD(), epsilon=0.1, do_eval=True)
  expected = (x_BTD() - v['moving_mean']) / np.sqrt(v['moving_variance'] + 0.1) * v['scale'] + v['bias']
  np.testing.assert_allclose(y, expected, atol=1e-5)
  assert side.updates == {}


def test_batch_norm_counts_examples_by_their_weights():
  """Integer weights are the same as so many copies of each example; one of no weight is the same as none."""
  v, x = batch_norm_variables(), x_BTD()
  counts = np.array([2, 0, 1, 3])
  y, side = apply(BatchNorm, v, x, counts.astype(np.float32))
  copies = np.repeat(x, counts, axis=0)
  y_copies, side_copies = apply(BatchNorm, v, copies)
  np.testing.assert_allclose(np.repeat(y, counts, axis=0), y_copies, atol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), side.updates, side_copies.updates)


def test_batch_norm_counts_tokens_by_their_weights():
  v, x = batch_norm_variables(), x_BTD()
  weights = (np.random.default_rng(3).random((B, T)) > 0.4).astype(np.float32)
  y, side = apply(BatchNorm, v, x, weights)
  y_kept, side_kept = apply(BatchNorm, v, x[weights > 0])
  np.testing.assert_allclose(y[weights > 0], y_kept, atol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), side.updates, side_kept.updates)


def test_padding_may_hold_anything():
  v, x, weights = batch_norm_variables(), x_BTD(), np.array([1, 1, 0, 1], np.float32)
  spoilt = x.copy()
  spoilt[2] = np.nan
  (y, side), (y_spoilt, side_spoilt) = apply(BatchNorm, v, x, weights), apply(BatchNorm, v, spoilt, weights)
  jax.tree.map(np.testing.assert_array_equal, side.updates, side_spoilt.updates)
  np.testing.assert_array_equal(y[weights > 0], y_spoilt[weights > 0])


def test_a_batch_of_no_weight_leaves_the_averages():
  v = batch_norm_variables()
  y, side = apply(BatchNorm, v, x_BTD(), np.zeros(B, np.float32))
  assert np.isfinite(y).all()
  for name in ('moving_mean', 'moving_variance'):
    np.testing.assert_array_equal(side.updates[name], v[name])


def test_averages_stay_float32_and_are_not_trained():
  layer = Config(BatchNorm, dims=D, dtype=jnp.bfloat16).instantiate()
  weights = layer.abstract_init()
  assert not weights['moving_mean'].trainable and not weights['moving_variance'].trainable
  assert weights['scale'].trainable and weights['bias'].trainable
  _, side = layer.apply(layer.init(jax.random.key(0)), x_BTD())
  assert {jnp.dtype(u.dtype) for u in jax.tree.leaves(side.updates)} == {jnp.dtype(jnp.float32)}


def test_gradient_goes_through_the_statistics_of_the_batch():
  """A shift or a scale of the whole batch changes nothing, so the gradient along both is zero."""
  v, x = batch_norm_variables(), x_BTD()
  target = np.random.default_rng(4).standard_normal(x.shape).astype(np.float32)

  def loss(x):
    return jnp.sum(apply(BatchNorm, v, x, epsilon=0.0)[0] * target)

  gradient = np.asarray(jax.grad(loss)(x))
  assert np.abs(gradient).max() > 0.1
  np.testing.assert_allclose(gradient.sum((0, 1)), np.zeros(D), atol=1e-4)
  np.testing.assert_allclose((gradient * x).sum((0, 1)), np.zeros(D), atol=1e-3)
