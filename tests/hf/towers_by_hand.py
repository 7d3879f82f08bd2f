"""CLIP and SigLIP in NumPy and float64, from the tensors of a checkpoint by name: what the package must compute.

It is written from the papers and the names of the tensors, and shares no code with the package.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from vit_by_hand import attend, patches

Tensors = dict[str, np.ndarray]


def embeddings(
  config: dict[str, Any], tensors: Tensors, image: np.ndarray, ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Embeddings of images and of texts [B, E], of norm 1, and the logits [texts, images]."""
  of = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
  is_siglip = config['model_type'] == 'siglip'
  act = gelu_tanh if is_siglip else quick_gelu

  def linear(name, x):
    return x @ of[f'{name}.weight'].T + of.get(f'{name}.bias', 0)

  def norm(name, x, eps):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * of[f'{name}.weight'] + of[f'{name}.bias']

  def blocks(prefix, part, x, allowed=None):
    heads, eps = part['num_attention_heads'], part['layer_norm_eps']
    for i in range(part['num_hidden_layers']):
      layer = f'{prefix}.encoder.layers.{i}.'
      y = norm(f'{layer}layer_norm1', x, eps)
      qkv = [linear(f'{layer}self_attn.{letter}_proj', y) for letter in 'qkv']
      x = x + linear(f'{layer}self_attn.out_proj', attend(*qkv, heads, allowed))
      x = x + linear(f'{layer}mlp.fc2', act(linear(f'{layer}mlp.fc1', norm(f'{layer}layer_norm2', x, eps))))
    return x

  text, vision = config['text_config'], config['vision_config']
  T, eps = ids.shape[1], text['layer_norm_eps']
  x = of['text_model.embeddings.token_embedding.weight'][ids]
  x = x + of['text_model.embeddings.position_embedding.weight'][:T]
  x = blocks('text_model', text, x, None if is_siglip else np.tri(T, dtype=bool))
  x = norm('text_model.final_layer_norm', x, eps)
  if is_siglip:
    texts = linear('text_model.head', x[:, -1])
  else:
    end = text['eos_token_id']
    at = ids.argmax(-1) if end == 2 else (ids == end).argmax(-1)
    texts = linear('text_projection', x[np.arange(len(x)), at])

  eps = vision['layer_norm_eps']
  x = patches(np.asarray(image, np.float64), of['vision_model.embeddings.patch_embedding.weight'])
  x = x + of.get('vision_model.embeddings.patch_embedding.bias', 0)
  if not is_siglip:
    first = np.broadcast_to(of['vision_model.embeddings.class_embedding'], (len(x), 1, x.shape[-1]))
    x = np.concatenate([first, x], axis=1)
  x = x + of['vision_model.embeddings.position_embedding.weight']
  if not is_siglip:
    x = norm('vision_model.pre_layrnorm', x, eps)
  x = norm('vision_model.post_layernorm', blocks('vision_model', vision, x), eps)
  if is_siglip:
    probe = np.broadcast_to(of['vision_model.head.probe'], (len(x), 1, x.shape[-1]))
    weights = np.split(of['vision_model.head.attention.in_proj_weight'], 3)
    biases = np.split(of['vision_model.head.attention.in_proj_bias'], 3)
    qkv = [y @ w.T + b for y, w, b in zip((probe, x, x), weights, biases)]
    y = linear('vision_model.head.attention.out_proj', attend(*qkv, vision['num_attention_heads']))[:, 0]
    z = norm('vision_model.head.layernorm', y, eps)
    images = y + linear('vision_model.head.mlp.fc2', act(linear('vision_model.head.mlp.fc1', z)))
  else:
    images = linear('visual_projection', x[:, 0])
  images, texts = (y / np.linalg.norm(y, axis=-1, keepdims=True) for y in (images, texts))
  logits = texts @ images.T * np.exp(of['logit_scale']) + of.get('logit_bias', 0)
  return images, texts, logits


def quick_gelu(x):
  return x / (1 + np.exp(-1.702 * x))


def gelu_tanh(x):
  return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
