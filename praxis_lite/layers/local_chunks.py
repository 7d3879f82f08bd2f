"""Chunked local attention: positions are cut into chunks, and a query attends only to keys of its own chunk (Llama 4).

B batch, T length of the queries, S length of the keys; I, J numbers of their blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from praxis_lite.layers.masks import Array, AttentionMask, BlockRanges, Known, Segments


class LocalChunks(AttentionMask):
  """Allows keys in the chunk of the query: the chunk of index i is i // `chunk`."""

  chunk: int

  def allows(self, query_T: jax.Array, key_S: jax.Array) -> Array:
    return query_T[..., :, None] // self.chunk == key_S[..., None, :] // self.chunk

  def some_allowed(self, at: BlockRanges) -> Known:
    q_low, q_high, k_low, k_high = self._ranges(at)
    return Known((q_low <= k_high) & (k_low <= q_high))

  def some_masked(self, at: BlockRanges) -> Known:
    q_low, q_high, k_low, k_high = self._ranges(at)
    return Known((q_low != q_high) | (k_low != k_high) | (q_low != k_low))

  def _ranges(self, at: BlockRanges) -> tuple[Array, ...]:
    """Returns the numbers of the first and the last chunk of each block: of queries [I, 1], and of keys [J]."""
    return tuple(index // self.chunk for index in (at.query_low, at.query_high, at.key_low, at.key_high))


def local_chunks(
  chunk: int, segment_ids: jax.Array | None, key_segment_ids: jax.Array | None, pos_BT: jax.Array | None
) -> AttentionMask:
  """Returns the mask of a sequence that attends to itself, whose chunks begin where its segments begin.

  Args:
    chunk: number of positions of a chunk.
    segment_ids, key_segment_ids: int32 [B, T]; with None for either, only `pos_BT` says where a segment begins.
    pos_BT: int32 positions in the segment; None means that indices are positions.
  """
  if pos_BT is None:
    return LocalChunks(chunk)
  ids_BT = jnp.maximum(pos_BT, 0) // chunk
  if segment_ids is not None and key_segment_ids is not None:  # One mask, because kernels take only one kind of ids.
    most = jnp.max(ids_BT, axis=1, keepdims=True, initial=0) + 1
    return Segments(segment_ids * most + ids_BT, key_segment_ids * most + ids_BT)
  return Segments(ids_BT, ids_BT)
