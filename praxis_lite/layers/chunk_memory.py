"""Attention to a chunk of the sequence and to a memory before it (Transformer-XL, Dai et al., 2019).

    chunk of position p   begins at c = p - p mod L
    keys                  the positions from c - M to p;  those before c come from stop_gradient(x)

L chunk length, M memory length; B batch, T length, S length of the keys, D model dims.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.attention import MultiHeadAttention
from praxis_lite.layers.attention_spec import LogitBias
from praxis_lite.layers.cached_attention import CachedAttention
from praxis_lite.layers.masks import (
  Array,
  ArrayMask,
  AttentionMask,
  BlockRanges,
  Known,
  key_array,
  query_array,
  to_mask,
)


class ChunkMemory(AttentionMask):
  """Allows all keys that are at most `memory` positions before the query's chunk, even those after the query."""

  chunk: int
  memory: int

  def allows(self, query_T: jax.Array, key_S: jax.Array) -> Array:
    return self._first(query_T)[..., :, None] <= key_S[..., None, :]

  def some_allowed(self, at: BlockRanges) -> Known:
    return Known(self._first(at.query_low) <= at.key_high)

  def some_masked(self, at: BlockRanges) -> Known:
    return Known(self._first(at.query_high) > at.key_low)

  def _first(self, index: Any) -> Any:
    """Returns the first index that a query may attend to, which may be negative."""
    return index - index % self.chunk - self.memory


class _PositionsFrom(AttentionMask):
  """Allows keys whose position is at least the query's entry of `first_BT`."""

  first_BT: jax.Array = query_array()
  key_pos_BS: jax.Array = key_array()

  def allows(self, query_T: jax.Array, key_S: jax.Array) -> Array:
    return self.first_BT[:, :, None] <= self.key_pos_BS[:, None, :]


class MemoryAttention(MultiHeadAttention):
  """Self-attention with the memory of a Transformer-XL; see the top of this file.

  A row of the data holds several chunks of a text in order. A token attends to the tokens of its chunk up to itself,
  and to the last `memory_length` tokens before the chunk. As in the paper, no gradient flows into the memory: the loss
  in a chunk has no gradient with respect to earlier inputs. It has one with respect to the weights that compute keys
  and values from these inputs. So a stack of these layers computes the same as the recurrence over chunks, but all
  chunks of a row at once. The memory is empty where a row, or a segment of a packed row, begins. Evaluation and
  decoding need no gradients, so there the memory is only a mask.

  In training, keys and values of a row are computed twice, once without gradients, and attention is dense.

  Attributes: the same as for `MultiHeadAttention`, and
    chunk_length: L; None disables the memory, and the layer is a `MultiHeadAttention`.
    memory_length: M; None means L.
  """

  chunk_length: int | None = None
  memory_length: int | None = None

  def setup(self) -> None:
    self._check_range('chunk_length', least=1)
    self._check_range('memory_length', least=0)
    if self.chunk_length is None:
      if self.memory_length is not None:
        raise ConfigError(f'{self.path_name}.memory_length: {self.memory_length} needs a chunk_length; it is None')
    else:
      for field in ('context_axis', 'relative_bias_tpl'):
        if getattr(self, field) is not None:
          raise ConfigError(f'{self.path_name}.{field}: not possible with a chunk_length; set one of them to None')
      if not self.causal:
        raise ConfigError(f'{self.path_name}.causal: a memory needs causal attention; set it to True')
    super().setup()

  def __call__(self, x_BTD: jax.Array, kv_BSD: jax.Array | None = None, **kwargs: Any) -> jax.Array:
    """Returns [B, T, D]; takes the arguments of `MultiHeadAttention.__call__`."""
    if self.chunk_length is None:
      return super().__call__(x_BTD, kv_BSD, **kwargs)
    if kv_BSD is not None:
      raise ConfigError(f'{self.path_name}.chunk_length: cross attention has no memory; set it to None')
    if self.do_eval:
      return super().__call__(x_BTD, **kwargs)
    return self._attend_with_memory(x_BTD, **kwargs)

  def _attend_with_memory(
    self,
    x_BTD: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    prefix_lengths: jax.Array | None = None,
    mask: jax.Array | None = None,
    logit_bias: jax.Array | LogitBias | None = None,
    first_values: jax.Array | None = None,
    **others: jax.Array | None,
  ) -> jax.Array:
    """Computes `__call__` in training, where no gradient flows from a chunk to the tokens before it."""
    if logit_bias is not None:
      raise ConfigError(f'{self.path_name}.chunk_length: layers with a memory take no shared bias; set it to None')
    rules = self._checked_mask(
      segment_ids=segment_ids, kv_segment_ids=segment_ids, segment_pos=segment_pos, prefix_lengths=prefix_lengths
    )
    T = x_BTD.shape[1]
    allowed_BNTT = (rules & to_mask(mask)).to_array(T, T)
    chunk_BT = (jnp.arange(T)[None] if segment_pos is None else segment_pos) // (self.chunk_length or T)
    is_own_B1TT = (chunk_BT[:, :, None] == chunk_BT[:, None, :])[:, None]
    assert allowed_BNTT is not None  # Attention is causal.
    both_BNTS = jnp.concatenate([allowed_BNTT & is_own_B1TT, allowed_BNTT & ~is_own_B1TT], axis=-1)

    gate_BTNH = self._gate(x_BTD)
    heads = self._mix_values(self._project(x_BTD, x_BTD, segment_pos), first_values)
    x_BTD, first_values = jax.lax.stop_gradient((x_BTD, first_values))
    memory = self._mix_values(self._project(x_BTD, x_BTD, segment_pos), first_values)
    key_BSKH, value_BSKH = (jnp.concatenate(pair, axis=1) for pair in zip(heads[1:], memory[1:]))
    heads = heads[0], key_BSKH, value_BSKH
    return self._attend(heads, ArrayMask(both_BNTS), segment_pos, self._make_dropout(x_BTD), None, gate_BTNH=gate_BTNH)

  def attention_mask(self, **rows: jax.Array | None) -> AttentionMask:
    """Returns which keys each query attends to; see `MultiHeadAttention.attention_mask`."""
    mask, segment_pos = super().attention_mask(**rows), rows.get('segment_pos')
    if self.chunk_length is None:
      return mask
    chunks = ChunkMemory(self.chunk_length, self._memory)
    if segment_pos is None:
      return mask & chunks
    return mask & _PositionsFrom(chunks._first(segment_pos), segment_pos)

  @property
  def _memory(self) -> int:
    assert self.chunk_length is not None
    return self.chunk_length if self.memory_length is None else self.memory_length

  def _cached_attention(self, logit_bias: LogitBias | None = None, sinks: jax.Array | None = None) -> CachedAttention:
    cached = super()._cached_attention(logit_bias, sinks)
    if self.chunk_length is None:
      return cached
    seen = self.chunk_length + self._memory
    return dataclasses.replace(cached, window=seen if cached.window is None else min(seen, cached.window))
