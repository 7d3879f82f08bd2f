"""Generative models of the handwritten digits of scikit-learn, which train in minutes on two CPU cores, and DiT.

praxis-lite train --exp=generative.DigitsVqVae --job_log_dir=runs/codes
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite.common.config import Config
from praxis_lite.experiments.digits import digit_datasets
from praxis_lite.inputs import ArrayInput, RandomFeature, SyntheticInput
from praxis_lite.layers import DiffusionTransformer, ImageDecoder, ImageEncoder, VectorQuantizer
from praxis_lite.models import AdversarialModel, DiffusionModel, VqVae, diffusion_transformer
from praxis_lite.sharding.weights import WeightInit
from praxis_lite.tasks.learners import adamw_learner
from praxis_lite.training import registry
from praxis_lite.training.experiment import BaseExperiment
from praxis_lite.training.learning import Learner, LearnerRule, MultiLearner
from praxis_lite.training.task import SingleTask

_ROWS = ('replica', 'data')


class _DigitImages(BaseExperiment):
  batch_size = 64

  def datasets(self) -> list[Config]:
    return digit_datasets(self.batch_size)


@registry.register
class DigitsVqVae(_DigitImages):
  """Digits as 2 x 2 codes out of 64, by a VQ-VAE of convolutions; trains in a minute on two CPU cores."""

  def task(self) -> Config:
    model = Config(
      VqVae,
      encoder_tpl=Config(ImageEncoder, image_channels=1, channels=(16, 32)),
      quantizer_tpl=Config(VectorQuantizer, input_dims=8, num_codes=64, decay=0.9, restart_share=0.05),
      decoder_tpl=Config(ImageDecoder, channels=(32, 16)),
    )
    task = Config(SingleTask, name='vq_vae', model=model)
    task.train.learner = adamw_learner(learning_rate=5e-3, warmup_steps=50, weight_decay=1e-4)
    task.train.set(num_train_steps=800, log_interval_steps=100, eval_interval_steps=400, save_interval_steps=400)
    return task


@registry.register
class VqVae128(BaseExperiment):
  """A VQ-VAE, 8.7M parameters (van den Oord et al., 2017), on 8 devices: 128 x 128 pixels become 32 x 32 codes of 512.

  The images are random numbers. For your own images, replace the input by an `ImageRecordInput` whose `mean` and `std`
  map pixels to -0.5 to 0.5. Strided filters are 3 x 3 here, and 4 x 4 in the paper.
  """

  mesh_axis_names = ('replica', 'data', 'mdl')
  ici_mesh_shape: tuple[int, ...] = (1, 8, 1)
  batch_size = 128

  def datasets(self) -> list[Config]:
    features = {'image': Config(RandomFeature, shape=(128, 128, 3), low=-0.5, high=0.5)}
    return [Config(SyntheticInput, name='train', is_training=True, features=features, batch_size=self.batch_size)]

  def task(self) -> Config:
    coder = {'channels': (256, 256), 'num_blocks': 2, 'activation': 'relu'}
    model = Config(
      VqVae,
      encoder_tpl=Config(ImageEncoder, image_channels=3, **coder),
      quantizer_tpl=Config(VectorQuantizer, input_dims=64, num_codes=512, decay=0.99),
      decoder_tpl=Config(ImageDecoder, **coder),
    )
    task = Config(SingleTask, name='vq_vae', model=model)
    task.train.learner = Config(Learner, optimizer=Config(optax.adam), learning_rate=2e-4)
    task.train.set(num_train_steps=250_000, eval_interval_steps=None, save_interval_steps=5000)
    task.train.inputs_split_mapping = {'map_1d': (_ROWS,), 'map_4d': (_ROWS, None, None, None)}
    return task


@registry.register
class DigitsDiffusion(_DigitImages):
  """Generates digits of a class by flow matching, with a DiT over 16 patches; trains in minutes on two CPU cores."""

  def task(self) -> Config:
    network = Config(DiffusionTransformer, image_channels=1, model_dims=64, num_layers=3, num_heads=4, num_classes=10)
    model = Config(DiffusionModel, network_tpl=network, image_size=(8, 8), num_sampling_steps=30, guidance=2.0)
    task = Config(SingleTask, name='diffusion', model=model)
    task.train.learner = adamw_learner(learning_rate=2e-3, warmup_steps=50, weight_decay=1e-4).set(ema_decay=0.99)
    task.train.set(num_train_steps=2000, log_interval_steps=200, eval_interval_steps=1000, save_interval_steps=1000)
    return task


@registry.register
class DigitsGan(_DigitImages):
  """Generates digits with a convolutional GAN, whose two parts have separate losses and learners; trains in minutes."""

  def task(self) -> Config:
    init = WeightInit.GaussianFanIn(1.4)  # Keeps activations' variance; if it shrinks, all images become the mean.
    model = Config(
      AdversarialModel,
      generator_tpl=Config(ImageDecoder, channels=(64, 32), params_init=init),
      discriminator_tpl=Config(ImageEncoder, image_channels=1, channels=(32, 64), params_init=init),
      latent_dims=8,
      image_size=(8, 8),
    )
    task = Config(SingleTask, name='gan', model=model)
    rules = [
      Config(
        LearnerRule,
        name=name,
        regex=rf'{name}\..*',
        loss=f'{name}_loss',
        learner=Config(Learner, optimizer=Config(optax.adam, b1=0.0), learning_rate=rate),
      )
      for name, rate in (('generator', 5e-4), ('discriminator', 1e-3))
    ]
    rules[0].learner.ema_decay = 0.98  # Averaged weights generate better images than the last weights.
    task.train.learner = Config(MultiLearner, rules=tuple(rules))
    task.train.set(num_train_steps=600, log_interval_steps=100, eval_interval_steps=300, save_interval_steps=300)
    return task


def random_latents(count: int = 256) -> dict[str, np.ndarray]:
  """Returns `image` [N, 32, 32, 4] of normal numbers and `label` [N] from 0 to 999, which stand in for latents."""
  rng = np.random.Generator(np.random.PCG64(0))
  label = np.arange(count, dtype=np.int32) % 1000
  return {'image': rng.standard_normal((count, 32, 32, 4), np.float32), 'label': label}


@registry.register
class DitXl(BaseExperiment):
  """DiT-XL/2 (Peebles and Xie, 2023), 675M parameters, on your own latents, fully sharded over 8 devices.

  Replace `random_latents` in `datasets[*].arrays`, which returns noise, by a function that returns your latents.
  """

  mesh_axis_names = ('replica', 'data', 'mdl')
  ici_mesh_shape: tuple[int, ...] = (1, 8, 1)
  batch_size = 256

  def datasets(self) -> list[Config]:
    arrays = Config(random_latents)
    return [Config(ArrayInput, name='train', arrays=arrays, is_training=True, batch_size=self.batch_size)]

  def task(self) -> Config:
    network = diffusion_transformer(
      image_channels=4, model_dims=1152, num_layers=28, num_heads=16, num_classes=1000, remat='full'
    )
    model = Config(DiffusionModel, network_tpl=network, image_size=(32, 32), value_range=(-1.0, 1.0))
    model.set(schedule='linear', prediction='epsilon', sampler='ancestral', num_sampling_steps=250, guidance=1.5)
    model.set(sample_limit=None, fprop_dtype=jnp.bfloat16)
    task = Config(SingleTask, name='diffusion', model=model)
    task.train.learner = Config(
      Learner, optimizer=Config(optax.adamw, weight_decay=0.0), learning_rate=1e-4, ema_decay=0.9999
    )
    task.train.set(num_train_steps=400_000, save_interval_steps=5000)
    task.train.inputs_split_mapping = {'map_1d': (_ROWS,), 'map_4d': (_ROWS, None, None, None)}
    return task
