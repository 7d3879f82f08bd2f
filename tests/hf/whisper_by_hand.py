"""Whisper in NumPy and float64, from the tensors of a checkpoint by name: what the package must compute.

It is written from the paper and the names of the tensors, and shares no code with the package.
"""

from __future__ import annotations

import math

import numpy as np

RATE, FRAME, STEP = 16_000, 400, 160


def features(audio, num_mels, window):
  """Features [B, S, M] of samples [B, N], which silence fills to `window`."""
  padded = np.pad(np.asarray(audio, np.float64), ((0, 0), (0, window - audio.shape[1])))
  padded = np.pad(padded, ((0, 0), (FRAME // 2, FRAME // 2)), mode='reflect')
  frames = np.stack([padded[:, t : t + FRAME] for t in range(0, window, STEP)], axis=1)
  hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)
  power = np.abs(np.fft.rfft(frames * hann)) ** 2
  logs = np.log10(np.maximum(power @ filters(num_mels), 1e-10))
  return np.maximum(logs, logs.max((1, 2), keepdims=True) - 8) / 4 + 1


def filters(num_mels):
  """Triangles of equal area on Slaney's scale: 15 mels to 1 kHz, then 27 for each factor of 6.4."""

  def to_hz(mel):
    return np.where(mel < 15, mel * 200 / 3, 1000 * 6.4 ** ((mel - 15) / 27))

  highest = 15 + 27 * math.log(RATE / 2 / 1000) / math.log(6.4)
  corners = to_hz(np.linspace(0, highest, num_mels + 2))
  hz = np.arange(FRAME // 2 + 1)[:, None] * RATE / FRAME
  up = (hz - corners[:-2]) / (corners[1:-1] - corners[:-2])
  down = (corners[2:] - hz) / (corners[2:] - corners[1:-1])
  return np.maximum(0, np.minimum(up, down)) * 2 / (corners[2:] - corners[:-2])


def logits(config, tensors, x, ids):
  """Logits [B, T, V] for features [B, S, M] and the tokens that the decoder reads."""
  model = _Model(config, {name: np.asarray(t, np.float64) for name, t in tensors.items()})
  T = ids.shape[1]
  x = gelu(model.convolve('model.encoder.conv1', x, 1))
  x = gelu(model.convolve('model.encoder.conv2', x, 2))
  source = model.stack('encoder', x, np.ones((1, 1, 1, 1), bool))
  table = model.tensors['model.decoder.embed_tokens.weight']
  decoded = model.stack('decoder', table[np.asarray(ids)], np.tril(np.ones((T, T), bool))[None, None], source)
  return decoded @ table.T


def greedy(config, tensors, x, given, count, suppressed=(), first=()):
  """The likeliest tokens after those that are given, [B, P]; some are never written, others not as the first."""
  ids = np.asarray(given)
  for number in range(count):
    after = logits(config, tensors, x, ids)[:, -1]
    after[:, [*suppressed, *(first if number == 0 else ())]] = -np.inf
    ids = np.concatenate([ids, after.argmax(-1)[:, None]], axis=1)
  return ids[:, given.shape[1] :]


def gelu(x):
  return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


class _Model:
  def __init__(self, config, tensors):
    self.config, self.tensors = config, tensors

  def convolve(self, name, x, stride):
    padded = np.pad(x, ((0, 0), (1, 1), (0, 0)))
    windows = np.stack([padded[:, t : t + 3] for t in range(0, x.shape[1], stride)], axis=1)
    return np.einsum('bswc,ocw->bso', windows, self.tensors[f'{name}.weight']) + self.tensors[f'{name}.bias']

  def stack(self, name, x, visible, source=None):
    x = x + self.tensors[f'model.{name}.embed_positions.weight'][: x.shape[1]]
    for i in range(self.config[f'{name}_layers']):
      layer = f'model.{name}.layers.{i}.'
      y = self.norm(f'{layer}self_attn_layer_norm', x)
      x = x + self.attention(f'{layer}self_attn', y, y, visible)
      if source is not None:
        y = self.norm(f'{layer}encoder_attn_layer_norm', x)
        x = x + self.attention(f'{layer}encoder_attn', y, source, np.ones((1, 1, 1, 1), bool))
      hidden = gelu(self.linear(f'{layer}fc1', self.norm(f'{layer}final_layer_norm', x)))
      x = x + self.linear(f'{layer}fc2', hidden)
    return self.norm(f'model.{name}.layer_norm', x)

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
    return x @ self.tensors[f'{name}.weight'].T + self.tensors.get(f'{name}.bias', 0)

  def norm(self, name, x):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * self.tensors[f'{name}.weight'] + self.tensors[f'{name}.bias']
