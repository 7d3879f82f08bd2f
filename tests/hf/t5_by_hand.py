"""T5 in NumPy and float64, from the tensors of a checkpoint by name: what the package must compute.

It is written from the paper and the names of the tensors, and shares no code with the package.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


def logits(config: dict[str, Any], tensors: Tensors, sources, is_source, ids) -> np.ndarray:
  """Logits [B, T, V] for sources [B, S], which of them are tokens [B, S], and the tokens that the decoder reads."""
  model = _Model(config, {name: np.asarray(x, np.float64) for name, x in tensors.items()})
  return model.logits(np.asarray(sources), np.asarray(is_source, bool), np.asarray(ids))


def greedy(config, tensors, sources, is_source, count, start=0):
  ids = np.full((len(sources), 1), start)
  for _ in range(count):
    after = logits(config, tensors, sources, is_source, ids)[:, -1]
    ids = np.concatenate([ids, after.argmax(-1)[:, None]], axis=1)
  return ids[:, 1:]


def bucket(offset: int, is_bidirectional: bool, num_buckets: int, max_distance: int) -> int:
  """The bucket of an offset, key position - query position, one at a time."""
  base = 0
  if is_bidirectional:
    num_buckets //= 2
    base, offset = (num_buckets if offset > 0 else 0), abs(offset)
  else:
    offset = max(-offset, 0)
  exact = num_buckets // 2
  if offset < exact:
    return base + offset
  far = exact + int(math.log(offset / exact) / math.log(max_distance / exact) * (num_buckets - exact))
  return base + min(far, num_buckets - 1)


class _Model:
  def __init__(self, config, tensors):
    self.config, self.tensors = config, tensors

  def logits(self, sources, is_source, ids):
    layers = self.config['num_layers']
    S, T = sources.shape[1], ids.shape[1]
    x, bias = self.tensors['shared.weight'][sources], self.bias('encoder', S)
    seen = is_source[:, None, None, :]
    for i in range(layers):
      layer = f'encoder.block.{i}.layer.'
      x = x + self.attend(f'{layer}0.SelfAttention', self.norm(x, f'{layer}0.layer_norm'), None, seen, bias)
      x = x + self.feed_forward(f'{layer}1.DenseReluDense', self.norm(x, f'{layer}1.layer_norm'))
    source = self.norm(x, 'encoder.final_layer_norm')
    x, bias = self.tensors['shared.weight'][ids], self.bias('decoder', T)
    causal = np.tri(T, dtype=bool)[None, None]
    for i in range(self.config.get('num_decoder_layers') or layers):
      layer = f'decoder.block.{i}.layer.'
      x = x + self.attend(f'{layer}0.SelfAttention', self.norm(x, f'{layer}0.layer_norm'), None, causal, bias)
      x = x + self.attend(f'{layer}1.EncDecAttention', self.norm(x, f'{layer}1.layer_norm'), source, seen, 0.0)
      x = x + self.feed_forward(f'{layer}2.DenseReluDense', self.norm(x, f'{layer}2.layer_norm'))
    x = self.norm(x, 'decoder.final_layer_norm')
    if self.config['tie_word_embeddings']:
      return x * self.config['d_model'] ** -0.5 @ self.tensors['shared.weight'].T
    return x @ self.tensors['lm_head.weight'].T

  def norm(self, x, name):
    mean_square = (x**2).mean(-1, keepdims=True)
    return x / np.sqrt(mean_square + self.config['layer_norm_epsilon']) * self.tensors[f'{name}.weight']

  def bias(self, stack, length):
    table = self.tensors[f'{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight']
    sizes = self.config['relative_attention_num_buckets'], self.config['relative_attention_max_distance']
    rows = [[bucket(k - q, stack == 'encoder', *sizes) for k in range(length)] for q in range(length)]
    return np.moveaxis(table[np.array(rows)], -1, 0)[None]

  def attend(self, name, x, source, seen, bias):
    heads = self.config['num_heads']

    def project(letter, of):
      y = of @ self.tensors[f'{name}.{letter}.weight'].T
      return np.moveaxis(y.reshape(*y.shape[:2], heads, -1), 2, 1)

    source = x if source is None else source
    query, key, value = project('q', x), project('k', source), project('v', source)
    scores = np.where(seen, query @ np.swapaxes(key, -1, -2) + bias, -1e30)  # T5 does not scale them.
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = weights / weights.sum(-1, keepdims=True) @ value
    out = np.moveaxis(out, 1, 2)
    return out.reshape(*out.shape[:2], -1) @ self.tensors[f'{name}.o.weight'].T

  def feed_forward(self, name, x):
    if self.config['feed_forward_proj'] == 'relu':
      return np.maximum(x @ self.tensors[f'{name}.wi.weight'].T, 0) @ self.tensors[f'{name}.wo.weight'].T
    gate = x @ self.tensors[f'{name}.wi_0.weight'].T
    gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return gate * (x @ self.tensors[f'{name}.wi_1.weight'].T) @ self.tensors[f'{name}.wo.weight'].T
