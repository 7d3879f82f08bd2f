"""Phi 3 and Phi 4: LLaMA with one tensor for queries, keys and values, and another for gate and up.

Some rotate only the first dims of each head (Phi 4 mini), and some have other rates for long contexts (LongRoPE).
"""

from __future__ import annotations

from praxis_lite.bridges.hf.hf_config import MOST_LAYERS, HfConfig
from praxis_lite.bridges.hf.layer_pairs import shapes_by_name
from praxis_lite.bridges.hf.llama_like import LLAMA_DEFAULTS, LlamaLike
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.config import Config
from praxis_lite.common.trees import NestedDict
from praxis_lite.layers.positions import RotaryPositions


class Phi3(LlamaLike):
  """Phi 3 and Phi 4, whose checkpoints join projections along their output dimension."""

  def _positions(self, hf: HfConfig) -> list[Config[RotaryPositions] | None]:
    rotary = hf.rotary(share=1.0)
    whole = rotary if rotary.share < 1 else hf.rotary()
    return [whole] * hf.size('num_hidden_layers', most=MOST_LAYERS)

  def table_of(self, weights: NestedDict) -> list[Pair]:
    of_variable = {pair.ours: pair for pair in super().table_of(weights)}
    shapes = shapes_by_name(weights)
    N, K = (shapes[f'attention.{name}.w'][1] for name in ('query', 'key'))
    F = shapes['ff.gate.w'][1] if 'ff.gate.w' in shapes else 0
    layer, ours = 'model.layers.{layer}.', 'transformer.layers.'
    for name, heads in (('query', f'N+{2 * K}'), ('key', f'{N}+N+{K}'), ('value', f'{N + K}+N')):
      joined = Pair(f'{layer}self_attn.qkv_proj.weight', f'{ours}attention.{name}.w', f'D N H -> ({heads} H) D')
      of_variable[joined.ours] = joined
    for name, outputs in (('gate', f'O+{F}'), ('up', f'{F}+O')):
      joined = Pair(f'{layer}mlp.gate_up_proj.weight', f'{ours}ff.{name}.w', f'I O -> {outputs} I')
      of_variable[joined.ours] = joined
    return list(of_variable.values())


_DEFAULTS = LLAMA_DEFAULTS | {
  'rms_norm_eps': 1e-5,
  'max_position_embeddings': 4096,
  'original_max_position_embeddings': 4096,
}
PHI3 = Phi3('phi3', 'Phi3ForCausalLM', _DEFAULTS, windows='all', has_default_padding=True)
