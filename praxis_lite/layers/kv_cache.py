"""KV caches: keys and values of the tokens so far, for decoding.

    growing   every row takes the next T slots; the slot of a padding token stays empty. If the last of the T columns
              are padding in all rows, they take no slots
    ring      W slots, for a sliding window of W: the token at position p is in slot p mod W of its row
    placed    the token at position p is in slot p of its row, even with a window. So rows may have different lengths,
              and a row may go back: new tokens replace those of their positions, and do not see later ones

Entries may be stored in int8: each vector has a scale, max |x| / 127.

L layers of a loop, B batch, T new tokens, S slots, K kv heads, H dims per head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from praxis_lite.common.errors import ConfigError


class KVCache(NamedTuple):
  """The slots of a cache, or new tokens that are not written yet.

  In a cache, the slots of a head are contiguous, which the products of attention need. New tokens have the layout in
  which the layer computes them, [B, T, K, H].
  """

  key: jax.Array  # [B, K, S, H], in the dtype of the cache.
  value: jax.Array | None  # [B, K, S, H]; None means that the values are the keys.
  pos: jax.Array  # [B, S] int32 position of the token in each slot; -1 for an empty slot.
  # In a growing cache, the number of slots that are taken. In a placed cache, [B]: the number of slots, from the first
  # one on, that the last tokens of a row may attend to. None for new tokens, which are in no cache yet.
  slot: jax.Array | None = None
  key_scale: jax.Array | None = None  # [B, K, S] float32, factors of int8 entries; None for other dtypes.
  value_scale: jax.Array | None = None
  # int32, the layer's number in a loop over layers: then all arrays have L as first dimension. None outside of a loop.
  turn: jax.Array | None = None

  def unstack(self) -> KVCache:
    """Returns the cache of this layer, taken from the stack if it is in one."""
    turn = self.turn
    if turn is None:
      return self
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, turn, keepdims=False), self._replace(turn=None))

  def restack(self, own: KVCache) -> KVCache:
    """Returns the stack with `own` as the cache of this layer."""
    turn = self.turn
    assert turn is not None
    after = jax.tree.map(
      lambda x, own: jax.lax.dynamic_update_index_in_dim(x, own, turn, 0), self._replace(turn=None), own
    )
    return after._replace(turn=turn)

  def page(self, start: jax.Array, size: int) -> KVCache:
    """Returns `size` slots of this layer, beginning at `start`."""

    def take(x: jax.Array) -> jax.Array:
      if self.turn is None:
        return jax.lax.dynamic_slice_in_dim(x, start, size, axis_of_slots(x.ndim))
      axis = axis_of_slots(x.ndim, 3)
      starts: list[jax.Array | int] = [self.turn, *[0] * (x.ndim - 1)]
      starts[axis] = start
      return jax.lax.dynamic_slice(x, starts, (1, *x.shape[1:axis], size, *x.shape[axis + 1 :]))[0]

    return jax.tree.map(take, self._replace(slot=None, turn=None))

  def read(self, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Returns the keys and values in all slots, both [B, S, K, H], in `dtype`."""

    def vectors(entries: jax.Array, scale: jax.Array | None) -> jax.Array:
      scaled = entries if scale is None else entries * scale[..., None]
      return jnp.swapaxes(scaled.astype(dtype), 1, 2)

    key = vectors(self.key, self.key_scale)
    return key, key if self.value is None else vectors(self.value, self.value_scale)

  @property
  def num_slots(self) -> int:
    return self.pos.shape[-1]

  @property
  def is_placed(self) -> bool:
    """Whether the slot of a token is its position, see the top of this file."""
    return self.slot is not None and self.slot.ndim > (self.turn is not None)

  @property
  def taken(self) -> jax.Array:
    """The number of this layer's slots, from the first one on, that the last tokens of the rows may attend to."""
    assert self.slot is not None
    return jnp.max(self.slot if self.turn is None else self.slot[self.turn])


def check_cache_dtype(path: str, dtype: DTypeLike | None) -> None:
  """Raises ConfigError, which names the field's path, if entries cannot have this dtype."""
  if dtype is not None and jnp.dtype(dtype) != jnp.int8 and not jnp.issubdtype(dtype, jnp.floating):
    raise ConfigError(f'{path}: expected int8 or a floating dtype, got {jnp.dtype(dtype)}')


def to_entries(key_BTKH: jax.Array, value_BTKH: jax.Array | None, pos_BT: jax.Array, dtype: DTypeLike) -> KVCache:
  """Returns tokens as entries of a cache of this dtype; if `value_BTKH` is None, the cache reads keys as values."""

  def entries(vectors_BTKH: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    return _quantize(vectors_BTKH) if jnp.dtype(dtype) == jnp.int8 else (vectors_BTKH.astype(dtype), None)

  key, key_scale = entries(key_BTKH)
  value, value_scale = (None, None) if value_BTKH is None else entries(value_BTKH)
  return KVCache(key, value, pos_BT, key_scale=key_scale, value_scale=value_scale)


def _quantize(x_BTKH: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns int8 vectors and their float32 scales, [B, T, K]."""
  scale_BTK = jnp.max(jnp.abs(x_BTKH), axis=-1).astype(jnp.float32) / 127
  return jnp.round(x_BTKH / jnp.maximum(scale_BTK, 1e-30)[..., None]).astype(jnp.int8), scale_BTK


def append_tokens(cache: KVCache, new: KVCache) -> KVCache:
  """Writes tokens to the next slots of a growing cache; columns at the end with only padding take no slots.

  In a placed cache, it writes them to the slots of their positions.
  """
  turn, columns = cache.turn, new.num_slots
  assert cache.slot is not None
  if cache.is_placed:
    seen_B = jnp.max(new.pos, axis=1) + 1  # 0 for a row that has only padding, and so attends to nothing.
    return write_to_ring(cache, new)._replace(slot=seen_B if turn is None else cache.slot.at[turn].set(seen_B))
  slot = cache.slot if turn is None else cache.slot[turn]
  taken: jax.Array | int = 1
  if columns > 1:
    taken = jnp.max(jnp.where(new.pos >= 0, jnp.arange(1, columns + 1, dtype=jnp.int32), 0))

  def write(slots: jax.Array, tokens: jax.Array) -> jax.Array:
    starts: list[jax.Array | int] = [0] * tokens.ndim
    starts[axis_of_slots(tokens.ndim)] = slot
    if turn is not None:
      starts, tokens = [turn, *starts], tokens[None]
    return jax.lax.dynamic_update_slice(slots, tokens, starts)

  after = slot + taken if turn is None else cache.slot.at[turn].add(taken)
  return _write_arrays(write, cache, to_slots(new))._replace(slot=after)


def write_to_ring(cache: KVCache, new: KVCache) -> KVCache:
  """Writes the last tokens of each row to their slots.

  It leaves out padding, and tokens whose slot a later token takes.
  """
  num_slots = cache.num_slots
  last_B1 = jnp.max(new.pos, axis=1, keepdims=True)
  stays_BT = (new.pos >= 0) & (new.pos > last_B1 - num_slots)
  slot_BT = jnp.where(stays_BT, new.pos % num_slots, num_slots)

  row_B1 = jnp.arange(slot_BT.shape[0])[:, None]

  def write(slots: jax.Array, tokens: jax.Array) -> jax.Array:
    heads = () if tokens.ndim == 2 else (slice(None),)  # The indexed shape is [B, T, K, ...], like the tokens.
    turn = () if cache.turn is None else (cache.turn,)
    return slots.at[*turn, row_B1, *heads, slot_BT].set(tokens, mode='drop')

  return _write_arrays(write, cache, new)


def _write_arrays(write: Callable[[jax.Array, jax.Array], jax.Array], cache: KVCache, new: KVCache) -> KVCache:
  """Returns the cache with its arrays changed by `write(slots, tokens)`."""
  slots = cache._replace(slot=None, turn=None)
  return jax.tree.map(write, slots, new)._replace(slot=cache.slot, turn=cache.turn)


def to_slots(new: KVCache) -> KVCache:
  """Returns new tokens, [B, T, K, ...], in the layout of slots."""
  return jax.tree.map(lambda x: x if x.ndim == 2 else jnp.swapaxes(x, 1, 2), new)


def join_slots(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.concatenate([a, b], axis=axis_of_slots(a.ndim))


def axis_of_slots(rank: int, rank_of_pos: int = 2) -> int:
  """Returns which dimension of an array of a cache has the slots, given the ranks of the array and of `pos`.

  In one cache, the arrays are positions [B, S], scales [B, K, S], and vectors [B, K, S, H]. In a stack of caches, these
  have further dimensions in front.
  """
  stacked = rank_of_pos - 2
  return stacked + min(rank - stacked - 1, 2)
