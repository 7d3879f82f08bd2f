"""Mamba-2: blocks of a state space model, without attention and feed-forward layers."""

from __future__ import annotations

import math
from typing import cast

from praxis_lite.bridges.hf.family import Family, Values, blocks_of
from praxis_lite.bridges.hf.hf_config import MOST_LAYERS, HfConfig, activation_name
from praxis_lite.bridges.hf.layer_pairs import out_projection_pairs, shapes_by_name, table_pairs
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.layers import Mamba2, MixerBlock, TransformerLm
from praxis_lite.models import LanguageModel, mamba2_lm


class Mamba2Family(Family):
  """Mamba-2, whose checkpoints join a mixer's five projections in one tensor, and its three convolutions in another."""

  def current_name(self, name: str) -> str:
    return name.replace('backbone.embedding.', 'backbone.embeddings.')

  def _model(self, hf: HfConfig) -> Config[LanguageModel]:
    D, N, H = hf.size('hidden_size'), hf.size('num_heads'), hf.size('head_dim')
    if hf.number('expand') * D != N * H:
      raise ConfigError(
        f'{hf.where}: expand x hidden_size is {hf.number("expand") * D:g}, and num_heads x head_dim is {N * H}; '
        'expected the same number'
      )
    model = mamba2_lm(
      vocab_size=hf.size('vocab_size'),
      model_dims=D,
      num_layers=hf.size('num_hidden_layers', most=MOST_LAYERS),
      dims_per_head=H,
      expand=hf.size('expand'),
      state_dims=hf.size('state_size'),
      num_groups=hf.size('n_groups'),
      kernel_size=hf.size('conv_kernel'),
      chunk_size=hf.size('chunk_size'),
      tie_embeddings=bool(hf['tie_word_embeddings']),
      epsilon=hf.number('layer_norm_epsilon'),
    )
    model.lm_tpl.transformer_tpl.layers_tpl.mixer_tpl.set(
      activation=hf.activation('hidden_act'),
      use_bias=bool(hf['use_bias']),
      use_conv_bias=bool(hf['use_conv_bias']),
      step_range=(hf.number('time_step_min'), hf.number('time_step_max')),
      step_limits=_limits(hf),
    )
    return model

  def values(self, lm: TransformerLm) -> Values:
    blocks = blocks_of(lm)
    mixer = cast(Mamba2, cast(MixerBlock, blocks[0]).mixer)
    expand, left = divmod(mixer.num_heads * mixer.dims_per_head, lm.model_dims)
    if left:
      raise ConfigError(
        f'{mixer.path_name}.num_heads: the heads have {mixer.num_heads * mixer.dims_per_head} dims together; '
        f'transformers expects a multiple of the model dims, {lm.model_dims}'
      )
    values = {
      'vocab_size': lm.vocab_size,
      'hidden_size': lm.model_dims,
      'num_hidden_layers': len(blocks),
      'num_heads': mixer.num_heads,
      'head_dim': mixer.dims_per_head,
      'expand': expand,
      'state_size': mixer.state_dims,
      'n_groups': mixer.num_groups,
      'conv_kernel': mixer.kernel_size,
      'chunk_size': mixer.chunk_size,
      'use_bias': mixer.use_bias,
      'use_conv_bias': mixer.use_conv_bias,
      'hidden_act': activation_name(mixer.activation, f'{mixer.path_name}.activation'),
      'layer_norm_epsilon': mixer.norm.epsilon,
      'time_step_min': mixer.step_range[0],
      'time_step_max': mixer.step_range[1],
      'tie_word_embeddings': lm.embedding_tpl is None,
    }
    if mixer.step_limits != _NO_LIMITS:
      values['time_step_limit'] = list(mixer.step_limits)
    return values

  def table_of(self, weights: NestedDict) -> list[Pair]:
    shapes = shapes_by_name(weights)
    (_, N, H), (_, G, S) = shapes['mixer.value.w'], shapes['mixer.key.w']
    layer, ours = 'backbone.layers.{layer}.', 'transformer.layers.'
    mixer = f'{ours}mixer.'
    rows = {'final_norm': 'backbone.norm_f', f'{ours}mixer_norm': f'{layer}norm'}
    pairs = [Pair(f'{theirs}.weight', f'{name}.scale') for name, theirs in rows.items()]
    pairs += table_pairs('backbone.embeddings.weight', 'embedding' not in weights)
    parts = {'gate': (N * H, '(N H)'), 'value': (N * H, '(N H)')}
    parts |= {'key': (G * S, '(N H)'), 'query': (G * S, '(N H)'), 'step': (N, 'N')}
    before, total = 0, sum(size for size, _ in parts.values())
    convolved = total - N * H - N
    for name, (size, heads) in parts.items():
      at = f'{before}|{heads}|{total - before - size}'
      plain = heads.strip('()')
      pairs += [
        Pair(f'{layer}mixer.in_proj.weight', f'{mixer}{name}.w', f'D {plain} -> {at} D'),
        Pair(f'{layer}mixer.in_proj.bias', f'{mixer}{name}.b', f'{plain} -> {at}'),
      ]
      if name in ('value', 'key', 'query'):
        start = before - N * H
        at = f'{start}|{heads}|{convolved - start - size}'
        pairs += [
          Pair(f'{layer}mixer.conv1d.weight', f'{mixer}{name}_conv.w', f'W N H -> {at} . W'),
          Pair(f'{layer}mixer.conv1d.bias', f'{mixer}{name}_conv.b', f'N H -> {at}'),
        ]
      before += size
    for theirs, name in (('A_log', 'log_decay'), ('dt_bias', 'step_bias'), ('D', 'skip')):
      pairs.append(Pair(f'{layer}mixer.{theirs}', f'{mixer}{name}'))
    return [
      *pairs,
      Pair(f'{layer}mixer.norm.weight', f'{mixer}norm.scale', 'N H -> (N H)'),
      *out_projection_pairs(f'{layer}mixer.out_proj', f'{mixer}out'),
    ]


def _limits(hf: HfConfig) -> tuple[float, float]:
  """Returns the least and greatest time step. config.json writes infinity as Infinity or {"__float__": "Infinity"}."""
  values = hf['time_step_limit']
  if not isinstance(values, list | tuple) or len(values) != 2:
    raise ConfigError(f'{hf.where}: time_step_limit = {values!r}; expected two numbers')
  infinite = (math.inf, {'__float__': 'Infinity'})
  low, high = (math.inf if x in infinite else hf.check_number('time_step_limit', x) for x in values)
  return low, high


_NO_LIMITS = (0.0, math.inf)
_DEFAULTS = {
  'num_heads': 128,
  'head_dim': 64,
  'vocab_size': 32768,
  'hidden_size': 4096,
  'state_size': 128,
  'num_hidden_layers': 64,
  'layer_norm_epsilon': 1e-5,
  'expand': 2,
  'conv_kernel': 4,
  'n_groups': 8,
  'use_bias': False,
  'use_conv_bias': True,
  'hidden_act': 'silu',
  'time_step_min': 0.001,
  'time_step_max': 0.1,
  'time_step_limit': _NO_LIMITS,
  'chunk_size': 256,
  'tie_word_embeddings': False,
}

MAMBA2 = Mamba2Family('mamba2', 'Mamba2ForCausalLM', _DEFAULTS, 'backbone.')
