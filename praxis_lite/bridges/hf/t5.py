"""T5, Flan-T5 and mT5: an encoder and a decoder that share an embedding; model_type t5 and mt5."""

from __future__ import annotations

import re
from collections.abc import Mapping

from praxis_lite.bridges.hf.family import Family, Values, blocks_of_stack
from praxis_lite.bridges.hf.files import StoredTensor
from praxis_lite.bridges.hf.hf_config import MOST_LAYERS, HfConfig, activation_name
from praxis_lite.bridges.hf.layer_pairs import linear_pairs, out_projection_pairs, projection_pairs, table_pairs
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict, leaves
from praxis_lite.layers import FeedForward, GatedFeedForward, RelativeBias, TransformerEncoderDecoder
from praxis_lite.models import BaseModel, EncoderDecoderModel, LanguageModel, encoder_decoder

_GATED = 'gated-'
# Tensors of old checkpoints that transformers ignores: cross attention has no relative position bias.
_UNUSED = re.compile(r'decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight')


class T5(Family):
  """T5's encoder and decoder. Its linear layers are stored as [out, in], its tables as [ids, dims]."""

  network = TransformerEncoderDecoder

  def copies_in(self, hf: HfConfig) -> Mapping[str, str]:
    return dict.fromkeys(('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight'), 'shared.weight')

  def _model(self, hf: HfConfig) -> Config[LanguageModel]:
    hf.must_be('is_encoder_decoder', True)
    is_gated, activation = _feed_forward(hf)
    tied = bool(hf['tie_word_embeddings'])
    encoder_layers = hf.size('num_layers', most=MOST_LAYERS)
    decoder_layers = hf['num_decoder_layers']
    model = encoder_decoder(
      style='t5' if is_gated else 't5_v1_0',
      vocab_size=hf.size('vocab_size'),
      model_dims=hf.size('d_model'),
      num_layers=encoder_layers if decoder_layers is None else hf.size('num_decoder_layers', most=MOST_LAYERS),
      num_encoder_layers=encoder_layers,
      num_heads=hf.size('num_heads'),
      dims_per_head=hf.size('d_kv'),
      hidden_dims=hf.size('d_ff'),
      activation=activation,
      tie_embeddings=tied,
      num_buckets=hf.size('relative_attention_num_buckets'),
      max_distance=hf.size('relative_attention_max_distance'),
    )
    lm, start = model.lm_tpl, hf['decoder_start_token_id']
    lm.scale_output_sqrt_depth = bool(hf.values.get('scale_decoder_outputs', tied))
    norms = [lm.final_norm_tpl, *(stack.layers_tpl.norm_tpl for stack in (lm.encoder_tpl, lm.decoder_tpl))]
    for norm in norms:
      norm.epsilon = hf.number('layer_norm_epsilon')
    model.start_id = hf['pad_token_id'] if start is None else start
    model.source_end_id = hf['eos_token_id']
    hf.check_ids('decoder_start_token_id, pad_token_id or eos_token_id', model.start_id, model.source_end_id)
    return model

  def is_buffer(self, name: str, tensor: StoredTensor, hf: HfConfig) -> bool:
    return bool(_UNUSED.fullmatch(name))

  def values(self, lm: TransformerEncoderDecoder) -> Values:
    block, bias = blocks_of_stack(lm.encoder)[0], lm.encoder_bias
    attention, ff = block.attention, block.ff
    where = f'{ff.path_name}.activation'
    if attention.logit_scale != 1 or not isinstance(ff, FeedForward) or not isinstance(bias, RelativeBias):
      raise ConfigError(
        f'{block.path_name}: T5 has dense feed-forward layers, relative biases that a stack shares, and '
        f'{attention.path_name}.scale = 1'
      )
    proj, is_gated = activation_name(ff.activation, where), isinstance(ff, GatedFeedForward)
    if is_gated:
      if ff.activation == 'gelu':  # transformers reads 'gated-gelu' as the tanh approximation.
        raise ConfigError(f"{where}: with gates, T5 has 'gelu_tanh' but not 'gelu'")
      proj = _GATED + ('gelu' if ff.activation == 'gelu_tanh' else proj)
    return {
      'is_encoder_decoder': True,
      'vocab_size': lm.vocab_size,
      'd_model': lm.model_dims,
      'd_kv': attention.dims_per_head,
      'd_ff': ff.hidden_dims,
      'num_layers': len(blocks_of_stack(lm.encoder)),
      'num_decoder_layers': len(blocks_of_stack(lm.decoder)),
      'num_heads': attention.num_heads,
      'relative_attention_num_buckets': bias.num_buckets,
      'relative_attention_max_distance': bias.max_distance,
      'layer_norm_epsilon': block.attention_norm.epsilon,
      'feed_forward_proj': proj,
      'tie_word_embeddings': lm.embedding_tpl is None,
      'scale_decoder_outputs': lm.scale_output_sqrt_depth,
    }

  def more_values(self, model: BaseModel) -> Values:
    if not isinstance(model, EncoderDecoderModel):
      return {}
    end = self.defaults['eos_token_id'] if model.source_end_id is None else model.source_end_id
    return {'decoder_start_token_id': model.start_id, 'pad_token_id': model.start_id, 'eos_token_id': end}

  def table_of(self, weights: NestedDict) -> list[Pair]:
    is_gated = any('gate' in path for path in leaves(weights))
    return self.table('embedding' not in weights, is_gated)

  def table(self, tied: bool, is_gated: bool = True) -> list[Pair]:
    up = 'wi_1' if is_gated else 'wi'
    pairs = table_pairs('shared.weight', tied)
    for stack, sublayers in _SUBLAYERS.items():
      ours, theirs = f'{stack}.layers.', f'{stack}.block.{{layer}}.layer.'
      pairs += [
        Pair(f'{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight', f'{stack}_bias.w'),
        Pair(f'{stack}.final_layer_norm.weight', f'{stack}_norm.scale'),
      ]
      for number, (layer, name) in enumerate(sublayers):
        there = f'{theirs}{number}.'
        pairs.append(Pair(f'{there}layer_norm.weight', f'{ours}{name}_norm.scale'))
        if name == 'ff':
          for stored, product in (('wi_0', 'gate'), (up, 'up'), ('wo', 'down')):
            pairs += linear_pairs(f'{there}{layer}.{stored}', f'{ours}ff.{product}')
          continue
        for letter, proj in (('q', 'query'), ('k', 'key'), ('v', 'value')):
          pairs += projection_pairs(f'{there}{layer}.{letter}', f'{ours}{name}.{proj}')
        pairs += out_projection_pairs(f'{there}{layer}.o', f'{ours}{name}.out')
    return pairs


# The sublayers of a block: their names in transformers, and ours.
_SUBLAYERS = {
  'encoder': (('SelfAttention', 'attention'), ('DenseReluDense', 'ff')),
  'decoder': (('SelfAttention', 'attention'), ('EncDecAttention', 'cross_attention'), ('DenseReluDense', 'ff')),
}


def _feed_forward(hf: HfConfig) -> tuple[bool, str]:
  """Returns whether the feed-forward layers have gates, and the name of their activation."""
  value = hf['feed_forward_proj']
  is_gated = isinstance(value, str) and value.startswith(_GATED)
  name = value.removeprefix(_GATED) if is_gated else value
  if is_gated and name == 'gelu':  # transformers reads 'gated-gelu' as the tanh approximation.
    name = 'gelu_new'
  return is_gated, HfConfig({'feed_forward_proj': name}, hf.where).activation('feed_forward_proj')


_T5 = {
  'vocab_size': 32_128,
  'd_model': 512,
  'd_kv': 64,
  'd_ff': 2048,
  'num_layers': 6,
  'num_decoder_layers': None,
  'num_heads': 8,
  'relative_attention_num_buckets': 32,
  'relative_attention_max_distance': 128,
  'layer_norm_epsilon': 1e-6,
  'feed_forward_proj': 'relu',
  'tie_word_embeddings': True,
  'pad_token_id': 0,
  'eos_token_id': 1,
  'decoder_start_token_id': None,
}
_MT5 = _T5 | {
  'vocab_size': 250_112,
  'd_ff': 1024,
  'num_layers': 8,
  'num_heads': 6,
  'feed_forward_proj': 'gated-gelu',
  'tie_word_embeddings': False,
}
T5_LIKE = (
  T5('t5', 'T5ForConditionalGeneration', _T5, prefix=''),
  T5('mt5', 'MT5ForConditionalGeneration', _MT5, prefix=''),
)
