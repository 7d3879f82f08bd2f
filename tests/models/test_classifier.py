"""The classifier: its loss and metrics against NumPy, its indifference to padding, and that it learns."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.layers import ConvNet, FullSoftmax, GroupNorm, Mlp
from praxis_lite.models import BaseModel, ClassificationModel

B, H, W, C, V = 6, 5, 4, 2, 3
KEY = jax.random.key(0)


def batch(seed=0, rows=B):
  rng = np.random.default_rng(seed)
  return {
    'image': rng.standard_normal((rows, H, W, C)).astype(np.float32),
    'label': rng.integers(0, V, rows).astype(np.int32),
    'weights': np.array([1.0, 0.5, 0.0, 2.0, 1.0, 0.0], np.float32)[:rows],
  }


def mlp(**fields):
  network = Config(Mlp, input_dims=H * W * C, hidden_dims=(7,), activation='tanh')
  return Config(ClassificationModel, num_classes=V, network_tpl=network, **fields)


def conv_net(**fields):
  network = Config(ConvNet, input_channels=C, channels=(3, 5), **fields)
  return Config(ClassificationModel, num_classes=V, network_tpl=network)


def run(config, inputs, variables=None, **kwargs):
  model = config.instantiate()
  variables = model.init(KEY) if variables is None else variables
  return model.apply(variables, inputs, **kwargs)


def test_a_model_without_decode_says_so():
  with pytest.raises(ConfigError, match=r'^task\.model: BaseModel has no method decode\(batch\)'):
    BaseModel().decode(batch())


def test_loss_and_accuracy_of_a_mlp_are_those_computed_by_hand():
  inputs, model = batch(), mlp().instantiate()
  v = jax.tree.map(np.asarray, model.init(KEY))
  (metrics, per_example), _ = model.apply(v, inputs)
  network, softmax = v['network']['linear_0'], v['softmax']
  hidden = np.tanh(inputs['image'].reshape(B, -1) @ network['w'] + network['b'])
  logits = hidden @ softmax['w'] + softmax['b']
  xent = np.log(np.exp(logits).sum(-1)) - logits[np.arange(B), inputs['label']]
  weights, total = inputs['weights'], inputs['weights'].sum()
  np.testing.assert_allclose(per_example['loss'], xent, rtol=1e-5)
  np.testing.assert_array_equal(per_example['prediction'], logits.argmax(-1))
  np.testing.assert_allclose(metrics['loss'], ((xent * weights).sum() / total, total), rtol=1e-5)
  correct = logits.argmax(-1) == inputs['label']
  np.testing.assert_allclose(metrics['accuracy'], ((correct * weights).sum() / total, total), rtol=1e-6)


def test_label_smoothing_mixes_the_label_with_all_classes():
  inputs, e = batch(), 0.3
  (_, smooth), _ = run(mlp(softmax_tpl=Config(FullSoftmax, use_bias=True, label_smoothing=e)), inputs)
  per_class = []
  for v in range(V):
    (_, out), _ = run(mlp(), {**inputs, 'label': np.full(B, v, np.int32)})
    per_class.append(np.asarray(out['loss']))
  hard = np.asarray(per_class)[inputs['label'], np.arange(B)]
  np.testing.assert_allclose(smooth['loss'], (1 - e) * hard + e * np.mean(per_class, axis=0), rtol=1e-5)


@pytest.mark.parametrize('value', [100.0, np.nan])
@pytest.mark.parametrize('config', [mlp, conv_net], ids=['mlp', 'conv_net'])
def test_examples_of_no_weight_change_nothing(config, value):
  """Neither the loss, nor its gradient, nor the moving statistics of batch norms."""
  inputs = batch()
  others = {k: v.copy() for k, v in inputs.items()}
  padding = inputs['weights'] == 0
  others['image'][padding] = value
  others['label'][padding] = (others['label'][padding] + 1) % V
  step = loss_and_gradients(config)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), step(inputs), step(others))


@functools.cache
def loss_and_gradients(config):
  """Of a batch, with the first values: the loss, metrics and updates of statistics, and the gradients."""
  model = config().instantiate()
  variables = model.init(KEY)

  @jax.jit
  def step(inputs):
    def loss(variables):
      (metrics, _), side = model.apply(variables, inputs)
      return metrics['loss'][0], (metrics, side.updates)

    return jax.value_and_grad(loss, has_aux=True)(variables)

  return step


def test_a_batch_of_padding_alone_is_finite_and_weighs_nothing():
  inputs = {**batch(), 'weights': np.zeros(B, np.float32)}
  model = conv_net().instantiate()
  variables = model.init(KEY)
  (metrics, _), side = model.apply(variables, inputs)
  assert metrics['loss'] == (0, 0) and metrics['accuracy'] == (0, 0)
  for i in range(2):
    np.testing.assert_array_equal(side.updates['network'][f'norm_{i}']['moving_variance'], 1)


def test_evaluation_of_an_example_does_not_depend_on_its_batch():
  inputs, model = batch(), conv_net().instantiate()
  variables = model.init(KEY)
  (_, together), _ = model.apply(variables, inputs, do_eval=True)
  one = {k: v[:1] for k, v in inputs.items()}
  (_, alone), side = model.apply(variables, one, do_eval=True)
  np.testing.assert_allclose(alone['loss'][0], together['loss'][0], rtol=1e-5)
  assert side.updates == {}


def test_decoding_gives_probabilities_without_labels():
  inputs = batch()
  model = mlp().instantiate()
  variables = model.init(KEY)
  (_, scored), _ = model.apply(variables, inputs)
  prompt = {k: inputs[k] for k in ('image', 'weights')}
  (metrics, decoded), _ = model.apply(variables, prompt, do_eval=True, method='decode')
  probabilities = np.asarray(decoded['probabilities'])
  np.testing.assert_allclose(probabilities.sum(-1), np.ones(B), rtol=1e-5)
  np.testing.assert_allclose(-np.log(probabilities[np.arange(B), inputs['label']]), scored['loss'], rtol=1e-4)
  np.testing.assert_array_equal(decoded['prediction'], scored['prediction'])
  expected = np.average(probabilities.max(-1), weights=inputs['weights'])
  np.testing.assert_allclose(metrics['confidence'][0], expected, rtol=1e-5)


def test_dropout_is_of_training_alone():
  config = mlp()
  config.network_tpl.dropout_tpl.rate = 0.5
  (_, train), _ = run(config, batch(), key=jax.random.key(1))
  (_, evaluated), _ = run(config, batch(), do_eval=True)
  (_, plain), _ = run(mlp(), batch())
  np.testing.assert_array_equal(evaluated['loss'], plain['loss'])
  assert not np.allclose(train['loss'], plain['loss'])


@pytest.mark.parametrize('config', [mlp, conv_net], ids=['mlp', 'conv_net'])
def test_it_learns_a_batch_by_heart(config):
  inputs, model = {**batch(), 'weights': np.ones(B, np.float32)}, config().instantiate()

  @jax.jit
  def step(variables):
    def loss(variables):
      (metrics, _), side = model.apply(variables, inputs)
      return metrics['loss'][0], side.updates

    (value, _), grads = jax.value_and_grad(loss, has_aux=True)(variables)
    return jax.tree.map(lambda w, g: w - 0.3 * g, variables, grads), value

  variables = model.init(KEY)
  losses = []
  for _ in range(60):
    variables, value = step(variables)
    losses.append(float(value))
  assert losses[-1] < 0.2 * losses[0]


def test_a_conv_net_takes_other_norms_and_none():
  (metrics, _), side = run(conv_net(norm_tpl=Config(GroupNorm, num_groups=1)), batch())
  assert np.isfinite(metrics['loss'][0]) and side.updates == {}
  assert 'norm_0' not in conv_net(norm_tpl=None).instantiate().abstract_init()['network']


def test_images_of_another_size_name_the_field():
  with pytest.raises(ConfigError, match=r'^network\.input_dims: 40'):
    run(mlp(), {**batch(), 'image': jnp.zeros((B, 3, 3, 1))})


def test_a_missing_leaf_is_named():
  inputs = batch()
  inputs['labels'] = inputs.pop('label')
  with pytest.raises(DataError, match=r"no leaf 'label'\. Did you mean 'labels'\?"):
    run(mlp(), inputs)
