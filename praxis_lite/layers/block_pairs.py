"""Which pairs of a block of queries and a block of keys attention has to compute.

The mask says which pairs of blocks are empty, that is, fully masked; see `masks.py`. If the positions of its blocks
alone make a pair empty, it is not in the table of pairs, so it costs nothing. If data, such as segment ids, make a pair
empty, it is in the table with the flag False, and a branch skips it. If even the positions of blocks depend on data,
such as the index of the device, then so do the table and the number of iterations. If no pair is partly masked, no mask
is computed.

I, J numbers of blocks of queries and of keys, Q queries and S keys of a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.layers.block_arrays import Keys, Queries
from praxis_lite.layers.masks import Array, AttentionMask, BlockRanges, Known, combine_masks

_NO_KEY = 2**30


class BlockPairs(NamedTuple):
  """Pairs of blocks to compute."""

  table: jax.Array  # [P, 2], P pairs (i, j); only the first `used` count.
  used: int | jax.Array
  flags: jax.Array | None = None  # [P], False for pairs that data make empty; None if data cannot make a pair empty.
  masked: bool = True  # Whether a pair may be partly masked.
  expected: float | None = None  # The mean of `used` over the devices, if `used` is traced; see `expected_trips`.


def needed_pairs(
  mask: AttentionMask, queries: Queries, keys: Keys, *, all_rows: bool = True, expected: float | None = None
) -> BlockPairs:
  """Returns the pairs of blocks that the mask does not empty completely.

  If the indices are NumPy arrays, the table and the number of iterations are static. Otherwise they depend on data and
  on the device. If the compiler may split the rows, the number of iterations must be the same on all devices, because
  the compiler may put collectives into the loop; then all pairs are returned.

  The arrays of the mask are in blocks. `all_rows` says whether they have all rows; see `BlockRanges`. `expected` is the
  mean number of pairs if indices depend on the device; see `count_pairs`.
  """
  at = _block_ranges(queries.at, keys.at, all_rows)
  needed, allowed = _select_pairs(mask, at)
  if not isinstance(needed, np.ndarray):
    if not all_rows:
      return BlockPairs(jnp.asarray(np.argwhere(np.ones(needed.shape, bool)), jnp.int32), needed.size)
    some = jnp.asarray(combine_masks(needed, allowed.by_data))
    rows, columns = jnp.nonzero(some, size=some.size, fill_value=0)
    pairs = jnp.stack([rows, columns], axis=1).astype(jnp.int32)
    return BlockPairs(pairs, jnp.sum(some, dtype=jnp.int32), expected=expected)
  table = np.argwhere(needed).astype(np.int32)
  masked = mask.some_masked(at).by_index
  flags = None
  if allowed.by_data is not None:
    flags = jnp.broadcast_to(allowed.by_data, needed.shape)[table[:, 0], table[:, 1]]
  return BlockPairs(
    jnp.asarray(table),
    len(table),
    flags,
    masked is None or bool(np.any(masked & needed)) or bool(np.any(np.asarray(keys.at) < 0)),
  )


def count_pairs(mask: AttentionMask, query_at: Array, key_at: Array) -> int:
  """Returns the number of pairs of blocks, except those that are empty because of indices.

  `query_at`, [I, Q], and `key_at`, [J, S], are the indices of queries and keys.
  """
  needed, _ = _select_pairs(mask, _block_ranges(query_at, key_at, all_rows=True))
  return int(np.sum(needed))


def _select_pairs(mask: AttentionMask, at: BlockRanges) -> tuple[Array, Known]:
  """Returns a pair: [I, J] bool, False for blocks that are empty whatever the data are; and `mask.some_allowed(at)`."""
  exists, allowed = (at.query_high >= 0) & (at.key_high >= 0), mask.some_allowed(at)
  return exists if allowed.by_index is None else exists & allowed.by_index, allowed


def _block_ranges(query_at: Array, key_at: Array, all_rows: bool) -> BlockRanges:
  (q_low, q_high), (k_low, k_high) = _index_range(query_at), _index_range(key_at)
  return BlockRanges(q_low[:, None], q_high[:, None], k_low, k_high, all_rows)


def _index_range(index: Array) -> tuple[Array, Array]:
  """Returns the least and greatest index of each block; for a block of only padding, `_NO_KEY` and -1."""
  xp: Any = np if isinstance(index, np.ndarray) else jnp
  return xp.where(index >= 0, index, _NO_KEY).min(axis=-1), xp.where(index >= 0, index, -1).max(axis=-1)
