"""BART in NumPy and float64, from the tensors of a checkpoint by name: what the package must compute.

It is written from the paper and the names of the tensors, and shares no code with the package.
"""

from __future__ import annotations

import math

import numpy as np


def logits(config, tensors, sources, is_source, ids):
  """Logits [B, T, V] for sources [B, S], which of them are tokens [B, S], and the tokens that the decoder reads."""
  model = _Model(config, {name: np.asarray(x, np.float64) for name, x in tensors.items()})
  is_source, T = np.asarray(is_source, bool), ids.shape[1]
  encoded = model.stack('encoder', np.asarray(sources), is_source[:, None, None])
  causal = np.tril(np.ones((T, T), bool))[None, None]
  decoded = model.stack('decoder', np.asarray(ids), causal, encoded, is_source[:, None, None])
  return decoded @ model.tensors['model.shared.weight'].T + model.tensors['final_logits_bias']


def greedy(config, tensors, sources, is_source, count, start=2):
  ids = np.full((len(sources), 1), start)
  for _ in range(count):
    after = logits(config, tensors, sources, is_source, ids)[:, -1]
    ids = np.concatenate([ids, after.argmax(-1)[:, None]], axis=1)
  return ids[:, 1:]


class _Model:
  def __init__(self, config, tensors):
    self.config, self.tensors = config, tensors

  def stack(self, name, ids, visible, source=None, is_source=None):
    config, D = self.config, self.config['d_model']
    x = self.tensors['model.shared.weight'][ids] * (math.sqrt(D) if config['scale_embedding'] else 1)
    x = x + self.tensors[f'model.{name}.embed_positions.weight'][2 : 2 + ids.shape[1]]
    x = self.norm(f'model.{name}.layernorm_embedding', x)
    for i in range(config[f'{name}_layers']):
      layer = f'model.{name}.layers.{i}.'
      x = self.norm(f'{layer}self_attn_layer_norm', x + self.attention(f'{layer}self_attn', x, x, visible))
      if source is not None:
        y = self.attention(f'{layer}encoder_attn', x, source, is_source)
        x = self.norm(f'{layer}encoder_attn_layer_norm', x + y)
      hidden = self.activation(self.linear(f'{layer}fc1', x))
      x = self.norm(f'{layer}final_layer_norm', x + self.linear(f'{layer}fc2', hidden))
    return x

  def attention(self, name, x, source, visible):
    N = self.config['encoder_attention_heads']

    def heads(letter, y):
      projected = self.linear(f'{name}.{letter}_proj', y)
      return projected.reshape(*y.shape[:2], N, -1).swapaxes(1, 2)

    q, k, v = heads('q', x), heads('k', source), heads('v', source)
    scores = np.where(visible, q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1]), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = weights / weights.sum(-1, keepdims=True) @ v
    return self.linear(f'{name}.out_proj', mixed.swapaxes(1, 2).reshape(x.shape))

  def linear(self, name, x):
    return x @ self.tensors[f'{name}.weight'].T + self.tensors[f'{name}.bias']

  def norm(self, name, x):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * self.tensors[f'{name}.weight'] + self.tensors[f'{name}.bias']

  def activation(self, x):
    if self.config['activation_function'] == 'relu':
      return np.maximum(x, 0)
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
