"""Models whose feed-forward layers are mixtures of experts, with separate tensors for each expert:

mixtral      Mistral with experts
qwen3_moe    Qwen 3 with experts
"""

from __future__ import annotations

import dataclasses
from typing import cast

from praxis_lite.bridges.hf.family import Values, blocks_of
from praxis_lite.bridges.hf.hf_config import HfConfig
from praxis_lite.bridges.hf.llama_like import LLAMA_DEFAULTS, LlamaLike
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.config import Config
from praxis_lite.layers import MoeFeedForward, TransformerLm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture(LlamaLike):
  """A model of the LLaMA family with experts."""

  # Fields of config.json that may hold the number of experts; an export writes the first one.
  num_experts_fields: tuple[str, ...]
  # The flag in config.json that says whether the weights of a token's experts sum to 1; None if they always do.
  renormalize_field: str | None = None
  layer_name: str  # The part of the name of a tensor that stands for the mixture of experts.
  names: tuple[str, str, str]  # The parts of tensor names for an expert's gate, up and down weights, in this order.

  def experts(self, hf: HfConfig) -> Config[MoeFeedForward]:
    hf.must_be('decoder_sparse_step', 1)
    hf.must_be('mlp_only_layers', [], None)
    field = next((name for name in self.num_experts_fields if name in hf.values), self.num_experts_fields[0])
    experts = Config(MoeFeedForward, num_experts=hf.size(field), num_experts_per_token=hf.size('num_experts_per_tok'))
    experts.router_tpl.renormalize = self.renormalize_field is None or bool(hf[self.renormalize_field])
    return experts

  def values(self, lm: TransformerLm) -> Values:
    return super().values(lm) | self.values_of_experts(cast(MoeFeedForward, blocks_of(lm)[0].ff))

  def values_of_experts(self, ff: MoeFeedForward) -> Values:
    """Inverts `experts`: returns the values of config.json for a mixture."""
    values: Values = {self.num_experts_fields[0]: ff.num_experts, 'num_experts_per_tok': ff.num_experts_per_token}
    if self.renormalize_field is not None:
      values[self.renormalize_field] = ff.router.renormalize
    return values

  def feed_forward_table(self, layer: str, ours: str) -> list[Pair]:
    theirs = f'{layer}{self.layer_name}.'
    return [
      Pair(f'{theirs}gate.weight', f'{ours}ff.router.w', 'D E -> E D'),
      *(
        Pair(f'{theirs}experts.{{expert}}.{name}.weight', f'{ours}ff.{variable}', 'E: I O -> O I')
        for name, variable in zip(self.names, ('gate', 'up', 'down'))
      ),
    ]


MIXTURES = (
  Mixture(
    'mixtral',
    'MixtralForCausalLM',
    LLAMA_DEFAULTS
    | {'num_key_value_heads': 8, 'rms_norm_eps': 1e-5, 'rope_theta': 1e6}
    | {'num_local_experts': 8, 'num_experts_per_tok': 2},
    windows='all',
    num_experts_fields=('num_local_experts',),
    layer_name='block_sparse_moe',
    names=('w1', 'w3', 'w2'),
  ),
  Mixture(
    'qwen3_moe',
    'Qwen3MoeForCausalLM',
    LLAMA_DEFAULTS
    | {'num_key_value_heads': 4, 'sliding_window': 4096, 'use_sliding_window': False}
    | {'moe_intermediate_size': 768, 'num_experts': 128, 'num_experts_per_tok': 8, 'norm_topk_prob': False},
    qk_norm='head',
    optional_biases=('attention_bias',),
    windows='all',
    hidden_dims_field='moe_intermediate_size',
    num_experts_fields=('num_experts', 'num_local_experts'),
    renormalize_field='norm_topk_prob',
    layer_name='mlp',
    names=('gate_proj', 'up_proj', 'down_proj'),
  ),
)
