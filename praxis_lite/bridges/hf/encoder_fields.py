"""The fields of config.json that text and image encoders share, such as BERT, ViT, CLIP and SigLIP."""

from __future__ import annotations

from typing import Any

from praxis_lite.bridges.hf.family import Values, blocks_of_stack
from praxis_lite.bridges.hf.hf_config import MOST_LAYERS, HfConfig, activation_name
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import FeedForward, TransformerEncoder, VisionTransformer


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
