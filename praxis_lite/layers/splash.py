"""Attention on TPUs with JAX's splash attention kernels, which keep logits on the chip: memory is linear in the length.

The kernels compute a row of the batch with all its heads. A mask reaches them in three forms:

    limits of offsets   a static table of the pairs of blocks in which some query may attend to some key; the kernels
                        skip all others. Inside of a block, they compare indices
    a causal mask with  the same comparison, in which a query of the prefix has the index of the prefix's last token.
    prefixes            Which blocks are empty depends on data, so the kernels skip no block
    segments, paddings  an integer for each query and each key, which the kernels compare

Lengths are padded to whole blocks. The backward pass computes the logits twice: in one kernel for the gradients of
queries, and in another for the gradients of keys and values.

B batch, T length of the queries, S length of the keys, N heads, K kv heads, H dims per head; I, J numbers of blocks.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.jax_internals.splash import (
  BlockTable,
  SplashArrays,
  SplashCall,
  splash_backward,
  splash_forward,
)
from praxis_lite.layers.attention_spec import Heads, Integers, Residuals
from praxis_lite.layers.blocks import Formula, sum_sink_gradients
from praxis_lite.layers.blockwise import RowSplit, compute_context, compute_gradients
from praxis_lite.layers.masks import (
  And,
  AttentionMask,
  BlockRanges,
  OffsetMask,
  Or,
  Paddings,
  Prefix,
  Segments,
  split_offsets,
)
from praxis_lite.sharding.mesh import platform
from praxis_lite.sharding.padding import pad_to

LANES = 128  # Lengths of blocks are multiples of this.
NO_KEY = np.iinfo(np.int32).min  # The id of keys that no query attends to.


# ---------------------------------------------------------------- masks


class MaskParts(NamedTuple):
  """A mask, taken apart into the kinds that the kernels can apply."""

  offsets: OffsetMask
  prefix: Prefix | None
  segments: Segments | None
  paddings: list[Paddings]

  def compare(self) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
    """Returns a function that says whether queries at given positions may attend to given keys; None if all may."""
    behind, ahead = self.offsets.behind, 0 if self.prefix else self.offsets.ahead
    return None if behind is None and ahead is None else functools.partial(_is_within, behind, ahead)

  def positions(self, query_T: jax.Array, num_keys: int) -> jax.Array:
    """Returns the positions that the kernels compare, for queries with these indices: [T], or [B, T] with prefixes."""
    if self.prefix is None:
      return query_T
    return jnp.maximum(query_T, jnp.minimum(self.prefix.length_B[:, None], num_keys).astype(jnp.int32) - 1)

  def ids(self, num_queries: int, num_keys: int) -> tuple[jax.Array, jax.Array]:
    """Returns ids of queries and keys, int32 [B or 1, T] and [B or 1, S]; a query attends only to keys with its id."""
    ids_BT, ids_BS = jnp.zeros((1, num_queries), jnp.int32), jnp.zeros((1, num_keys), jnp.int32)
    if self.segments is not None:
      ids_BT, ids_BS = self.segments.ids_BT.astype(jnp.int32), self.segments.key_ids_BS.astype(jnp.int32)
    for padding in self.paddings:
      ids_BS = jnp.where(padding.paddings_BS == 0, ids_BS, NO_KEY)
    return ids_BT, ids_BS


def mask_obstacle(mask: AttentionMask, query_len: int, key_len: int) -> str:
  """Returns why the kernels cannot apply a mask, as the end of a sentence; '' if they can."""
  parts = sort_parts(mask)
  if isinstance(parts, str):
    return parts
  limits = [limit for limit in (parts.offsets.behind, parts.offsets.ahead) if limit is not None]
  if (limits or parts.prefix) and query_len != key_len:
    return f'takes a causal mask or a window with as many keys as queries, not {query_len:,} and {key_len:,}'
  if min(limits, default=0) < 0:
    return "has no mask that excludes a query's own index"
  return ''


def sort_parts(mask: AttentionMask) -> MaskParts | str:
  """Returns the parts of a mask; if the kernels cannot apply it, the reason, as the end of a sentence."""
  offsets, others = split_offsets(mask)
  found = MaskParts(offsets, None, None, [])
  for part in others.parts if isinstance(others, And) else () if others is None else (others,):
    if isinstance(part, Paddings):
      found.paddings.append(part)
    elif isinstance(part, Segments) and found.segments is None:
      found = found._replace(segments=part)
    elif (prefix := _causal_prefix(part)) and found.prefix is None:
      found = found._replace(prefix=prefix)
    else:
      return f'takes offsets, prefixes, segments and paddings, not the mask {_kinds(part)}'
  if found.prefix and (found.offsets.behind, found.offsets.ahead) != (None, None):
    return 'takes no window together with prefixes'
  return found


def _causal_prefix(mask: AttentionMask) -> Prefix | None:
  """Returns the prefix, if a mask is causal except that all tokens of a prefix see each other; otherwise None."""
  parts = mask.parts if isinstance(mask, Or) else ()
  prefixes = [part for part in parts if isinstance(part, Prefix)]
  causal = [part for part in parts if isinstance(part, OffsetMask) and (part.behind, part.ahead) == (None, 0)]
  return prefixes[0] if len(parts) == 2 and prefixes and causal else None


def _kinds(mask: AttentionMask) -> str:
  if isinstance(mask, And | Or):
    return f'({(" & " if isinstance(mask, And) else " | ").join(map(_kinds, mask.parts))})'
  return type(mask).__name__


# ---------------------------------------------------------------- both passes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def attend_by_splash(
  formula: Formula, block_size: int | None, split: RowSplit | None, heads: Heads, integers: Integers
) -> jax.Array:
  """Returns attention [B, T, N, H] in blocks of at most `block_size`; None allows the largest blocks that fit.

  On a CPU, the kernels are interpreted, which is slow and meant for tests.
  """
  return _forward(formula, block_size, split, heads, integers)[0]


def _forward(
  formula: Formula, block_size: int | None, split: RowSplit | None, heads: Heads, integers: Integers
) -> tuple[jax.Array, Residuals]:
  def local(heads: Heads, integers: Integers) -> tuple[jax.Array, jax.Array]:
    out_BNTH, lse_BNT = forward_rows(*_prepare(formula, block_size, heads, integers))
    T = heads.query.shape[1]
    return jnp.swapaxes(out_BNTH, 1, 2)[:, :T], lse_BNT[None, :, :, :T]

  return compute_context(local, split, heads, integers)


def _backward(
  formula: Formula, block_size: int | None, split: RowSplit | None, residuals: Residuals, do_BTNH: jax.Array
) -> tuple[Heads, None]:
  def local(heads: Heads, integers: Integers, out_BTNH: jax.Array, lse: jax.Array, do_BTNH: jax.Array) -> Heads:
    call, arrays = _prepare(formula, block_size, heads, integers)
    T = arrays.query.shape[2]
    out_BNTH, do_BNTH = (_to_heads(x, T) for x in (out_BTNH, do_BTNH))
    lse_BNT = pad_to(lse[0], (*lse.shape[1:3], T))
    dq, dk, dv = backward_rows(call, arrays, out_BNTH, lse_BNT, do_BNTH)
    found = (jnp.swapaxes(g, 1, 2)[:, : x.shape[1]] for g, x in zip((dq * formula.scale, dk, dv), heads))
    dq, dk, dv = (g.astype(x.dtype) for g, x in zip(found, heads))
    dsinks = sum_sink_gradients(heads.sinks, out_BNTH, lse_BNT, do_BNTH, split.batch_axes if split else ())
    return Heads(dq, dk, dv, sinks=dsinks)

  return compute_gradients(local, split, residuals, do_BTNH)


attend_by_splash.defvjp(_forward, _backward)


def forward_rows(call: SplashCall, arrays: SplashArrays) -> tuple[jax.Array, jax.Array]:
  """Returns the results of `splash_forward`, stacked over the rows of the batch."""
  forward = jax.vmap(lambda *arrays: splash_forward(call, SplashArrays(*arrays)), in_axes=_rows(arrays))
  # If rematerialization keeps the results, the backward pass does not need this call again. JAX removes unneeded calls
  # of jitted functions, but not of kernels.
  return jax.jit(forward)(*arrays)


def backward_rows(
  call: SplashCall, arrays: SplashArrays, out_BNTH: jax.Array, lse_BNT: jax.Array, do_BNTH: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the results of `splash_backward`, stacked over the rows of the batch."""
  backward = jax.vmap(
    lambda results, *arrays: splash_backward(call, SplashArrays(*arrays), *results), in_axes=(0, *_rows(arrays))
  )
  return backward((out_BNTH, lse_BNT, do_BNTH), *arrays)


def _rows(arrays: SplashArrays) -> tuple[int | None, ...]:
  """Returns the dimension of rows of each array; None for an array that all rows share."""
  differs = arrays.query_pos is not None and arrays.query_pos.ndim == 2
  return 0, 0, 0, 0 if differs else None, 0 if arrays.ids else None, None


# ---------------------------------------------------------------- arguments of the kernels


def _prepare(
  formula: Formula, block_size: int | None, heads: Heads, integers: Integers
) -> tuple[SplashCall, SplashArrays]:
  """Returns the arguments of the kernels, padded to whole blocks; the arrays contain all rows."""
  parts = sort_parts(integers.mask)
  assert isinstance(parts, MaskParts)  # `mask_obstacle` has checked it.
  lengths = heads.query.shape[1], heads.key.shape[1]
  largest = largest_splash_block(block_size, heads.query, formula.soft_cap)
  blocks = _block_len(lengths[0], largest), _block_len(lengths[1], largest)
  T, S = (-(-length // block) * block for length, block in zip(lengths, blocks))
  mask_fn = parts.compare()
  tables, pairs = _tables(parts, T // blocks[0], S // blocks[1], blocks)
  call = SplashCall(tables, pairs, blocks, mask_fn, formula.soft_cap, interpret=platform() == 'cpu')
  return call, SplashArrays(
    _to_heads(heads.query * jnp.asarray(formula.scale, heads.query.dtype), T),
    _to_heads(heads.key, S),
    _to_heads(heads.value, S),
    None if mask_fn is None else parts.positions(jnp.arange(T, dtype=jnp.int32), lengths[1]),
    _padded_ids(parts, heads, (T, S)),
    heads.sinks,
  )


def largest_splash_block(block_size: int | None, query: jax.Array, soft_cap: float | None) -> int:
  """Returns the largest length of a block of queries and keys, a multiple of 128.

  A core of v4, v5e or v5p has 16 MiB of memory for a kernel. Blocks are the largest that fit with any mask, because
  each block of queries reads all keys that it meets from main memory. A layer's field may limit the `block_size`.
  """
  size = query.shape[-1] * query.dtype.itemsize
  is_small = size <= 256 and query.dtype.itemsize == 2 and soft_cap is None
  most = 1024 if is_small else 512 if size <= 1024 else 256
  return min(-(-(block_size or most) // LANES) * LANES, most)


def _block_len(length: int, largest: int) -> int:
  """Returns the length of equal blocks, a multiple of 128 and at most `largest`."""
  count = -(-length // largest)
  return -(-length // (count * LANES)) * LANES


def _to_heads(x_BTNH: jax.Array, length: int) -> jax.Array:
  """Returns [B, N, length, H], padded with zeros."""
  B, _, N, H = x_BTNH.shape
  return pad_to(jnp.swapaxes(x_BTNH, 1, 2), (B, N, length, H))


def _tables(
  parts: MaskParts, num_queries: int, num_keys: int, blocks: tuple[int, int]
) -> tuple[tuple[BlockTable, BlockTable] | None, int]:
  """Returns two tables of the blocks that meet, by block of queries and by block of keys; and how many pairs meet.

  The tables are None if all blocks meet.
  """
  low_I1, low_J = np.arange(num_queries)[:, None] * blocks[0], np.arange(num_keys) * blocks[1]
  at = BlockRanges(low_I1, low_I1 + blocks[0] - 1, low_J, low_J + blocks[1] - 1)
  some = parts.offsets.some_allowed(at).by_index
  if some is None:
    return None, num_queries * num_keys
  meet_IJ = np.broadcast_to(np.asarray(some), (num_queries, num_keys))
  by_key = BlockTable(*(np.swapaxes(x, 1, 2) for x in _met_blocks(meet_IJ.T)))
  return (_met_blocks(meet_IJ), by_key), int(meet_IJ.sum())


def _is_within(behind: int | None, ahead: int | None, query: jax.Array, key: jax.Array) -> jax.Array:
  limits = ([] if ahead is None else [key <= query + ahead]) + ([] if behind is None else [query <= key + behind])
  return functools.reduce(operator.and_, limits)


def _met_blocks(meet_IJ: np.ndarray) -> BlockTable:
  """Returns, for each of I blocks, the indices of the blocks that it meets, and which entries are used.

  `meet_IJ` is True for blocks that meet. Both arrays are [1, I, W], with W the most blocks that one block meets.

  Unused entries repeat the last used one, so that the kernel fetches nothing for them.
  """
  count_I1 = meet_IJ.sum(axis=1, keepdims=True)
  index_IW = np.argsort(~meet_IJ, axis=1, kind='stable')[:, : count_I1.max()]
  used_IW = np.arange(index_IW.shape[1]) < count_I1
  index_IW = np.where(used_IW, index_IW, np.take_along_axis(index_IW, count_I1 - 1, axis=1))
  # 8 or 16 bits, because the kernels keep tables in scalar memory, which is small.
  small = np.int8 if meet_IJ.shape[1] <= 128 else np.int16
  return BlockTable(index_IW[None].astype(small), used_IW[None].astype(np.int8))


def _padded_ids(parts: MaskParts, heads: Heads, lengths: tuple[int, int]) -> tuple[jax.Array, jax.Array] | None:
  """Returns ids of queries, [B, T], and of keys, [B, S], for padded lengths; None if the mask needs no ids."""
  (B, T), S = heads.query.shape[:2], heads.key.shape[1]
  sees_padding = lengths[1] > S and (parts.prefix is None and parts.offsets.ahead != 0)
  if parts.segments is None and not parts.paddings and not sees_padding:
    return None
  queries, keys = (
    jnp.pad(jnp.broadcast_to(x, (B, x.shape[1])), [(0, 0), (0, length - x.shape[1])], constant_values=fill)
    for x, length, fill in zip(parts.ids(T, S), lengths, (0, NO_KEY))
  )
  return queries, keys
