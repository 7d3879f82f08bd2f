"""The same experiment in small: which sizes and meshes it gets."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves_by_path
from praxis_lite.instruments.explain.report import batch_of
from praxis_lite.instruments.verification import shrink
from praxis_lite.instruments.verification.shrink import small_task
from praxis_lite.instruments.verification.small_mesh import small_mesh
from praxis_lite.layers import Mlp
from praxis_lite.layers.base.facts import PipelineStages
from praxis_lite.layers.linears import Linear
from praxis_lite.layers.sequential import Sequential
from praxis_lite.models import ClassificationModel, griffin_lm, set_pipeline
from praxis_lite.sharding.placement import placed_specs
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure
from praxis_lite.training.task import SingleTask


@pytest.mark.parametrize(
  ('sizes', 'small'),
  [
    ((2, 2, 2), (2, 2, 2)),
    ((2, 2, 3), (2, 2, 3)),
    ((5, 2, 2), (5, 2, 2)),
    ((1, 16, 4), (1, 4, 4)),
    ((1, 1, 1), (2, 2, 2)),
    ((1,), (8,)),
    ((7,), (7,)),
    ((9, 1), (9, 1)),
    ((7, 5), (5, 3)),
    ((4096,), (4,)),
    ((30,), (6,)),
    ((12, 4), (6, 4)),
    ((3, 25), (3, 5)),
    ((16, 16, 3), (2, 4, 3)),
    ((2, 16, 4), (2, 4, 2)),
    ((2, 2, 2, 2), (2, 2, 2, 2)),
    ((2, 2, 2, 4), (2, 2, 2, 2)),
  ],
  ids=str,
)
def test_meshes(sizes, small):
  names = 'abcd'[: len(sizes)]
  assert tuple(small_mesh(dict(zip(names, sizes))).values()) == small


def test_more_devices_than_are_allowed():
  mesh = dict.fromkeys('abcde', 2)
  with pytest.raises(ConfigError, match=r'5 axes of more than one device need at least 32 .* pass --devices=32'):
    small_mesh(mesh)
  assert small_mesh(mesh, 32) == mesh
  assert math.prod(small_mesh({**mesh, 'f': 1, 'a': 8}, 64).values()) <= 64


@pytest.mark.parametrize('most', [2, 8, 24])
def test_meshes_fit_and_no_axis_is_lost(most):
  for sizes in itertools.product((1, 2, 3, 6, 16), repeat=3):
    mesh = dict(zip('abc', sizes))
    if math.prod(sizes) > 1 and 2 ** sum(n > 1 for n in sizes) <= most:
      small = small_mesh(mesh, most)
      assert math.prod(small.values()) <= most
      assert all((n > 1) == (small[name] > 1) and small[name] <= n for name, n in mesh.items())


def small_experiment(name):
  config = configure(registry.get(name))
  return config, small_task(config.task, batch_of(config.datasets))


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'name',
  ['lm.StdlibLmMixed', 'lm_sizes.Llama8B', 'lm_sizes.Gpt2Xl', 'recurrent.RecurrentGemma2B', 'families.DeepSeekV3'],
)
def test_dimensions_are_as_even_as_the_real_ones(name):
  """Also if layers take turns by three, and 26 layers are 8 turns and two more."""
  config, small = small_experiment(name)
  real, task = config.task.instantiate(), small.config.instantiate()
  declared = leaves_by_path(real.model.abstract_init())
  assert declared.keys() == leaves_by_path(task.model.abstract_init()).keys()
  sizes = real.mesh_sizes()
  parts = {tuple(spec): spec for spec in leaves_by_path(placed_specs(small.placements)).values()}
  assert any(entry is not None for spec in parts for entry in spec)
  for path, weight in leaves_by_path(task.model.abstract_init()).items():
    spec = leaves_by_path(placed_specs(small.placements))[path]
    for n, k, entry in zip(declared[path].full_shape, weight.full_shape, spec):
      axes = (entry,) if isinstance(entry, str) else entry or ()
      by = [int(np.prod([mesh[axis] for axis in axes])) for mesh in (sizes, small.mesh_sizes)]
      assert (n % by[0] == 0) == (k % by[1] == 0), (path, n, k, entry)
  assert max(small.sizes.values()) <= 512


def test_sizes_keep_their_order_and_what_they_divide():
  _, small = small_experiment('lm_sizes.Llama8B')
  real = sorted(small.sizes)
  assert [small.sizes[n] for n in real] == sorted(small.sizes.values())
  for m in real:
    assert all(small.sizes[n] % small.sizes[m] == 0 for n in real if n % m == 0)


class Chain(Sequential):
  """Layers one after the other, from 24 to 24 dims."""

  output_dims: int = 24

  def __call__(self, x_BD, weights_B):
    return Sequential.__call__(self, x_BD)


def test_sizes_of_a_large_model_keep_their_order_only_where_they_meet(monkeypatch):
  """Each of the powers of two meets 24 and no other power, as the experts of a model do not meet its heads."""
  monkeypatch.setattr(shrink, '_MOST_WEIGHTS', 10_000)
  powers = [2**k for k in range(6, 14)]
  layers = [Config(Linear, input_dims=m, output_dims=n) for k in powers for m, n in ((24, k), (k, 24))]
  network = Config(Chain, layers_tpl=tuple(layers))
  task = Config(SingleTask, model=Config(ClassificationModel, num_classes=10, network_tpl=network))
  leaves = {'image': ((64, 24), np.float32), 'label': ((64,), np.int32), 'weights': ((64,), np.float32)}
  sizes = small_task(task, {name: jax.ShapeDtypeStruct(*leaf) for name, leaf in leaves.items()}).sizes
  assert all(sizes[24] < sizes[n] <= 4 * sizes[24] for n in powers), sizes


def test_a_flattened_image_stays_the_product_of_its_dimensions():
  network = Config(Mlp, input_dims=48 * 48 * 3, hidden_dims=(1000,))
  config = Config(SingleTask, model=Config(ClassificationModel, num_classes=100, network_tpl=network))
  leaves = {'image': ((64, 48, 48, 3), np.float32), 'label': ((64,), np.int32), 'weights': ((64,), np.float32)}
  small = small_task(config, {name: jax.ShapeDtypeStruct(*leaf) for name, leaf in leaves.items()})
  side = small.sizes[48]
  assert side < 48 and small.sizes[48 * 48 * 3] == side * side * 3
  assert small.inputs['image'].shape == (64, side, side, 3)


def test_thresholds_of_strategies_see_the_real_sizes():
  _, small = small_experiment('digits.DigitsFullySharded')
  assert 'data' in tuple(leaves_by_path(placed_specs(small.placements))['network', 'linear_0', 'w'])
  weight = leaves_by_path(small.config.instantiate().model.abstract_init())['network', 'linear_0', 'w']
  assert np.prod(weight.full_shape) * 4 < 64 * 512 * 4


def test_prompts_shrink_with_the_rest():
  config = configure(registry.get('lm_sizes.Llama8B'))
  prompts = {'ids': jax.ShapeDtypeStruct((4, 8192), np.int32), 'prompt_lengths': jax.ShapeDtypeStruct((4,), np.int32)}
  small = small_task(config.task, batch_of(config.datasets), prompts)
  assert small.prompts['ids'].shape == (4, small.sizes[8192]) and small.prompts['prompt_lengths'].shape == (4,)


@pytest.mark.slow
def test_what_bounds_decoding_is_no_size_of_the_model():
  config = configure(registry.get('moe.FineGrained16B'))
  config.task.model.decoder_tpl.max_decode_steps = 128
  config.task.model.lm_tpl.transformer_tpl.layers_tpl.attention_tpl.cache_page_size = 512
  small = small_task(config.task, batch_of(config.datasets))
  assert small.config.model.decoder_tpl.max_decode_steps == 8
  assert small.config.model.lm_tpl.transformer_tpl.layers_tpl.attention_tpl.cache_page_size == 8


@pytest.mark.slow
@pytest.mark.parametrize(('num_layers', 'small_layers'), [(97, 7), (101, 11)])
def test_stages_of_a_pattern_stay_even_or_not_and_keep_what_is_left_over(num_layers, small_layers):
  """32 repetitions of three blocks in 16 stages, and one block left over; 33 repetitions, and two left over."""
  model = griffin_lm(vocab_size=8, model_dims=8, num_layers=num_layers, num_heads=2, window=4)
  set_pipeline(model, num_stages=16, num_microbatches=32)
  task = Config(SingleTask, model=model, mesh_axis_names=('stage', 'data', 'mdl'), ici_mesh_shape=(16, 2, 1))
  batch = {name: jax.ShapeDtypeStruct((64, 8), np.int32) for name in ('ids', 'labels')}
  batch['weights'] = jax.ShapeDtypeStruct((64, 8), np.float32)
  small = small_task(task, batch, most_devices=4).config.model
  assert (small.num_layers, small.lm_tpl.transformer_tpl.num_stages) == (small_layers, 2)


class Chunked(Linear):
  """Multiplies chunks of the rows one after the other."""

  count_fields = ('num_chunks',)

  num_chunks: int = 48

  def __call__(self, x_BD):
    return jax.numpy.concatenate([Linear.__call__(self, x) for x in jax.numpy.array_split(x_BD, self.num_chunks)])


class Staged(Linear):
  """Says that it runs its rows in the stages of a pipeline."""

  parts: int = 48

  def pipeline_stages(self):
    return PipelineStages(self.parts, 'parts', ('data',))


@pytest.mark.parametrize(('data', 'small_parts'), [(24, 2), (32, 3)])
def test_the_stages_that_a_layer_declares_become_fewer_and_fit_the_mesh_as_before(data, small_parts):
  network = Config(Mlp, input_dims=96, hidden_dims=(48,), linear_tpl=Config(Staged))
  task = Config(SingleTask, model=Config(ClassificationModel, num_classes=48, network_tpl=network))
  task.set(mesh_axis_names=('data', 'mdl'), ici_mesh_shape=(data, 1))
  leaves = {'image': ((64, 96), np.float32), 'label': ((64,), np.int32), 'weights': ((64,), np.float32)}
  small = small_task(task, {name: jax.ShapeDtypeStruct(*leaf) for name, leaf in leaves.items()}, most_devices=2)
  assert small.config.model.network_tpl.linear_tpl.parts == small_parts


def test_a_count_that_a_layer_declares_stays_as_it_is():
  network = Config(Mlp, input_dims=96, hidden_dims=(48,), linear_tpl=Config(Chunked))
  task = Config(SingleTask, model=Config(ClassificationModel, num_classes=48, network_tpl=network))
  leaves = {'image': ((64, 96), np.float32), 'label': ((64,), np.int32), 'weights': ((64,), np.float32)}
  small = small_task(task, {name: jax.ShapeDtypeStruct(*leaf) for name, leaf in leaves.items()})
  network = small.config.model.network_tpl
  assert network.linear_tpl.num_chunks == 48 and network.hidden_dims[0] == small.sizes[48] < 48
