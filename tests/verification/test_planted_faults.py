"""Each of these faults is found, and the variable or result that is wrong is named."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.common.config import Config, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.instruments.verification import format_verification, verify
from praxis_lite.instruments.verification.differences import find_differences
from praxis_lite.instruments.verification.steps import Name
from praxis_lite.layers import Conv2D, Mlp, Pooling
from praxis_lite.layers.base import Layer, WeightSplit
from praxis_lite.layers.tensor_parallel import TensorParallelLinear
from praxis_lite.models import ClassificationModel
from praxis_lite.sharding.weights import WeightHParams, WeightHParamsCollection
from praxis_lite.training import execution, partitioned_step
from praxis_lite.training.task import SingleTask

AXES = ('replica', 'data', 'mdl')
ROWS = ('replica', 'data')


def inputs(*image, rows=16):
  """The shapes of a batch of images, or of vectors."""
  leaves = {'image': (image, np.float32), 'label': ((), np.int32), 'weights': ((), np.float32)}
  return {name: jax.ShapeDtypeStruct((rows, *shape), dtype) for name, (shape, dtype) in leaves.items()}


def classifier(network, **fields):
  """The config of a task on 2 x 2 x 2 devices, rows over the first two axes."""
  task = Config(SingleTask, mesh_axis_names=AXES, ici_mesh_shape=(2, 2, 2), **fields)
  task.model = Config(ClassificationModel, num_classes=5, network_tpl=network)
  task.train.inputs_split_mapping = {f'map_{n}d': (ROWS, *[None] * (n - 1)) for n in (1, 2, 4)}
  return task


def explicit(network, **fields):
  """The config of a task on 8 devices under shard_map."""
  task = classifier(network, **fields)
  task.train.inputs_split_mapping = None
  return task.set(mesh_axis_names=('data', 'mdl'), ici_mesh_shape=(4, 2), partitioning='shard_map')


def unguarded(monkeypatch):
  monkeypatch.setattr(partitioned_step, 'guard', lambda lowered: [])


# ---------------------------------------------------------------- a guard switched off


def mlp_over_all_axes():
  network = Config(Mlp, input_dims=32, hidden_dims=(32, 64))
  network.linear_tpl.weight_split_dims_mapping.wt = ('data', 'mdl')
  network.linear_tpl.activation_split_dims_mapping.out = (ROWS, 'mdl')
  return classifier(network)


@pytest.mark.slow
def test_products_without_their_guard(monkeypatch):
  found = verify(mlp_over_all_axes(), inputs(32), quick=True)
  assert found.is_right
  assert found.guarded and 'faults of XLA that praxis_lite works around: dot_general in ' in format_verification(found)
  unguarded(monkeypatch)
  found = verify(mlp_over_all_axes(), inputs(32), quick=True)
  assert any(name.startswith('network.linear_') for name in found.variables())
  assert 'right with network.linear_' in found.remedy and 'instead of' in found.remedy


class Images(Layer):
  """Image rows over 'data'; then a layer on images, and the mean of each channel."""

  layer_tpl: Config = None
  channels: int = 8

  def setup(self):
    first = Config(Conv2D, filter_shape=(3, 3, 2, 8))
    first.activation_split_dims_mapping.out = (None, 'data', None, None)
    self.create_child('first', first)
    self.create_child('second', self.layer_tpl)

  @property
  def output_dims(self):
    return self.channels

  def __call__(self, x, weights):
    return jnp.mean(self.second(self.first(x)), axis=(1, 2))


def images(layer):
  task = classifier(Config(Images, layer_tpl=layer))
  task.train.inputs_split_mapping = {'map_1d': ('replica',), 'map_4d': ('replica', 'data', None, None)}
  return task


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'layer',
  [
    Config(Conv2D, filter_shape=(3, 3, 8, 8)),
    Config(Conv2D, filter_shape=(3, 3, 8, 8), groups=8),
    Config(Pooling, window=(3, 3), strides=(1, 1), padding='SAME'),
  ],
  ids=['convolution', 'grouped', 'pooling'],
)
def test_images_without_their_guards(monkeypatch, layer):
  unguarded(monkeypatch)
  found = verify(images(layer), inputs(8, 8, 2), quick=True)
  assert 'network.first.w' in found.variables()
  assert 'right with' in found.remedy and "'data'" in found.remedy


# ---------------------------------------------------------------- layers that are wrong on a mesh


class Own(Layer):
  """A layer [B, D] -> [B, D] with a weight; subclasses are wrong in some way."""

  dims: int = 16
  weight_split_dims_mapping: Config = template(WeightSplit)
  keep_split: bool = False

  def setup(self):
    collections = {WeightHParamsCollection.KEEP_SPLIT} if self.keep_split else set()
    split = self.weight_split_dims_mapping.wt
    weight = WeightHParams((self.dims, self.dims), tensor_split_dims_mapping=split, collections=collections)
    self.create_variable('w', weight)

  @property
  def output_dims(self):
    return self.dims

  @property
  def is_mapped(self):
    return bool(self.surroundings.manual_axes)

  def __call__(self, x, weights):
    return jnp.tanh(x @ self.theta.w)


class MixesRows(Own):
  """Adds up over the axis that splits the batch."""

  def __call__(self, x, weights):
    y = super().__call__(x, weights)
    return jax.lax.psum(y, 'data') if self.is_mapped else y


class SumsTwice(Own):
  """Adds up what is whole on each device of an axis."""

  def __call__(self, x, weights):
    y = super().__call__(x, weights)
    return jax.lax.psum(y, 'mdl') if self.is_mapped else y


class LocalMean(Own):
  """Normalizes over the rows at hand, not over all."""

  def __call__(self, x, weights):
    y = super().__call__(x, weights)
    return y - jnp.mean(y * weights[:, None], axis=0)


class CountsPadding(Own):
  """Normalizes over all rows, those of zero weight too."""

  def __call__(self, x, weights):
    return super().__call__(x, weights) - jnp.mean(super().__call__(x, weights) ** 2, axis=0)


class OwnPart(Own):
  """Multiplies by its part of the weight, of whichever dimension that is."""

  keep_split: bool = True

  def __call__(self, x, weights):
    if not self.is_mapped:
      return super().__call__(x, weights)
    w = self.theta.w
    if w.shape[0] != self.dims:
      x = x[:, : w.shape[0]]  # Right only on the first device.
    return jnp.tanh(jax.lax.psum(x @ w, 'mdl') if w.shape[0] != self.dims else x @ w)


class DropsRows(Layer):
  """Dropout, and two layers that stay split over 'mdl'; `by_device` draws another mask on each device of that axis."""

  by_device: bool = True
  output_dims = 16

  def setup(self):
    for name, split in (('column', (None, 'mdl')), ('row', ('mdl', None))):
      child = Config(TensorParallelLinear, input_dims=16, output_dims=16, parallel=name)
      child.weight_split_dims_mapping.wt = split
      self.create_child(name, child)

  def __call__(self, x, weights):
    if not self.do_eval:
      key = self.next_prng_key()
      if self.by_device and self.surroundings.manual_axes:
        key = jax.random.fold_in(key, jax.lax.axis_index('mdl'))
      x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)
    return self.row(jnp.tanh(self.column(x)))


class OwnMap(Own):
  """A `shard_map` of its own that adds a bias on each device before it adds up."""

  def __call__(self, x, weights):
    y = super().__call__(x, weights)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1:
      return y + 0.1
    add = jax.shard_map(
      lambda y: jax.lax.psum(y / 2 + 0.1, 'mdl'), in_specs=P(ROWS), out_specs=P(ROWS), check_vma=False
    )
    return add(y)


def wrong_in(task, **options):
  """The paths of the variables that are found to be wrong, and the whole text."""
  found = verify(task, inputs(16), **{'search_seconds': 0, 'quick': True, **options})
  assert not found.is_right
  return found.variables(), format_verification(found)


@pytest.mark.slow_cases
@pytest.mark.parametrize('layer', [MixesRows, SumsTwice, LocalMean], ids=lambda layer: layer.__name__)
def test_layers_that_are_wrong_under_shard_map(layer):
  variables, text = wrong_in(explicit(Config(layer)))
  assert 'network.w' in variables and 'wrong: loss' in text


def test_a_kept_part_of_the_wrong_dimension():
  task = explicit(Config(OwnPart))
  task.model.network_tpl.weight_split_dims_mapping.wt = ('mdl', None)
  variables, text = wrong_in(task)
  assert 'network.w' in variables and "split as ('mdl', None): network.weight_split_dims_mapping.wt" in text


@pytest.mark.slow
def test_dropout_that_differs_by_device_along_an_axis_with_whole_rows():
  variables, text = wrong_in(explicit(Config(DropsRows)))
  assert 'network.column.w' in variables
  assert 'gradients of 7 rows with dropout' in text
  found = verify(explicit(Config(DropsRows, by_device=False)), inputs(16), quick=True)
  assert found.is_right and any('other means than Dropout' in why for why in found.not_compared)


def test_rows_of_zero_weight_that_count():
  variables, _ = wrong_in(classifier(Config(CountsPadding)))
  assert 'network.w' in variables


def test_a_shard_map_of_a_layers_own():
  variables, text = wrong_in(classifier(Config(OwnMap)), search_seconds=20)
  assert 'softmax.w' in variables
  assert 'no mapping is the cause' in text


def test_draws_that_cannot_be_compared_are_an_error():
  class Noisy(Own):
    def __call__(self, x, weights):
      return super().__call__(x + jax.random.normal(self.next_prng_key(), x.shape), weights)

  with pytest.raises(ConfigError, match=r'nothing can be compared: .* random numbers by'):
    verify(explicit(Config(Noisy)), inputs(16), quick=True)


# ---------------------------------------------------------------- steps that are wrong


def test_gradients_that_are_summed_where_their_mean_is_wanted(monkeypatch):
  def summed(gradients, axes, specs):
    return jax.tree.map(lambda g: jax.lax.psum(g, axes), gradients)

  monkeypatch.setattr(execution, 'sync_gradients', summed)
  variables, text = wrong_in(explicit(Config(Own)))
  assert variables == ['network.w', 'softmax.b', 'softmax.w'] or set(variables) >= {'network.w', 'softmax.w'}
  assert 'off by 7 times' in text and 'wrong: loss' not in text


@pytest.mark.slow
def test_norms_of_parts_of_gradients(monkeypatch):
  """Clipping by the norm of a device's own parts: gradients are right, and the optimizer's step is wrong."""
  monkeypatch.setattr(execution.ShardMapped, 'sum_parts', lambda self, sums: sums)
  task = explicit(Config(Own), strategy=[('.*', 'fsdp(axis="data", min_size_to_shard_mb=0)')])
  task.train.learner.clip_gradient_norm_to_value = 1e-3
  _, text = wrong_in(task, quick=False)
  assert 'in a step of the optimizer of 7 rows' in text and 'gradient of' not in text


@pytest.mark.slow
def test_what_is_wrong_in_evaluation_alone(monkeypatch):
  class WrongInEvaluation(OwnMap):
    def __call__(self, x, weights):
      return super().__call__(x, weights) if self.do_eval else Own.__call__(self, x, weights)

  _, text = wrong_in(classifier(Config(WrongInEvaluation)), quick=False)
  assert 'wrong: loss: off by' in text and 'in evaluation of 7 rows' in text and 'gradient of' not in text


@pytest.mark.slow
def test_layers_of_ours_that_look_like_these_are_right():
  network = Config(Mlp, input_dims=16, hidden_dims=(24,))
  network.linear_tpl.weight_split_dims_mapping.wt = (None, 'mdl')
  found = verify(explicit(network), inputs(16))
  assert found.is_right, format_verification(found)
  assert {'gradients of 7 rows', 'decoding of 7 rows'} <= set(found.compared)


def test_a_result_without_entries_is_right():
  empty = {Name('output', 'boxes'): np.zeros((0, 4), np.float32)}
  assert find_differences(empty, empty, [empty]) == {}
