"""What several families share: pairs (tensor, variable) of layers, and the fields of config.json for encoders."""

from __future__ import annotations

from typing import Any

from praxis_lite.bridges.hf.family import Values, blocks_of_stack
from praxis_lite.bridges.hf.hf_config import MOST_LAYERS, HfConfig, activation_name
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict, leaves
from praxis_lite.layers import FeedForward, TransformerEncoder, VisionTransformer


def shapes_by_name(weights: NestedDict) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of variables by the last three parts of their paths, such as 'attention.query.w'."""
  return {'.'.join(map(str, path[-3:])): weight.shape for path, weight in leaves(weights).items()}


def table_pairs(theirs: str, tied: bool) -> list[Pair]:
  """Returns the pairs of embedding and softmax: one if they share the tensor `theirs`, otherwise one for each."""
  if tied:
    return [Pair(theirs, 'softmax.w')]
  return [Pair(theirs, 'embedding.w'), Pair('lm_head.weight', 'softmax.w', 'D V -> V D')]


def linear_pairs(theirs: str, ours: str) -> list[Pair]:
  """Returns the pairs of a linear layer with a bias, stored as [out, in]."""
  return [Pair(f'{theirs}.weight', f'{ours}.w', 'I O -> O I'), Pair(f'{theirs}.bias', f'{ours}.b')]


def norm_pairs(theirs: str, ours: str) -> list[Pair]:
  """Returns the pairs of a LayerNorm."""
  return [Pair(f'{theirs}.weight', f'{ours}.scale'), Pair(f'{theirs}.bias', f'{ours}.bias')]


def projection_pairs(theirs: str, ours: str) -> list[Pair]:
  """Returns the pairs of a projection to heads with a bias, stored as [heads x dims, in]."""
  weight = Pair(f'{theirs}.weight', f'{ours}.w', 'D N H -> (N H) D')
  return [weight, Pair(f'{theirs}.bias', f'{ours}.b', 'N H -> (N H)')]


def out_projection_pairs(theirs: str, ours: str) -> list[Pair]:
  """Returns the pairs of a projection from heads with a bias, stored as [out, heads x dims]."""
  return [Pair(f'{theirs}.weight', f'{ours}.w', 'N H D -> D (N H)'), Pair(f'{theirs}.bias', f'{ours}.b')]


def attention_pairs(theirs: str, ours: str, *, has_key_bias: bool = True) -> list[Pair]:
  """Returns the pairs of attention whose projections are `q_proj`, `k_proj`, `v_proj` and `out_proj`."""
  key = projection_pairs(f'{theirs}.k_proj', f'{ours}.key')
  return [
    *projection_pairs(f'{theirs}.q_proj', f'{ours}.query'),
    *(key if has_key_bias else key[:1]),
    *projection_pairs(f'{theirs}.v_proj', f'{ours}.value'),
    *out_projection_pairs(f'{theirs}.out_proj', f'{ours}.out'),
  ]


def stack_pairs(theirs: str, stack: str, *, has_key_bias: bool = True) -> list[Pair]:
  """Returns the pairs of the layers of the 'encoder' or 'decoder' of BART or Whisper; names begin with `theirs`."""
  theirs, ours = f'{theirs}layers.{{layer}}.', f'{stack}.layers.'
  kinds = {'self_attn': 'attention', **({'encoder_attn': 'cross_attention'} if stack == 'decoder' else {})}
  pairs = []
  for name, own in kinds.items():
    pairs += attention_pairs(f'{theirs}{name}', f'{ours}{own}', has_key_bias=has_key_bias)
    pairs += norm_pairs(f'{theirs}{name}_layer_norm', f'{ours}{own}_norm')
  pairs += linear_pairs(f'{theirs}fc1', f'{ours}ff.up') + linear_pairs(f'{theirs}fc2', f'{ours}ff.down')
  return pairs + norm_pairs(f'{theirs}final_layer_norm', f'{ours}ff_norm')


def block_pairs(theirs: str, ours: str, attention: str) -> list[Pair]:
  """Returns the pairs of a block of BERT or ViT, without norms. `attention` names the module with Q, K and V."""
  pairs = out_projection_pairs(f'{theirs}attention.output.dense', f'{ours}attention.out')
  for name in ('query', 'key', 'value'):
    pairs += projection_pairs(f'{theirs}{attention}.{name}', f'{ours}attention.{name}')
  pairs += linear_pairs(f'{theirs}intermediate.dense', f'{ours}ff.up')
  return pairs + linear_pairs(f'{theirs}output.dense', f'{ours}ff.down')


def encoder_sizes(hf: HfConfig) -> dict[str, Any]:
  """Returns the arguments that `transformer_encoder` and `vision_transformer` both take."""
  return {
    'model_dims': hf.size('hidden_size'),
    'num_layers': hf.size('num_hidden_layers', most=MOST_LAYERS),
    'num_heads': hf.size('num_attention_heads'),
    'hidden_dims': hf.size('intermediate_size'),
    'activation': hf.activation('hidden_act'),
    'epsilon': hf.number('layer_norm_eps'),
  }


def encoder_values(encoder: TransformerEncoder | VisionTransformer, epsilon: float) -> Values:
  """Inverts `encoder_sizes`: returns values of config.json; raises ConfigError if transformers has no such blocks."""
  blocks = blocks_of_stack(encoder.transformer)
  ff = blocks[0].ff
  if not isinstance(ff, FeedForward):
    raise ConfigError(f'{encoder.path_name}: an encoder of transformers has dense feed-forward layers')
  return {
    'hidden_size': encoder.model_dims,
    'num_hidden_layers': len(blocks),
    'num_attention_heads': blocks[0].attention.num_heads,
    'intermediate_size': ff.hidden_dims,
    'hidden_act': activation_name(ff.activation, f'{ff.path_name}.activation'),
    'layer_norm_eps': epsilon,
  }
