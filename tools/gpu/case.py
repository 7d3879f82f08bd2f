"""The models of the GPU benchmark: sizes, initial weights, tokens, and the number of operations per token.

This file imports only NumPy, because PyTorch runs in a separate environment.

The model is a decoder in the LLaMA style (RMSNorm, rotary positions, gated feed-forward layers, no biases) with one
table for embedding and softmax. L layers, D model dims, N heads, H dims per head, F hidden dims, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY, CLIP_NORM = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
NORM_EPSILON, ROTARY_BASE = 1e-5, 10_000.0
_POOL = 999_983  # Prime, so that rows of repeated draws differ.


class ModelCase(NamedTuple):
  """A model, a sequence length, and dtypes.

  Attributes:
    name: the name of the size.
    length: T.
    model_dims, num_layers, num_heads, hidden_dims, vocab: D, L, N, F and V.
    compute: dtype of activations and of the operands of products: 'bfloat16' or 'float32'.
    state: dtype of weights and of the optimizer's moments.
  """

  name: str
  length: int
  model_dims: int
  num_layers: int
  num_heads: int
  hidden_dims: int
  vocab: int = 50304
  compute: str = 'bfloat16'
  state: str = 'float32'

  @property
  def shapes(self) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights, by name. The weights of all layers are stacked."""
    _, _, D, L, N, F, V, *_ = self
    H = D // N
    return {
      'embedding': (V, D),
      **dict.fromkeys('qkv', (L, D, N, H)),
      'o': (L, N, H, D),
      'gate': (L, D, F),
      'up': (L, D, F),
      'down': (L, F, D),
      'norm1': (L, D),
      'norm2': (L, D),
      'final_norm': (D,),
    }

  @property
  def num_params(self) -> int:
    """N in the formulas below. The shared table counts once, because only the logits multiply by it."""
    return sum(math.prod(shape) for shape in self.shapes.values())

  def flops_of_token(self, *, causal: bool) -> float:
    """Operations of a training step per token: 6 N + 12 L D T; with `causal`, 6 N + 6 L D T (half the attention)."""
    return 6.0 * self.num_params + (6.0 if causal else 12.0) * self.num_layers * self.model_dims * self.length


_SIZES = {
  '124M': (768, 12, 12, 2048),
  '350M': (1024, 24, 16, 2816),
  '1.3B': (2048, 24, 16, 5504),
  '7B': (4096, 32, 32, 11008),
}
SIZES = tuple(_SIZES)
TINY = ModelCase('tiny', 64, 64, 2, 4, 192, vocab=256, compute='float32')


def case_of(size: str, length: int) -> ModelCase:
  """Returns a case of the benchmark; the state of the largest model is in bfloat16."""
  return ModelCase(size, length, *_SIZES[size], state='bfloat16' if size == '7B' else 'float32')


class FirstWeight(NamedTuple):
  """The first values of a weight: `values`, float32 [n], repeated until they fill `shape` in C order."""

  name: str
  shape: tuple[int, ...]
  values: np.ndarray


def first_weights(case: ModelCase) -> Iterator[FirstWeight]:
  """Yields the first values of each weight, equal for all implementations.

  Only a few values are drawn, and the device repeats them, because drawing and sending all values of a large model
  would take minutes.
  """
  pool = np.random.default_rng(0).standard_normal(_POOL, dtype=np.float32)
  residual = 0.02 / math.sqrt(2 * case.num_layers)
  for i, (name, shape) in enumerate(case.shapes.items()):
    if 'norm' in name:
      yield FirstWeight(name, shape, np.ones(1, np.float32))
    else:
      scale = residual if name in ('o', 'down') else 0.02
      yield FirstWeight(name, shape, np.roll(pool, 7919 * i) * np.float32(scale))


def tokens(case: ModelCase, batch: int, step: int) -> np.ndarray:
  """Returns the tokens of a step, [batch, T + 1] int32. All implementations read the same endless stream of rows."""
  rows = [np.random.default_rng((1, step * batch + row)) for row in range(batch)]
  return np.stack([rng.integers(0, case.vocab, case.length + 1, dtype=np.int32) for rng in rows])
