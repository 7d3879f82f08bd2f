"""Cuts queries, keys, values and the arrays of a mask into blocks along their length, and joins blocks again.

I, J numbers of blocks, Q queries and S keys of a block, B batch, T length, N = K G heads, K kv heads, G query heads for
each, H dims per head; outside of blocks, S is the length of the keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.layers.masks import Array, AttentionMask

T = TypeVar('T')


class Queries(NamedTuple):
  """I blocks of queries.

  `at` is the index of each query in its row; -1 marks padding. `pos` and `seeds` may be None.
  """

  x: jax.Array  # [I, B, K, G, Q, H]
  at: Array  # [I, Q]
  pos: jax.Array | None = None  # [I, B or 1, Q]; None means that positions are `at`.
  seeds: jax.Array | None = None  # [I, B, K, G, Q] uint32, seeds of dropout; None without dropout.


class Keys(NamedTuple):
  """J blocks of keys and values; see `Queries` for `at` and `pos`."""

  k: jax.Array  # [J, B, K, S, H]
  v: jax.Array  # [J, B, K, S, H]
  at: Array  # [J, S]
  pos: jax.Array | None = None  # [J, B or 1, S]


def pick_block(blocks: T, i: jax.Array) -> T:
  """Returns block `i` of each array of a tree."""
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(jnp.asarray(x), i, keepdims=False), blocks)


def put_block(blocks: T, block: T, i: jax.Array) -> T:
  """Returns a tree of arrays `blocks` in which block `i` of each array is replaced."""
  return jax.tree.map(lambda x, y: _put_entry(0)(x, y, i), blocks, block)


@functools.cache
def _put_entry(dim: int) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
  """Returns a function that puts an entry at an index of dimension `dim`.

  It never becomes a scatter under a `vmap` with one index for all. JAX would make a scatter of a
  `dynamic_update_index_in_dim` there, which the partitioner cannot split in a `shard_map` over only some mesh axes.
  """

  @jax.custom_batching.custom_vmap
  def put(x: jax.Array, entry: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, entry, i, dim)

  @put.def_vmap
  def _(
    axis_size: int, in_batched: Sequence[bool], x: jax.Array, entry: jax.Array, i: jax.Array
  ) -> tuple[jax.Array, bool]:
    x, entry = (
      v if is_batched else jnp.broadcast_to(v, (axis_size, *v.shape)) for v, is_batched in zip((x, entry), in_batched)
    )
    if not in_batched[2]:
      return _put_entry(dim + 1)(x, entry, i), True
    return jax.vmap(lambda *args: jax.lax.dynamic_update_index_in_dim(*args, dim))(x, entry, i), True

  return put


def to_blocks(x: jax.Array, size: int, *, edge: bool = False) -> jax.Array:
  """Returns [I, B, size, ...] for [B, T, ...]: blocks of T, padded at the end with zeros or with the last element."""
  count = -(-x.shape[1] // size)
  amounts = [(0, 0), (0, count * size - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]
  if amounts[1][1]:
    x = jnp.pad(x, amounts, mode='edge') if edge else jnp.pad(x, amounts)
  return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)


def join_blocks(x: jax.Array, length: int) -> jax.Array:
  """The inverse of `to_blocks`: returns [B, length, ...] for [I, B, size, ...]."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])[:, :length]


def query_blocks(
  query_BTNH: jax.Array,
  index: Array,
  num_kv_heads: int,
  *,
  pos_BT: jax.Array | None = None,
  seeds_BTN: jax.Array | None = None,
) -> Queries:
  """Returns the blocks of queries with these indices [I, Q]."""
  size = index.shape[1]

  def group(x_BTN: jax.Array) -> jax.Array:
    """[B, T, N, ...] to [I, B, K, G, Q, ...]."""
    x = to_blocks(x_BTN, size)
    x = x.reshape(*x.shape[:3], num_kv_heads, -1, *x.shape[4:])
    return jnp.moveaxis(x, 2, 4)

  return Queries(
    group(query_BTNH),
    index,
    None if pos_BT is None else to_blocks(pos_BT, size, edge=True),
    None if seeds_BTN is None else group(seeds_BTN),
  )


def key_blocks(key_BSKH: jax.Array, value_BSKH: jax.Array, index: Array, *, pos_BS: jax.Array | None = None) -> Keys:
  """Returns the blocks of keys and values with these indices [J, S]."""
  size = index.shape[1]
  k, v = (jnp.moveaxis(to_blocks(x, size), 2, 3) for x in (key_BSKH, value_BSKH))
  return Keys(k, v, index, None if pos_BS is None else to_blocks(pos_BS, size, edge=True))


def mask_blocks(mask: AttentionMask, query_size: int, key_size: int) -> AttentionMask:
  """Returns a mask with its arrays in blocks of these sizes, [I, B, Q, ...] and [J, B, S, ...]."""
  return mask.map_arrays(
    query=lambda x: to_blocks(x, query_size, edge=True), key=lambda x: to_blocks(x, key_size, edge=True)
  )


def unblock_queries(x_IBKGQ: jax.Array, length: int) -> jax.Array:
  """Returns [B, T, N, ...] for blocks of queries, [I, B, K, G, Q, ...]."""
  x = jnp.moveaxis(x_IBKGQ, 4, 2)
  return join_blocks(x.reshape(*x.shape[:3], -1, *x.shape[5:]), length)


def unblock_keys(x_JBKSH: jax.Array, length: int) -> jax.Array:
  """Returns keys [B, J x S, K, H], given their J blocks of S keys each, [J, B, K, S, H]."""
  return join_blocks(jnp.moveaxis(x_JBKSH, 3, 2), length)


def block_indices(length: int, size: int) -> np.ndarray:
  """Returns the indices 0 to length - 1, cut into blocks: [I, size], with -1 after the last index."""
  index = np.arange(-(-length // size) * size, dtype=np.int32).reshape(-1, size)
  return np.where(index < length, index, -1)


def even_block_size(length: int, largest: int) -> int:
  """Returns the size of equal blocks, at most `largest`, that need the least padding of `length`.

  If there are several blocks, the size is a multiple of 8.
  """
  count = -(-length // largest)
  size = -(-length // count)
  return size if count == 1 else -(-size // 8) * 8
