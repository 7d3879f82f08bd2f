"""A masked autoencoder in NumPy and float64: what the package must compute, from its variables by name.

It is written from the paper, and shares no code with the package.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np


class Parts(NamedTuple):
  """The result of `predict_hidden`."""

  output: Any
  target: Any
  is_hidden: Any


def predictions(variables, image, noise, num_seen, patch_size, heads):
  """Predictions of all patches [B, T, P], and which of them were hidden [B, T]; `heads` of encoder and decoder."""
  of = tree_of(variables)
  encoder, decoder = of['network'], of['patch_decoder']
  grid = image.shape[1] // patch_size[0], image.shape[2] // patch_size[1]
  num_others = int('class_token' in encoder)
  conv = encoder['patches']['conv']
  x = patches(image, patch_size) @ conv['w'].reshape(-1, conv['w'].shape[-1]) + conv['b']
  if 'position' in encoder:
    table = encoder['position']['w']
  else:
    table = sinusoids(*grid, x.shape[-1])
    table = np.concatenate([np.zeros_like(table[:num_others]), table])
  order = np.argsort(noise, axis=1)
  rows = []
  for row, seen in zip(x + table[num_others:], order[:, :num_seen]):
    first = [encoder['class_token'] + table[0]] if num_others else []
    rows.append(np.stack([*first, *row[seen]]))
  states = norm(blocks(np.stack(rows), encoder['transformer']['layers'], heads[0]), encoder['final_norm'])
  states = states @ decoder['embed']['w'] + decoder['embed']['b']
  rows = []
  for row, seen in zip(states, order[:, :num_seen]):
    tokens = np.tile(decoder['mask_token'], (x.shape[1], 1))
    tokens[seen] = row[num_others:]
    table = sinusoids(*grid, tokens.shape[-1])
    table = np.concatenate([np.zeros_like(table[:num_others]), table])
    rows.append(
      np.concatenate([row[:num_others], tokens]) + (decoder['position']['w'] if 'position' in decoder else table)
    )
  y = norm(blocks(np.stack(rows), decoder['transformer']['layers'], heads[1]), decoder['final_norm'])
  is_hidden = np.ones(noise.shape, bool)
  np.put_along_axis(is_hidden, order[:, :num_seen], False, axis=1)
  return y[:, num_others:] @ decoder['pixels']['w'] + decoder['pixels']['b'], is_hidden


def tree_of(x):
  return {name: tree_of(of) for name, of in x.items()} if isinstance(x, dict) else np.asarray(x, np.float64)


def part_of(x, i):
  return {name: part_of(of, i) for name, of in x.items()} if isinstance(x, dict) else x[i]


def sinusoids(rows, columns, dims):
  rates = 10_000.0 ** (-np.arange(dims // 4) / (dims // 4))
  halves = [np.concatenate([np.sin(n * rates), np.cos(n * rates)]) for n in range(max(rows, columns))]
  return np.array([np.concatenate([halves[i], halves[j]]) for i in range(rows) for j in range(columns)])


def norm(x, of):
  return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * of['scale'] + of['bias']


def gelu(x):
  return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def blocks(x, layers, heads):
  for i in range(len(layers['ff']['up']['w'])):
    of = part_of(layers, i)
    y = norm(x, of['attention_norm'])
    query, key, value = (
      np.einsum('btd,dnh->bnth', y, of['attention'][name]['w']) + of['attention'][name]['b'][:, None]
      for name in ('query', 'key', 'value')
    )
    assert query.shape[1] == heads
    scores = np.exp(query @ np.swapaxes(key, -1, -2) / math.sqrt(query.shape[-1]))
    out = scores / scores.sum(-1, keepdims=True) @ value
    x = x + np.einsum('bnth,nhd->btd', out, of['attention']['out']['w']) + of['attention']['out']['b']
    ff = of['ff']
    y = norm(x, of['ff_norm'])
    x = x + gelu(y @ ff['up']['w'] + ff['up']['b']) @ ff['down']['w'] + ff['down']['b']
  return x


def patches(image, size):
  """The numbers in each patch, row by row."""
  h, w = size
  rows, columns = image.shape[1] // h, image.shape[2] // w
  pieces = [image[:, i * h : i * h + h, j * w : j * w + w] for i in range(rows) for j in range(columns)]
  return np.stack([np.asarray(piece, np.float64).reshape(len(image), -1) for piece in pieces], axis=1)


def normalized(x):
  return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, ddof=1, keepdims=True) + 1e-6)
