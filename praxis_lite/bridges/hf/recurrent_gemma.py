"""RecurrentGemma: blocks of a gated linear recurrence alternate with blocks of local attention (Griffin)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from praxis_lite.bridges.hf.family import Family, Values, blocks_of
from praxis_lite.bridges.hf.hf_config import MOST_LAYERS, HfConfig, activation_name
from praxis_lite.bridges.hf.layer_pairs import linear_pairs, out_projection_pairs, projection_pairs
from praxis_lite.bridges.hf.llama_like import shortest_cycle
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import FeedForward, MixerBlock, PartialRotaryPositions, RgLru, TransformerLm
from praxis_lite.models import LanguageModel, griffin_lm

_KINDS = 'recurrent', 'attention'


class RecurrentGemma(Family):
  """RecurrentGemma. `block_types` of config.json says which blocks have a recurrence, and which local attention."""

  def _model(self, hf: HfConfig) -> Config[LanguageModel]:
    hf.must_be('tie_word_embeddings', True)
    D, N, F = hf.size('hidden_size'), hf.size('num_attention_heads'), hf.size('intermediate_size')
    types = hf['block_types']
    if not isinstance(types, list | tuple) or not types or not all(kind in _KINDS for kind in types):
      raise ConfigError(f'{hf.where}: block_types = {types!r}; expected a list of {" and ".join(_KINDS)}')
    base, share = _rotary(hf)
    model = griffin_lm(
      vocab_size=hf.size('vocab_size'),
      model_dims=D,
      num_layers=hf.size('num_hidden_layers', most=MOST_LAYERS),
      num_heads=N,
      num_kv_heads=N if hf['num_key_value_heads'] is None else hf.size('num_key_value_heads'),
      width=D if hf['lru_width'] is None else hf.size('lru_width'),
      hidden_dims=F // 2,
      window=hf.size('attention_window_size'),
      kernel_size=hf.size('conv1d_width'),
      pattern=tuple(types),
      rotary_base=base,
      rotary_share=share,
      activation=hf.activation('hidden_activation'),
      logit_soft_cap=hf.number('logits_soft_cap'),
      epsilon=hf.number('rms_norm_eps'),
    )
    layers = model.lm_tpl.transformer_tpl.layers_tpl
    for block in layers if isinstance(layers, tuple) else (layers,):
      if block.attention_tpl is not None:
        block.attention_tpl.use_bias = bool(hf['attention_bias'])
    return model

  def values(self, lm: TransformerLm) -> Values:
    blocks = blocks_of(lm)
    types = ['recurrent' if isinstance(block, MixerBlock) else 'attention' for block in blocks]
    values: dict[str, Any] = {
      'vocab_size': lm.vocab_size,
      'hidden_size': lm.model_dims,
      'num_hidden_layers': len(blocks),
      'num_attention_heads': lm.num_heads,
      'block_types': shortest_cycle(types),
      'logits_soft_cap': lm.softmax.soft_cap,
      'tie_word_embeddings': True,
    }
    first = dict(zip(types[::-1], blocks[::-1]))
    ff = cast(FeedForward, blocks[0].ff)
    values['intermediate_size'] = 2 * ff.hidden_dims
    values['hidden_activation'] = activation_name(ff.activation, f'{ff.path_name}.activation')
    values['rms_norm_eps'] = blocks[0].ff_norm.epsilon
    if 'recurrent' in first:
      mixer = cast(RgLru, cast(MixerBlock, first['recurrent']).mixer)
      values |= {'conv1d_width': mixer.kernel_size, 'lru_width': mixer.width}
    if 'attention' in first:
      attention = first['attention'].attention
      rotary = cast(PartialRotaryPositions, attention.rotary)
      values |= {
        'num_key_value_heads': attention.num_kv_heads,
        'attention_window_size': attention.sliding_window,
        'attention_bias': attention.use_bias,
        'rope_theta': rotary.max_timescale,
        'partial_rotary_factor': rotary.share,
      }
    return values

  def table(self, tied: bool) -> list[Pair]:
    layer, ours = 'model.layers.{layer}.', 'transformer.layers.'
    block = f'{layer}temporal_block.'
    pairs = [
      Pair('model.final_norm.weight', 'final_norm.scale'),
      Pair('model.embed_tokens.weight', 'softmax.w'),
      Pair(f'{layer}channel_pre_norm.weight', f'{ours}ff_norm.scale'),
      Pair(f'{layer}temporal_pre_norm.weight', f'{ours}attention_norm.scale'),
      Pair(f'{layer}temporal_pre_norm.weight', f'{ours}mixer_norm.scale'),
    ]
    for name in ('gate', 'up', 'down'):
      pairs += linear_pairs(f'{layer}mlp_block.{name}_proj', f'{ours}ff.{name}')
    for theirs, name in (('q_proj', 'attention.query'), ('k_proj', 'attention.key'), ('v_proj', 'attention.value')):
      pairs += projection_pairs(f'{block}{theirs}', f'{ours}{name}')
    for theirs, name in (('linear_y', 'mixer.gate'), ('linear_x', 'mixer.value')):
      pairs += projection_pairs(f'{block}{theirs}', f'{ours}{name}')
    for theirs, name in (('o_proj', 'attention.out'), ('linear_out', 'mixer.out')):
      pairs += out_projection_pairs(f'{block}{theirs}', f'{ours}{name}')
    for theirs, name in (('input_gate', 'admit'), ('recurrent_gate', 'forget')):
      pairs += [
        Pair(f'{block}rg_lru.{theirs}_weight', f'{ours}mixer.{name}_w'),
        Pair(f'{block}rg_lru.{theirs}_bias', f'{ours}mixer.{name}_b'),
      ]
    return [
      *pairs,
      Pair(f'{block}rg_lru.recurrent_param', f'{ours}mixer.decay', 'N H -> (N H)'),
      Pair(f'{block}conv_1d.weight', f'{ours}mixer.conv.w', 'W N H -> (N H) . W'),
      Pair(f'{block}conv_1d.bias', f'{ours}mixer.conv.b', 'N H -> (N H)'),
    ]


def _rotary(hf: HfConfig) -> tuple[float, float]:
  """Returns the base of the rotary wavelengths, and the share of the dims that is rotated."""
  rope = hf.values.get('rope_parameters') or {}
  if not isinstance(rope, Mapping) or rope.get('rope_type', 'default') != 'default':
    raise ConfigError(f'{hf.where}: rope_parameters = {rope!r} is not supported; only rope_type = "default" is')
  base, share = (hf.check_number(name, rope.get(name, hf[name])) for name in ('rope_theta', 'partial_rotary_factor'))
  return base, share


_DEFAULTS = {
  'num_hidden_layers': 26,
  'vocab_size': 256_000,
  'hidden_size': 2560,
  'intermediate_size': 7680,
  'num_attention_heads': 10,
  'num_key_value_heads': None,
  'lru_width': None,
  'attention_window_size': 2048,
  'conv1d_width': 4,
  'logits_soft_cap': 30.0,
  'rms_norm_eps': 1e-6,
  'hidden_activation': 'gelu_pytorch_tanh',
  'rope_theta': 10_000.0,
  'partial_rotary_factor': 0.5,
  'block_types': ('recurrent', 'recurrent', 'attention'),
  'attention_bias': False,
  'tie_word_embeddings': True,
}

RECURRENT_GEMMA = RecurrentGemma('recurrent_gemma', 'RecurrentGemmaForCausalLM', _DEFAULTS)
