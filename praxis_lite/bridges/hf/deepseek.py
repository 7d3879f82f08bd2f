"""DeepSeek-V3 and R1: latent attention, and experts in groups after some dense layers."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import cast

from praxis_lite.bridges.hf.family import Values, blocks_of
from praxis_lite.bridges.hf.hf_config import MOST_LAYERS, HfConfig, rope_values
from praxis_lite.bridges.hf.layer_pairs import linear_pairs, shapes_by_name
from praxis_lite.bridges.hf.llama_like import LLAMA_DEFAULTS, LlamaLike
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.config import Config, target
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.figures import number_of
from praxis_lite.common.trees import NestedDict, leaves
from praxis_lite.layers import (
  LatentAttention,
  MoeFeedForward,
  MultiTokenPrediction,
  RMSNorm,
  TransformerLm,
)
from praxis_lite.layers.positions import YarnRotaryScaling
from praxis_lite.models import LanguageModel, transformer_lm

_BIAS_UPDATE_RATE = 0.001  # As in DeepSeek-V3's training.


class DeepseekV3(LlamaLike):
  """DeepSeek-V3.

  Modules that predict further tokens (MTP) come after the last layer; transformers ignores them. They are read if the
  checkpoint has them, and then written too, together with their copies of the embedding and softmax tables.
  """

  def _model(self, hf: HfConfig) -> Config[LanguageModel]:
    hf.must_be('moe_layer_freq', 1)
    hf.must_be('scoring_func', 'sigmoid')
    hf.must_be('topk_method', 'noaux_tc')
    num_layers, num_dense = hf.size('num_hidden_layers', most=MOST_LAYERS), hf['first_k_dense_replace']
    if type(num_dense) is not int or not 0 <= num_dense < num_layers:
      raise ConfigError(
        f'{hf.where}: first_k_dense_replace = {num_dense!r}; expected a number from 0, and less than the '
        f'{number_of(num_layers, "layer")}'
      )
    plain, turned = hf.size('qk_nope_head_dim'), hf.size('qk_rope_head_dim')
    model = transformer_lm(
      vocab_size=hf.size('vocab_size'),
      model_dims=hf.size('hidden_size'),
      num_layers=num_layers,
      num_heads=hf.size('num_attention_heads'),
      dims_per_head=plain + turned,
      hidden_dims=hf.size('moe_intermediate_size'),
      tie_embeddings=bool(hf['tie_word_embeddings']),
      experts=self.experts(hf),
      first_hidden_dims=(hf.size('intermediate_size'),) * num_dense,
    )
    norm = Config(RMSNorm, epsilon=hf.number('rms_norm_eps'))
    bias, scale = bool(hf['attention_bias']), self._logit_scale(hf, plain + turned)
    for block in (*model.lm_tpl.transformer_tpl.first_tpl, model.lm_tpl.transformer_tpl.layers_tpl):
      block.norm_tpl, block.ff_tpl.activation = norm.clone(), hf.activation('hidden_act')
      out = block.attention_tpl.out_tpl
      block.attention_tpl = Config(LatentAttention, latent_dims=hf.size('kv_lora_rank'), rotary_dims=turned)
      block.attention_tpl.set(value_dims=hf.size('v_head_dim'), rotary_tpl=hf.rotary(), out_tpl=out, scale=scale)
      block.attention_tpl.set(use_bias=bias, latent_norm_tpl=Config(RMSNorm, epsilon=_LATENT_EPSILON))
      block.attention_tpl.rotary_tpl.interleaved = bool(hf['rope_interleave'])
      if hf['q_lora_rank'] is not None:
        block.attention_tpl.query_latent_dims = hf.size('q_lora_rank')
    model.lm_tpl.final_norm_tpl = norm
    num_modules = hf.size(_MODULES, least=0)
    if num_modules:
      model.lm_tpl.mtp_tpl = Config(MultiTokenPrediction, num_modules=num_modules, loss_weight=_MTP_LOSS_WEIGHT)
    return model

  def to_stored(self, hf: HfConfig, names: Collection[str]) -> HfConfig:
    first = hf.size('num_hidden_layers', most=MOST_LAYERS)
    if not hf.values.get(_MODULES) or any(name.startswith(f'model.layers.{first}.') for name in names):
      return hf
    return HfConfig({**hf.values, _MODULES: 0}, hf.where)

  def copies_in(self, hf: HfConfig) -> Mapping[str, str]:
    first, tied = hf.size('num_hidden_layers', most=MOST_LAYERS), hf['tie_word_embeddings']
    table = 'model.embed_tokens.weight'
    copies = {}
    for layer in range(first, first + hf.size(_MODULES, least=0)):
      copies[f'model.layers.{layer}.embed_tokens.weight'] = table
      copies[f'model.layers.{layer}.shared_head.head.weight'] = table if tied else self.head
    return copies

  def written_copies(self, hf: HfConfig) -> Mapping[str, str]:
    return self.copies_in(hf.replace_defaults(self.defaults))

  def experts(self, hf: HfConfig) -> Config[MoeFeedForward]:
    experts = Config(MoeFeedForward, num_experts=hf.size('n_routed_experts'))
    experts.set(num_experts_per_token=hf.size('num_experts_per_tok'), num_shared_experts=hf.size('n_shared_experts'))
    experts.router_tpl.set(score='sigmoid', bias_update_rate=_BIAS_UPDATE_RATE)
    experts.router_tpl.set(num_groups=hf.size('n_group'), num_groups_per_token=hf.size('topk_group'))
    experts.router_tpl.set(renormalize=bool(hf['norm_topk_prob']), weight_scale=hf.number('routed_scaling_factor'))
    return experts

  def _logit_scale(self, hf: HfConfig, dims: int) -> float:
    """Returns the factor of the attention logits, which includes YaRN's `mscale_all_dim` for queries and for keys."""
    scaling = hf.rotary().scaling_tpl
    if scaling is None or target(scaling) is not YarnRotaryScaling:
      return dims**-0.5
    rope = hf.values.get('rope_parameters') or hf.values.get('rope_scaling') or {}
    slope = hf.check_number('mscale_all_dim', rope.get('mscale_all_dim', 0.0))
    return YarnRotaryScaling.log_magnitude(scaling.factor, slope) ** 2 * dims**-0.5

  def is_unused(self, name: str, hf: HfConfig) -> bool:
    match = re.match(r'model\.layers\.(\d+)\.', name)
    num_layers = hf.size('num_hidden_layers', most=MOST_LAYERS) + hf.size(_MODULES, least=0)
    return match is not None and int(match[1]) >= num_layers

  def values(self, lm: TransformerLm) -> Values:
    blocks = blocks_of(lm)
    attention, ff = cast(LatentAttention, blocks[-1].attention), cast(MoeFeedForward, blocks[-1].ff)
    dense = [block.ff for block in blocks if not isinstance(block.ff, MoeFeedForward)]
    assert attention.dims_per_head is not None
    values = self.shared_values(lm, ff) | {
      'num_key_value_heads': attention.num_heads,
      'qk_nope_head_dim': attention.dims_per_head - attention.rotary_dims,
      'qk_rope_head_dim': attention.rotary_dims,
      'head_dim': attention.rotary_dims,
      'v_head_dim': attention.value_dims or attention.dims_per_head,
      'kv_lora_rank': attention.latent_dims,
      'q_lora_rank': attention.query_latent_dims,
      'attention_bias': attention.use_bias,
      'rope_interleave': attention.rotary.interleaved,
      'first_k_dense_replace': len(dense),
      'intermediate_size': dense[0].hidden_dims if dense else ff.hidden_dims,
      'moe_intermediate_size': ff.hidden_dims,
      'n_routed_experts': ff.num_experts,
      'num_experts_per_tok': ff.num_experts_per_token,
      'n_shared_experts': ff.num_shared_experts,
      'n_group': ff.router.num_groups,
      'topk_group': ff.router.num_groups_per_token,
      'norm_topk_prob': ff.router.renormalize,
      'routed_scaling_factor': ff.router.weight_scale,
      **rope_values(attention.rotary),
      **({} if lm.mtp_tpl is None else {_MODULES: lm.mtp.num_modules}),
    }
    scaling = attention.rotary.scaling
    if isinstance(scaling, YarnRotaryScaling):
      magnitude = math.sqrt(attention.logit_scale * math.sqrt(attention.dims_per_head))
      slope = (magnitude - 1) / (YarnRotaryScaling.log_magnitude(scaling.factor) - 1)
      cast(dict[str, object], values['rope_scaling'])['mscale_all_dim'] = slope
    return values

  def table_of(self, weights: NestedDict) -> list[Pair]:
    shapes = shapes_by_name(weights)
    plain, V = (shapes[f'attention.{name}.w'][2] for name in ('key', 'value'))
    theirs, ours = 'model.layers.{layer}.self_attn.', 'transformer.layers.attention.'
    has_latent = 'attention.query_latent.w' in shapes
    pairs = {pair.ours: pair for pair in super().table_of(weights)}
    for pair in (
      Pair(f'{theirs}q_{"b_" * has_latent}proj.weight', f'{ours}query.w', 'D N H -> (N H) D'),
      Pair(f'{theirs}q_a_proj.weight', f'{ours}query_latent.w', 'D R -> R D'),
      Pair(f'{theirs}q_a_proj.bias', f'{ours}query_latent.b'),
      Pair(f'{theirs}q_a_layernorm.weight', f'{ours}query_latent_norm.scale'),
      Pair(f'{theirs}kv_a_proj_with_mqa.weight', f'{ours}latent.w', 'D R -> R D'),
      Pair(f'{theirs}kv_a_proj_with_mqa.bias', f'{ours}latent.b'),
      Pair(f'{theirs}kv_a_layernorm.weight', f'{ours}latent_norm.scale'),
      Pair(f'{theirs}kv_b_proj.weight', f'{ours}key.w', f'R N H -> (N H+{V}) R'),
      Pair(f'{theirs}kv_b_proj.weight', f'{ours}value.w', f'R N V -> (N {plain}+V) R'),
    ):
      pairs[pair.ours] = pair
    return [*pairs.values(), *_module_pairs(weights, list(pairs.values()))]

  def feed_forward_table(self, layer: str, ours: str) -> list[Pair]:
    pairs = [
      *super().feed_forward_table(layer, ours),
      Pair(f'{layer}mlp.gate.weight', f'{ours}ff.router.w', 'D E -> E D'),
      Pair(f'{layer}mlp.gate.e_score_correction_bias', f'{ours}ff.router.bias'),
    ]
    for name in ('gate', 'up', 'down'):
      pairs += [
        Pair(f'{layer}mlp.experts.{{expert}}.{name}_proj.weight', f'{ours}ff.{name}', 'E: I O -> O I'),
        *linear_pairs(f'{layer}mlp.shared_experts.{name}_proj', f'{ours}ff.shared.{name}'),
      ]
    return pairs


def _module_pairs(weights: NestedDict, of_layers: list[Pair]) -> Iterator[Pair]:
  """Yields the pairs of the modules that predict further tokens; each contains a block like those of the layers."""
  num_layers = sum(
    math.prod(weight.repeat_prefix)
    for path, weight in leaves(weights['transformer']).items()
    if path[-3:] == ('attention', 'out', 'w')
  )
  for number in range(len(weights.get('mtp', ()))):
    theirs, ours = f'model.layers.{num_layers + number}.', f'mtp.modules_{number}.'
    yield Pair(f'{theirs}eh_proj.weight', f'{ours}join.w', 'I O -> O I')
    for name, norm in (('embedding_norm', 'enorm'), ('hidden_norm', 'hnorm'), ('norm', 'shared_head.norm')):
      yield Pair(f'{theirs}{norm}.weight', f'{ours}{name}.scale')
    for pair in of_layers:
      if pair.theirs.startswith('model.layers.{layer}.'):
        own = pair.ours.replace('transformer.layers.', f'{ours}block.')
        yield Pair(pair.theirs.replace('model.layers.{layer}.', theirs), own, pair.axes)


_MODULES = 'num_nextn_predict_layers'
_MTP_LOSS_WEIGHT = 0.1  # As at the end of DeepSeek-V3's training.
_LATENT_EPSILON = 1e-6  # Fixed in transformers, not a field of config.json.
_V3 = LLAMA_DEFAULTS | {
  'first_k_dense_replace': 3,
  'kv_lora_rank': 512,
  'q_lora_rank': 1536,
  'qk_nope_head_dim': 128,
  'qk_rope_head_dim': 64,
  'v_head_dim': 128,
  'intermediate_size': 18_432,
  'moe_intermediate_size': 2048,
  'n_routed_experts': 256,
  'n_shared_experts': 1,
  'num_experts_per_tok': 8,
  'n_group': 8,
  'topk_group': 4,
  'norm_topk_prob': True,
  'routed_scaling_factor': 2.5,
  'rope_interleave': True,
  _MODULES: 0,
}
DEEPSEEK_V3 = DeepseekV3('deepseek_v3', 'DeepseekV3ForCausalLM', _V3)
