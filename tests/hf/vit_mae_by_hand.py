"""ViT-MAE in NumPy and float64, from the tensors of a checkpoint by name: what the package must compute.

It is written from the paper and the names of the tensors, and shares no code with the package.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vit_by_hand import Tensors, attend, gelu, patches


def outputs(config: dict[str, Any], tensors: Tensors, image: np.ndarray, noise: np.ndarray) -> np.ndarray:
  """Predictions of all patches, [B, T, P], where the patches with the most noise [B, T] are hidden."""
  of = {name: np.asarray(x, np.float64) for name, x in tensors.items()}

  def linear(name, x):
    return x @ of[f'{name}.weight'].T + of[f'{name}.bias']

  def norm(name, x):
    x = x - x.mean(-1, keepdims=True)
    return (
      x / np.sqrt((x**2).mean(-1, keepdims=True) + config['layer_norm_eps']) * of[f'{name}.weight'] + of[f'{name}.bias']
    )

  def block(layer, x, heads):
    y = norm(f'{layer}layernorm_before', x)
    qkv = [linear(f'{layer}attention.attention.{name}', y) for name in ('query', 'key', 'value')]
    x = x + linear(f'{layer}attention.output.dense', attend(*qkv, heads))
    y = gelu(linear(f'{layer}intermediate.dense', norm(f'{layer}layernorm_after', x)))
    return x + linear(f'{layer}output.dense', y)

  x = patches(np.asarray(image, np.float64), of['vit.embeddings.patch_embeddings.projection.weight'])
  x = x + of['vit.embeddings.patch_embeddings.projection.bias']
  table = of['vit.embeddings.position_embeddings'][0]
  order = np.argsort(noise, axis=1)[:, : int(x.shape[1] * (1 - config['mask_ratio']))]
  first = of['vit.embeddings.cls_token'][0] + table[:1]
  x = np.stack([np.concatenate([first, row[seen]]) for row, seen in zip(x + table[1:], order)])
  for i in range(config['num_hidden_layers']):
    x = block(f'vit.encoder.layer.{i}.', x, config['num_attention_heads'])
  x = linear('decoder.decoder_embed', norm('vit.layernorm', x))
  tokens = np.tile(of['decoder.mask_token'][0], (len(x), noise.shape[1], 1))
  for row, states, seen in zip(tokens, x, order):
    row[seen] = states[1:]
  x = np.concatenate([x[:, :1], tokens], axis=1) + of['decoder.decoder_pos_embed']
  for i in range(config['decoder_num_hidden_layers']):
    x = block(f'decoder.decoder_layers.{i}.', x, config['decoder_num_attention_heads'])
  return linear('decoder.decoder_pred', norm('decoder.decoder_norm', x))[:, 1:]
