"""CLIP and SigLIP: images and texts in one space, model_type clip and siglip.

           CLIP                                              SigLIP
images     class token, a norm before the blocks             attention pooling (MAP)
texts      causal, features of the first end token           features of the last token of a row, padding included
both       projections without biases                        a projection with a bias, for texts only
loss       softmax                                           sigmoid
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from praxis_lite.bridges.hf.family import Values, WholeModelFamily
from praxis_lite.bridges.hf.files import StoredTensor
from praxis_lite.bridges.hf.hf_config import HfConfig
from praxis_lite.bridges.hf.layer_pairs import (
  attention_pairs,
  encoder_sizes,
  encoder_values,
  linear_pairs,
  norm_pairs,
  out_projection_pairs,
)
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.bridges.hf.vit import patch_pairs, vision_sizes, vision_values
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.layers import TransformerEncoder, VisionTransformer
from praxis_lite.layers.base import Layer
from praxis_lite.models import BaseModel, TwoTowerModel, transformer_encoder, vision_transformer


@dataclasses.dataclass(frozen=True)
class TwoTowers(WholeModelFamily):
  """A vision transformer and an encoder of texts, whose fields are in `vision_config` and `text_config`."""

  text_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # transformers' defaults in `text_config`.
  vision_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  is_siglip: bool = False  # Whether it is SigLIP, and not CLIP.

  network = TwoTowerModel
  table_path = ''

  def network_in(self, model: BaseModel) -> Layer | None:
    return model

  def refusal(self) -> str:
    return f' is not supported; of {self.model_type}, only {self.architecture} is, which has both towers'

  def _model(self, hf: HfConfig) -> Config[TwoTowerModel]:
    text, vision = self._part(hf, 'text_config'), self._part(hf, 'vision_config')
    image_tpl, text_tpl = self._vision(vision), self._text(text)
    width = text_tpl.model_dims
    if self.is_siglip:
      dims = width if text.values.get('projection_size') is None else text.size('projection_size')
    else:
      dims = hf.size('projection_dim')
    model = Config(TwoTowerModel, embedding_dims=dims, image_tpl=image_tpl, text_tpl=text_tpl)
    model.params_init = image_tpl.params_init
    if self.is_siglip:
      if image_tpl.model_dims != dims:
        raise ConfigError(
          f'{hf.where}: features of images have hidden_size = {image_tpl.model_dims} of vision_config, and those of '
          f'texts {dims}; they must be as wide'
        )
      model.set(has_image_projection=False, text_pooling='last')
      model.projection_tpl.use_bias = True
      model.loss_tpl.kind = 'sigmoid'
      return model
    end = text['eos_token_id']
    if end == _OLD_END:
      return model.set(text_pooling='largest')
    text.check_ids('eos_token_id', end)
    return model.set(text_pooling='end', end_id=end)

  def _part(self, hf: HfConfig, name: str) -> HfConfig:
    """Returns the part `name` of config.json, such as `text_config`."""
    values: dict[str, Any] = {}
    for field in (name, f'{name}_dict'):  # Old files have both fields; the second one's values win.
      found = hf.values.get(field) or {}
      if not isinstance(found, dict):
        raise ConfigError(f'{hf.where}: {field} = {found!r}; expected a JSON object')
      values |= found
    defaults = self.text_defaults if name == 'text_config' else self.vision_defaults
    return HfConfig(values, f'{hf.where}, {name}', defaults)

  def _text(self, hf: HfConfig) -> Config[TransformerEncoder]:
    hf.must_be('attention_dropout', 0, 0.0)
    return transformer_encoder(
      vocab_size=hf.size('vocab_size'),
      max_len=hf.size('max_position_embeddings'),
      style='pre_norm',
      num_token_types=0,
      causal=not self.is_siglip,
      **encoder_sizes(hf),
    )

  def _vision(self, hf: HfConfig) -> Config[VisionTransformer]:
    hf.must_be('attention_dropout', 0, 0.0)
    hf.must_be('vision_use_head', True)
    network = vision_transformer(pooling='attention' if self.is_siglip else 'class_token', **vision_sizes(hf))
    if not self.is_siglip:
      network.patch_tpl.conv_tpl.use_bias = False
      network.embedding_norm_tpl = network.final_norm_tpl.clone()
    return network

  def is_buffer(self, name: str, tensor: StoredTensor, hf: HfConfig) -> bool:
    return re.fullmatch(r'(text|vision)_model\.embeddings\.position_ids', name) is not None

  def values(self, model: TwoTowerModel) -> Values:
    text, vision = model.text, model.image
    if text.position_tpl is None or text.final_norm_tpl is None:
      raise ConfigError(f'{text.path_name}: a tower of transformers has learned positions and a norm after the blocks')
    of_text: dict[str, Any] = {
      'vocab_size': text.vocab_size,
      'max_position_embeddings': text.max_positions,
      **encoder_values(text, text.final_norm.epsilon),
    }
    if self.is_siglip:
      of_text['projection_size'] = model.embedding_dims
    else:
      if model.text_pooling == 'end' and model.end_id == _OLD_END:
        raise ConfigError(
          f'{model.path_name}.end_id: {_OLD_END} means the token with the largest id in files of CLIP, so a model '
          "whose texts end with it cannot be written; if it is the largest id of each text, set text_pooling='largest'"
        )
      end = _OLD_END if model.text_pooling == 'largest' else model.end_id
      of_text |= {'eos_token_id': end, 'projection_dim': model.embedding_dims}
    parts: Values = {'text_config': of_text, 'vision_config': vision_values(vision)}
    return parts if self.is_siglip else parts | {'projection_dim': model.embedding_dims}

  def table_of(self, weights: NestedDict) -> list[Pair]:
    return [*self._text_pairs(), *self._vision_pairs(), *self._head_pairs()]

  def _text_pairs(self) -> Iterable[Pair]:
    theirs, ours = 'text_model.', 'text.'
    yield Pair(f'{theirs}embeddings.token_embedding.weight', f'{ours}embedding.w')
    yield Pair(f'{theirs}embeddings.position_embedding.weight', f'{ours}position.w')
    yield from _block_pairs(theirs, ours)
    yield from norm_pairs(f'{theirs}final_layer_norm', f'{ours}final_norm')

  def _vision_pairs(self) -> Iterable[Pair]:
    theirs, ours = 'vision_model.', 'image.'
    yield Pair(f'{theirs}embeddings.class_embedding', f'{ours}class_token')
    yield from patch_pairs(f'{theirs}embeddings.patch_embedding', f'{ours}patches.conv')
    yield Pair(f'{theirs}embeddings.position_embedding.weight', f'{ours}position.w')
    yield from norm_pairs(f'{theirs}pre_layrnorm', f'{ours}embedding_norm')
    yield from _block_pairs(theirs, ours)
    yield from norm_pairs(f'{theirs}post_layernorm', f'{ours}final_norm')

  def _head_pairs(self) -> Iterable[Pair]:
    if not self.is_siglip:
      yield Pair('visual_projection.weight', 'image_projection.w', 'I O -> O I')
      yield Pair('text_projection.weight', 'text_projection.w', 'I O -> O I')
      yield Pair('logit_scale', 'loss.log_scale')
      return
    yield from linear_pairs('text_model.head', 'text_projection')
    yield Pair('logit_scale', 'loss.log_scale', ' -> .')
    yield Pair('logit_bias', 'loss.bias', ' -> .')
    theirs, ours = 'vision_model.head.', 'image.pooling_layer.'
    yield Pair(f'{theirs}probe', f'{ours}probe', 'D -> . . D')
    for part, name in zip(('.+2', '1+.+1', '2+.'), ('query', 'key', 'value')):  # All three share a tensor.
      yield Pair(f'{theirs}attention.in_proj_weight', f'{ours}attention.{name}.w', f'D N H -> ({part} N H) D')
      yield Pair(f'{theirs}attention.in_proj_bias', f'{ours}attention.{name}.b', f'N H -> ({part} N H)')
    yield from out_projection_pairs(f'{theirs}attention.out_proj', f'{ours}attention.out')
    yield from norm_pairs(f'{theirs}layernorm', f'{ours}norm')
    yield from linear_pairs(f'{theirs}mlp.fc1', f'{ours}ff.up')
    yield from linear_pairs(f'{theirs}mlp.fc2', f'{ours}ff.down')


def _block_pairs(theirs: str, ours: str) -> Iterable[Pair]:
  theirs, ours = f'{theirs}encoder.layers.{{layer}}.', f'{ours}transformer.layers.'
  yield from attention_pairs(f'{theirs}self_attn', f'{ours}attention')
  yield from norm_pairs(f'{theirs}layer_norm1', f'{ours}attention_norm')
  yield from norm_pairs(f'{theirs}layer_norm2', f'{ours}ff_norm')
  yield from linear_pairs(f'{theirs}mlp.fc1', f'{ours}ff.up')
  yield from linear_pairs(f'{theirs}mlp.fc2', f'{ours}ff.down')


# Old files name this end token, which is wrong. Their models end a row at the token with the largest id in it.
_OLD_END = 2
_CLIP = {
  'num_hidden_layers': 12,
  'hidden_act': 'quick_gelu',
  'layer_norm_eps': 1e-5,
}
_SIGLIP = {
  'hidden_size': 768,
  'intermediate_size': 3072,
  'num_hidden_layers': 12,
  'num_attention_heads': 12,
  'hidden_act': 'gelu_pytorch_tanh',
  'layer_norm_eps': 1e-6,
}
_IMAGE = {'num_channels': 3, 'image_size': 224}
TWO_TOWERS = (
  TwoTowers(
    *('clip', 'CLIPModel', {'projection_dim': 512, 'tie_word_embeddings': False}, ''),
    text_defaults=_CLIP
    | {'hidden_size': 512, 'intermediate_size': 2048, 'num_attention_heads': 8}
    | {'vocab_size': 49_408, 'max_position_embeddings': 77, 'eos_token_id': 49_407},
    vision_defaults=_CLIP
    | _IMAGE
    | {'hidden_size': 768, 'intermediate_size': 3072, 'num_attention_heads': 12, 'patch_size': 32},
  ),
  TwoTowers(
    *('siglip', 'SiglipModel', {'tie_word_embeddings': False}, ''),
    text_defaults=_SIGLIP | {'vocab_size': 32_000, 'max_position_embeddings': 64},
    vision_defaults=_SIGLIP | _IMAGE | {'patch_size': 16},
    is_siglip=True,
  ),
)
