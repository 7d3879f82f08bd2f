"""ViT in NumPy and float64, from the tensors of a checkpoint by name: what the package must compute.

It is written from the paper and the names of the tensors, and shares no code with the package.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


def outputs(config: dict[str, Any], tensors: Tensors, image: np.ndarray) -> np.ndarray:
  """Logits of classes [B, V], or the features of the pooler [B, D], for images [B, height, width, C]."""
  of = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
  heads, eps = config['num_attention_heads'], config['layer_norm_eps']

  def linear(name, x):
    return x @ of[f'{name}.weight'].T + of[f'{name}.bias']

  def norm(name, x):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * of[f'{name}.weight'] + of[f'{name}.bias']

  x = patches(np.asarray(image, np.float64), of['vit.embeddings.patch_embeddings.projection.weight'])
  x = x + of['vit.embeddings.patch_embeddings.projection.bias']
  first = np.broadcast_to(of['vit.embeddings.cls_token'], (len(x), 1, x.shape[-1]))
  x = np.concatenate([first, x], axis=1) + of['vit.embeddings.position_embeddings']
  for i in range(config['num_hidden_layers']):
    layer = f'vit.encoder.layer.{i}.'
    y = norm(f'{layer}layernorm_before', x)
    qkv = [linear(f'{layer}attention.attention.{name}', y) for name in ('query', 'key', 'value')]
    x = x + linear(f'{layer}attention.output.dense', attend(*qkv, heads))
    y = gelu(linear(f'{layer}intermediate.dense', norm(f'{layer}layernorm_after', x)))
    x = x + linear(f'{layer}output.dense', y)
  x = norm('vit.layernorm', x)[:, 0]
  if config['architectures'] == ['ViTModel']:
    return np.tanh(linear('vit.pooler.dense', x))
  return linear('classifier', x)


def patches(image: np.ndarray, weight: np.ndarray) -> np.ndarray:
  """Products of the patches of images with the filters [D, C, height, width], row by row."""
  _, _, h, w = weight.shape
  return np.stack(
    [
      np.einsum('bhwc,dchw->bd', image[:, i : i + h, j : j + w], weight)
      for i in range(0, image.shape[1] - h + 1, h)
      for j in range(0, image.shape[2] - w + 1, w)
    ],
    axis=1,
  )


def gelu(x):
  return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def attend(query, key, value, heads, allowed=None):
  """Attention of [B, T, D] to [B, S, D] by heads; `allowed` [T, S] says what is seen."""
  query, key, value = (np.moveaxis(x.reshape(*x.shape[:2], heads, -1), 2, 1) for x in (query, key, value))
  scores = query @ np.swapaxes(key, -1, -2) / math.sqrt(query.shape[-1])
  if allowed is not None:
    scores = np.where(allowed, scores, -1e30)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  out = np.moveaxis(weights / weights.sum(-1, keepdims=True) @ value, 1, 2)
  return out.reshape(*out.shape[:2], -1)
