"""Families of models: for each `model_type`, config.json as the config of a language model and back, and its tensors.

llama      RMSNorm, rotary positions, gated feed-forward; biases of attention or feed-forward by config.json
mistral    the same with sliding windows
qwen2      biases of queries, keys and values; sliding windows in some layers
qwen3      norms of queries and keys
gemma      zero-centred norms, embeddings times sqrt(D), GELU
gemma2     that, norms after each sublayer too, soft caps, sliding windows in every other layer
gpt2       LayerNorm, learned positions, biases
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from praxis_lite.config import Config
from praxis_lite.errors import ConfigError, did_you_mean
from praxis_lite.hf.hf_config import HfConfig, activation_name, rope_values
from praxis_lite.hf.tensors import Pair
from praxis_lite.layer import Layer
from praxis_lite.layers import (
  Dropout,
  MultiHeadAttention,
  Repeat,
  RMSNorm,
  SharedEmbeddingSoftmax,
  TransformerBlock,
  TransformerLm,
)
from praxis_lite.models import LanguageModel, transformer_lm

Values = dict[str, object]


@dataclasses.dataclass(frozen=True)
class Family:
  """A `model_type` of transformers.

  Attributes:
    model_type, architecture: as config.json has them.
    defaults: what transformers assumes where config.json has no such value.
    prefix: of the names of tensors below the head, left out where a checkpoint is of the model without its head.
  """

  model_type: str
  architecture: str
  defaults: Mapping[str, Any]
  prefix: str = 'model.'

  def model(self, hf: HfConfig) -> Config[LanguageModel]:
    """Returns the config of the model that config.json describes; raises ConfigError if the layers cannot be it."""
    raise NotImplementedError

  def values(self, lm: TransformerLm) -> Values:
    """Returns what config.json says of a model, as far as this family can say it."""
    raise NotImplementedError

  def table(self, tied: bool) -> list[Pair]:
    """Returns the tensors; `tied` is whether softmax and embedding share a table."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class LlamaLike(Family):
  """LLaMA and what has been derived from it.

  Attributes:
    qkv_bias: whether queries, keys and values always have biases, and the output has none.
    optional_biases: names in config.json of what may have biases.
    qk_norm: whether queries and keys are normalized.
    is_gemma: zero-centred norms and scaled embeddings.
    hybrid_norms: norms before and after each sublayer, and soft caps.
    windows: which layers have sliding windows: none, all, or by `layer_types`.
  """

  qkv_bias: bool = False
  optional_biases: tuple[str, ...] = ()
  qk_norm: bool = False
  is_gemma: bool = False
  hybrid_norms: bool = False
  windows: str = 'none'

  def model(self, hf: HfConfig) -> Config[LanguageModel]:
    hf = hf.with_defaults(self.defaults)
    hf.must_be('use_bidirectional_attention', False, None)
    for name in {'attention_bias', 'mlp_bias'} - {*self.optional_biases}:
      hf.must_be(name, False)
    num_layers, windows = hf.size('num_hidden_layers'), self._windows(hf)
    alike = len(set(windows)) == 1
    model = transformer_lm(
      vocab_size=hf.size('vocab_size'),
      model_dims=hf.size('hidden_size'),
      num_layers=num_layers,
      num_heads=hf.size('num_attention_heads'),
      num_kv_heads=None if hf['num_key_value_heads'] is None else hf.size('num_key_value_heads'),
      dims_per_head=None if hf['head_dim'] is None else hf.size('head_dim'),
      hidden_dims=hf.size('intermediate_size'),
      tie_embeddings=bool(hf['tie_word_embeddings']),
      repeat=alike,
    )
    lm = model.lm_tpl
    block = lm.transformer_tpl.layers_tpl
    norm = Config(RMSNorm, epsilon=float(hf['rms_norm_eps']), zero_centered=self.is_gemma)
    block.norm_tpl, lm.final_norm_tpl = norm, norm.clone()
    bias = 'attention_bias' in self.optional_biases and bool(hf['attention_bias'])
    block.attention_tpl.set(use_bias=bias or self.qkv_bias, use_out_bias=bias, rotary_tpl=hf.rotary())
    if self.qk_norm:
      block.attention_tpl.qk_norm_tpl = norm.clone()
    block.ff_tpl.activation = self._activation(hf)
    block.ff_tpl.use_bias = 'mlp_bias' in self.optional_biases and bool(hf['mlp_bias'])
    if alike:
      block.attention_tpl.sliding_window = windows[0]
    else:
      lm.transformer_tpl.sliding_windows = _shortest_cycle(windows)
    if self.is_gemma:
      (lm.softmax_tpl if lm.embedding_tpl is None else lm.embedding_tpl).scale_sqrt_depth = True
    if self.hybrid_norms:
      block.norm_policy = 'primer_hybrid'
      block.attention_tpl.set(
        scale=float(hf['query_pre_attn_scalar']) ** -0.5, logit_soft_cap=hf['attn_logit_softcapping']
      )
      lm.softmax_tpl.soft_cap = hf['final_logit_softcapping']
    return model

  def values(self, lm: TransformerLm) -> Values:
    blocks = blocks_of(lm)
    block, attention = blocks[0], blocks[0].attention
    where = f'{block.ff.path_name}.activation'
    values: Values = {
      'vocab_size': lm.vocab_size,
      'hidden_size': lm.model_dims,
      'num_hidden_layers': len(blocks),
      'num_attention_heads': attention.num_heads,
      'num_key_value_heads': attention.num_kv_heads,
      'head_dim': attention.dims_per_head,
      'intermediate_size': block.ff.hidden_dims,
      self._activation_field: activation_name(block.ff.activation, where),
      'rms_norm_eps': block.attention_norm.epsilon,
      'tie_word_embeddings': isinstance(lm.softmax, SharedEmbeddingSoftmax) and lm.embedding_tpl is None,
      **(rope_values(attention.rotary) if attention.rotary_tpl is not None else {}),
    }
    if 'attention_bias' in self.optional_biases:
      values['attention_bias'] = attention.use_bias
    if 'mlp_bias' in self.optional_biases:
      values['mlp_bias'] = block.ff.use_bias
    if self.hybrid_norms:
      scale = attention.dims_per_head**-0.5 if attention.scale is None else attention.scale
      scalar = scale**-2
      values['query_pre_attn_scalar'] = round(scalar) if math.isclose(scalar, round(scalar)) else scalar
      values['attn_logit_softcapping'] = attention.logit_soft_cap
      values['final_logit_softcapping'] = lm.softmax.soft_cap
    windows = [b.attention.sliding_window for b in blocks]
    if self.windows != 'none':
      values['sliding_window'] = next((w for w in windows if w is not None), None)
    if self.windows == 'by layer':
      values['layer_types'] = ['full_attention' if w is None else 'sliding_attention' for w in windows]
      if not self.defaults['use_sliding_window']:
        values['use_sliding_window'] = any(w is not None for w in windows)
    return values

  def table(self, tied: bool) -> list[Pair]:
    layer, ours = 'model.layers.{layer}.', 'transformer.layers.'
    pairs = [Pair('model.norm.weight', 'final_norm.scale')]
    if tied:
      pairs += [Pair('model.embed_tokens.weight', 'softmax.w')]
    else:
      pairs += [Pair('model.embed_tokens.weight', 'embedding.w'), Pair('lm_head.weight', 'softmax.w', 'D V -> V D')]
    for theirs, name in (('q', 'query'), ('k', 'key'), ('v', 'value')):
      pairs += [
        Pair(f'{layer}self_attn.{theirs}_proj.weight', f'{ours}attention.{name}.w', 'D N H -> (N H) D'),
        Pair(f'{layer}self_attn.{theirs}_proj.bias', f'{ours}attention.{name}.b', 'N H -> (N H)'),
        Pair(f'{layer}self_attn.{theirs}_norm.weight', f'{ours}attention.{name}_norm.scale'),
      ]
    pairs += [
      Pair(f'{layer}self_attn.o_proj.weight', f'{ours}attention.out.w', 'N H D -> D (N H)'),
      Pair(f'{layer}self_attn.o_proj.bias', f'{ours}attention.out.b'),
    ]
    for name in ('gate', 'up', 'down'):
      pairs += [
        Pair(f'{layer}mlp.{name}_proj.weight', f'{ours}ff.{name}.w', 'I O -> O I'),
        Pair(f'{layer}mlp.{name}_proj.bias', f'{ours}ff.{name}.b'),
      ]
    norms = {'attention_norm': 'input_layernorm', 'ff_norm': 'post_attention_layernorm'}
    if self.hybrid_norms:  # The same name for another norm.
      norms |= {
        'attention_out_norm': 'post_attention_layernorm',
        'ff_norm': 'pre_feedforward_layernorm',
        'ff_out_norm': 'post_feedforward_layernorm',
      }
    return [*pairs, *(Pair(f'{layer}{theirs}.weight', f'{ours}{name}.scale') for name, theirs in norms.items())]

  @property
  def _activation_field(self) -> str:
    return 'hidden_activation' if self.hybrid_norms else 'hidden_act'

  def _activation(self, hf: HfConfig) -> str:
    # Gemma's first files said 'gelu' and meant its approximation; later ones have a second field.
    if self.is_gemma and not self.hybrid_norms:
      field = 'hidden_activation' if hf.values.get('hidden_activation') else 'hidden_act'
      return 'gelu_tanh' if hf[field] == 'gelu' else hf.activation(field)
    return hf.activation(self._activation_field)

  def _windows(self, hf: HfConfig) -> list[int | None]:
    """The sliding window of each layer."""
    count = hf.size('num_hidden_layers')
    if self.windows == 'none' or hf['sliding_window'] is None or not hf['use_sliding_window']:
      return [None] * count
    window = hf.size('sliding_window')
    if self.windows == 'all':
      return [window] * count
    types = hf['layer_types']
    if types is None and self.hybrid_norms:
      types = ['full_attention' if i % 2 else 'sliding_attention' for i in range(count)]
    if types is None:
      first = hf['max_window_layers']
      types = ['sliding_attention' if i >= first else 'full_attention' for i in range(count)]
    if len(types) != count or not {*types} <= {'sliding_attention', 'full_attention'}:
      raise ConfigError(f'{hf.where}: layer_types must have {count} times full_attention or sliding_attention')
    return [window if kind == 'sliding_attention' else None for kind in types]


@dataclasses.dataclass(frozen=True)
class Gpt2(Family):
  """GPT-2, whose linear layers are stored as [in, out], and whose queries, keys and values are one tensor."""

  def model(self, hf: HfConfig) -> Config[LanguageModel]:
    hf = hf.with_defaults(self.defaults)
    hf.must_be('scale_attn_weights', True)
    hf.must_be('scale_attn_by_inverse_layer_idx', False)
    hf.must_be('add_cross_attention', False)
    hidden_dims = None if hf['n_inner'] is None else hf.size('n_inner')
    model = transformer_lm(
      style='gpt2',
      vocab_size=hf.size('vocab_size'),
      model_dims=hf.size('n_embd'),
      num_layers=hf.size('n_layer'),
      num_heads=hf.size('n_head'),
      hidden_dims=hidden_dims,
      max_len=hf.size('n_positions'),
      tie_embeddings=bool(hf['tie_word_embeddings']),
    )
    lm = model.lm_tpl
    lm.transformer_tpl.layers_tpl.ff_tpl.activation = hf.activation('activation_function')
    for norm in (lm.transformer_tpl.layers_tpl.norm_tpl, lm.final_norm_tpl):
      norm.epsilon = float(hf['layer_norm_epsilon'])
    return model

  def values(self, lm: TransformerLm) -> Values:
    blocks = blocks_of(lm)
    attention, ff = blocks[0].attention, blocks[0].ff
    activation = activation_name(ff.activation, f'{ff.path_name}.activation')
    return {
      'vocab_size': lm.vocab_size,
      'n_embd': lm.model_dims,
      'n_layer': len(blocks),
      'n_head': attention.num_heads,
      'n_inner': ff.hidden_dims,
      'n_positions': getattr(lm.position, 'max_len', 0) if lm.position_tpl is not None else 0,
      'activation_function': 'gelu_new' if activation == 'gelu_pytorch_tanh' else activation,
      'layer_norm_epsilon': blocks[0].attention_norm.epsilon,
      'tie_word_embeddings': lm.embedding_tpl is None,
    }

  def table(self, tied: bool) -> list[Pair]:
    layer, ours = 'transformer.h.{layer}.', 'transformer.layers.'
    pairs = [Pair('transformer.wpe.weight', 'position.w')]
    if tied:
      pairs += [Pair('transformer.wte.weight', 'softmax.w')]
    else:
      pairs += [Pair('transformer.wte.weight', 'embedding.w'), Pair('lm_head.weight', 'softmax.w', 'D V -> V D')]
    norms = {
      'final_norm': 'transformer.ln_f',
      f'{ours}attention_norm': f'{layer}ln_1',
      f'{ours}ff_norm': f'{layer}ln_2',
    }
    for name, theirs in norms.items():
      pairs += [Pair(f'{theirs}.weight', f'{name}.scale'), Pair(f'{theirs}.bias', f'{name}.bias')]
    for i, name in enumerate(('query', 'key', 'value')):
      pairs += [
        Pair(f'{layer}attn.c_attn.weight', f'{ours}attention.{name}.w', f'D N H -> D ({i}/3 N H)'),
        Pair(f'{layer}attn.c_attn.bias', f'{ours}attention.{name}.b', f'N H -> ({i}/3 N H)'),
      ]
    pairs += [
      Pair(f'{layer}attn.c_proj.weight', f'{ours}attention.out.w', 'N H D -> (N H) D'),
      Pair(f'{layer}attn.c_proj.bias', f'{ours}attention.out.b'),
    ]
    for theirs, name in (('c_fc', 'up'), ('c_proj', 'down')):
      pairs += [
        Pair(f'{layer}mlp.{theirs}.weight', f'{ours}ff.{name}.w'),
        Pair(f'{layer}mlp.{theirs}.bias', f'{ours}ff.{name}.b'),
      ]
    return pairs


_LLAMA = {
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
_QWEN = _LLAMA | {
  'num_key_value_heads': 32,
  'sliding_window': 4096,
  'use_sliding_window': False,
  'max_window_layers': 28,
}
_GEMMA = _LLAMA | {'head_dim': 256, 'hidden_act': 'gelu_pytorch_tanh', 'tie_word_embeddings': True}
_GEMMA2 = _GEMMA | {
  'num_key_value_heads': 4,
  'hidden_activation': 'gelu_pytorch_tanh',
  'query_pre_attn_scalar': 256,
  'attn_logit_softcapping': 50.0,
  'final_logit_softcapping': 30.0,
  'sliding_window': 4096,
}
_GPT2 = {
  'n_positions': 1024,
  'n_inner': None,
  'activation_function': 'gelu_new',
  'layer_norm_epsilon': 1e-5,
  'tie_word_embeddings': True,
}

FAMILIES: dict[str, Family] = {
  family.model_type: family
  for family in (
    LlamaLike('llama', 'LlamaForCausalLM', _LLAMA, optional_biases=('attention_bias', 'mlp_bias')),
    LlamaLike(
      'mistral',
      'MistralForCausalLM',
      _LLAMA | {'num_key_value_heads': 8, 'sliding_window': 4096},
      windows='all',
    ),
    LlamaLike('qwen2', 'Qwen2ForCausalLM', _QWEN, qkv_bias=True, windows='by layer'),
    LlamaLike(
      'qwen3',
      'Qwen3ForCausalLM',
      _QWEN | {'head_dim': 128},
      qk_norm=True,
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
      hybrid_norms=True,
      optional_biases=('attention_bias',),
      windows='by layer',
    ),
    Gpt2('gpt2', 'GPT2LMHeadModel', _GPT2, 'transformer.'),
  )
}


def family_of(hf: HfConfig) -> Family:
  """Returns the family of a checkpoint; raises ConfigError, which names those there are, if it is of another."""
  model_type = hf['model_type']
  if model_type not in FAMILIES:
    raise ConfigError(
      f'{hf.where}: model_type {model_type!r} is not supported.{did_you_mean(str(model_type), FAMILIES)} '
      f'Known: {", ".join(FAMILIES)}'
    )
  hf.must_be('quantization_config', None)
  return FAMILIES[model_type]


def described(model: LanguageModel, preferred: str | None = None) -> tuple[Family, Values]:
  """Returns the family that a model belongs to, and config.json of it.

  A family is right if the model that its config.json describes is the given one.

  Args:
    model: the model, built.
    preferred: the `model_type` to try first, such as that of the checkpoint it was imported from.

  Raises:
    ConfigError: there is none; the message names the nearest and what differs.
  """
  lm = model.lm
  if not isinstance(lm, TransformerLm):
    raise ConfigError(f'task.model.lm_tpl: a {type(lm).__name__} has no counterpart in transformers; TransformerLm has')
  names = sorted(FAMILIES, key=lambda name: name != preferred)
  differences: dict[str, list[str]] = {}
  for name in names:
    family = FAMILIES[name]
    try:
      values: Values = {'model_type': name, 'architectures': [family.architecture], **family.values(lm)}
      there = family.model(HfConfig(values)).instantiate(name='model').lm
    except (ConfigError, AttributeError):  # It has not even the parts to describe.
      continue
    differences[name] = list(_differences(lm, there))
    if not differences[name]:
      return family, values
  if not differences:
    raise ConfigError(f'this model is of none of the families {", ".join(FAMILIES)}')
  nearest = min(differences, key=lambda name: len(differences[name]))
  raise ConfigError(
    f'this model is of none of the families {", ".join(FAMILIES)}; of {nearest} it differs in '
    f'{"; ".join(differences[nearest][:_SHOWN])}'
  )


def is_tied(lm: TransformerLm) -> bool:
  """Whether softmax and embedding share a table."""
  return lm.embedding_tpl is None


def blocks_of(lm: TransformerLm) -> list[TransformerBlock]:
  """Returns the block of each layer; that of a repeated layer as often as it is repeated."""
  transformer = lm.transformer
  if isinstance(transformer, Repeat):
    return [transformer.layers] * transformer.num_layers
  return list(transformer.layers)


_SHOWN = 3
# Fields that do not change what a trained model computes, or that layers below have, completed.
_NOT_COMPARED = {
  *('name', 'dtype', 'fprop_dtype', 'params_init', 'mesh_axis_names', 'logical_axis_rules', 'inputs_split_mapping'),
  *('weight_split_dims_mapping', 'activation_split_dims_mapping', 'implementation', 'lookup_style', 'out_init'),
  *('label_smoothing', 'z_loss_weight'),
}
_COMPLETED_BELOW = {'num_heads', 'num_kv_heads', 'dims_per_head', 'hidden_dims'}


def _differences(ours: Layer, theirs: Layer) -> Iterator[str]:
  """Yields how a layer, and those below it, differ from another in what they compute."""
  if isinstance(ours, Dropout):
    return
  if type(ours) is not type(theirs):
    yield f'{ours.path_name}, which is {type(ours).__name__} here and {type(theirs).__name__} there'
    return
  skipped = _NOT_COMPARED | (_COMPLETED_BELOW if isinstance(ours, (TransformerLm, TransformerBlock)) else set())
  for field in dataclasses.fields(ours):
    here, there = getattr(ours, field.name), getattr(theirs, field.name)
    if field.name in skipped or (
      isinstance(here, Config) and isinstance(there, Config) and field.name != 'scaling_tpl'
    ):
      continue
    if isinstance(ours, MultiHeadAttention) and field.name == 'scale':
      here, there = (
        attention.dims_per_head**-0.5 if s is None else s for attention, s in ((ours, here), (theirs, there))
      )
    if here != there and not (isinstance(here, float) and isinstance(there, float) and math.isclose(here, there)):
      yield f'{ours.path_name}.{field.name}, which is {here!r} here and {there!r} there'
  children, of_theirs = dict(ours.children()), dict(theirs.children())
  if isinstance(ours, TransformerLm) and isinstance(theirs, TransformerLm):
    del children['transformer']
    for here_block, there_block in dict.fromkeys(zip(blocks_of(ours), blocks_of(theirs))):
      yield from _differences(here_block, there_block)
  for name, child in children.items():
    if name in of_theirs:  # Otherwise the fields differ that say whether there is one.
      yield from _differences(child, of_theirs[name])


def _shortest_cycle(windows: list[int | None]) -> tuple[int | None, ...]:
  """Returns the shortest beginning whose repetition gives all of `windows`."""
  for length in range(1, len(windows) + 1):
    if all(w == windows[i % length] for i, w in enumerate(windows)):
      return tuple(windows[:length])
  return tuple(windows)
