"""ConvNeXt: images to classes, model_type convnext."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from praxis_lite.bridges.hf.family import Values
from praxis_lite.bridges.hf.hf_config import HfConfig, activation_name, count_classes
from praxis_lite.bridges.hf.layer_pairs import linear_pairs, norm_pairs
from praxis_lite.bridges.hf.resnet import ImageClassifierFamily, stage_sizes
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.bridges.hf.vit import patch_pairs
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.layers import ConvNeXt
from praxis_lite.models import ClassificationModel, convnext_classifier


class ConvNeXtFamily(ImageClassifierFamily):
  """A classifier of images with a ConvNeXt."""

  backbone = ConvNeXt

  def _model(self, hf: HfConfig) -> Config[Any]:
    hf.must_be('problem_type', None, 'single_label_classification')
    dims, scale = stage_sizes(hf, 'hidden_sizes'), hf.number('layer_scale_init_value')
    hf.must_be('num_stages', len(dims))
    if any(one == other for one, other in itertools.pairwise(dims)):
      raise ConfigError(
        f'{hf.where}: hidden_sizes = {list(dims)}; successive stages of the same width are not supported'
      )
    return convnext_classifier(
      num_classes=count_classes(hf),
      channels=hf.size('num_channels'),
      patch_size=hf.size('patch_size'),
      stage_dims=dims,
      stage_depths=stage_sizes(hf, 'depths'),
      initial_scale=scale if scale > 0 else None,
      stochastic_depth=hf.number('drop_path_rate'),
      activation=hf.activation('hidden_act'),
      final_epsilon=hf.number('layer_norm_eps'),
    )

  def values(self, model: ClassificationModel) -> Values:
    network = model.network
    assert isinstance(network, ConvNeXt)
    scale = network.blocks[0].initial_scale
    return {
      'num_channels': network.channels,
      'patch_size': network.patch_size,
      'num_stages': len(network.stage_dims),
      'hidden_sizes': list(network.stage_dims),
      'depths': list(network.stage_depths),
      'hidden_act': activation_name(network.activation, f'{network.path_name}.activation'),
      'layer_norm_eps': network.final_norm.epsilon,
      'layer_scale_init_value': 0.0 if scale is None else scale,
      'drop_path_rate': network.stochastic_depth,
      'num_labels': model.num_classes,
    }

  def table_of(self, weights: NestedDict) -> list[Pair]:
    return [*self._network_pairs(weights['network']), *linear_pairs('classifier', 'softmax')]

  def _network_pairs(self, network: NestedDict) -> Iterator[Pair]:
    yield from patch_pairs(f'{self.prefix}embeddings.patch_embeddings', 'network.patches')
    yield from norm_pairs(f'{self.prefix}embeddings.layernorm', 'network.patch_norm')
    stage, start = 0, 0
    num_blocks = sum(name.startswith('blocks_') for name in network)
    widths = [network[f'blocks_{n}']['norm']['scale'].shape for n in range(num_blocks)]
    for n, width in enumerate(widths):
      if n and width != widths[n - 1]:
        theirs = f'{self.prefix}encoder.stages.{stage + 1}.downsampling_layer.'
        yield from norm_pairs(f'{theirs}0', f'network.down_norm_{stage}')
        yield from patch_pairs(f'{theirs}1', f'network.down_{stage}')
        stage, start = stage + 1, n
      theirs, ours = f'{self.prefix}encoder.stages.{stage}.layers.{n - start}.', f'network.blocks_{n}.'
      yield Pair(f'{theirs}dwconv.weight', f'{ours}depthwise.w', 'h w C D -> D C h w')
      yield Pair(f'{theirs}dwconv.bias', f'{ours}depthwise.b')
      yield from norm_pairs(f'{theirs}layernorm', f'{ours}norm')
      yield from linear_pairs(f'{theirs}pwconv1', f'{ours}ff.up')
      yield from linear_pairs(f'{theirs}pwconv2', f'{ours}ff.down')
      yield Pair(f'{theirs}layer_scale_parameter', f'{ours}scale')
    yield from norm_pairs(f'{self.prefix}layernorm', 'network.final_norm')


_CONVNEXT = {
  'num_channels': 3,
  'patch_size': 4,
  'num_stages': 4,
  'hidden_sizes': [96, 192, 384, 768],
  'depths': [3, 3, 9, 3],
  'hidden_act': 'gelu',
  'layer_norm_eps': 1e-12,
  'layer_scale_init_value': 1e-6,
  'drop_path_rate': 0.0,
  'num_labels': 2,
  'tie_word_embeddings': False,
}
CONVNEXT = ConvNeXtFamily('convnext', 'ConvNextForImageClassification', _CONVNEXT, 'convnext.')
