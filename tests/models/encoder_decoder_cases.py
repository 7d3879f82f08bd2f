"""A small encoder-decoder, and a packed batch for it."""

from __future__ import annotations

import numpy as np

from praxis_lite.models import encoder_decoder

V, B, S, T = 13, 5, 9, 7


def config(style='t5', **fields):
  sizes = {'vocab_size': V, 'model_dims': 12, 'num_layers': 2, 'num_encoder_layers': 3, 'num_heads': 3}
  sizes |= {'hidden_dims': 10, 'num_buckets': 8, 'max_distance': 6, 'start_id': 4}
  if style in ('classical', 'bart'):
    del sizes['num_buckets'], sizes['max_distance']
  model = encoder_decoder(**{**sizes, 'style': style, **fields})
  model.decoder_tpl.set(max_decode_steps=6, temperature=0.0)
  return model


def packed_batch():
  """Up to three pairs in each row, padding at both ends, and a row without any."""
  rng = np.random.default_rng(0)
  sources = np.array([[1, 1, 2, 2, 2, 2, 3, 3, 0], [1] * 9, [0] * 9, [1, 1, 1, 2, 2, 2, 0, 0, 0], [1] * 8 + [0]])
  targets = np.array([[1, 1, 1, 2, 3, 3, 0], [1] * 5 + [0] * 2, [0] * 7, [1, 2, 2, 2, 2, 2, 2], [1] * 7])
  batch = {name: rng.integers(0, V, (B, n)) for name, n in (('source_ids', S), ('ids', T), ('labels', T))}
  for side, segments in (('source_', sources), ('', targets)):
    batch[f'{side}segment_ids'] = segments
    batch[f'{side}segment_pos'] = np.array([[i - list(row).index(s) for i, s in enumerate(row)] for row in segments])
  batch = {name: x.astype(np.int32) for name, x in batch.items()}
  weights = (targets > 0).astype(np.float32)
  weights[1, 0] = 0.5
  return batch | {'weights': weights}
