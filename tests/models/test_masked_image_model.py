"""Masked autoencoders: their formula, what is hidden, steps on any mesh, a classifier from one, and mistakes."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import mae_by_hand
import numpy as np
import pytest
from drawn_state import drawn_variables
from model_steps import assert_close, take_a_step

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves_by_path, path_name
from praxis_lite.inputs import ArrayInput
from praxis_lite.layers.masked_patches import choose_patches, normalize_patches, pixels_of_patches
from praxis_lite.models import image_classifier, masked_autoencoder, set_pipeline, set_sharding
from praxis_lite.runs import open_run, run_train
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

B, T = 5, 9
# A row of pixels and two columns do not fill a patch.
SIZES = {
  'image_size': (7, 11),
  'patch_size': (2, 3),
  'channels': 2,
  'model_dims': 12,
  'num_layers': 2,
  'num_heads': 3,
  'hidden_dims': 10,
  'decoder_dims': 8,
  'decoder_layers': 1,
  'decoder_heads': 2,
}
KINDS = {
  'paper': {'mask_ratio': 0.6},
  'plain': {'class_token': False, 'pooling': 'mean', 'positions': 'learned', 'normalizes_targets': False},
}


def config(kind='paper', **fields):
  return masked_autoencoder(**{**SIZES, **KINDS[kind], **fields})


@functools.cache
def make(kind='paper'):
  model = config(kind).instantiate()
  return model, jax.tree.map(lambda w: 3 * w if w.ndim > 1 else w, drawn_variables(model.abstract_init()))


def batch_of(rows=B):
  image = np.random.default_rng(0).standard_normal((rows, 7, 11, 2)).astype(np.float32)
  return {'image': image, 'weights': np.array([1, 0.5, 0, 2, 1], np.float32)[:rows]}


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind', KINDS)
def test_predictions_and_targets_are_those_of_numpy(kind):
  model, variables = make(kind)
  image = batch_of()['image']
  noise = np.random.default_rng(1).random((B, T)).astype(np.float32)
  (output, target, is_hidden), _ = model.apply(variables, image, noise, method='predict_hidden', do_eval=True)
  hidden = 6 if kind == 'paper' else 7
  expected = mae_by_hand.predictions(variables, image, noise, T - hidden, (2, 3), (3, 2))
  assert np.ptp(expected[0], axis=0).max() > 0.05
  np.testing.assert_allclose(output, expected[0], atol=2e-5)
  np.testing.assert_array_equal(is_hidden, expected[1])
  wanted = mae_by_hand.patches(image, (2, 3))
  np.testing.assert_allclose(target, mae_by_hand.normalized(wanted) if kind == 'paper' else wanted, atol=1e-5)
  errors = (np.square(np.asarray(output) - target).mean(-1) * is_hidden).sum(1) / hidden
  loss = model.apply(variables, mae_by_hand.Parts(output, target, is_hidden), batch_of(), method='compute_loss')[0]
  np.testing.assert_allclose(loss[1]['loss'], errors, rtol=1e-5)
  weights = batch_of()['weights']
  np.testing.assert_allclose(loss[0]['loss'][0], (errors * weights).sum() / weights.sum(), rtol=1e-5)


def test_hidden_patches_are_not_seen_and_rows_hide_patches_of_their_own():
  model, variables = make()
  image = batch_of()['image']
  noise = np.random.default_rng(1).random((B, T)).astype(np.float32)
  predict = jax.jit(lambda image: model.apply(variables, image, noise, method='predict_hidden', do_eval=True)[0])
  output, _, is_hidden = predict(image)
  assert (np.asarray(is_hidden).sum(1) == 6).all() and len(np.unique(is_hidden, axis=0)) > 1
  masked = np.repeat(np.repeat(np.asarray(is_hidden).reshape(B, 3, 3), 2, 1), 3, 2)[..., None]
  changed = image.copy()
  changed[:, :6, :9] = np.where(masked, 77, image[:, :6, :9])
  np.testing.assert_array_equal(predict(changed)[0], output)
  assert np.abs(predict(image + 1)[0] - output).max() > 1e-3


def test_a_row_hides_the_same_patches_whatever_the_size_of_its_batch_and_others_at_the_next_step():
  model, variables = make()

  def hidden(batch, key):
    method = 'compute_predictions'
    return np.asarray(model.apply(variables, batch, key=jax.random.key(key), method=method)[0].is_hidden)

  whole = hidden(batch_of(), 0)
  np.testing.assert_array_equal(hidden(batch_of(3), 0), whole[:3])
  assert (hidden(batch_of(), 1) != whole).any()


def test_patches_of_odd_numbers_of_channels_and_constant_patches():
  x = np.arange(2 * 5 * 7 * 3, dtype=np.float32).reshape(2, 5, 7, 3)
  patches = pixels_of_patches(x, (2, 3))
  assert patches.shape == (2, 4, 18)
  np.testing.assert_array_equal(patches[1, 3], x[1, 2:4, 3:6].reshape(-1))
  assert not np.asarray(normalize_patches(jnp.full((1, 2, 4), 3.0))).any()
  assert not np.asarray(normalize_patches(jnp.ones((1, 2, 1)))).any()
  numbers, places, is_hidden = choose_patches(jnp.array([[0.3, 0.1, 0.2]]), 1)
  assert numbers.tolist() == [[1]] and places.tolist() == [[2, 0, 1]] and is_hidden.tolist() == [[True, False, True]]


@pytest.mark.slow
def test_rows_of_padding_may_hold_nan_and_bfloat16_is_near():
  model, variables = make()
  batch = batch_of()
  bad = {**batch, 'image': np.where(batch['weights'][:, None, None, None] == 0, np.nan, batch['image'])}

  def value(model, batch):
    return model.apply(variables, batch, key=jax.random.key(0), do_eval=True)[0][0]['loss'][0]

  def gradients(batch):
    return jax.jit(jax.grad(lambda v: model.apply(v, batch, key=jax.random.key(0))[0][0]['loss'][0]))(variables)

  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), gradients(bad), gradients(batch))
  half = value(config(fprop_dtype=jnp.bfloat16).instantiate(), batch)
  assert half.dtype == jnp.float32
  np.testing.assert_allclose(half, value(model, batch), rtol=0.03)


# ------------------------------------------------------------------ meshes


def after_a_step(kind, mesh=None):
  """The loss, and the variables after a step of gradient descent at a rate of 1, which are those minus gradients."""
  return take_a_step(set_sharding(config(kind, remat='full' if mesh else 'none')), batch_of(), mesh)


@functools.cache
def on_one_device(kind):
  return after_a_step(kind)


@pytest.mark.slow
@pytest.mark.parametrize('kind, mesh', [('paper', (1, 2, 2, 2)), ('paper', (2, 1, 3, 1)), ('plain', (1, 1, 2, 3))])
def test_a_step_on_a_mesh_that_divides_nothing_is_that_of_one_device(kind, mesh):
  (loss, variables), (expected, one) = after_a_step(kind, mesh), on_one_device(kind)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert_close(variables, one, 1e-5)


@pytest.mark.slow
def test_encoder_and_decoder_in_stages_train_like_one_device():
  deeper = {'decoder_layers': 3}
  staged = set_sharding(config('paper', **deeper), batch_axes='data')
  set_pipeline(staged, num_stages=2, num_microbatches=2, stage_axis='spare', batch_axes='data')
  loss, variables = take_a_step(staged, batch_of(), (2, 1, 3, 1), rows='data')
  expected, one = take_a_step(config('paper', **deeper), batch_of())
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert_close(variables, one, 1e-5)


def test_the_decoder_is_split_too():
  tree = leaves_by_path(set_sharding(config()).instantiate().abstract_init())
  splits = {path_name(path): w.full_split_dims_mapping for path, w in tree.items()}
  assert splits['patch_decoder.embed.w'] == splits['patch_decoder.pixels.w'] == ('data', 'mdl')
  assert splits['patch_decoder.transformer.layers.ff.up.w'] == (None, 'data', 'mdl')
  assert splits['network.transformer.layers.ff.up.w'] == (None, 'data', 'mdl')


# ------------------------------------------------------------------ a classifier, and mistakes


@pytest.mark.slow
def test_a_classifier_starts_from_its_encoder(tmp_path):
  sizes = {name: value for name, value in SIZES.items() if not name.startswith('decoder')}
  image = np.random.default_rng(0).standard_normal((8, 7, 11, 2)).astype(np.float32)

  def experiment(model):
    task = Config(SingleTask, model=model)
    task.train.set(num_train_steps=1, save_interval_steps=1, eval_interval_steps=None)
    task.train.learner.set(learning_rate=0.0)
    arrays = {'image': image, 'label': np.zeros(8, np.int32)}
    return ExperimentConfig(task, [Config(ArrayInput, arrays=arrays, batch_size=4, is_training=True)], [])

  run_train(experiment(config()), tmp_path / 'mae')
  classifier = experiment(image_classifier(num_classes=3, positions='sinusoidal', **sizes))
  classifier.task.train.init_from.set(path=str(tmp_path / 'mae'), rules=((r'softmax\..*', None),))
  run_train(classifier, tmp_path / 'classes')
  old, new = (open_run(tmp_path / name).load() for name in ('mae', 'classes'))
  jax.tree.map(np.testing.assert_array_equal, new.variables['network'], old.variables['network'])
  found = old.predict({'image': image[:2]})
  assert found['features'].shape == (2, 12) and found['states'].shape == (2, 10, 12)


@pytest.mark.parametrize(
  'change, says',
  [
    ({'mask_ratio': 0.0}, r'mask_ratio: expected more than 0'),
    ({'mask_ratio': 1.0}, r'mask_ratio: expected .*less than 1'),
    ({'mask_ratio': float('nan')}, r'mask_ratio: expected'),
    ({'mask_ratio': 0.95}, r'mask_ratio: 0\.95 of 9 patches hides none or all of them'),
    ({'decoder_dims': 6}, r'patch_decoder\.position\.dims: expected a multiple of 4, got 6'),
  ],
)
def test_mistakes_of_a_config_are_named(change, says):
  with pytest.raises(ConfigError, match=says):
    config(**change).instantiate()


def test_images_of_another_size_and_a_split_length_are_named():
  model, data = config().instantiate(), Config(ArrayInput, arrays=batch_of(), batch_size=2).instantiate()
  with pytest.raises(ConfigError, match=r"expected images \[B, 7, 11, 2\] in 'image', .*got \[5, 6, 11, 2\]"):
    model.check_input(data, {'image': batch_of()['image'][:, :6]})
  with pytest.raises(ConfigError, match=r"got only \['label'\]"):
    model.check_input(data, {'label': np.zeros(3)})
  with pytest.raises(ConfigError, match='a MaskedAutoencoder takes patches out of an image, so no context_axis'):
    set_sharding(config(), context_axis='data')
  assert math.isclose(model.mask_ratio, 0.6)
