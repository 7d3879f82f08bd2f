"""LLaMA and models derived from it:

llama      RMSNorm, rotary positions, gated feed-forward; config.json says if attention or feed-forward has biases
mistral    llama with sliding windows
qwen2      biases of queries, keys and values; sliding windows in some layers
qwen3      norms of queries and keys
gemma      zero-centred norms, embeddings times sqrt(D), GELU
gemma2     gemma with norms after each sublayer too, soft caps, and sliding windows in every other layer
gemma3     gemma2 with norms of queries and keys, no soft caps, and different rotary positions in layers with windows
olmo2      norms only after sublayers; norms of queries and of keys over all heads together
smollm3    llama without rotary positions in some layers, such as every fourth
"""

from __future__ import annotations

import dataclasses
import math
from typing import TypeVar, cast

import numpy as np

from praxis_lite.bridges.hf.family import Family, Values, blocks_of
from praxis_lite.bridges.hf.files import StoredTensor
from praxis_lite.bridges.hf.hf_config import MOST_LAYERS, HfConfig, activation_name, rope_values
from praxis_lite.bridges.hf.layer_pairs import linear_pairs, out_projection_pairs, projection_pairs, table_pairs
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.config import Config, target
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import (
  FeedForward,
  MoeFeedForward,
  MultiHeadAttention,
  RMSNorm,
  RotaryPositions,
  SharedEmbeddingSoftmax,
  TransformerLm,
)
from praxis_lite.layers.positions import LongRotaryScaling
from praxis_lite.models import LanguageModel, transformer_lm


@dataclasses.dataclass(frozen=True)
class LlamaLike(Family):
  """LLaMA and models derived from it."""

  qkv_bias: bool = False  # Whether queries, keys and values always have biases, and the output never has one.
  optional_biases: tuple[str, ...] = ()  # Names of the flags in config.json that turn biases on.
  # What queries and keys are normalized over, see `MultiHeadAttention`; None if they are not normalized.
  qk_norm: str | None = None
  is_gemma: bool = False  # Whether norms are zero-centred and embeddings scaled.
  # See `TransformerBlock`. With 'primer_hybrid', config.json also has the scale and soft caps of logits.
  norm_policy: str = 'pre'
  windows: str = 'none'  # Which layers have sliding windows: 'none', 'all', or as `layer_types` says.
  # Number of layers in a period, for files without `layer_types`: the last layer of each period has full attention, and
  # the others have a window.
  layers_in_period: int | None = None
  may_omit_positions: bool = False  # Whether layers may lack rotary positions.
  # Whether transformers assumes a padding id if config.json has none. An export then writes null, because the assumed
  # id may exceed a small vocabulary.
  has_default_padding: bool = False
  hidden_dims_field: str = 'intermediate_size'  # The field of config.json for the hidden dims of feed-forward layers.

  def experts(self, hf: HfConfig) -> Config[MoeFeedForward] | None:
    """Returns the config of the mixtures of experts that replace feed-forward layers; None if these are dense."""
    return None

  def feed_forward_table(self, layer: str, ours: str) -> list[Pair]:
    """Returns the pairs of a feed-forward layer; `layer` and `ours` are the prefixes of its tensors and variables."""
    names = ('gate', 'up', 'down')
    return [pair for name in names for pair in linear_pairs(f'{layer}mlp.{name}_proj', f'{ours}ff.{name}')]

  def _model(self, hf: HfConfig) -> Config[LanguageModel]:
    hf.must_be('use_bidirectional_attention', False, None)
    for name in {'attention_bias', 'mlp_bias'} - {*self.optional_biases}:
      hf.must_be(name, False)
    num_layers = hf.size('num_hidden_layers', most=MOST_LAYERS)
    cycle = shortest_cycle([*zip(self._windows(hf), self._positions(hf))])
    model = transformer_lm(
      vocab_size=hf.size('vocab_size'),
      model_dims=hf.size('hidden_size'),
      num_layers=num_layers,
      num_heads=hf.size('num_attention_heads'),
      num_kv_heads=None if hf['num_key_value_heads'] is None else hf.size('num_key_value_heads'),
      dims_per_head=None if hf['head_dim'] is None else hf.size('head_dim'),
      hidden_dims=hf.size(self.hidden_dims_field),
      tie_embeddings=bool(hf['tie_word_embeddings']),
      experts=self.experts(hf),
    )
    lm = model.lm_tpl
    block = lm.transformer_tpl.layers_tpl
    norm = Config(RMSNorm, epsilon=hf.number('rms_norm_eps'), zero_centered=self.is_gemma)
    block.norm_tpl, lm.final_norm_tpl = norm, norm.clone()
    bias = 'attention_bias' in self.optional_biases and bool(hf['attention_bias'])
    block.attention_tpl.set(use_bias=bias or self.qkv_bias, use_out_bias=bias)
    if self.qk_norm is not None:
      block.attention_tpl.set(qk_norm_tpl=norm.clone(), qk_norm_over=self.qk_norm)
    block.ff_tpl.activation = self._activation(hf)
    if 'mlp_bias' in self.optional_biases:
      block.ff_tpl.use_bias = bool(hf['mlp_bias'])
    if self.is_gemma:
      (lm.softmax_tpl if lm.embedding_tpl is None else lm.embedding_tpl).scale_sqrt_depth = True
    block.norm_policy = self.norm_policy
    if self.norm_policy == 'primer_hybrid':
      block.attention_tpl.set(
        scale=hf.number('query_pre_attn_scalar') ** -0.5, logit_soft_cap=hf['attn_logit_softcapping']
      )
      lm.softmax_tpl.soft_cap = hf['final_logit_softcapping']
    windows, rotary = zip(*cycle)
    block.attention_tpl.set(sliding_window=windows[0], rotary_tpl=rotary[0])
    if any(r != rotary[0] for r in rotary):
      lm.transformer_tpl.layers_tpl = tuple(block.clone() for _ in cycle)
      for of_layer, window, positions in zip(lm.transformer_tpl.layers_tpl, windows, rotary):
        of_layer.attention_tpl.set(sliding_window=window, rotary_tpl=positions)
    elif len(cycle) > 1:
      block.attention_tpl.sliding_window = None
      lm.transformer_tpl.sliding_windows = windows
    scaling = None if rotary[0] is None else rotary[0].scaling_tpl
    if scaling is not None and target(scaling) is LongRotaryScaling and not scaling.is_long:
      model.decoder_tpl.max_context = scaling.original_max_len
    return model

  def is_buffer(self, name: str, tensor: StoredTensor, hf: HfConfig) -> bool:
    if not name.endswith('.rotary_emb.inv_freq'):
      return False
    dims = hf.size('hidden_size') // hf.size('num_attention_heads') if hf['head_dim'] is None else hf.size('head_dim')
    rates_h, scaling = tensor.read_all().astype(np.float32), hf.rotary().scaling_tpl
    unscaled = hf.rotary().set(name='rotary', dims=dims, scaling_tpl=None)
    either = [unscaled.clone().set(scaling_tpl=s).instantiate().rates_h for s in (None, scaling)]
    # Rates in 16 bits have relative errors of up to 1/256; the smallest rates have larger ones.
    return any(rates_h.shape == e.shape and np.allclose(rates_h, e, rtol=1e-2, atol=1e-7) for e in either)

  def shared_values(self, lm: TransformerLm, ff: FeedForward | MoeFeedForward) -> Values:
    """Returns the values of config.json that all these families have; `ff` is the feed-forward layer of a block."""
    blocks = blocks_of(lm)
    return {
      'vocab_size': lm.vocab_size,
      'hidden_size': lm.model_dims,
      'num_hidden_layers': len(blocks),
      'num_attention_heads': lm.num_heads,
      self.hidden_dims_field: ff.hidden_dims,
      self._activation_field: activation_name(ff.activation, f'{ff.path_name}.activation'),
      'rms_norm_eps': blocks[0].ff_norm.epsilon,
      'tie_word_embeddings': isinstance(lm.softmax, SharedEmbeddingSoftmax) and lm.embedding_tpl is None,
    }

  def values(self, lm: TransformerLm) -> Values:
    blocks = blocks_of(lm)
    block, attention = blocks[0], blocks[0].attention
    values = self.shared_values(lm, block.ff) | {
      'num_key_value_heads': attention.num_kv_heads,
      'head_dim': attention.dims_per_head,
      **self._position_values([b.attention for b in blocks]),
    }
    if 'attention_bias' in self.optional_biases:
      values['attention_bias'] = attention.use_bias
    if 'mlp_bias' in self.optional_biases:
      values['mlp_bias'] = cast(FeedForward, block.ff).use_bias
    if self.norm_policy == 'primer_hybrid':
      scalar = attention.logit_scale**-2
      values['query_pre_attn_scalar'] = round(scalar) if math.isclose(scalar, round(scalar)) else scalar
      values['attn_logit_softcapping'] = attention.logit_soft_cap
      values['final_logit_softcapping'] = lm.softmax.soft_cap
    if self.has_default_padding:
      values['pad_token_id'] = None
    windows = [b.attention.sliding_window for b in blocks]
    if self.windows != 'none':
      values['sliding_window'] = next((w for w in windows if w is not None), None)
    if self.windows == 'by layer':
      values['layer_types'] = ['full_attention' if w is None else 'sliding_attention' for w in windows]
    if self.windows != 'none' and not self.defaults['use_sliding_window']:
      values['use_sliding_window'] = any(w is not None for w in windows)
    return values

  def table(self, tied: bool) -> list[Pair]:
    layer, ours = 'model.layers.{layer}.', 'transformer.layers.'
    pairs = [Pair('model.norm.weight', 'final_norm.scale'), *table_pairs('model.embed_tokens.weight', tied)]
    for theirs, name in (('q', 'query'), ('k', 'key'), ('v', 'value')):
      pairs += projection_pairs(f'{layer}self_attn.{theirs}_proj', f'{ours}attention.{name}')
      pairs.append(Pair(f'{layer}self_attn.{theirs}_norm.weight', f'{ours}attention.{name}_norm.scale'))
    pairs += out_projection_pairs(f'{layer}self_attn.o_proj', f'{ours}attention.out')
    pairs += self.feed_forward_table(layer, ours)
    norms = _NORMS[self.norm_policy]
    return [*pairs, *(Pair(f'{layer}{theirs}.weight', f'{ours}{name}.scale') for name, theirs in norms.items())]

  @property
  def _activation_field(self) -> str:
    return 'hidden_activation' if self.norm_policy == 'primer_hybrid' else 'hidden_act'

  def _activation(self, hf: HfConfig) -> str:
    # Gemma's first config files said 'gelu' but meant its tanh approximation; later files have `hidden_activation`.
    if self.is_gemma and self.norm_policy == 'pre':
      field = 'hidden_activation' if hf.values.get('hidden_activation') else 'hidden_act'
      return 'gelu_tanh' if hf[field] == 'gelu' else hf.activation(field)
    return hf.activation(self._activation_field)

  def _windows(self, hf: HfConfig) -> list[int | None]:
    """Returns the sliding window of each layer, in tokens; None for a layer with full attention."""
    count = hf.size('num_hidden_layers', most=MOST_LAYERS)
    if self.windows == 'none' or hf['sliding_window'] is None or not hf['use_sliding_window']:
      return [None] * count
    window = hf.size('sliding_window')
    if self.windows == 'all':
      return [window] * count
    types = hf['layer_types']
    if types is None and self.layers_in_period is not None:
      is_full = [i % self.layers_in_period == self.layers_in_period - 1 for i in range(count)]
      types = ['full_attention' if full else 'sliding_attention' for full in is_full]
    if types is None:
      first = hf.number('max_window_layers')
      types = ['sliding_attention' if i >= first else 'full_attention' for i in range(count)]
    known = 'sliding_attention', 'full_attention'
    if not isinstance(types, list) or len(types) != count or not all(kind in known for kind in types):
      raise ConfigError(f'{hf.where}: layer_types must have {count} times full_attention or sliding_attention')
    return [window if kind == 'sliding_attention' else None for kind in types]

  def _positions(self, hf: HfConfig) -> list[Config[RotaryPositions] | None]:
    """Returns the rotary positions of each layer; None for a layer without them."""
    count = hf.size('num_hidden_layers', most=MOST_LAYERS)
    if not self.may_omit_positions:
      return [hf.rotary()] * count
    flags = hf['no_rope_layers']  # Despite the name, a flag is 1 or True for a layer with rotary positions.
    if flags is None:
      period = hf.size('no_rope_layer_interval')
      flags = [(i + 1) % period != 0 for i in range(count)]
    if not isinstance(flags, list) or len(flags) != count or not all(flag in (0, 1) for flag in flags):
      raise ConfigError(f'{hf.where}: no_rope_layers must have {count} times 0 or 1')
    return [hf.rotary() if flag else None for flag in flags]

  def _position_values(self, attentions: list[MultiHeadAttention]) -> Values:
    first = next((attention for attention in attentions if attention.rotary_tpl is not None), None)
    values = {} if first is None else rope_values(first.rotary)
    if self.may_omit_positions:
      values['no_rope_layers'] = [int(attention.rotary_tpl is not None) for attention in attentions]
    return values


class Gemma3(LlamaLike):
  """Gemma 3, whose layers with a sliding window have different rotary positions."""

  def _windows(self, hf: HfConfig) -> list[int | None]:
    if hf['layer_types'] is None:
      hf.must_be('sliding_window_pattern', self.layers_in_period)
    return super()._windows(hf)

  def _positions(self, hf: HfConfig) -> list[Config[RotaryPositions] | None]:
    return [hf.rotary() if window is None else hf.local_rotary() for window in self._windows(hf)]

  def _position_values(self, attentions: list[MultiHeadAttention]) -> Values:
    values: Values = {}
    for attention in attentions:
      if attention.rotary_tpl is not None and attention.sliding_window is None:
        values |= rope_values(attention.rotary)
      elif attention.rotary_tpl is not None:
        values['rope_local_base_freq'] = attention.rotary.max_timescale
    return values


Kind = TypeVar('Kind')


def shortest_cycle(kinds: list[Kind]) -> list[Kind]:
  """Returns the shortest prefix of `kinds` that gives all of `kinds` when it is repeated."""
  lengths = range(1, len(kinds) + 1)
  return kinds[: next(n for n in lengths if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))]


# The names of norms in each policy. The name `post_attention_layernorm` means a different norm in each.
_NORMS = {
  'pre': {'attention_norm': 'input_layernorm', 'ff_norm': 'post_attention_layernorm'},
  'post_sublayer': {'attention_norm': 'post_attention_layernorm', 'ff_norm': 'post_feedforward_layernorm'},
  'primer_hybrid': {
    'attention_norm': 'input_layernorm',
    'attention_out_norm': 'post_attention_layernorm',
    'ff_norm': 'pre_feedforward_layernorm',
    'ff_out_norm': 'post_feedforward_layernorm',
  },
}


LLAMA_DEFAULTS = {
  'num_key_value_heads': None,
  'head_dim': None,
  'hidden_act': 'silu',
  'rms_norm_eps': 1e-6,
  'tie_word_embeddings': False,
  'attention_bias': False,
  'mlp_bias': False,
  'sliding_window': None,
  'use_sliding_window': True,
  'layer_types': None,
}
_QWEN = LLAMA_DEFAULTS | {
  'num_key_value_heads': 32,
  'sliding_window': 4096,
  'use_sliding_window': False,
  'max_window_layers': 28,
}
_GEMMA = LLAMA_DEFAULTS | {'head_dim': 256, 'hidden_act': 'gelu_pytorch_tanh', 'tie_word_embeddings': True}
_GEMMA2 = _GEMMA | {
  'num_key_value_heads': 4,
  'hidden_activation': 'gelu_pytorch_tanh',
  'query_pre_attn_scalar': 256,
  'attn_logit_softcapping': 50.0,
  'final_logit_softcapping': 30.0,
  'sliding_window': 4096,
}
LLAMA_LIKE = (
  LlamaLike('llama', 'LlamaForCausalLM', LLAMA_DEFAULTS, optional_biases=('attention_bias', 'mlp_bias')),
  LlamaLike(
    'mistral',
    'MistralForCausalLM',
    LLAMA_DEFAULTS | {'num_key_value_heads': 8, 'sliding_window': 4096},
    windows='all',
  ),
  LlamaLike('qwen2', 'Qwen2ForCausalLM', _QWEN, qkv_bias=True, windows='by layer'),
  LlamaLike(
    'qwen3',
    'Qwen3ForCausalLM',
    _QWEN | {'head_dim': 128},
    qk_norm='head',
    optional_biases=('attention_bias',),
    windows='by layer',
  ),
  LlamaLike(
    'gemma',
    'GemmaForCausalLM',
    _GEMMA | {'num_key_value_heads': 16},
    is_gemma=True,
    optional_biases=('attention_bias',),
  ),
  LlamaLike(
    'gemma2',
    'Gemma2ForCausalLM',
    _GEMMA2,
    is_gemma=True,
    norm_policy='primer_hybrid',
    optional_biases=('attention_bias',),
    windows='by layer',
    layers_in_period=2,
  ),
  Gemma3(
    'gemma3_text',
    'Gemma3ForCausalLM',
    _GEMMA2
    | {'attn_logit_softcapping': None, 'final_logit_softcapping': None}
    | {'rope_theta': 1e6, 'rope_local_base_freq': 10_000.0, 'vocab_size': 262_208, 'num_attention_heads': 8},
    is_gemma=True,
    qk_norm='head',
    norm_policy='primer_hybrid',
    optional_biases=('attention_bias',),
    windows='by layer',
    layers_in_period=6,
  ),
  LlamaLike(
    'olmo2',
    'Olmo2ForCausalLM',
    LLAMA_DEFAULTS | {'rms_norm_eps': 1e-5},
    qk_norm='heads',
    norm_policy='post_sublayer',
    optional_biases=('attention_bias',),
  ),
  LlamaLike(
    'smollm3',
    'SmolLM3ForCausalLM',
    LLAMA_DEFAULTS
    | {'num_key_value_heads': 4, 'tie_word_embeddings': True, 'rope_theta': 2e6}
    | {'use_sliding_window': False, 'no_rope_layers': None, 'no_rope_layer_interval': 4},
    optional_biases=('attention_bias', 'mlp_bias'),
    windows='by layer',
    may_omit_positions=True,
    has_default_padding=True,
  ),
)
