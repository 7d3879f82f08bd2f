"""ResNet, BiT, ConvNeXt: logits are those of a forward pass in NumPy, on meshes; tensors are written as they were."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
import resnet_by_hand
from checkpoints import assert_same_tensors, weight, write
from on_meshes import MESHES, load

from praxis_lite.bridges.hf import read_model, write_model
from praxis_lite.bridges.hf.sizes import training_experiment
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import GroupNorm
from praxis_lite.models import resnet_classifier
from praxis_lite.sharding import GuardedJit
from praxis_lite.sharding.mesh import bind_mesh

pytestmark = pytest.mark.usefixtures('shared_programs')

V, C = 3, 2
_SIZES = {'num_channels': C, 'embedding_size': 12, 'depths': [1, 2], 'hidden_act': 'relu', 'num_labels': V}
_RESNET = {'model_type': 'resnet', 'architectures': ['ResNetForImageClassification']}
_BIT = {'model_type': 'bit', 'architectures': ['BitForImageClassification']}
_CONVNEXT = {'model_type': 'convnext', 'architectures': ['ConvNextForImageClassification'], 'layer_norm_eps': 1e-5}
_TWO = {'num_channels': C, 'depths': [1, 2], 'hidden_sizes': [6, 9], 'num_stages': 2, 'num_labels': V, 'patch_size': 3}
CASES = {
  'resnet': _SIZES | _RESNET | {'layer_type': 'bottleneck', 'hidden_sizes': [20, 28]},
  'basic': _SIZES | _RESNET | {'layer_type': 'basic', 'hidden_sizes': [12, 10]},
  'bit': _SIZES | _BIT | {'layer_type': 'preactivation', 'hidden_sizes': [32, 64], 'num_groups': 4},
  'convnext': _TWO | _CONVNEXT | {'layer_scale_init_value': 1e-6, 'drop_path_rate': 0.1, 'hidden_act': 'gelu'},
  'unscaled': _TWO | _CONVNEXT | {'layer_scale_init_value': 0.0, 'drop_path_rate': 0.0, 'hidden_act': 'gelu'},
}
# Odd sizes, on which padding before and after an image matters.
IMAGES = np.random.default_rng(0).standard_normal((3, 18, 13, C)).astype(np.float32)


def shapes_of(config):
  """The names and shapes of the tensors of a checkpoint, as transformers writes them."""
  if config['model_type'] == 'convnext':
    return convnext_shapes_of(config)
  is_bit, shapes = config['model_type'] == 'bit', {}

  def conv(name, size, i, o):
    shapes[f'{name}.weight'] = (o, i, size, size)

  def norm(name, dims, averages=False):
    for part in ('weight', 'bias', *(('running_mean', 'running_var') if averages else ())):
      shapes[f'{name}.{part}'] = (dims,)

  def normed(name, size, i, o):
    conv(f'{name}convolution', size, i, o)
    norm(f'{name}normalization', o, averages=True)

  stem, dims = config['embedding_size'], config['hidden_sizes']
  if is_bit:
    conv('bit.embedder.convolution', 7, C, stem)
  else:
    normed('resnet.embedder.embedder.', 7, C, stem)
  before = stem
  for stage, (out, depth) in enumerate(zip(dims, config['depths'])):
    for i in range(depth):
      name = f'{config["model_type"]}.encoder.stages.{stage}.layers.{i}.'
      inner = out // 4
      if is_bit:
        sizes = ((1, before, inner), (3, inner, inner), (1, inner, out))
        for n, size in enumerate(sizes):
          conv(f'{name}conv{n + 1}', *size)
          norm(f'{name}norm{n + 1}', size[1])
        if i == 0:
          conv(f'{name}downsample.conv', 1, before, out)
      else:
        sizes = ((1, before, inner), (3, inner, inner), (1, inner, out))
        if config['layer_type'] == 'basic':
          sizes = ((3, before, out), (3, out, out))
        for n, size in enumerate(sizes):
          normed(f'{name}layer.{n}.', *size)
        if before != out or (stage and not i):
          normed(f'{name}shortcut.', 1, before, out)
      before = out
  if is_bit:
    norm('bit.norm', before)
  return shapes | {'classifier.1.weight': (V, before), 'classifier.1.bias': (V,)}


def convnext_shapes_of(config):
  shapes, before = {}, config['hidden_sizes'][0]

  def layer(name, *shape):
    shapes.update({f'{name}.weight': shape, f'{name}.bias': shape[:1]})

  layer('convnext.embeddings.patch_embeddings', before, C, 3, 3)
  layer('convnext.embeddings.layernorm', before)
  for stage, (dims, depth) in enumerate(zip(config['hidden_sizes'], config['depths'])):
    name = f'convnext.encoder.stages.{stage}.'
    if stage:
      layer(f'{name}downsampling_layer.0', before)
      layer(f'{name}downsampling_layer.1', dims, before, 2, 2)
    for i in range(depth):
      layer(f'{name}layers.{i}.dwconv', dims, 1, 7, 7)
      layer(f'{name}layers.{i}.layernorm', dims)
      layer(f'{name}layers.{i}.pwconv1', 4 * dims, dims)
      layer(f'{name}layers.{i}.pwconv2', dims, 4 * dims)
      if config['layer_scale_init_value']:
        shapes[f'{name}layers.{i}.layer_scale_parameter'] = (dims,)
    before = dims
  layer('convnext.layernorm', before)
  layer('classifier', V, before)
  return shapes


def make(folder, case, **changes):
  """Writes a checkpoint; returns its folder, config and tensors."""
  config = {**CASES[case], **changes}
  tensors = {name: weight(name, shape, config['model_type']) for name, shape in shapes_of(config).items()}
  for name in tensors:
    if name.endswith('running_var'):
      tensors[name] = np.abs(tensors[name]) + np.float32(0.5)
    elif tensors[name].ndim == 4:  # Otherwise logits are in the hundreds.
      tensors[name] *= np.float32(5 / np.prod(tensors[name].shape[1:]) ** 0.5)
  write(folder, config, {}, **tensors)
  return folder, config, tensors


def batch():
  return {'image': IMAGES, 'weights': np.ones(len(IMAGES), np.float32)}


def outputs_of(there):
  """Log probabilities of classes."""

  def run(variables):
    out, _ = there.model.apply(there.layout.unpad(variables), batch(), method='predict', do_eval=True)
    return jax.numpy.log(out['probabilities'])

  return np.asarray(GuardedJit(bind_mesh(run, there.layout.mesh))(there.variables))


@pytest.mark.slow_cases
@pytest.mark.parametrize('mesh', MESHES, ids=str)
@pytest.mark.parametrize('case', CASES)
def test_outputs_are_those_of_numpy_on_every_mesh_and_tensors_are_written_as_they_were(case, mesh, tmp_path):
  folder, config, tensors = make(tmp_path / 'source', case)
  there = load(folder, mesh)
  expected = resnet_by_hand.outputs(config, tensors, IMAGES)
  expected = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
  assert np.abs(np.diff(expected, axis=0)).max() > 0.03
  np.testing.assert_allclose(outputs_of(there), expected, rtol=1e-5, atol=1e-5)
  assert_same_tensors(there.write(tmp_path / 'out', max_file_bytes=5000), tensors)
  assert json.loads((tmp_path / 'out' / 'config.json').read_text()).items() >= config.items()


def test_counters_of_batches_are_left_out(tmp_path):
  folder, _, tensors = make(tmp_path / 'source', 'basic')
  counter = {'resnet.embedder.embedder.normalization.num_batches_tracked': np.array(7, np.uint8)}
  write(folder, CASES['basic'], {}, **tensors, **counter)
  model, variables = read_model(folder)
  write_model(tmp_path / 'out', model, variables)
  assert_same_tensors(tmp_path / 'out', tensors)


@pytest.mark.parametrize(
  'case, change, says',
  [
    ('resnet', {'downsample_in_bottleneck': True}, 'downsample_in_bottleneck = true is not supported; only false is'),
    ('resnet', {'layer_type': 'inverted'}, 'layer_type = "inverted" is not supported; only "bottleneck" or "basic" is'),
    ('resnet', {'depths': 3}, r'depths = 3; expected a list of positive numbers, one for each stage'),
    ('resnet', {'hidden_sizes': [8, 0]}, r'hidden_sizes = \[8, 0\]; expected a list of positive numbers'),
    ('resnet', {'depths': [1]}, r'network\.stage_depths: expected a number of at least 1 for each of stage_dims'),
    ('bit', {'layer_type': 'bottleneck'}, 'layer_type = "bottleneck" is not supported'),
    ('bit', {'hidden_sizes': [32, 40]}, r'hidden_sizes = \[32, 40\]; expected multiples of 32'),
    ('bit', {'hidden_sizes': [64, 64], 'embedding_size': 64}, 'the first other than embedding_size, 64'),
    ('bit', {'output_stride': 4}, 'output_stride = 4 makes dilated stages, which are not supported'),
    ('bit', {'drop_path_rate': 0.1}, r'drop_path_rate = 0\.1 grows from block to block'),
    ('convnext', {'num_stages': 3}, 'num_stages = 3 is not supported; only 2 is'),
    ('convnext', {'hidden_sizes': [8, 8]}, r'hidden_sizes = \[8, 8\]; successive stages of the same width'),
    ('convnext', {'patch_size': [4, 4]}, 'patch_size'),
    ('bit', {'num_labels': 1}, 'a head with 1 label computes a number'),
    ('bit', {'architectures': ['BitBackbone']}, 'is not supported; of bit, only BitForImageClassification is$'),
  ],
)
def test_what_is_not_supported_is_named(case, change, says, tmp_path):
  make(tmp_path, case)
  (tmp_path / 'config.json').write_text(json.dumps(CASES[case] | change))
  with pytest.raises(ConfigError, match=says):
    read_model(tmp_path)


def test_a_network_of_another_kind_is_named(tmp_path):
  sizes = {'num_classes': V, 'channels': C, 'stem_dims': 12, 'stage_dims': (8,), 'stage_depths': (1,)}
  small = resnet_classifier(stem_size=3, **sizes)
  group = resnet_classifier(**sizes)
  group.network_tpl.norm_tpl = Config(GroupNorm, num_groups=2)
  for model, says in (
    (small, r'differs from resnet, the nearest, in .*stem_size, which is 3 here and 7 there'),
    (group, r'stem_norm, which is GroupNorm here and BatchNorm there'),
    (resnet_classifier(style='v2', **sizes), 'this model belongs to none of the families'),
  ):
    with pytest.raises(ConfigError, match=says):
      write_model(tmp_path, model.instantiate(), {})


def test_an_experiment_of_its_sizes_trains_on_images():
  found = training_experiment(CASES['resnet'])
  assert found.datasets[0].image_size == (224, 224) and found.datasets[0].channels == C
