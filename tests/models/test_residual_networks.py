"""ResNet and ConvNeXt: their formula, what a block is at first, steps on any mesh with filler rows, and mistakes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables
from model_steps import assert_close, take_a_step

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves_by_path, path_name
from praxis_lite.layers import ConvNeXtBlock, ResNetBlock, StandardizedConv2D
from praxis_lite.models import convnext_classifier, resnet_classifier, set_pipeline, set_sharding

pytestmark = pytest.mark.usefixtures('shared_programs')

B, V = 5, 3
SIZES = {'channels': 2, 'stem_dims': 6, 'stem_size': 3, 'stage_dims': (8, 12), 'stage_depths': (1, 2)}
KINDS = {
  'v1.5': {},
  'v2': {'style': 'v2', 'stochastic_depth': 0.4},
  'bit': {'style': 'bit', 'num_groups': 2, 'stage_dims': (8, 16)},
  'basic': {'kind': 'basic', 'has_pooling': False},
}


def config(case='v1.5', **fields):
  if case == 'convnext':
    sizes = {'channels': 2, 'patch_size': 3, 'stage_dims': (6, 5), 'stage_depths': (1, 2), 'kernel_size': 3}
    return convnext_classifier(num_classes=V, **{**sizes, 'initial_scale': 0.5, 'stochastic_depth': 0.4, **fields})
  return resnet_classifier(num_classes=V, **{**SIZES, **KINDS[case], **fields})


def batch_of(rows=B):
  rng = np.random.default_rng(0)
  image = rng.standard_normal((rows, 13, 10, 2)).astype(np.float32)
  weights = np.array([1, 0.5, 0, 2, 1], np.float32)[:rows]
  return {'image': image, 'label': rng.integers(0, V, rows).astype(np.int32), 'weights': weights}


# ------------------------------------------------------------------ the formula, in NumPy


def windows(x, size, stride):
  edge = (size - 1) // 2
  x = np.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
  return np.lib.stride_tricks.sliding_window_view(x, (size, size), (1, 2))[:, ::stride, ::stride]


def conv(x, of, stride=1):
  return np.einsum('bhwcij,ijco->bhwo', windows(x, len(of['w']), stride), of['w'])


def normed(x, of, weights):
  """Batch norm with the weighted statistics of the batch."""
  w = weights.reshape(-1, 1, 1, 1) / (weights.sum() * x.shape[1] * x.shape[2])
  mean = (x * w).sum((0, 1, 2))
  return (x - mean) / np.sqrt((np.square(x - mean) * w).sum((0, 1, 2)) + 1e-5) * of['scale'] + of['bias'], mean


def v2_by_hand(variables, image, weights):
  """Log probabilities of v2 in training, and the mean of the batch at the last norm."""
  of = jax.tree.map(lambda x: np.asarray(x, np.float64), variables)
  relu, net = functools.partial(np.maximum, 0), of['network']
  x = windows(conv(image, net['stem'], 2), 3, 2).max((-1, -2))
  for n in range(3):
    block = net[f'blocks_{n}']
    y = relu(normed(x, block['norm_0'], weights)[0])
    short = conv(y, block['shortcut'], 1 + (n == 1)) if n < 2 else x
    y = relu(normed(conv(y, block['conv_0']), block['norm_1'], weights)[0])
    y = relu(normed(conv(y, block['conv_1'], 1 + (n == 1)), block['norm_2'], weights)[0])
    x = short + conv(y, block['conv_2'])
  x, mean = normed(x, net['final_norm'], weights)
  logits = relu(x).mean((1, 2)) @ of['softmax']['w'] + of['softmax']['b']
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True)), mean


def test_v2_in_training_is_its_formula_and_moves_the_averages_to_the_batch():
  model = config('v2', stochastic_depth=0.0, norm_decay=0.75).instantiate()
  variables, batch = drawn_variables(model.abstract_init()), batch_of()
  expected, mean = v2_by_hand(variables, batch['image'].astype(np.float64), batch['weights'])
  (_, examples), side = jax.jit(lambda v: model.apply(v, batch))(variables)
  rows = np.arange(B)
  found = np.asarray(examples['loss'])
  np.testing.assert_allclose(found, -expected[rows, batch['label']], rtol=1e-4, atol=1e-4)
  before = variables['network']['final_norm']['moving_mean']
  moved = side.updates['network']['final_norm']['moving_mean']
  np.testing.assert_allclose(moved, 0.75 * before + 0.25 * mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('kind', ['v1.5', 'v2'])
def test_the_branch_of_a_block_is_zero_at_first(kind):
  fields = {'pre_activation': kind == 'v2', 'begins_as_identity': True}
  block = Config(ResNetBlock, input_dims=8, output_dims=8, **fields).instantiate()
  x = np.random.default_rng(0).random((2, 5, 4, 8)).astype(np.float32)
  np.testing.assert_allclose(block.apply(block.init(jax.random.key(0)), x)[0], x, atol=1e-6)


def test_filters_are_standardized_and_zeros_stay_zeros():
  layer = Config(StandardizedConv2D, filter_shape=(1, 1, 3, 2)).instantiate()
  w = np.array([[1.0, 0], [2, 0], [6, 0]], np.float32)[None, None]
  y, _ = layer.apply({'w': w, 'b': np.zeros(2, np.float32)}, np.eye(3, dtype=np.float32)[:, None, None])
  column = np.array([-2.0, -1, 3]) / np.sqrt(14 / 3)
  np.testing.assert_allclose(y[:, 0, 0], np.stack([column, np.zeros(3)], -1), rtol=1e-5)


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind', ['v1.5', 'bit'])
def test_rows_of_padding_count_in_nothing_and_may_hold_nan(kind):
  model = config(kind).instantiate()
  variables, batch = drawn_variables(model.abstract_init()), batch_of()
  real = batch['weights'] > 0
  bad = {**batch, 'image': np.where(real[:, None, None, None], batch['image'], np.nan)}
  without = {name: x[real] for name, x in batch.items()}

  def results(batch):
    def loss(v):
      (metrics, _), side = model.apply(v, batch)
      return metrics['loss'][0], side.updates

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables)

  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), results(bad), results(without))


@pytest.mark.slow
def test_bfloat16_has_nearly_the_same_loss_in_float32():
  model, half = config('bit').instantiate(), config('bit', fprop_dtype=jnp.bfloat16).instantiate()
  variables = drawn_variables(model.abstract_init())
  (metrics, _), _ = half.apply(variables, batch_of(), do_eval=True)
  assert metrics['loss'][0].dtype == jnp.float32
  (expected, _), _ = model.apply(variables, batch_of(), do_eval=True)
  np.testing.assert_allclose(metrics['loss'][0], expected['loss'][0], rtol=0.03)


# ------------------------------------------------------------------ meshes


def after_a_step(kind, mesh=None):
  """The loss, and the variables after a step of gradient descent at a rate of 1, and the averages of batch norms."""
  return take_a_step(set_sharding(config(kind)), batch_of(), mesh)


@functools.cache
def on_one_device(kind):
  return after_a_step(kind)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'kind, mesh',
  [
    ('basic', (2, 1, 1, 3)),
    ('v1.5', (1, 2, 2, 2)),
    ('v1.5', (1, 1, 3, 1)),
    ('v2', (2, 1, 3, 1)),
    ('bit', (1, 2, 2, 2)),
    ('convnext', (1, 2, 2, 2)),
    ('convnext', (2, 1, 3, 1)),
  ],
)
def test_a_step_on_a_mesh_that_divides_nothing_is_that_of_one_device(kind, mesh):
  """Batch norms have the statistics of the whole batch without filler rows, and so have their averages."""
  (loss, variables), (expected, one) = after_a_step(kind, mesh), on_one_device(kind)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert_close(variables, one, 2e-5)


def test_channels_are_split():
  def splits(case):
    tree = leaves_by_path(set_sharding(config(case)).instantiate().abstract_init())
    return {path_name(path): w.full_split_dims_mapping for path, w in tree.items()}

  tree = splits('convnext')
  assert tree['network.blocks_1.depthwise.w'] == tree['network.down_0.w'] == (None, None, None, ('mdl', 'data'))
  assert tree['network.blocks_2.ff.up.w'] == ('data', 'mdl')
  tree = splits('v1.5')
  assert tree['network.stem.w'] == tree['network.blocks_1.shortcut.w'] == (None, None, None, ('mdl', 'data'))
  assert tree['network.blocks_0.norm_2.moving_mean'] == ('mdl',)
  assert tree['softmax.w'] == ('data', 'mdl')


def test_stochastic_depth_grows_from_block_to_block():
  network = config('convnext', stage_depths=(2, 3), stochastic_depth=0.4).instantiate().network
  np.testing.assert_allclose([block.residual.rate for block in network.blocks], [0, 0.1, 0.2, 0.3, 0.4])
  assert config('convnext', stage_dims=(4,), stage_depths=(1,)).instantiate().network.blocks[0].residual.rate == 0


def test_a_block_of_convnext_is_small_at_first_or_has_no_scale():
  x = np.random.default_rng(0).standard_normal((2, 5, 4, 6)).astype(np.float32)
  block = Config(ConvNeXtBlock, dims=6).instantiate()
  np.testing.assert_allclose(block.apply(block.init(jax.random.key(0)), x)[0], x, atol=1e-4)
  assert 'scale' not in Config(ConvNeXtBlock, dims=6, initial_scale=None).instantiate().abstract_init()


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
  'change, says',
  [
    ({'style': 'v3'}, "resnet: style.*'v3'"),
    ({'kind': 'wide'}, r"network\.blocks_0\.kind.*'wide'"),
    (
      {'stage_depths': (1,)},
      r'network\.stage_depths: expected a number of at least 1 for each of stage_dims, \(8, 12\)',
    ),
    ({'stage_depths': (1, 0)}, r'network\.stage_depths: expected a number of at least 1'),
    ({'stage_dims': (3, 8)}, r'network\.blocks_0\.output_dims: 3; a bottleneck needs at least 4'),
    (
      {'stage_dims': (0, 12)},
      r'network\.stage_dims: expected numbers of at least 1, one for each stage; got \(0, 12\)',
    ),
    ({'case': 'convnext', 'kernel_size': 4}, r'kernel_size: expected an odd size'),
    ({'stem_stride': 0}, r'network\.stem_stride'),
    ({'activation': 'rleu'}, r"network\.activation: unknown activation 'rleu'\. Did you mean 'relu'\?"),
    ({'style': 'bit', 'num_groups': 5}, r'num_groups: 5 does not divide dims'),
    ({'case': 'convnext', 'stage_depths': (1,)}, r'network\.stage_depths: expected a number of at least 1'),
    ({'case': 'convnext', 'patch_size': 0}, r'network\.patch_size'),
    ({'case': 'convnext', 'stochastic_depth': 1.0}, r'network\.stochastic_depth'),
    (
      {'case': 'convnext', 'activation': 'geul'},
      r"network\.activation: unknown activation 'geul'\. Did you mean 'gelu'\?",
    ),
  ],
)
def test_mistakes_of_a_config_are_named(change, says):
  with pytest.raises(ConfigError, match=says):
    config(**change).instantiate()


def test_images_with_other_channels_and_a_split_length_are_named():
  model = config().instantiate()
  with pytest.raises(
    ConfigError, match=r'network\.down_0\.filter_shape: a window of 2 x 2 is larger than the image, 1 x 1'
  ):
    small = {**batch_of(), 'image': batch_of()['image'][:, :5, :5]}
    convnext = config('convnext').instantiate()
    jax.eval_shape(lambda: convnext.apply(convnext.init(jax.random.key(0)), small, do_eval=True))
  for image in (batch_of()['image'][..., :1], batch_of()['image'][..., 0]):
    with pytest.raises(ConfigError, match=r'network\.channels: 2, so images are \[B, height, width, 2\]'):
      jax.eval_shape(lambda image=image: model.apply(model.init(jax.random.key(0)), {**batch_of(), 'image': image}))
  with pytest.raises(ConfigError, match=r'set_sharding: a network of convolutions .* no context_axis can split it'):
    set_sharding(config(), context_axis='data')


@pytest.mark.parametrize('case, name', [('v1.5', 'ResNet'), ('convnext', 'ConvNeXt')])
def test_there_are_no_stages_of_a_pipeline(case, name):
  with pytest.raises(ConfigError, match=f'set_pipeline: {name} has no stack of repeated blocks'):
    set_pipeline(config(case), num_stages=2, num_microbatches=2)
