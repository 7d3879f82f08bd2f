"""Residual networks for images. model_type resnet is v1.5; bit is v2, with group norms and standardized filters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from praxis_lite.bridges.hf.family import Values, WholeModelFamily
from praxis_lite.bridges.hf.files import StoredTensor
from praxis_lite.bridges.hf.hf_config import HfConfig, activation_name, count_classes
from praxis_lite.bridges.hf.layer_pairs import linear_pairs, norm_pairs
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.layers import GroupNorm, ResNet
from praxis_lite.layers.base import Layer
from praxis_lite.models import BaseModel, ClassificationModel, resnet_classifier


class ImageClassifierFamily(WholeModelFamily):
  """A classifier of images with a convolutional network."""

  network = ClassificationModel
  table_path = ''
  own_heads = frozenset({'classifier'})
  backbone: ClassVar[type[Layer]] = ResNet

  def network_in(self, model: BaseModel) -> Layer | None:
    return model if isinstance(getattr(model, 'network', None), self.backbone) else None


class _ResidualFamily(ImageClassifierFamily):
  """A classifier of images with a residual network."""

  def sizes(self, hf: HfConfig) -> dict[str, Any]:
    """Returns the arguments of `resnet_classifier` that ResNet and BiT share; checks the fields that both have."""
    hf.must_be('problem_type', None, 'single_label_classification')
    return {
      'num_classes': count_classes(hf),
      'channels': hf.size('num_channels'),
      'stem_dims': hf.size('embedding_size'),
      'stage_dims': stage_sizes(hf, 'hidden_sizes'),
      'stage_depths': stage_sizes(hf, 'depths'),
      'activation': hf.activation('hidden_act'),
    }

  def values(self, model: ClassificationModel) -> Values:
    network = _network_of(model)
    return {
      'num_channels': network.channels,
      'embedding_size': network.stem_dims,
      'hidden_sizes': list(network.stage_dims),
      'depths': list(network.stage_depths),
      'hidden_act': activation_name(network.activation, f'{network.path_name}.activation'),
      'num_labels': model.num_classes,
    }

  def table_of(self, weights: NestedDict) -> list[Pair]:
    return [*self._network_pairs(weights['network']), *linear_pairs('classifier.1', 'softmax')]

  def _network_pairs(self, network: NestedDict) -> Iterator[Pair]:
    raise NotImplementedError

  def _numbered_blocks(self, network: NestedDict) -> Iterator[tuple[str, str, NestedDict]]:
    """Yields for each block the prefix of its tensors, the prefix of its variables, and their declarations."""
    blocks = {int(name.removeprefix('blocks_')): of for name, of in network.items() if name.startswith('blocks_')}
    stage, start = 0, 0
    for n, block in sorted(blocks.items()):
      if n and 'shortcut' in block:
        stage, start = stage + 1, n
      yield f'{self.prefix}encoder.stages.{stage}.layers.{n - start}.', f'network.blocks_{n}.', block


class ResNetFamily(_ResidualFamily):
  """ResNet v1.5 with batch norms."""

  def _model(self, hf: HfConfig) -> Config[Any]:
    hf.must_be('downsample_in_first_stage', False)
    hf.must_be('downsample_in_bottleneck', False)
    hf.must_be('layer_type', 'bottleneck', 'basic')
    return resnet_classifier(kind=hf['layer_type'], **self.sizes(hf))

  def is_buffer(self, name: str, tensor: StoredTensor, hf: HfConfig) -> bool:
    return name.endswith('.num_batches_tracked')

  def values(self, model: ClassificationModel) -> Values:
    return super().values(model) | {'layer_type': _network_of(model).blocks[0].kind}

  def _network_pairs(self, network: NestedDict) -> Iterator[Pair]:
    yield from _layer_pairs(f'{self.prefix}embedder.embedder.', 'network.stem', 'network.stem_norm')
    for theirs, ours, block in self._numbered_blocks(network):
      for i in range(sum(name.startswith('conv_') for name in block)):
        yield from _layer_pairs(f'{theirs}layer.{i}.', f'{ours}conv_{i}', f'{ours}norm_{i}')
      if 'shortcut' in block:
        yield from _layer_pairs(f'{theirs}shortcut.', f'{ours}shortcut', f'{ours}shortcut_norm')


class BitFamily(_ResidualFamily):
  """ResNet v2 with group norms and standardized filters."""

  def _model(self, hf: HfConfig) -> Config[Any]:
    hf.must_be('layer_type', 'preactivation')
    hf.must_be('global_padding', None)
    hf.must_be('embedding_dynamic_padding', False)
    hf.must_be('width_factor', 1)
    sizes = self.sizes(hf)
    dims, stem = sizes['stage_dims'], sizes['stem_dims']
    if any(n % 32 for n in dims) or dims[0] == stem:
      raise ConfigError(
        f'{hf.where}: hidden_sizes = {list(dims)}; expected multiples of 32, the first other than embedding_size, '
        f'{stem}'
      )
    if hf.size('output_stride') <= 2 ** len(dims) and len(dims) > 1:
      raise ConfigError(
        f'{hf.where}: output_stride = {hf["output_stride"]} makes dilated stages, which are not supported'
      )
    rate = hf.number('drop_path_rate')
    if rate:
      raise ConfigError(f'{hf.where}: drop_path_rate = {rate} grows from block to block, which is not supported; set 0')
    return resnet_classifier(style='bit', num_groups=hf.size('num_groups'), **sizes)

  def values(self, model: ClassificationModel) -> Values:
    norm = _network_of(model).blocks[0].norm[0]
    groups = {'num_groups': norm.num_groups} if isinstance(norm, GroupNorm) else {}
    values = super().values(model)
    # With the stride of the whole network, transformers dilates no stage.
    stride = max(32, 2 ** (len(_network_of(model).stage_dims) + 1))
    return values | {'layer_type': 'preactivation', 'output_stride': stride, **groups}

  def _network_pairs(self, network: NestedDict) -> Iterator[Pair]:
    yield _filter_pair(f'{self.prefix}embedder.convolution', 'network.stem')
    for theirs, ours, block in self._numbered_blocks(network):
      for i in range(sum(name.startswith('conv_') for name in block)):
        yield _filter_pair(f'{theirs}conv{i + 1}', f'{ours}conv_{i}')
        yield from norm_pairs(f'{theirs}norm{i + 1}', f'{ours}norm_{i}')
      if 'shortcut' in block:
        yield _filter_pair(f'{theirs}downsample.conv', f'{ours}shortcut')
    yield from norm_pairs(f'{self.prefix}norm', 'network.final_norm')


def _network_of(model: ClassificationModel) -> ResNet:
  assert isinstance(model.network, ResNet)
  return model.network


def _layer_pairs(theirs: str, conv: str, norm: str) -> Iterator[Pair]:
  yield _filter_pair(f'{theirs}convolution', conv)
  yield from norm_pairs(f'{theirs}normalization', norm)
  yield Pair(f'{theirs}normalization.running_mean', f'{norm}.moving_mean')
  yield Pair(f'{theirs}normalization.running_var', f'{norm}.moving_variance')


def _filter_pair(theirs: str, ours: str) -> Pair:
  return Pair(f'{theirs}.weight', f'{ours}.w', 'h w C O -> O C h w')


def stage_sizes(hf: HfConfig, name: str) -> tuple[int, ...]:
  """Returns a list of positive numbers; raises ConfigError for any other value."""
  values = hf[name]
  if not isinstance(values, list | tuple) or not all(type(n) is int and n > 0 for n in values) or not values:
    raise ConfigError(f'{hf.where}: {name} = {values!r}; expected a list of positive numbers, one for each stage')
  return tuple(values)


_SIZES = {
  'num_channels': 3,
  'embedding_size': 64,
  'hidden_sizes': [256, 512, 1024, 2048],
  'depths': [3, 4, 6, 3],
  'hidden_act': 'relu',
  'num_labels': 2,
  'tie_word_embeddings': False,
}
_RESNET = {'layer_type': 'bottleneck', 'downsample_in_first_stage': False, 'downsample_in_bottleneck': False}
_BIT = {
  'layer_type': 'preactivation',
  'global_padding': None,
  'num_groups': 32,
  'drop_path_rate': 0.0,
  'embedding_dynamic_padding': False,
  'output_stride': 32,
  'width_factor': 1,
}
RESNET = ResNetFamily('resnet', 'ResNetForImageClassification', _SIZES | _RESNET, 'resnet.')
BIT = BitFamily('bit', 'BitForImageClassification', _SIZES | _BIT, 'bit.')
