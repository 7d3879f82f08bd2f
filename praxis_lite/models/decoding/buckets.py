"""Buckets: the few sizes for which decoding is compiled, whatever the lengths of prompts and continuations.

S slots of the caches: a power of two, at least 256, but at most the context of the model
W width of the arrays of prompts and of continuations: 512, 2048, 8192, ...; int32, so a large width is cheap
C chunk: the number of tokens of a prompt that are read at once, a divisor of S
"""

from __future__ import annotations

from typing import NamedTuple

_LEAST_SLOTS, _LEAST_WIDTH = 256, 512
_CHUNKS = 16  # Number of chunks of a prompt that takes all slots, if their size is within the next two limits.
_LEAST_CHUNK, _MOST_CHUNK = 32, 256


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


def chunk_of(slots: int) -> int:
  """Returns the number of tokens of a prompt that are read at once into `slots` slots, a divisor of `slots`."""
  most = min(max(slots // _CHUNKS, _LEAST_CHUNK), _MOST_CHUNK, slots)
  return next((size for size in range(most, most // 2, -1) if slots % size == 0), slots)
