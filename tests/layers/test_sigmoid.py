"""Sigmoid cross entropy: one binary decision for each class."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import Mlp, SigmoidCrossEntropy
from praxis_lite.models import ClassificationModel

D, V = 3, 5
X = np.random.default_rng(0).standard_normal((2, 4, D)).astype(np.float32)


def layer(**fields):
  return Config(SigmoidCrossEntropy, input_dims=D, num_classes=V, use_bias=True, **fields).instantiate()


def drawn(seed=1):
  rng = np.random.default_rng(seed)
  return {'w': rng.standard_normal((D, V)).astype(np.float32), 'b': rng.standard_normal(V).astype(np.float32)}


def by_hand(logits, target):
  p = 1 / (1 + np.exp(-np.float64(logits)))
  return -(target * np.log(p) + (1 - target) * np.log(1 - p))


def logits_of(v):
  return X @ v['w'] + v['b']


def test_loss_of_one_label():
  v, ids = drawn(), np.random.default_rng(2).integers(0, V, (2, 4))
  output, _ = layer().apply(v, X, ids)
  np.testing.assert_allclose(output.xent, by_hand(logits_of(v), np.eye(V)[ids]).sum(-1), rtol=1e-4)
  np.testing.assert_allclose(output.logits, logits_of(v), rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(output.correct, logits_of(v).argmax(-1) == ids)
  assert output.xent.dtype == jnp.float32


@pytest.mark.parametrize('dtype', [np.float32, np.int32, bool])
def test_loss_of_several_labels_or_none(dtype):
  v = drawn()
  target = np.random.default_rng(2).integers(0, 2, (2, 4, V)).astype(dtype)
  target[0, 0] = 0
  output, _ = layer().apply(v, X, class_probabilities=target)
  np.testing.assert_allclose(output.xent, by_hand(logits_of(v), target.astype(float)).sum(-1), rtol=1e-4)
  best = logits_of(v).argmax(-1)
  np.testing.assert_array_equal(output.correct, np.take_along_axis(target, best[..., None], -1)[..., 0] == 1)


def test_weights_of_classes_count_and_weights_of_examples_do_not():
  v, ids = drawn(), np.zeros((2, 4), np.int32)
  weights = np.array([1.0, 0.0, 0.5, 2.0, 0.0], np.float32)
  output, _ = layer().apply(v, X, ids, np.broadcast_to(weights, (2, 4, V)))
  np.testing.assert_allclose(output.xent, (by_hand(logits_of(v), np.eye(V)[ids]) * weights).sum(-1), rtol=1e-4)
  plain, _ = layer().apply(v, X, ids)
  np.testing.assert_array_equal(layer().apply(v, X, ids, np.zeros((2, 4), np.float32))[0].xent, plain.xent)


def test_gradient_is_probability_minus_target_for_logits_of_any_size():
  ids = np.array([0, 1, 2])
  x = np.array([[0.0], [100.0], [-100.0]], np.float32)
  one = Config(SigmoidCrossEntropy, input_dims=1, num_classes=3).instantiate()
  w = np.array([[1.0, -1.0, 3.0]], np.float32)
  grad = jax.grad(lambda x: one.apply({'w': w}, x, ids)[0].xent.sum())(x)
  logits = np.float64(x @ w)
  expected = ((1 / (1 + np.exp(-logits)) - np.eye(3)[ids]) * w).sum(-1, keepdims=True)
  np.testing.assert_allclose(grad, expected, rtol=1e-4)


def test_a_label_that_does_not_exist_is_nan_and_logits_are_capped():
  output, _ = layer(soft_cap=1.5).apply(drawn(), X, np.array([[0, 1, 5, -1], [0, 0, 0, 0]]))
  np.testing.assert_array_equal(np.isnan(output.xent), [[False, False, True, True], [False] * 4])
  np.testing.assert_allclose(output.logits, 1.5 * np.tanh(logits_of(drawn()) / 1.5), rtol=1e-4, atol=1e-5)


def test_a_classifier_learns_with_it():
  config = Config(ClassificationModel, num_classes=V, softmax_tpl=Config(SigmoidCrossEntropy))
  config.network_tpl = Config(Mlp, input_dims=D, hidden_dims=(4,))
  model = config.instantiate()
  batch = {
    'image': X[0],
    'label': np.array([0, 1, 2, 4], np.int32),
    'weights': np.array([1.0, 1.0, 1.0, 0.0], np.float32),
  }
  variables = model.init(jax.random.key(0))

  def loss(variables):
    predictions, _ = model.apply(variables, batch, method='compute_predictions')
    return model.apply(variables, predictions, batch, method='compute_loss')[0][0]['loss'][0]

  value, grads = jax.value_and_grad(loss)(variables)
  assert loss(jax.tree.map(lambda v, g: v - 0.1 * g, variables, grads)) < value


@pytest.mark.parametrize('labels, message', [
  ({}, 'a call takes either class_ids or class_probabilities'),
  ({'class_ids': np.zeros((2, 4), int), 'class_probabilities': np.zeros((2, 4, V), bool)}, 'takes either class_ids or'),
  ({'class_ids': np.zeros(2, np.int32)}, r'the labels have shape \(2, 5\), and the logits \(2, 4, 5\)'),
  ({'class_probabilities': np.zeros((2, 4, 1), np.float32)}, r'the labels have shape \(2, 4, 1\)'),
])  # fmt: skip
def test_mistakes_are_named(labels, message):
  with pytest.raises(ConfigError, match=message):
    layer().apply(drawn(), X, **labels)


def test_a_cap_that_is_not_positive_is_refused():
  with pytest.raises(ConfigError, match=r'SigmoidCrossEntropy\.soft_cap: expected more than 0, or None, got 0'):
    layer(soft_cap=0.0)
