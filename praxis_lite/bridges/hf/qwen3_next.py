"""Qwen3-Next: blocks of the gated delta rule alternate with gated attention; all have experts, one of them shared."""

from __future__ import annotations

from typing import cast

from praxis_lite.bridges.hf.family import Values, blocks_of
from praxis_lite.bridges.hf.hf_config import MOST_LAYERS, HfConfig, rope_values
from praxis_lite.bridges.hf.layer_pairs import linear_pairs, out_projection_pairs, shapes_by_name
from praxis_lite.bridges.hf.llama_like import LLAMA_DEFAULTS, shortest_cycle
from praxis_lite.bridges.hf.mixtures import Mixture
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.layers import (
  GatedDeltaNet,
  MixerBlock,
  MoeFeedForward,
  RotaryPositions,
  TransformerLm,
)
from praxis_lite.models import LanguageModel

_KINDS = 'linear_attention', 'full_attention'
_SHARE = 0.25  # The share of a head's dims that rotary positions rotate if config.json does not say.


class Qwen3Next(Mixture):
  """Qwen3-Next, without its modules that predict further tokens (MTP); transformers omits them too."""

  def _model(self, hf: HfConfig) -> Config[LanguageModel]:
    model = super()._model(hf)
    lm = model.lm_tpl
    attention = lm.transformer_tpl.layers_tpl
    for norm in (attention.norm_tpl, attention.attention_tpl.qk_norm_tpl, lm.final_norm_tpl):
      norm.zero_centered = True
    attention.attention_tpl.gate_output = True
    recurrent = Config(MixerBlock, mixer_tpl=self._mixer(hf), norm_tpl=attention.norm_tpl.clone())
    recurrent.ff_tpl = attention.ff_tpl.clone()
    of_kind = dict(zip(_KINDS, (recurrent, attention)))
    kinds = shortest_cycle(self._kinds(hf))
    blocks = tuple(of_kind[kind].clone() for kind in kinds)
    lm.transformer_tpl.layers_tpl = blocks if len(blocks) > 1 else blocks[0]
    return model

  def experts(self, hf: HfConfig) -> Config[MoeFeedForward]:
    F, shared = hf.size('moe_intermediate_size'), hf.size('shared_expert_intermediate_size')
    if shared % F:
      raise ConfigError(
        f'{hf.where}: shared_expert_intermediate_size = {shared} is not supported; only multiples of '
        f'moe_intermediate_size = {F} are'
      )
    return super().experts(hf).set(num_shared_experts=shared // F, shared_expert_gate=True)

  def _mixer(self, hf: HfConfig) -> Config[GatedDeltaNet]:
    G, N = hf.size('linear_num_key_heads'), hf.size('linear_num_value_heads')
    S, H = hf.size('linear_key_head_dim'), hf.size('linear_value_head_dim')
    if N % G:
      raise ConfigError(f'{hf.where}: linear_num_key_heads = {G} does not divide linear_num_value_heads = {N}')
    if 2 * S % H:
      raise ConfigError(
        f'{hf.where}: linear_value_head_dim = {H} is not supported; only divisors of 2 x linear_key_head_dim = {2 * S} '
        'are'
      )
    mixer = Config(GatedDeltaNet, num_heads=N, num_groups=G, dims_per_head=H, key_dims=S)
    mixer.set(kernel_size=hf.size('linear_conv_kernel_dim'), activation=hf.activation('hidden_act'))
    mixer.norm_tpl.epsilon = hf.number('rms_norm_eps')
    return mixer

  def _kinds(self, hf: HfConfig) -> list[str]:
    count, kinds = hf.size('num_hidden_layers', most=MOST_LAYERS), hf['layer_types']
    if kinds is None:
      period = hf.size('full_attention_interval')
      return [_KINDS[(i + 1) % period == 0] for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in _KINDS for kind in kinds):
      raise ConfigError(f'{hf.where}: layer_types must have {count} times {" or ".join(_KINDS)}')
    return kinds

  def _positions(self, hf: HfConfig) -> list[Config[RotaryPositions] | None]:
    return [hf.rotary(_SHARE)] * hf.size('num_hidden_layers', most=MOST_LAYERS)

  def is_unused(self, name: str, hf: HfConfig) -> bool:
    return name.startswith('mtp.')

  def values(self, lm: TransformerLm) -> Values:
    blocks = blocks_of(lm)
    kinds = [_KINDS[not isinstance(block, MixerBlock)] for block in blocks]
    ff = cast(MoeFeedForward, blocks[0].ff)
    values = self.shared_values(lm, ff) | {
      **self.values_of_experts(ff),
      'layer_types': kinds,
      'shared_expert_intermediate_size': ff.num_shared_experts * ff.hidden_dims,
    }
    first = dict(zip(kinds[::-1], blocks[::-1]))
    if 'linear_attention' in first:
      mixer = cast(GatedDeltaNet, cast(MixerBlock, first['linear_attention']).mixer)
      values |= {
        'linear_num_key_heads': mixer.num_groups,
        'linear_num_value_heads': mixer.num_heads,
        'linear_key_head_dim': mixer.key_dims,
        'linear_value_head_dim': mixer.dims_per_head,
        'linear_conv_kernel_dim': mixer.kernel_size,
      }
    if 'full_attention' in first:
      attention = first['full_attention'].attention
      values |= {
        'num_key_value_heads': attention.num_kv_heads,
        'head_dim': attention.dims_per_head,
        'attention_bias': attention.use_bias,
        **rope_values(attention.rotary),
      }
    return values

  def table_of(self, weights: NestedDict) -> list[Pair]:
    pairs = {pair.ours: pair for pair in super().table_of(weights)}
    shapes = shapes_by_name(weights)
    layer, ours = 'model.layers.{layer}.', 'transformer.layers.'
    own = [Pair(f'{layer}input_layernorm.weight', f'{ours}mixer_norm.scale')]
    if 'attention.query.w' in shapes:
      own += _attention_pairs(f'{layer}self_attn.q_proj', f'{ours}attention.', shapes['attention.query.w'][2])
    if 'mixer.key.w' in shapes:
      (_, G, S), (_, N, H) = shapes['mixer.key.w'], shapes['mixer.value.w']
      own += _mixer_pairs(f'{layer}linear_attn.', f'{ours}mixer.', (G, S, N, H))
    return [*(pairs | {pair.ours: pair for pair in own}).values()]

  def feed_forward_table(self, layer: str, ours: str) -> list[Pair]:
    pairs = super().feed_forward_table(layer, ours)
    for name in ('gate', 'up', 'down'):
      pairs += linear_pairs(f'{layer}mlp.shared_expert.{name}_proj', f'{ours}ff.shared.{name}')
    return pairs + linear_pairs(f'{layer}mlp.shared_expert_gate', f'{ours}ff.shared_gate')


def _attention_pairs(theirs: str, ours: str, H: int) -> list[Pair]:
  """Returns the pairs of the queries and the output gate, which are adjacent within each head."""
  return [
    Pair(f'{theirs}.{name}', f'{ours}{layer}.{variable}', axes.replace('H)', f'{dims})'))
    for layer, dims in (('query', f'H+{H}'), ('output_gate', f'{H}+H'))
    for name, variable, axes in (('weight', 'w', 'D N H -> (N H) D'), ('bias', 'b', 'N H -> (N H)'))
  ]


def _mixer_pairs(theirs: str, ours: str, sizes: tuple[int, int, int, int]) -> list[Pair]:
  """Returns the pairs of a mixer.

  A checkpoint concatenates the projections for each group of heads, but the convolutions as a whole.
  """
  G, S, N, H = sizes
  R = N // G
  values, before = 2 * R * H, 2 * S // H
  parts = {
    ('in_proj_qkvz', 'query'): f'D G S -> (G S+{S + values}) D',
    ('in_proj_qkvz', 'key'): f'D G S -> (G {S}+S+{values}) D',
    ('in_proj_qkvz', 'value'): f'D (G R={R}) H -> (G {before}+R+{R} H) D',
    ('in_proj_qkvz', 'gate'): f'D (G R={R}) H -> (G {before + R}+R H) D',
    ('in_proj_ba', 'rate'): f'D (G R={R}) -> (G R+{R}) D',
    ('in_proj_ba', 'step'): f'D (G R={R}) -> (G {R}+R) D',
  }
  convolutions = {
    'query': f'W G S -> (G S)|{G * S + N * H} . W',
    'key': f'W G S -> {G * S}|(G S)|{N * H} . W',
    'value': f'W N H -> {2 * G * S}|(N H) . W',
  }
  return [
    *(Pair(f'{theirs}{name}.weight', f'{ours}{part}.w', axes) for (name, part), axes in parts.items()),
    *(Pair(f'{theirs}conv1d.weight', f'{ours}{part}_conv.w', axes) for part, axes in convolutions.items()),
    Pair(f'{theirs}A_log', f'{ours}log_decay'),
    Pair(f'{theirs}dt_bias', f'{ours}step_bias'),
    Pair(f'{theirs}norm.weight', f'{ours}norm.scale'),
    out_projection_pairs(f'{theirs}out_proj', f'{ours}out')[0],
  ]


QWEN3_NEXT = Qwen3Next(
  'qwen3_next',
  'Qwen3NextForCausalLM',
  LLAMA_DEFAULTS
  | {'num_key_value_heads': 2, 'head_dim': 256, 'full_attention_interval': 4}
  | {'linear_num_key_heads': 16, 'linear_num_value_heads': 32, 'linear_conv_kernel_dim': 4}
  | {'linear_key_head_dim': 128, 'linear_value_head_dim': 128}
  | {'moe_intermediate_size': 512, 'shared_expert_intermediate_size': 512}
  | {'num_experts': 512, 'num_experts_per_tok': 10, 'norm_topk_prob': True},
  qk_norm='head',
  optional_biases=('attention_bias',),
  hidden_dims_field='moe_intermediate_size',
  num_experts_fields=('num_experts', 'num_local_experts'),
  renormalize_field='norm_topk_prob',
  layer_name='mlp',
  names=('gate_proj', 'up_proj', 'down_proj'),
)
