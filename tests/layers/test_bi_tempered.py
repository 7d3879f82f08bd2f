"""The bi-tempered loss against its definition in float64, with a normalizer found by bisection."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import BiTemperedLoss, BiTemperedSoftmax, bi_tempered_loss, cross_entropy
from praxis_lite.layers.bi_tempered import tempered_exp, tempered_log, tempered_softmax

# Compiled once for all temperatures.
softmax_of, log_of, exp_of = jax.jit(tempered_softmax), jax.jit(tempered_log), jax.jit(tempered_exp)
loss_of = jax.jit(bi_tempered_loss)
loss_and_grad = jax.jit(jax.value_and_grad(lambda *args: jnp.sum(bi_tempered_loss(*args))))

TEMPERATURES = [0.4, 0.8, 0.99999, 1.0, 1.00001, 1.2, 2.0, 4.0]
LOGITS = (4 * np.random.default_rng(0).standard_normal((5, 7))).astype(np.float32)


def log_t(x, t):
  x = np.asarray(x, np.float64)
  return np.log(x) if t == 1 else (x ** (1 - t) - 1) / (1 - t)


def exp_t(x, t):
  x = np.asarray(x, np.float64)
  return np.exp(x) if t == 1 else np.maximum(1 + (1 - t) * x, 0) ** (1 / (1 - t))


def probabilities(logits, t):
  """By bisection on the normalizer, from the largest logit, where the sum is at least 1, to where it is less."""
  logits = np.asarray(logits, np.float64)
  low = logits.max(axis=-1, keepdims=True)
  high = low - log_t(1 / logits.shape[-1], t) + 1e-9
  for _ in range(200):
    middle = (low + high) / 2
    above = exp_t(logits - middle, t).sum(axis=-1, keepdims=True) > 1
    low, high = np.where(above, middle, low), np.where(above, high, middle)
  return exp_t(logits - low, t)


def loss_by_hand(logits, target, t1, t2):
  p = probabilities(logits, t2)
  with np.errstate(divide='ignore', invalid='ignore'):
    products = np.where(target == 0, 0, target * (log_t(target, t1) - log_t(p, t1)))
  return np.sum(products - (target ** (2 - t1) - p ** (2 - t1)) / (2 - t1), axis=-1)


@pytest.mark.parametrize('t', [0.0, *TEMPERATURES])
def test_logarithm_and_exponential(t):
  x = np.linspace(0.01, 3, 40).astype(np.float32)
  np.testing.assert_allclose(log_of(x, t), log_t(x, t), rtol=2e-4, atol=1e-5)
  x = np.linspace(-5, 0, 40).astype(np.float32)
  np.testing.assert_allclose(exp_of(x, t), exp_t(x, t), rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize('t', TEMPERATURES)
@pytest.mark.parametrize('num_classes, spread', [(1, 1.0), (1000, 0.0), (1000, 5.0), (7, 300.0)])
def test_probabilities_are_normalized_as_by_bisection(t, num_classes, spread):
  logits = (spread * np.random.default_rng(0).standard_normal((4, num_classes)) + 50).astype(np.float32)
  p = np.asarray(softmax_of(logits, t))
  np.testing.assert_allclose(p.sum(axis=-1), 1, rtol=1e-4)
  np.testing.assert_allclose(p, probabilities(logits, t), rtol=1e-3, atol=1e-5)


def test_heavy_tails_are_heavier_and_light_ones_end():
  p = {t: np.asarray(softmax_of(jnp.array([9.0, 0.0, 0.0]), t)) for t in (0.5, 1.0, 2.0)}
  assert p[0.5][1] == 0 < p[1.0][1] < p[2.0][1]


@pytest.mark.parametrize('t1, t2', [(1.0, 1.0), (0.7, 1.3), (0.0, 4.0), (0.8, 0.6), (1.0, 1.5), (1.5, 1.5)])
@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_loss_of_labels_and_of_targets(t1, t2, smoothing):
  labels = np.array([0, 3, 6, 2, 2])
  target = (1 - smoothing) * np.eye(7)[labels] + smoothing / 7
  expected = loss_by_hand(LOGITS, target, t1, t2)
  if t2 < 1 <= t1:  # An impossible label has an infinite loss.
    expected = np.where(np.isfinite(expected), expected, np.inf)
  loss = loss_of(LOGITS, labels, t1, t2, smoothing)
  np.testing.assert_allclose(loss, expected, rtol=1e-3, atol=1e-4)
  assert loss.dtype == jnp.float32
  of_targets = loss_of(LOGITS, np.float32(target), t1, t2, 0.0)
  np.testing.assert_allclose(of_targets, loss, rtol=1e-4, atol=1e-5)


def test_temperatures_of_1_are_cross_entropy_with_its_gradient():
  labels, logits = jnp.array([0, 3, 6, 2, 2]), jnp.asarray(LOGITS)
  ours = loss_and_grad(logits, labels, 1.0, 1.0)
  usual = jax.value_and_grad(lambda x: cross_entropy(x, labels)[0].sum())(logits)
  for actual, expected in zip(ours, usual):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('t1, t2', [(0.7, 1.3), (0.2, 3.0), (0.8, 0.6), (1.0, 2.0)])
def test_gradient_is_that_of_the_definition(t1, t2):
  logits, target = LOGITS[:2] / 8, np.eye(7)[[0, 3]]
  _, grad = loss_and_grad(logits, np.array([0, 3]), t1, t2)
  h = 1e-5
  for i, j in np.ndindex(logits.shape):
    step = np.zeros_like(logits, np.float64)
    step[i, j] = h
    up, down = (loss_by_hand(logits + sign * step, target, t1, t2).sum() for sign in (1, -1))
    assert grad[i, j] == pytest.approx((up - down) / (2 * h), abs=2e-3)


@pytest.mark.parametrize('t2', [0.5, 1.0, 1.5])
def test_loss_is_bounded_and_its_gradients_finite_for_any_logits(t2):
  logits = jnp.array([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0], [-80.0, 80.0, 0.0]])
  value, grad = loss_and_grad(logits, np.array([2, 1, 0]), 0.5, t2)
  assert 0 < value < 3 * 2.7
  assert np.isfinite(grad).all()


def test_bfloat16_logits_scalars_of_rows_and_labels_that_do_not_exist():
  for logits, labels in (
    (jnp.bfloat16(LOGITS), np.zeros(5, np.int32)),
    (np.zeros(3, np.float32), np.int32(1)),
    (np.zeros((0, 3), np.float32), np.zeros(0, np.int32)),
  ):
    loss = jax.eval_shape(bi_tempered_loss, logits, labels, 0.8, 1.2)
    assert (loss.shape, loss.dtype) == (labels.shape, jnp.float32)
  loss = loss_of(np.zeros((3, 2), np.float32), np.array([-1, 2, 1]), 0.8, 1.2)
  np.testing.assert_array_equal(np.isnan(loss), [True, True, False])


# ---------------------------------------------------------------- layers


def test_temperatures_move_in_training_and_are_the_last_ones_in_evaluation():
  layer = Config(BiTemperedLoss, t1=0.5, t2=2.0, start_step=1, end_step=3).instantiate()
  variables, logits, labels = layer.init(jax.random.key(0)), LOGITS, np.zeros(5, np.int32)
  train, evaluate = jax.jit(layer.apply), jax.jit(functools.partial(layer.apply, do_eval=True))
  for left in (1.0, 1.0, 0.5, 0.0, 0.0):
    loss, side = train(variables, logits, labels)
    t1, t2 = left + (1 - left) * 0.5, left + (1 - left) * 2.0
    np.testing.assert_allclose(loss, loss_of(logits, labels, t1, t2, 0.0), rtol=1e-5)
    at_eval, side_of_eval = evaluate(variables, logits, labels)
    np.testing.assert_allclose(at_eval, loss_of(logits, labels, 0.5, 2.0, 0.0), rtol=1e-5)
    assert not side_of_eval.updates
    variables = side.updates
  assert variables['count'] == 5
  assert Config(BiTemperedLoss, t1=0.5).instantiate().abstract_init() == {}


def test_softmax_with_the_loss():
  config = Config(BiTemperedSoftmax, input_dims=3, num_classes=7, use_bias=True, soft_cap=2.0)
  layer = config.instantiate()
  rng = np.random.default_rng(0)
  v = {'w': rng.standard_normal((3, 7)).astype(np.float32), 'b': rng.standard_normal(7).astype(np.float32)}
  x, labels = rng.standard_normal((2, 5, 3)).astype(np.float32), rng.integers(0, 7, (2, 5))
  output, _ = jax.jit(layer.apply)(v, x, labels)
  logits = 2 * np.tanh((x @ v['w'] + v['b']) / 2)
  np.testing.assert_allclose(output.logits, logits, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(output.xent, loss_by_hand(logits, np.eye(7)[labels], 0.8, 1.2), rtol=1e-3, atol=1e-4)
  np.testing.assert_array_equal(output.correct, logits.argmax(-1) == labels)


@pytest.mark.parametrize('fields, message', [
  ({'t1': 2.0}, r'BiTemperedLoss\.t1: expected at least 0 and less than 2, got 2\.0'),
  ({'t2': 0.0}, r'BiTemperedLoss\.t2: expected more than 0, got 0\.0'),
  ({'label_smoothing': 1.0}, r'BiTemperedLoss\.label_smoothing: expected at least 0 and less than 1'),
  ({'start_step': 5, 'end_step': 5}, r'BiTemperedLoss\.end_step: expected more than start_step, 5, or 0, got 5'),
])  # fmt: skip
def test_mistakes_are_named(fields, message):
  with pytest.raises(ConfigError, match=message):
    Config(BiTemperedLoss, **fields).instantiate()
