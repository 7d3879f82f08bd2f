"""BERT and RoBERTa in NumPy and float64, from the tensors of a checkpoint by name: what the package must compute.

It is written from the papers and the names of the tensors, and shares no code with the package.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


def logits(config: dict[str, Any], tensors: Tensors, ids, is_token, types) -> np.ndarray:
  """Logits of tokens [B, T, V], or of classes [B, V], for ids, which of them are tokens, and types, each [B, T].

  Without a head: the states [B, T, D].
  """
  model = _Model(config, {name: np.asarray(x, np.float64) for name, x in tensors.items()})
  x = model.states(np.asarray(ids), np.asarray(is_token, bool), np.asarray(types))
  is_roberta = config['model_type'] == 'roberta'
  if config['architectures'][0].endswith('Model'):
    return x
  if 'SequenceClassification' in config['architectures'][0]:
    pooler, head = ('classifier.dense', 'classifier.out_proj') if is_roberta else ('bert.pooler.dense', 'classifier')
    return model.linear(head, np.tanh(model.linear(pooler, x[:, 0])))
  if is_roberta:
    x = model.norm('lm_head.layer_norm', gelu(model.linear('lm_head.dense', x)))
    table, bias = 'lm_head.decoder.weight', 'lm_head.bias'
  else:
    x = model.activate(model.linear('cls.predictions.transform.dense', x))
    x = model.norm('cls.predictions.transform.LayerNorm', x)
    table, bias = 'cls.predictions.decoder.weight', 'cls.predictions.bias'
  if config.get('tie_word_embeddings', True):
    table = f'{config["model_type"]}.embeddings.word_embeddings.weight'
  else:
    bias = table.replace('weight', 'bias')
  return x @ model.tensors[table].T + model.tensors[bias]


def pooled(tensors: Tensors, states: np.ndarray) -> np.ndarray:
  """The vector of each text [B, D] that the pooler of a model without a head makes of its states."""
  return np.tanh(states[:, 0] @ tensors['pooler.dense.weight'].T + tensors['pooler.dense.bias'])


def gelu(x):
  return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def prefix_of(config: dict[str, Any]) -> str:
  """What the names of tensors begin with; nothing if there is no head."""
  return '' if config['architectures'][0].endswith('Model') else f'{config["model_type"]}.'


class _Model:
  def __init__(self, config, tensors):
    self.config, self.tensors, self.prefix = config, tensors, prefix_of(config)

  def states(self, ids, is_token, types):
    words, places, kinds = (
      self.tensors[f'{self.prefix}embeddings.{name}_embeddings.weight'] for name in ('word', 'position', 'token_type')
    )
    at = np.arange(ids.shape[1])
    if self.config['model_type'] == 'roberta':
      at = at + self.config['pad_token_id'] + 1
    x = self.norm(f'{self.prefix}embeddings.LayerNorm', words[ids] + places[at] + kinds[types])
    for i in range(self.config['num_hidden_layers']):
      layer = f'{self.prefix}encoder.layer.{i}.'
      y = self.attend(f'{layer}attention.self.', x, is_token)
      x = self.norm(f'{layer}attention.output.LayerNorm', x + self.linear(f'{layer}attention.output.dense', y))
      y = self.activate(self.linear(f'{layer}intermediate.dense', x))
      x = self.norm(f'{layer}output.LayerNorm', x + self.linear(f'{layer}output.dense', y))
    return x

  def linear(self, name, x):
    return x @ self.tensors[f'{name}.weight'].T + self.tensors[f'{name}.bias']

  def norm(self, name, x):
    centred = x - x.mean(-1, keepdims=True)
    centred /= np.sqrt((centred**2).mean(-1, keepdims=True) + self.config['layer_norm_eps'])
    return centred * self.tensors[f'{name}.weight'] + self.tensors[f'{name}.bias']

  def activate(self, x):
    return np.maximum(x, 0) if self.config['hidden_act'] == 'relu' else gelu(x)

  def attend(self, name, x, is_token):
    heads = self.config['num_attention_heads']
    query, key, value = (
      np.moveaxis(self.linear(f'{name}{part}', x).reshape(*x.shape[:2], heads, -1), 2, 1)
      for part in ('query', 'key', 'value')
    )
    scores = query @ np.swapaxes(key, -1, -2) / math.sqrt(query.shape[-1])
    scores = np.where(is_token[:, None, None, :], scores, -1e30)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = weights / weights.sum(-1, keepdims=True) @ value
    return np.moveaxis(out, 1, 2).reshape(x.shape)
