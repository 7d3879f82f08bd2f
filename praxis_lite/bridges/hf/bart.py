"""BART: an encoder and a decoder of post-norm blocks that share an embedding; model_type bart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from praxis_lite.bridges.hf.family import Family, Values, blocks_of_stack
from praxis_lite.bridges.hf.hf_config import MOST_LAYERS, HfConfig, activation_name
from praxis_lite.bridges.hf.layer_pairs import norm_pairs, stack_pairs
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import FeedForward, LearnedPositions, SharedEmbeddingSoftmax, TransformerEncoderDecoder
from praxis_lite.models import BaseModel, EncoderDecoderModel, LanguageModel, encoder_decoder

STACKS = ('encoder', 'decoder')
_FIRST_POSITION = 2  # The first vectors of the tables of positions are not used.


def sizes_of_stacks(hf: HfConfig) -> dict[str, Any]:
  """Returns the sizes of an encoder and a decoder with equal blocks; their embedding is also the softmax's table."""
  hf.must_be('is_encoder_decoder', True)
  hf.must_be('tie_word_embeddings', True)
  for name in ('attention_heads', 'ffn_dim'):
    hf.must_be(f'decoder_{name}', hf[f'encoder_{name}'])
  return {
    'vocab_size': hf.size('vocab_size'),
    'model_dims': hf.size('d_model'),
    'num_layers': hf.size('decoder_layers', most=MOST_LAYERS),
    'num_encoder_layers': hf.size('encoder_layers', most=MOST_LAYERS),
    'num_heads': hf.size('encoder_attention_heads'),
    'hidden_dims': hf.size('encoder_ffn_dim'),
    'activation': hf.activation('activation_function'),
  }


def values_of_stacks(lm: TransformerEncoderDecoder, ff: FeedForward) -> Values:
  """Inverts `sizes_of_stacks`: returns values of config.json. `ff` is the feed-forward layer of each block."""
  return {
    'is_encoder_decoder': True,
    'vocab_size': lm.vocab_size,
    'd_model': lm.model_dims,
    'encoder_layers': len(blocks_of_stack(lm.encoder)),
    'decoder_layers': len(blocks_of_stack(lm.decoder)),
    **{f'{stack}_attention_heads': blocks_of_stack(lm.encoder)[0].attention.num_heads for stack in STACKS},
    **{f'{stack}_ffn_dim': ff.hidden_dims for stack in STACKS},
    'activation_function': activation_name(ff.activation, f'{ff.path_name}.activation'),
    'tie_word_embeddings': True,
  }


class Bart(Family):
  """BART's encoder and decoder. Its linear layers are stored as [out, in], its tables as [ids, dims]."""

  network = TransformerEncoderDecoder

  def copies_in(self, hf: HfConfig) -> Mapping[str, str]:
    copies = ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
    return {f'{self.prefix}{name}': f'{self.prefix}shared.weight' for name in copies}

  def _model(self, hf: HfConfig) -> Config[LanguageModel]:
    for name in ('normalize_before', 'add_final_layer_norm', 'static_position_embeddings', 'extra_pos_embeddings'):
      # Old files have these fields. Published BART models have these values; other values mean another family.
      hf.must_be(name, None, _FIRST_POSITION if name == 'extra_pos_embeddings' else False)
    model = encoder_decoder(style='bart', max_len=hf.size('max_position_embeddings'), **sizes_of_stacks(hf))
    model.lm_tpl.softmax_tpl.scale_sqrt_depth = bool(hf['scale_embedding'])
    model.packed = False
    model.start_id, model.source_end_id = hf['decoder_start_token_id'], hf['eos_token_id']
    hf.check_ids('decoder_start_token_id or eos_token_id', model.start_id, model.source_end_id)
    return model

  def values(self, lm: TransformerEncoderDecoder) -> Values:
    block, position = blocks_of_stack(lm.encoder)[0], getattr(lm, 'encoder_position', None)
    attention, ff, softmax = block.attention, block.ff, lm.softmax
    dims = lm.model_dims // attention.num_heads
    if (
      not isinstance(ff, FeedForward)
      or not isinstance(position, LearnedPositions)
      or not isinstance(softmax, SharedEmbeddingSoftmax)
      or attention.dims_per_head != dims
      or not math.isclose(attention.logit_scale, dims**-0.5)
    ):
      raise ConfigError(
        f'{lm.path_name}: BART has learned positions, one table for embeddings and softmax, dense feed-forward layers, '
        'and heads whose dims are model_dims / num_heads, with logits divided by their square root'
      )
    return {
      **values_of_stacks(lm, ff),
      'max_position_embeddings': position.max_len - _FIRST_POSITION,
      'scale_embedding': softmax.scale_sqrt_depth,
    }

  def more_values(self, model: BaseModel) -> Values:
    if not isinstance(model, EncoderDecoderModel):
      return {}
    end = self.defaults['eos_token_id'] if model.source_end_id is None else model.source_end_id
    return {'decoder_start_token_id': model.start_id, 'eos_token_id': end}

  def table(self, tied: bool) -> list[Pair]:
    pairs = [Pair(f'{self.prefix}shared.weight', 'softmax.w'), Pair('final_logits_bias', 'softmax.b', 'V -> . V')]
    for stack in STACKS:
      theirs = f'{self.prefix}{stack}.'
      pairs.append(Pair(f'{theirs}embed_positions.weight', f'{stack}_position.w'))
      pairs += norm_pairs(f'{theirs}layernorm_embedding', f'{stack}_embedding_norm')
      pairs += stack_pairs(theirs, stack)
    return pairs


_BART = {
  'vocab_size': 50_265,
  'd_model': 1024,
  'encoder_layers': 12,
  'decoder_layers': 12,
  'encoder_attention_heads': 16,
  'decoder_attention_heads': 16,
  'encoder_ffn_dim': 4096,
  'decoder_ffn_dim': 4096,
  'activation_function': 'gelu',
  'max_position_embeddings': 1024,
  'scale_embedding': False,
  'tie_word_embeddings': True,
  'is_encoder_decoder': True,
  'eos_token_id': 2,
  'decoder_start_token_id': 2,
}
BART = Bart('bart', 'BartForConditionalGeneration', _BART)
