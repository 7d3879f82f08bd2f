"""Models of images: small ones that learn handwritten digits in minutes on two CPU cores, and published sizes.

  praxis-lite train --exp=vision.DigitsVit --job_log_dir=runs/digits
  praxis-lite train --exp=vision.VitB16 --job_log_dir=runs/b16 --set 'datasets[0].file_pattern=train/*.tfrecord' \\
    --set 'datasets[1].file_pattern=validation/*.tfrecord'
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.experiments.digits import digit_datasets, digits
from praxis_lite.inputs import ImageRecordInput, RandomFeature, SyntheticInput
from praxis_lite.layers import ImageMixing
from praxis_lite.models import (
  TwoTowerModel,
  convnext_classifier,
  image_classifier,
  masked_autoencoder,
  resnet_classifier,
  set_sharding,
  transformer_encoder,
  vision_transformer,
)
from praxis_lite.models.convnext_configs import ConvNeXtSizes
from praxis_lite.models.resnet_configs import ResNetSizes
from praxis_lite.models.vision_configs import VisionSizes
from praxis_lite.sharding.weights import WeightInit
from praxis_lite.tasks.image_classification import ImageClassificationTask
from praxis_lite.tasks.learners import adamw_learner
from praxis_lite.training import registry
from praxis_lite.training.experiment import BaseExperiment
from praxis_lite.training.learning import Learner, LinearWarmupCosine
from praxis_lite.training.task import SingleTask

_ROWS = ('replica', 'data')


def shifted_digits(split: str, reach: int = 0) -> dict[str, np.ndarray]:
  """Returns `digits` of a split, each image shifted in all ways by up to `reach` pixels; zeros fill the borders."""
  data = digits(split)
  size = data['image'].shape[1]
  padded = np.pad(data['image'], ((0, 0), (reach, reach), (reach, reach), (0, 0)))
  starts = [(i, j) for i in range(2 * reach + 1) for j in range(2 * reach + 1)]
  images = [padded[:, i : i + size, j : j + size] for i, j in starts]
  return {'image': np.concatenate(images), 'label': np.tile(data['label'], len(starts))}


@registry.register
class DigitsVit(BaseExperiment):
  """Digits of 8 x 8 pixels, classified by a vision transformer over patches of 2 x 2, in minutes on two CPU cores."""

  batch_size = 64

  def datasets(self) -> list[Config]:
    return digit_datasets(self.batch_size, shifted_digits, reach=1)

  def model(self) -> Config:
    model = image_classifier(
      num_classes=10,
      image_size=8,
      patch_size=2,
      channels=1,
      model_dims=64,
      num_layers=4,
      num_heads=4,
      hidden_dims=128,
      pooling='mean',
    )
    model.softmax_tpl.label_smoothing = 0.1
    # Scaled by fan-in, small models begin to learn immediately.
    model.params_init = model.network_tpl.params_init = WeightInit.GaussianFanIn()
    return model

  def task(self) -> Config:
    task = Config(ImageClassificationTask, model=self.model())
    task.train.learner = adamw_learner(learning_rate=2e-3, warmup_steps=100, weight_decay=0.05)
    # Without the average, the accuracy of two seeds may differ by more than a percentage point.
    task.train.learner.ema_decay = 0.998
    task.train.set(num_train_steps=2000, log_interval_steps=100, eval_interval_steps=500, save_interval_steps=1000)
    task.train.inputs_split_mapping = {'map_1d': None, 'map_4d': None}
    return task


class _DigitsConvolutions(BaseExperiment):
  batch_size = 64

  def datasets(self) -> list[Config]:
    return digit_datasets(self.batch_size, shifted_digits, reach=1)

  def model(self) -> Config:
    raise NotImplementedError

  def task(self) -> Config:
    task = Config(ImageClassificationTask, model=self.model())
    task.train.learner = adamw_learner(learning_rate=5e-3, warmup_steps=50, weight_decay=0.05)
    task.train.set(num_train_steps=500, log_interval_steps=100, eval_interval_steps=250, save_interval_steps=250)
    task.train.inputs_split_mapping = {'map_1d': None, 'map_4d': None}
    return task


@registry.register
class DigitsResNet(_DigitsConvolutions):
  """Digits, classified by a residual network of four blocks with batch norms, in minutes on two CPU cores."""

  def model(self) -> Config:
    sizes: ResNetSizes = {
      'channels': 1,
      'kind': 'basic',
      'stem_dims': 16,
      'stem_size': 3,
      'stem_stride': 1,
      'has_pooling': False,
      'stage_dims': (16, 32),
      'stage_depths': (2, 2),
    }
    return resnet_classifier(num_classes=10, **sizes)


@registry.register
class DigitsConvNeXt(_DigitsConvolutions):
  """Digits, classified by a ConvNeXt of four blocks, in minutes on two CPU cores."""

  def model(self) -> Config:
    sizes: ConvNeXtSizes = {
      'channels': 1,
      'patch_size': 2,
      'stage_dims': (32, 64),
      'stage_depths': (2, 2),
      'kernel_size': 3,
      'initial_scale': 0.1,
    }
    model = convnext_classifier(num_classes=10, **sizes)
    # Scaled by fan-in, small models begin to learn immediately.
    model.params_init = model.network_tpl.params_init = WeightInit.GaussianFanIn()
    return model


@registry.register
class DigitsMae(BaseExperiment):
  """Learns to predict 8 hidden patches of a digit from the other 8, in minutes on two CPU cores."""

  batch_size = 64

  def datasets(self) -> list[Config]:
    return digit_datasets(self.batch_size)

  def task(self) -> Config:
    model = masked_autoencoder(
      image_size=8,
      patch_size=2,
      channels=1,
      model_dims=64,
      num_layers=3,
      num_heads=4,
      hidden_dims=128,
      pooling='mean',
      decoder_dims=64,
      decoder_layers=2,
      decoder_heads=4,
      mask_ratio=0.5,
      normalizes_targets=False,
    )
    # Scaled by fan-in, small models begin to learn immediately.
    model.network_tpl.params_init = model.patch_decoder_tpl.params_init = WeightInit.GaussianFanIn()
    task = Config(SingleTask, name='masked_autoencoder', model=model)
    task.train.learner = adamw_learner(learning_rate=2e-3, warmup_steps=50, weight_decay=0.05)
    task.train.set(num_train_steps=1000, log_interval_steps=100, eval_interval_steps=500, save_interval_steps=500)
    task.train.inputs_split_mapping = {'map_1d': None, 'map_4d': None}
    return task


_NAMES = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')


def digit_names() -> dict[str, np.ndarray]:
  """Returns `ids` and `segment_ids`, [10, 5] int32: the names of the digits as bytes, with padding at the end."""
  ids = np.array([list(name.encode().ljust(5, b'\0')) for name in _NAMES], np.int32)
  return {'ids': ids, 'segment_ids': (ids != 0).astype(np.int32)}


def named_digits(split: str, reach: int = 0) -> dict[str, np.ndarray]:
  """Returns the images of `shifted_digits`, each with the name of its digit; see `digit_names`."""
  data = shifted_digits(split, reach)
  return {'image': data['image'], **{name: x[data['label']] for name, x in digit_names().items()}}


@registry.register
class DigitsTowers(BaseExperiment):
  """Digits and their names, such as "seven", embedded by two towers with the loss of SigLIP; learns in minutes."""

  batch_size = 64

  def datasets(self) -> list[Config]:
    return digit_datasets(self.batch_size, named_digits, reach=1)

  def model(self) -> Config:
    image = vision_transformer(
      image_size=8,
      patch_size=2,
      channels=1,
      model_dims=64,
      num_layers=2,
      num_heads=4,
      hidden_dims=128,
      pooling='attention',
    )
    text = transformer_encoder(
      vocab_size=128,
      model_dims=64,
      num_layers=1,
      num_heads=4,
      hidden_dims=128,
      style='pre_norm',
      max_len=5,
      num_token_types=0,
    )
    model = Config(TwoTowerModel, embedding_dims=32, image_tpl=image, text_tpl=text)
    model.loss_tpl.set(kind='sigmoid', chunk_size=32)
    model.params_init = image.params_init = text.params_init = WeightInit.GaussianFanIn()
    return model

  def task(self) -> Config:
    task = Config(SingleTask, name='towers', model=self.model())
    task.train.learner = adamw_learner(learning_rate=2e-3, warmup_steps=100, weight_decay=0.05)
    task.train.set(num_train_steps=1000, log_interval_steps=100, eval_interval_steps=500, save_interval_steps=500)
    task.train.inputs_split_mapping = {'map_1d': None, 'map_2d': None, 'map_4d': None}
    return task


class _ImageNet(BaseExperiment):
  """Trains on ImageNet-1k, fully sharded over 8 devices.

  The files are TFDS records with an encoded `image` and a `label`.
  """

  mesh_axis_names = ('replica', 'data', 'mdl')
  ici_mesh_shape: tuple[int, ...] = (1, 8, 1)
  batch_size = 4096
  num_epochs = 300
  num_images = 1_281_167
  rand_augment: tuple[int, int] | None = None

  @property
  def steps_per_epoch(self) -> int:
    return self.num_images // self.batch_size

  def datasets(self) -> list[Config]:
    train = Config(ImageRecordInput, name='train', is_training=True, shuffle_buffer_size=250_000)
    train.rand_augment = self.rand_augment
    validation = Config(ImageRecordInput, name='validation')
    return [
      data.set(file_pattern=REQUIRED, image_size=(224, 224), batch_size=self.batch_size) for data in (train, validation)
    ]

  def model(self) -> Config:
    raise NotImplementedError

  def learner(self) -> Config:
    raise NotImplementedError

  def task(self) -> Config:
    task = Config(ImageClassificationTask, model=set_sharding(self.model()))
    task.train.learner = self.learner()
    steps = self.num_epochs * self.num_images // self.batch_size
    task.train.set(num_train_steps=steps, log_interval_steps=50, eval_interval_steps=2500, save_interval_steps=1000)
    task.train.inputs_split_mapping = {'map_1d': (_ROWS,), 'map_4d': (_ROWS, None, None, None)}
    return task


class _Vit(_ImageNet):
  """Trains for 300 epochs, with the settings of big_vision for ViT on this data (Steiner et al., 2022)."""

  rand_augment = (2, 15)
  sizes: VisionSizes = {}

  def model(self) -> Config:
    sizes: VisionSizes = {'image_size': 224, 'patch_size': 16, 'representation': True, **self.sizes}
    model = image_classifier(num_classes=1000, **sizes)
    model.params_init = model.network_tpl.params_init = WeightInit.Xavier()
    model.softmax_tpl.params_init = WeightInit.Constant(0.0)
    return model.set(mixing_tpl=Config(ImageMixing, mixup_alpha=0.5), fprop_dtype=jnp.bfloat16)

  def learner(self) -> Config:
    return Config(
      Learner,
      optimizer=Config(optax.adamw, weight_decay=0.1, mu_dtype='bfloat16'),
      learning_rate=1e-3,
      schedule=Config(LinearWarmupCosine, warmup_steps=10_000, final_value=0.0),
      clip_gradient_norm_to_value=1.0,
    )


@registry.register
class VitB16(_Vit):
  """ViT-B/16, 87M parameters (Dosovitskiy et al., 2021), on ImageNet-1k, fully sharded over 8 devices."""

  sizes = {'model_dims': 768, 'num_layers': 12, 'num_heads': 12}


@registry.register
class VitL16(_Vit):
  """ViT-L/16, 305M parameters, on ImageNet-1k, fully sharded over 8 devices."""

  sizes = {'model_dims': 1024, 'num_layers': 24, 'num_heads': 16, 'remat': 'full'}


class _ResNet(_ImageNet):
  """Trains for 90 epochs with momentum and 5 epochs of warmup; the rate scales with the batch (Goyal et al., 2017)."""

  batch_size = 1024
  num_epochs = 90
  rate_for_256 = 0.1
  style = 'v1.5'

  def model(self) -> Config:
    model = resnet_classifier(num_classes=1000, style=self.style, fprop_dtype=jnp.bfloat16)
    model.softmax_tpl.label_smoothing = 0.1
    return model

  def learner(self) -> Config:
    return Config(
      Learner,
      optimizer=Config(optax.sgd, momentum=0.9, nesterov=True),
      learning_rate=self.rate_for_256 * self.batch_size / 256,
      schedule=Config(LinearWarmupCosine, warmup_steps=5 * self.steps_per_epoch, final_value=0.0),
      l2_regularizer_weight=1e-4,
    )


@registry.register
class ResNet50(_ResNet):
  """ResNet-50 v1.5, 25.6M parameters (He et al., 2015), on ImageNet-1k, fully sharded over 8 devices."""


@registry.register
class BitR50(_ResNet):
  """BiT-R50x1, a ResNet v2 with group norms and standardized filters, 25.5M parameters (Kolesnikov et al., 2020)."""

  style = 'bit'
  rate_for_256 = 0.03


@registry.register
class ConvNeXtTiny(_ImageNet):
  """ConvNeXt-T, 28.6M parameters, on ImageNet-1k for 300 epochs, with the settings of the paper (Liu et al., 2022)."""

  rand_augment = (2, 9)

  def model(self) -> Config:
    model = convnext_classifier(num_classes=1000, stochastic_depth=0.1, fprop_dtype=jnp.bfloat16)
    model.softmax_tpl.label_smoothing = 0.1
    return model.set(mixing_tpl=Config(ImageMixing, mixup_alpha=0.8, cutmix_alpha=1.0))

  def learner(self) -> Config:
    return Config(
      Learner,
      optimizer=Config(optax.adamw, weight_decay=0.05),
      learning_rate=4e-3,
      schedule=Config(LinearWarmupCosine, warmup_steps=20 * self.steps_per_epoch, final_value=0.0),
      ema_decay=0.9999,
    )


@registry.register
class MaeL16(_ImageNet):
  """Pre-trains ViT-L/16 as a masked autoencoder, 329M parameters, for 800 epochs (He et al., 2022).

  The labels of the images are not used. A classifier starts from such a run by `init_from`.
  """

  num_epochs = 800

  def model(self) -> Config:
    sizes: VisionSizes = {'image_size': 224, 'patch_size': 16, 'model_dims': 1024, 'num_layers': 24, 'num_heads': 16}
    sizes['remat'] = 'full'
    return masked_autoencoder(fprop_dtype=jnp.bfloat16, **sizes)

  def task(self) -> Config:
    return super().task().set(name='masked_autoencoder')

  def learner(self) -> Config:
    return Config(
      Learner,
      optimizer=Config(optax.adamw, b2=0.95, weight_decay=0.05),
      learning_rate=2.4e-3,
      schedule=Config(LinearWarmupCosine, warmup_steps=40 * self.steps_per_epoch, final_value=0.0),
    )


@registry.register
class SiglipB16(BaseExperiment):
  """SigLIP B/16, 203M parameters (Zhai et al., 2023), on synthetic images and texts, fully sharded over 8 devices.

  The published model has seen 9 billion images in batches of this size. For your own data, replace the input by an
  `ImageTextRecordInput` with the tokenizer of the texts.
  """

  mesh_axis_names = ('replica', 'data', 'mdl')
  ici_mesh_shape: tuple[int, ...] = (1, 8, 1)
  batch_size = 32_768
  vocab_size, text_len = 32_000, 64

  def datasets(self) -> list[Config]:
    features = {
      'image': Config(RandomFeature, shape=(224, 224, 3), low=-1, high=1),
      'ids': Config(RandomFeature, shape=(self.text_len,), dtype='int32', low=0, high=self.vocab_size),
    }
    return [Config(SyntheticInput, name='train', is_training=True, features=features, batch_size=self.batch_size)]

  def model(self) -> Config:
    remat = 'full'
    image = vision_transformer(
      image_size=224, patch_size=16, model_dims=768, num_layers=12, num_heads=12, pooling='attention', remat=remat
    )
    text = transformer_encoder(
      vocab_size=self.vocab_size,
      max_len=self.text_len,
      model_dims=768,
      num_layers=12,
      num_heads=12,
      hidden_dims=3072,
      style='pre_norm',
      num_token_types=0,
      activation='gelu_tanh',
      remat=remat,
    )
    model = Config(TwoTowerModel, embedding_dims=768, image_tpl=image, text_tpl=text, has_image_projection=False)
    model.set(text_pooling='last', params_init=image.params_init, fprop_dtype=jnp.bfloat16)
    model.projection_tpl.use_bias = True
    model.loss_tpl.kind = 'sigmoid'
    return model

  def task(self) -> Config:
    task = Config(SingleTask, name='towers', model=set_sharding(self.model()))
    task.train.learner = Config(
      Learner,
      optimizer=Config(optax.adamw, b2=0.95, weight_decay=0.1),
      learning_rate=1e-3,
      schedule=Config(LinearWarmupCosine, warmup_steps=20_000, final_value=0.0),
      clip_gradient_norm_to_value=1.0,
    )
    steps = 9_000_000_000 // self.batch_size
    task.train.set(num_train_steps=steps, eval_interval_steps=None, save_interval_steps=5000)
    task.train.inputs_split_mapping = {'map_1d': (_ROWS,), 'map_2d': (_ROWS, None), 'map_4d': (_ROWS, None, None, None)}
    return task
