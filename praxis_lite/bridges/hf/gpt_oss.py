"""GPT-OSS: attention sinks, sliding windows in every other layer, and experts with biases and clipped activations."""

from __future__ import annotations

from typing import cast

from praxis_lite.bridges.hf.family import Values, blocks_of
from praxis_lite.bridges.hf.hf_config import HfConfig
from praxis_lite.bridges.hf.llama_like import LLAMA_DEFAULTS, LlamaLike
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.config import Config
from praxis_lite.layers import MoeFeedForward, TransformerLm
from praxis_lite.models import LanguageModel

_SLOPE = 1.702  # The factor in the sigmoid of 'gelu_sigmoid', x sigmoid(1.702 x).


class GptOss(LlamaLike):
  """GPT-OSS, whose checkpoints hold all experts of a layer in one tensor, with gate and up interleaved.

  The experts may have 4 bits; see `mxfp4.py`.
  """

  def _model(self, hf: HfConfig) -> Config[LanguageModel]:
    model = super()._model(hf)
    layers = model.lm_tpl.transformer_tpl.layers_tpl
    for block in layers if isinstance(layers, tuple) else (layers,):
      block.attention_tpl.use_sinks = True
    return model

  def takes(self, quantization: object) -> bool:
    is_mxfp4 = isinstance(quantization, dict) and quantization.get('quant_method') == 'mxfp4'
    return is_mxfp4 or super().takes(quantization)

  def experts(self, hf: HfConfig) -> Config[MoeFeedForward]:
    hf.must_be('hidden_act', 'silu')
    hf.must_be('swiglu_alpha', _SLOPE)
    experts = Config(MoeFeedForward, num_experts=hf.size('num_local_experts'), use_bias=True, up_offset=1.0)
    experts.set(num_experts_per_token=hf.size('num_experts_per_tok'), hidden_limit=hf.number('swiglu_limit'))
    experts.router_tpl.use_bias = True
    return experts

  def _activation(self, hf: HfConfig) -> str:
    return 'gelu_sigmoid'  # transformers ignores `hidden_act`, too.

  def values(self, lm: TransformerLm) -> Values:
    ff = cast(MoeFeedForward, blocks_of(lm)[0].ff)
    values = super().values(lm) | {
      'hidden_act': 'silu',
      'num_local_experts': ff.num_experts,
      'num_experts_per_tok': ff.num_experts_per_token,
      'swiglu_alpha': _SLOPE,
      'swiglu_limit': ff.hidden_limit,
    }
    if 'rope_theta' in values and 'rope_scaling' not in values:  # Without it, transformers would assume YaRN.
      values['rope_parameters'] = {'rope_type': 'default', 'rope_theta': values['rope_theta']}
    return values

  def feed_forward_table(self, layer: str, ours: str) -> list[Pair]:
    router, experts = f'{layer}mlp.router.', f'{layer}mlp.experts.'
    return [
      Pair(f'{layer}self_attn.sinks', f'{ours}attention.sinks'),
      Pair(f'{router}weight', f'{ours}ff.router.w', 'D E -> E D'),
      Pair(f'{router}bias', f'{ours}ff.router.b'),
      Pair(f'{experts}gate_up_proj', f'{ours}ff.gate', 'E D F -> E D (F .+1)'),
      Pair(f'{experts}gate_up_proj_bias', f'{ours}ff.gate_bias', 'E F -> E (F .+1)'),
      Pair(f'{experts}gate_up_proj', f'{ours}ff.up', 'E D F -> E D (F 1+.)'),
      Pair(f'{experts}gate_up_proj_bias', f'{ours}ff.up_bias', 'E F -> E (F 1+.)'),
      Pair(f'{experts}down_proj', f'{ours}ff.down'),
      Pair(f'{experts}down_proj_bias', f'{ours}ff.down_bias'),
    ]


_DEFAULTS = LLAMA_DEFAULTS | {
  'num_hidden_layers': 36,
  'num_local_experts': 128,
  'num_experts_per_tok': 4,
  'vocab_size': 201_088,
  'hidden_size': 2880,
  'intermediate_size': 2880,
  'head_dim': 64,
  'num_attention_heads': 64,
  'num_key_value_heads': 8,
  'sliding_window': 128,
  'max_position_embeddings': 131_072,
  'rms_norm_eps': 1e-5,
  'attention_bias': True,
  'swiglu_limit': 7.0,
  'rope_theta': 150_000.0,
  'rope_scaling': {
    'rope_type': 'yarn',
    'factor': 32.0,
    'beta_fast': 32.0,
    'beta_slow': 1.0,
    'truncate': False,
    'original_max_position_embeddings': 4096,
  },
}
GPT_OSS = GptOss(
  'gpt_oss',
  'GptOssForCausalLM',
  _DEFAULTS,
  optional_biases=('attention_bias',),
  windows='by layer',
  layers_in_period=2,
)
