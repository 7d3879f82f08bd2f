"""Handwritten digits: the 1,797 images of 8 x 8 pixels included in scikit-learn (`pip install praxis_lite[digits]`)."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import Config
from praxis_lite.common.errors import DataError
from praxis_lite.inputs import ArrayInput
from praxis_lite.layers import BatchNorm, ConvNet, Dropout, Mlp
from praxis_lite.models import ClassificationModel
from praxis_lite.tasks.image_classification import ImageClassificationTask
from praxis_lite.tasks.learners import adamw_learner
from praxis_lite.training import registry
from praxis_lite.training.experiment import BaseExperiment

_NUM_TRAIN = 1437  # Four fifths of the images; the others are for validation.


def digits(split: str) -> dict[str, np.ndarray]:
  """Returns `image` [N, 8, 8, 1] in [0, 1] and `label` [N] of the 'train' or the 'validation' split."""
  try:
    from sklearn import datasets
  except ImportError:
    raise DataError(
      'the digits dataset is part of scikit-learn, which is not installed: pip install praxis_lite[digits]'
    ) from None
  images, labels = datasets.load_digits(return_X_y=True)
  order = np.random.Generator(np.random.PCG64(0)).permutation(len(labels))
  rows = order[:_NUM_TRAIN] if split == 'train' else order[_NUM_TRAIN:]
  return {'image': (images[rows] / 16).astype(np.float32).reshape(-1, 8, 8, 1), 'label': labels[rows].astype(np.int32)}


def digit_datasets(
  batch_size: int, arrays: Callable[..., dict[str, np.ndarray]] = digits, **for_training: object
) -> list[Config]:
  """Returns the configs of training and validation data.

  Args:
    batch_size: the batch size of both.
    arrays: a function of a split, such as `digits`.
    **for_training: further arguments of `arrays` for training data.
  """
  train = Config(ArrayInput, name='train', arrays=Config(arrays, split='train', **for_training), is_training=True)
  validation = Config(ArrayInput, name='validation', arrays=Config(arrays, split='validation'))
  return [data.set(batch_size=batch_size) for data in (train, validation)]


class _Digits(BaseExperiment):
  batch_size = 64

  def datasets(self) -> list[Config]:
    return digit_datasets(self.batch_size)

  def network(self) -> Config:
    raise NotImplementedError

  def task(self) -> Config:
    task = Config(ImageClassificationTask)
    task.model = Config(ClassificationModel, num_classes=10, network_tpl=self.network())
    task.train.set(num_train_steps=500, log_interval_steps=50, eval_interval_steps=250, save_interval_steps=250)
    return task


@registry.register
class DigitsMlp(_Digits):
  """Digits, classified by an MLP of one hidden layer; trains in seconds on a CPU."""

  def network(self) -> Config:
    return Config(Mlp, input_dims=64, hidden_dims=(128,))


@registry.register
class DigitsConvNet(_Digits):
  """Digits, classified by a small convolutional network with batch norm."""

  def network(self) -> Config:
    # A run has only 500 steps, so averages over hundreds of steps would still include the first steps.
    return Config(ConvNet, input_channels=1, channels=(16, 32), norm_tpl=Config(BatchNorm, decay=0.9))


@registry.register
class DigitsMlpSharded(DigitsMlp):
  """Digits, with the batch and the hidden layer split over 8 devices; 10 classes and a batch of 50 are padded."""

  batch_size = 50
  ici_mesh_shape = (2, 4)
  mesh_axis_names = ('data', 'mdl')

  def network(self) -> Config:
    network = super().network().set(hidden_dims=(126,))
    network.linear_tpl.weight_split_dims_mapping.wt = ('data', 'mdl')
    network.linear_tpl.activation_split_dims_mapping.out = ('data', 'mdl')
    return network

  def task(self) -> Config:
    task = super().task()
    task.train.inputs_split_mapping = {'map_1d': ('data',), 'map_4d': ('data', None, None, None)}
    task.model.softmax_tpl.weight_split_dims_mapping.wt = ('mdl', 'data')
    return task


class _Digits8(_Digits):
  """A wider MLP with dropout in bfloat16, on 8 devices in 4 microbatches; subclasses differ in communication."""

  ici_mesh_shape = (8,)
  mesh_axis_names = ('data',)
  strategy: list[tuple[str, str]] | None = None
  partitioning = 'auto'

  def network(self) -> Config:
    return Config(Mlp, input_dims=64, hidden_dims=(512,), dropout_tpl=Config(Dropout, rate=0.1))

  def task(self) -> Config:
    task = super().task()
    task.model.fprop_dtype = jnp.bfloat16
    task.train.learner = adamw_learner(warmup_steps=50, weight_decay=1e-2).set(num_microbatches=4)
    task.train.inputs_split_mapping = {'map_1d': ('data',), 'map_4d': ('data', None, None, None)}
    return task.set(strategy=self.strategy, partitioning=self.partitioning)


# Splits variables larger than about 1 KiB, which are all except the bias of the last layer.
_FULLY_SHARDED = [('.*', 'fsdp(axis="data", min_size_to_shard_mb=0.001)')]


@registry.register
class DigitsDataParallel(_Digits8):
  """Digits, data parallel: weights are replicated, and XLA inserts the all-reduces of gradients."""


@registry.register
class DigitsDataParallelExplicit(_Digits8):
  """Digits, data parallel through `shard_map`: gradients are averaged once a step, after all microbatches."""

  partitioning = 'shard_map'


@registry.register
class DigitsFullySharded(_Digits8):
  """Digits, fully sharded: each device stores an eighth of the weights and slots; XLA inserts the all-gathers."""

  strategy = _FULLY_SHARDED


@registry.register
class DigitsFullyShardedExplicit(_Digits8):
  """Digits, fully sharded through `shard_map`: layers gather their weights and reduce-scatter the gradients."""

  strategy = _FULLY_SHARDED
  partitioning = 'shard_map'
