"""Buckets: the few sizes that decoding is compiled for, whatever the lengths of prompts and of their continuations.

S slots     of the caches: a power of two, at least 256, but no more than the model sees at once
W width     of the arrays of prompts and of continuations: 512, 2048, 8192, ...; int32, so they may be generous
C chunk     tokens of a prompt that are read at once, a divisor of S
"""

from __future__ import annotations

from typing import NamedTuple

_LEAST_SLOTS, _LEAST_WIDTH = 256, 512
_CHUNKS = 16  # Into so many parts the slots are read, unless the parts are too small or too large for that:
_LEAST_CHUNK, _MOST_CHUNK = 32, 256


class Bucket(NamedTuple):
  """Sizes of a program; see the top of this file."""

  slots: int
  width: int

  @classmethod
  def of(cls, prompt_length: int, max_tokens: int, context: int | None) -> Bucket:
    """Returns the bucket of prompts of at most so many tokens.

    Args:
      prompt_length: the longest prompt.
      max_tokens: most tokens after a prompt.
      context: how many tokens the model sees at once; None: all.
    """
    slots = _LEAST_SLOTS
    while slots < prompt_length + max_tokens - 1:  # The last token needs no slot.
      slots *= 2
    width = _LEAST_WIDTH
    while width < max(prompt_length, max_tokens):
      width *= 4
    return cls(slots if context is None else min(slots, context), width)


def chunk_of(slots: int) -> int:
  """Returns how many tokens of a prompt are read at once into caches of so many slots, a divisor of it."""
  most = min(max(slots // _CHUNKS, _LEAST_CHUNK), _MOST_CHUNK, slots)
  return next((size for size in range(most, most // 2, -1) if slots % size == 0), slots)
