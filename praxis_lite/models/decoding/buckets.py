"""Buckets: the few sizes for which decoding is compiled, so that all lengths of prompts and continuations share them.

S slots of the caches: a power of two, at least 256, but at most the context of the model
W width of the arrays of prompts and of continuations: 512, 2048, 8192, ...; int32, so a large width is cheap
C chunk: the number of tokens of a prompt that are read at once, a divisor of S
"""

from __future__ import annotations

from typing import NamedTuple

from praxis_lite.sharding.mesh import platform

_LEAST_SLOTS, _LEAST_WIDTH = 256, 512


class _ChunkSizes(NamedTuple):
  """How many tokens of a prompt are read at once."""

  chunks: int  # Number of chunks of a prompt that is as long as the cache, within the limits below.
  least: int  # The smallest number of tokens of one row in a chunk.
  most: int  # The largest number of tokens of one row in a chunk.
  # The largest number of tokens of all rows together in a chunk; None means no limit. Each row gets at least `least`
  # tokens, even if the sum then exceeds this limit.
  most_of_all_rows: int | None = None


_ON_CPU = _ChunkSizes(16, 32, 256)
# On a GPU or TPU, computing some hundred tokens takes about as long as reading all weights from memory.
_ELSEWHERE = _ChunkSizes(4, 128, 1024, 2048)


class Bucket(NamedTuple):
  """Sizes of a program; see the top of this file."""

  slots: int
  width: int

  @classmethod
  def choose(cls, prompt_length: int, max_tokens: int, context: int | None) -> Bucket:
    """Returns the bucket for prompts of at most `prompt_length` tokens.

    Args:
      prompt_length: the longest prompt.
      max_tokens: the largest number of tokens after a prompt.
      context: the number of tokens that the model sees at once; None means all.
    """
    slots = _LEAST_SLOTS
    while slots < prompt_length + max_tokens - 1:  # The last token needs no slot.
      slots *= 2
    width = _LEAST_WIDTH
    while width < max(prompt_length, max_tokens):
      width *= 4
    return cls(slots if context is None else min(slots, context), width)


def chunk_of(slots: int, rows: int = 1) -> int:
  """Returns how many tokens of a prompt are read at once, a divisor of `slots`, if `rows` prompts are read together."""
  sizes = _ON_CPU if platform() == 'cpu' else _ELSEWHERE
  limit = sizes.most if sizes.most_of_all_rows is None else min(sizes.most, sizes.most_of_all_rows // rows)
  most = min(max(sizes.least, min(slots // sizes.chunks, limit)), slots)
  return next((size for size in range(most, most // 2, -1) if slots % size == 0), slots)
