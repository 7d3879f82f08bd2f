"""VqVae: its loss and codes against its parts, rows of weight zero, meshes, and that its experiment learns."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import praxis_lite
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.experiments.digits import digits
from praxis_lite.experiments.generative import DigitsVqVae
from praxis_lite.instruments.verification import format_verification, verify
from praxis_lite.layers import FiniteScalarQuantizer, ImageDecoder, ImageEncoder, VectorQuantizer
from praxis_lite.models import VqVae
from praxis_lite.runs import run_train
from praxis_lite.training.experiment import configure


def model(quantizer=None, **fields):
  quantizer = quantizer or Config(VectorQuantizer, input_dims=3, num_codes=7)
  encoder = Config(ImageEncoder, image_channels=2, channels=(3, 5))
  return Config(VqVae, encoder_tpl=encoder, quantizer_tpl=quantizer, decoder_tpl=Config(ImageDecoder, channels=(5, 3)))


def batch(rows=3):
  images = np.random.default_rng(0).standard_normal((rows, 8, 4, 2)).astype(np.float32)
  return {'image': images, 'weights': np.array([1.0, 0.0, 2.0], np.float32)[:rows]}


def test_loss_codes_and_reconstructions_are_those_of_the_parts():
  layer, inputs = model().instantiate(), batch()
  variables = layer.init(jax.random.key(0))
  apply = jax.jit(layer.apply)
  (metrics, per_example), side = apply(variables, inputs)
  predicted, _ = layer.apply(variables, {'image': inputs['image']}, method='predict', do_eval=True)
  assert predicted['codes'].shape == (3, 2, 1, 1) and predicted['reconstruction'].shape == (3, 8, 4, 2)
  errors = ((np.asarray(predicted['reconstruction']) - inputs['image']) ** 2).mean((1, 2, 3))
  np.testing.assert_allclose(per_example['loss'][::2], errors[::2], rtol=1e-4)
  assert metrics['loss'][0] == pytest.approx((errors[0] + 2 * errors[2]) / 3, rel=1e-4)
  counts = np.bincount(np.asarray(predicted['codes'])[::2].ravel(), minlength=7) / 4
  assert metrics['perplexity'][0] == pytest.approx(np.exp(-(counts * np.log(counts + (counts == 0))).sum()), rel=1e-4)
  images, _ = layer.apply(variables, predicted['codes'], method='reconstruct', do_eval=True)
  np.testing.assert_allclose(images, predicted['reconstruction'], atol=1e-5)
  inputs['image'][1] = np.nan
  (again, _), side_again = apply(variables, inputs)
  np.testing.assert_allclose(again['loss'][0], metrics['loss'][0], rtol=1e-6)
  for a, e in zip(jax.tree.leaves(side_again), jax.tree.leaves(side)):
    np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


def test_impossible_models_and_images_are_refused():
  with pytest.raises(ConfigError, match=r'decoder_tpl\.channels: 1 doubling, but the encoder has 2 halvings'):
    model().set(decoder_tpl=Config(ImageDecoder, channels=(5,))).instantiate()
  layer = model(Config(FiniteScalarQuantizer, levels=(3, 3))).instantiate()
  with pytest.raises(ConfigError, match=r'multiples of 4, got the shape \[3, 6, 4, 2\]$'):
    layer.apply(layer.init(jax.random.key(0)), {'image': batch()['image'][:, :6]}, method='predict', do_eval=True)
  with pytest.raises(ConfigError, match=r'got the shape \[3, 8, 4, 1\]; set image_channels = 1 of the encoder$'):
    layer.apply(layer.init(jax.random.key(0)), {'image': batch()['image'][..., :1]}, method='predict', do_eval=True)
  with pytest.raises(ConfigError, match=r"no 'image', which task\.model\.input_name names"):
    layer.check_input(configure(DigitsVqVae).datasets[0].instantiate(), {'picture': batch()['image']})


@pytest.mark.slow
@pytest.mark.parametrize('partitioning', ['auto', 'shard_map'])
def test_a_mesh_that_does_not_divide_the_batch_changes_nothing(partitioning):
  """An axis of 3 for the rows and an unused one: loss, gradients and the averages of the codebook."""
  config = configure(DigitsVqVae)
  config.datasets[0].batch_size = 5
  config.task.set(mesh_axis_names=('data', 'unused'), ici_mesh_shape=(3, 2), partitioning=partitioning)
  found = verify(config.task, config.datasets[0].instantiate().batch_struct(), quick=True, search_seconds=0)
  assert found.is_right, format_verification(found)


@pytest.mark.slow
def test_digits_become_codes_that_are_used_and_come_back(tmp_path):
  """The variance of a pixel is 0.14, and that around the mean of all digits 0.07."""
  config = configure(DigitsVqVae)
  config.task.train.set(num_train_steps=200, eval_interval_steps=200, save_interval_steps=200)
  metrics = run_train(config, tmp_path).metrics['eval/validation']
  assert metrics['loss'] < 0.04 and metrics['perplexity'] > 30
  loaded, images = praxis_lite.open_run(tmp_path).load(), digits('validation')['image'][:7]
  predicted = loaded.predict({'image': images})
  assert predicted['codes'].shape == (7, 2, 2, 1) and predicted['codes'].max() < 64
  assert np.square(predicted['reconstruction'] - images).mean() < 0.04
