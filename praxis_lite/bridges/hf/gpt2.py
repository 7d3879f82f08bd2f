"""GPT-2: LayerNorm, learned positions, biases."""

from __future__ import annotations

import re

import numpy as np

from praxis_lite.bridges.hf.family import Family, Values, blocks_of
from praxis_lite.bridges.hf.files import StoredTensor
from praxis_lite.bridges.hf.hf_config import HfConfig, activation_name
from praxis_lite.bridges.hf.layer_pairs import norm_pairs, table_pairs
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.config import Config
from praxis_lite.layers import TransformerLm
from praxis_lite.models import LanguageModel, transformer_lm


class Gpt2(Family):
  """GPT-2. Its linear layers are stored as [in, out]; queries, keys and values share a tensor."""

  stores_inputs_first = True

  def _model(self, hf: HfConfig) -> Config[LanguageModel]:
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
      norm.epsilon = hf.number('layer_norm_epsilon')
    return model

  def is_buffer(self, name: str, tensor: StoredTensor, hf: HfConfig) -> bool:
    match = re.fullmatch(r'transformer\.h\.\d+\.attn\.(bias|masked_bias)', name)
    if not match:
      return False
    values = tensor.read_all()
    if match[1] == 'masked_bias':
      return values.shape == () and float(values) < _MASKED_LOGIT
    return values.ndim == 4 and np.array_equal(values, np.tri(values.shape[-1])[None, None])

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
      'n_positions': lm.max_positions or self.defaults['n_positions'],
      'activation_function': 'gelu_new' if activation == 'gelu_pytorch_tanh' else activation,
      'layer_norm_epsilon': blocks[0].attention_norm.epsilon,
      'tie_word_embeddings': lm.embedding_tpl is None,
    }

  def table(self, tied: bool) -> list[Pair]:
    layer, ours = 'transformer.h.{layer}.', 'transformer.layers.'
    pairs = [Pair('transformer.wpe.weight', 'position.w'), *table_pairs('transformer.wte.weight', tied)]
    norms = {
      'final_norm': 'transformer.ln_f',
      f'{ours}attention_norm': f'{layer}ln_1',
      f'{ours}ff_norm': f'{layer}ln_2',
    }
    for name, theirs in norms.items():
      pairs += norm_pairs(theirs, name)
    for name, part in (('query', '.+2'), ('key', '1+.+1'), ('value', '2+.')):
      pairs += [
        Pair(f'{layer}attn.c_attn.weight', f'{ours}attention.{name}.w', f'D N H -> D ({part} N H)'),
        Pair(f'{layer}attn.c_attn.bias', f'{ours}attention.{name}.b', f'N H -> ({part} N H)'),
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


_MASKED_LOGIT = -9000  # Old checkpoints store the logit of masked keys, -1e4, which is -9984 in bfloat16.
_GPT2 = {
  'n_positions': 1024,
  'n_inner': None,
  'activation_function': 'gelu_new',
  'layer_norm_epsilon': 1e-5,
  'tie_word_embeddings': True,
}

GPT2 = Gpt2('gpt2', 'GPT2LMHeadModel', _GPT2, 'transformer.')
