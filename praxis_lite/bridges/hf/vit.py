"""ViT: images to classes or features, model_type vit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from praxis_lite.bridges.hf.family import Values, WholeModelFamily
from praxis_lite.bridges.hf.hf_config import HfConfig, count_classes
from praxis_lite.bridges.hf.layer_pairs import block_pairs, encoder_sizes, encoder_values, linear_pairs, norm_pairs
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.layers import VisionTransformer
from praxis_lite.layers.base import Layer
from praxis_lite.models import BaseModel, ClassificationModel, ImageFeatureModel, image_classifier, vision_transformer

_CLASSIFIER, _FEATURES = 'ViTForImageClassification', 'ViTModel'


class VisionFamily(WholeModelFamily):
  """Vision transformers with a class token: a classifier, whose name is `architecture`, and a model with a pooler."""

  network: ClassVar[type[Layer] | tuple[type[Layer], ...]] = (ClassificationModel, ImageFeatureModel)
  table_path = ''
  own_heads = frozenset({'classifier'})
  other_architectures: ClassVar[tuple[str, ...]] = (_FEATURES,)

  def network_in(self, model: BaseModel) -> Layer | None:
    return model if isinstance(getattr(model, 'network', None), VisionTransformer) else None

  def _model(self, hf: HfConfig) -> Config[Any]:
    hf.must_be('qkv_bias', True)
    hf.must_be('pooler_act', 'tanh')
    hf.must_be('problem_type', None, 'single_label_classification')
    hf.must_be('pooler_output_size', None, hf.size('hidden_size'))
    sizes = vision_sizes(hf)
    if hf.has_architecture(_FEATURES):
      network = vision_transformer(representation=True, **sizes)
      return Config(ImageFeatureModel, network_tpl=network, params_init=network.params_init)
    return image_classifier(num_classes=count_classes(hf), **sizes)

  def current_name(self, name: str) -> str:
    # transformers 5 renames tensors when it loads them, and some checkpoints have these names.
    name = re.sub(r'(^|\.)layers\.(\d+)\.', r'\1encoder.layer.\2.', name)
    for new, old in _RENAMED.items():
      name = re.sub(rf'((?:encoder\.layer|decoder_layers)\.\d+\.){re.escape(new)}\.', rf'\g<1>{old}.', name)
    return name

  def is_unused(self, name: str, hf: HfConfig) -> bool:
    if name == f'{self.prefix}embeddings.mask_token':
      return True
    return name.startswith('classifier.' if hf.has_architecture(_FEATURES) else f'{self.prefix}pooler.')

  def values(self, model: ClassificationModel | ImageFeatureModel) -> Values:
    network = model.network
    assert isinstance(network, VisionTransformer)
    values = vision_values(network)
    if isinstance(model, ImageFeatureModel):
      return values | {'architectures': [_FEATURES]}
    return values | {'num_labels': model.num_classes}

  def table_of(self, weights: NestedDict) -> list[Pair]:
    return [*self._network_pairs(self.prefix), *linear_pairs('classifier', 'softmax')]

  def _network_pairs(self, prefix: str) -> Iterable[Pair]:
    theirs, ours = f'{prefix}embeddings.', 'network.'
    yield Pair(f'{theirs}cls_token', f'{ours}class_token', 'D -> . . D')
    yield Pair(f'{theirs}position_embeddings', f'{ours}position.w', 'T D -> . T D')
    yield from patch_pairs(f'{theirs}patch_embeddings.projection', f'{ours}patches.conv')
    yield from vision_block_pairs(f'{prefix}encoder.layer.{{layer}}.', 'network.transformer.layers.')
    yield from norm_pairs(f'{prefix}layernorm', 'network.final_norm')
    yield from linear_pairs(f'{prefix}pooler.dense', 'network.representation.linear')


def vision_sizes(hf: HfConfig) -> dict[str, Any]:
  """Returns the arguments of `vision_transformer` that config.json has."""
  return {
    'image_size': image_sizes(hf, 'image_size'),
    'patch_size': image_sizes(hf, 'patch_size'),
    'channels': hf.size('num_channels'),
    **encoder_sizes(hf),
  }


def vision_values(network: VisionTransformer) -> Values:
  """Returns the values of config.json for a vision transformer; raises ConfigError if transformers has none like it."""
  if not network.has_learned_positions or network.final_norm_tpl is None:
    raise ConfigError(
      f'{network.path_name}: a vision transformer of transformers has learned positions and a norm after the blocks'
    )
  return {
    'image_size': one_or_both(network.image_size),
    'patch_size': one_or_both(network.patch_size),
    'num_channels': network.channels,
    **encoder_values(network, network.final_norm.epsilon),
  }


def vision_block_pairs(theirs: str, ours: str) -> Iterator[Pair]:
  """Yields the `Pair`s of the variables of a stack's blocks. Both prefixes end with a dot; `theirs` has '{layer}'."""
  yield from block_pairs(theirs, ours, 'attention.attention')
  yield from norm_pairs(f'{theirs}layernorm_before', f'{ours}attention_norm')
  yield from norm_pairs(f'{theirs}layernorm_after', f'{ours}ff_norm')


def patch_pairs(theirs: str, ours: str) -> Iterable[Pair]:
  """Yields the pairs of the convolution that embeds patches."""
  yield Pair(f'{theirs}.weight', f'{ours}.w', 'h w C D -> D C h w')
  yield Pair(f'{theirs}.bias', f'{ours}.b')


def image_sizes(hf: HfConfig, name: str) -> tuple[int, int]:
  """Returns (height, width) from a field that is one number or a pair; raises ConfigError if it is neither."""
  value = hf[name]
  both = tuple(value) if isinstance(value, list | tuple) else (value, value)
  if len(both) != 2 or not all(type(n) is int and n > 0 for n in both):
    raise ConfigError(f'{hf.where}: {name} = {value!r}; expected a number of pixels, or [height, width]')
  return both


def one_or_both(size: tuple[int, int]) -> int | list[int]:
  """Returns a size for config.json: one number for a square, otherwise both."""
  return size[0] if size[0] == size[1] else list(size)


_RENAMED = {
  **{
    f'attention.{letter}_proj': f'attention.attention.{name}' for letter, name in zip('qkv', ('query', 'key', 'value'))
  },
  **{'attention.o_proj': 'attention.output.dense', 'mlp.fc1': 'intermediate.dense', 'mlp.fc2': 'output.dense'},
}
_VIT = {
  'hidden_size': 768,
  'num_hidden_layers': 12,
  'num_attention_heads': 12,
  'intermediate_size': 3072,
  'hidden_act': 'gelu',
  'layer_norm_eps': 1e-12,
  'image_size': 224,
  'patch_size': 16,
  'num_channels': 3,
  'num_labels': 2,
  'tie_word_embeddings': False,
}
VIT = VisionFamily('vit', _CLASSIFIER, _VIT, 'vit.')
