"""Attention over blocks of queries and blocks of keys: what one device computes for the pairs of blocks that matter.

For each pair (i, j), with the running maximum m, sum l and output o of the queries i (online softmax; Milakov and
Gimelshein, 2018; Dao et al., 2022):

    s = scale * q_i k_j + bias, masked            m' = max(m, max s)           p = exp(s - m')
    l = l exp(m - m') + sum p                     o = o exp(m - m') + p v_j

and backward, from the output's gradient do, delta = sum(do * out) and the logarithm of the sum, lse = m + log l:

    p = exp(s - lse)     dv_j += p do_i     ds = p (do_i v_j - delta)     dq_i += ds k_j     dk_j += ds q_i

A sink is a logit of a head that takes part in the softmax, as a key with the value 0 would. So it changes only `out`
and `lse`, from which all gradients follow as above, and its own gradient is -sum(exp(sink - lse) delta) over queries.

The mask says which pairs of blocks are empty, that is, fully masked; see `masks.py`. A pair that is empty because of
its indices is not in the table of pairs, so it costs nothing. A pair that is empty because of data, such as segment
ids, has the flag False in the table, and a branch skips it. If even the indices of blocks depend on data, such as the
index of the device, then so do the table and the number of iterations. If no pair is partly masked, no mask is
computed.

I, J numbers of blocks, Q queries and S keys of a block, B batch, K kv heads, G query heads for each, H dims per head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.layers.base.expected_trips import expected_trips
from praxis_lite.layers.masks import Array, AttentionMask, BlockRanges, Known, combine_masks
from praxis_lite.layers.precision import sum_dtype, to_sum_dtype

T = TypeVar('T')
MASKED = -0.7 * float(np.finfo(np.float32).max)
_NO_KEY = 2**30


class OffsetBias(Protocol):
  """A bias on logits by the positions of queries and keys; hashable. See `positions.BucketedBias`."""

  def __call__(self, params: Any, query_pos: jax.Array, key_pos: jax.Array, /) -> jax.Array:
    """Returns [B, N, Q, S] of positions [B, Q] and [B, S], or [1, N, Q, S] of [1, Q] and [1, S]."""
    ...


@dataclasses.dataclass(frozen=True)
class Formula:
  """How products of queries and keys become probabilities."""

  scale: float  # Factor of the products.
  soft_cap: float | None = None  # Bounds the logits smoothly, soft_cap * tanh(logits / soft_cap); None disables it.
  bias: OffsetBias | None = None  # Bias added to the bounded logits; None disables it.
  dropout_rate: float = 0.0  # Share of the probabilities that is set to 0; the others are scaled by 1 / (1 - rate).


class Queries(NamedTuple):
  """I blocks of queries.

  `at` is the index of each query in its row; -1 is padding. The fields after it may be None if they are not needed.
  """

  x: jax.Array  # [I, B, K, G, Q, H]
  at: Array  # [I, Q]
  pos: jax.Array | None = None  # [I, B or 1, Q]; None means the index.
  seeds: jax.Array | None = None  # [I, B, K, G, Q] uint32, of dropout.


class Keys(NamedTuple):
  """J blocks of keys and values; see `Queries`."""

  k: jax.Array  # [J, B, K, S, H]
  v: jax.Array  # [J, B, K, S, H]
  at: Array  # [J, S]
  pos: jax.Array | None = None  # [J, B or 1, S]


class Sums(NamedTuple):
  """The running sums of online softmax, in the dtype of sums: `m` and `l` [I, B, K, G, Q], `o` [I, B, K, G, Q, H]."""

  m: jax.Array
  l: jax.Array  # noqa: E741
  o: jax.Array


class BackwardInputs(NamedTuple):
  """Results of the forward pass for the backward pass: `lse` and `delta` [I, B, K, G, Q], `do` [I, B, K, G, Q, H]."""

  lse: jax.Array
  delta: jax.Array
  do: jax.Array


class Gradients(NamedTuple):
  """Gradients, in the dtype of sums, of queries, keys, values, and of the parameters of the bias."""

  q: jax.Array
  k: jax.Array
  v: jax.Array
  bias: Any


class BlockPairs(NamedTuple):
  """Pairs of blocks to compute."""

  table: jax.Array  # [P, 2], pairs (i, j); only the first `used` count.
  used: int | jax.Array
  flags: jax.Array | None = None  # [P], False for pairs that data empties; None if the mask knows of no such data.
  masked: bool = True  # Whether a pair may be partly masked.
  expected: float | None = None  # The mean of `used` over the devices, if it is traced; see `expected_trips`.


# ---------------------------------------------------------------- which pairs matter


def needed_pairs(
  mask: AttentionMask, queries: Queries, keys: Keys, *, all_rows: bool = True, expected: float | None = None
) -> BlockPairs:
  """Returns the pairs of blocks that the mask does not empty completely.

  If the indices are NumPy arrays, the table and the number of iterations are static. Otherwise they depend on data and
  on the device; if the compiler may split the rows, all pairs are returned then, because it may put communication of
  all devices into the loop over them.

  Args:
    mask: the mask, with its arrays in blocks.
    queries, keys: the blocks.
    all_rows: whether the arrays have all rows; see `BlockRanges`.
    expected: the mean number of pairs if indices depend on the device; see `count_pairs`.
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
  """Returns the number of pairs of blocks that the mask does not empty because of their indices, [I, Q] and [J, S]."""
  needed, _ = _select_pairs(mask, _block_ranges(query_at, key_at, all_rows=True))
  return int(np.sum(needed))


def _select_pairs(mask: AttentionMask, at: BlockRanges) -> tuple[Array, Known]:
  """Returns [I, J] bool, which pairs of blocks are needed by their indices; and what the mask knows of them."""
  exists, allowed = (at.query_high >= 0) & (at.key_high >= 0), mask.some_allowed(at)
  return exists if allowed.by_index is None else exists & allowed.by_index, allowed


def _block_ranges(query_at: Array, key_at: Array, all_rows: bool) -> BlockRanges:
  (q_low, q_high), (k_low, k_high) = _index_range(query_at), _index_range(key_at)
  return BlockRanges(q_low[:, None], q_high[:, None], k_low, k_high, all_rows)


def _index_range(index: Array) -> tuple[Array, Array]:
  """Returns the least and greatest index of each block. A block of padding gets a range that overlaps with no other."""
  xp: Any = np if isinstance(index, np.ndarray) else jnp
  return xp.where(index >= 0, index, _NO_KEY).min(axis=-1), xp.where(index >= 0, index, -1).max(axis=-1)


# ---------------------------------------------------------------- forward


def zero_sums(shape: tuple[int, ...], dtype: jnp.dtype) -> Sums:
  """Returns the initial sums for queries of this shape, [..., B, K, G, Q, H], in the dtype of sums."""
  return Sums(jnp.full(shape[:-1], MASKED, dtype), jnp.zeros(shape[:-1], dtype), jnp.zeros(shape, dtype))


def add_blocks(
  formula: Formula, mask: AttentionMask, bias: Any, queries: Queries, keys: Keys, pairs: BlockPairs, sums: Sums
) -> Sums:
  """Returns the sums with these pairs of blocks added; the arrays of the mask are in blocks."""

  def add(n: jax.Array, sums: Sums) -> Sums:
    i, j = pairs.table[n, 0], pairs.table[n, 1]
    query, key, mask_ij = _pick(queries, i), _pick(keys, j), _pick_mask(mask, pairs, i, j)

    def attend(old: Sums) -> Sums:
      logits, _ = _compute_logits(formula, mask_ij, bias, query, key)
      return add_keys(old, logits, key.v, _dropout(formula, query, key))

    return _put(sums, _skip_empty(pairs, n, attend, lambda old: old, _pick(sums, i)), i)

  return _loop_over(pairs, add, sums)


def add_keys(sums: Sums, logits: jax.Array, value: jax.Array, factors: jax.Array | float = 1.0) -> Sums:
  """Returns the sums of a block of queries with a block of keys added.

  Args:
    sums: the sums so far, [B, K, G, Q, ...].
    logits: [B, K, G, Q, S] float32, `MASKED` where a query does not attend.
    value: [B, K, S, H].
    factors: factors of the probabilities, [B, K, G, Q, S].
  """
  m = jnp.maximum(sums.m, jnp.max(logits, axis=-1))
  probs, kept = jnp.exp(logits - m[..., None]), jnp.exp(sums.m - m)
  total = sums.l * kept + jnp.sum(probs, axis=-1)
  weights = (probs * factors).astype(value.dtype)
  return Sums(m, total, sums.o * kept[..., None] + _product('BKGQS,BKSH->BKGQH', weights, value))


def add_sinks(sums: Sums, sinks: jax.Array) -> Sums:
  """Returns the sums with a key of value 0 added, whose logits `sinks` broadcast to `sums.m`; see `group_sinks`."""
  sinks = sinks.astype(sums.m.dtype)
  m = jnp.maximum(sums.m, sinks)
  kept = jnp.exp(sums.m - m)
  return Sums(m, sums.l * kept + jnp.exp(sinks - m), sums.o * kept[..., None])


def finish_sums(sums: Sums, sinks: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
  """Returns (output, lse), also of sinks if there are any; a query that has seen no key has output 0."""
  if sinks is not None:
    sums = add_sinks(sums, sinks)
  seen = sums.m > 0.5 * MASKED
  l = jnp.where(seen, sums.l, 1.0)  # noqa: E741
  out = jnp.where(seen[..., None], sums.o / l[..., None], 0.0)
  return out, jnp.where(seen, sums.m + jnp.log(l), -MASKED)


def group_sinks(sinks_N: jax.Array | None, num_kv_heads: int) -> jax.Array | None:
  """Returns sinks as [K, G, 1], which broadcasts to sums of queries."""
  return None if sinks_N is None else sinks_N.reshape(num_kv_heads, -1, 1)


# ---------------------------------------------------------------- backward


def sink_gradients(sinks: jax.Array | None, lse: jax.Array, delta: jax.Array) -> jax.Array | None:
  """Returns the gradient of each head's sink, [N]; None without sinks.

  Args:
    sinks: their logits, which broadcast to `lse`.
    lse: the logarithm of the sum of each query, sinks included.
    delta: the product of each query's result and its gradient, in the shape of `lse`.
  """
  if sinks is None:
    return None
  of_queries = -jnp.exp(sinks.astype(lse.dtype) - lse) * delta
  shape = (1,) * (lse.ndim - sinks.ndim) + sinks.shape
  return jnp.sum(of_queries, axis=tuple(axis for axis, size in enumerate(shape) if size == 1)).reshape(-1)


def sum_sink_gradients(
  sinks: jax.Array | None, out: jax.Array, lse: jax.Array, do: jax.Array, axes: tuple[str, ...]
) -> jax.Array | None:
  """Returns the gradients of sinks [N] of results out [B, N, T, H], lse [B, N, T] and the gradient of `out`.

  They are summed over `axes`, the mesh axes that split the queries.
  """
  if sinks is None:
    return None
  delta = jnp.sum(to_sum_dtype(do) * out, axis=-1)
  found = sink_gradients(sinks[:, None], lse, delta)
  assert found is not None
  return jax.lax.psum(found, axes).astype(sinks.dtype) if axes else found.astype(sinks.dtype)


def zero_gradients(queries: Queries, keys: Keys, bias: Any) -> Gradients:
  """Returns the initial gradients."""
  x, k, v, bias = jax.tree.map(lambda a: jnp.zeros(a.shape, sum_dtype(a)), (queries.x, keys.k, keys.v, bias))
  return Gradients(x, k, v, bias)


def add_gradients(
  formula: Formula,
  mask: AttentionMask,
  bias: Any,
  queries: Queries,
  results: BackwardInputs,
  keys: Keys,
  pairs: BlockPairs,
  gradients: Gradients,
) -> Gradients:
  """Returns the gradients with these pairs of blocks added."""

  def add(n: jax.Array, sums: Gradients) -> Gradients:
    i, j = pairs.table[n, 0], pairs.table[n, 1]
    query, key, mask_ij = _pick(queries, i), _pick(keys, j), _pick_mask(mask, pairs, i, j)

    def attend(of: BackwardInputs, old: Gradients) -> Gradients:
      added = _compute_gradients(formula, mask_ij, bias, query, key, of)
      return jax.tree.map(jnp.add, old, added)

    old = Gradients(_pick(sums.q, i), _pick(sums.k, j), _pick(sums.v, j), sums.bias)
    new = _skip_empty(pairs, n, attend, lambda of, old: old, _pick(results, i), old)
    return Gradients(_put(sums.q, new.q, i), _put(sums.k, new.k, j), _put(sums.v, new.v, j), new.bias)

  return _loop_over(pairs, add, gradients)


def _compute_gradients(
  formula: Formula, mask: AttentionMask | None, bias: Any, query: Queries, key: Keys, of: BackwardInputs
) -> Gradients:
  """Returns the gradients of one pair of blocks, and of the parameters of the bias."""
  logits, slope = _compute_logits(formula, mask, bias, query, key)
  probs = jnp.exp(logits - of.lse[..., None])
  kept = _dropout(formula, query, key)
  do = of.do.astype(key.v.dtype)
  dv = _product('BKGQS,BKGQH->BKSH', (probs * kept).astype(do.dtype), do)
  dprobs = kept * _product('BKGQH,BKSH->BKGQS', do, key.v)
  dlogits = probs * (dprobs - of.delta[..., None])
  dbias = bias if formula.bias is None else _bias_gradient(formula.bias, bias, query, key, dlogits)
  dproducts = (dlogits * slope * formula.scale).astype(key.k.dtype)
  dq = _product('BKGQS,BKSH->BKGQH', dproducts, key.k)
  dk = _product('BKGQS,BKGQH->BKSH', dproducts, query.x)
  return Gradients(dq, dk, dv, dbias)


def _skip_empty(pairs: BlockPairs, n: jax.Array, attend: Callable[..., T], leave: Callable[..., T], *args: Any) -> T:
  """Returns `attend(*args)`, or `leave(*args)` for a pair that is empty because of data."""
  return attend(*args) if pairs.flags is None else jax.lax.cond(pairs.flags[n], attend, leave, *args)


def _loop_over(pairs: BlockPairs, add: Callable[[jax.Array, T], T], sums: T) -> T:
  """Runs `sums = add(n, sums)` for each pair n, and returns the sums."""

  def body(n: jax.Array, sums: T) -> T:
    # JAX moves computations on constants out of a scan over layers. If n did not depend on the sums, JAX would
    # compute the masks of all pairs outside of that scan, and keep them.
    return add(*jax.lax.optimization_barrier((n, sums)))

  with nullcontext() if pairs.expected is None else expected_trips(pairs.expected):
    return jax.lax.fori_loop(0, pairs.used, body, sums)


# ---------------------------------------------------------------- one pair of blocks


def _pick_mask(mask: AttentionMask, pairs: BlockPairs, i: jax.Array, j: jax.Array) -> AttentionMask | None:
  """Returns the mask of a pair of blocks; None if no pair is partly masked."""
  return mask.map_arrays(query=lambda x: _pick(x, i), key=lambda x: _pick(x, j)) if pairs.masked else None


def _compute_logits(
  formula: Formula, mask: AttentionMask | None, bias: Any, query: Queries, key: Keys
) -> tuple[jax.Array, jax.Array | float]:
  """Returns the float32 logits [B, K, G, Q, S] of a pair of blocks, and their derivative (1, or that of the cap)."""
  logits = formula.scale * _product('BKGQH,BKSH->BKGQS', query.x, key.k)
  slope: jax.Array | float = 1.0
  if formula.soft_cap is not None:
    capped = jnp.tanh(logits / formula.soft_cap)
    logits, slope = formula.soft_cap * capped, 1.0 - jnp.square(capped)
  if formula.bias is not None:
    logits += _compute_bias(formula.bias, bias, query, key)
  if mask is not None:
    key_at = jnp.asarray(key.at)
    allowed = combine_masks((key_at >= 0)[None, None], mask.allows(jnp.asarray(query.at), key_at))
    assert allowed is not None
    logits = jnp.where(allowed[:, None, None], logits, MASKED)
  return logits, slope


def _compute_bias(fn: OffsetBias, params: Any, query: Queries, key: Keys) -> jax.Array:
  """Returns the bias of a pair of blocks, [B or 1, K, G, Q, S]."""
  query_pos = query.at[None] if query.pos is None else query.pos
  key_pos = key.at[None] if key.pos is None else key.pos
  bias = fn(params, jnp.maximum(query_pos, 0), jnp.maximum(key_pos, 0)).astype(sum_dtype(query.x))
  return bias.reshape(bias.shape[0], *query.x.shape[1:3], *bias.shape[2:])


def _bias_gradient(fn: OffsetBias, params: Any, query: Queries, key: Keys, dlogits: jax.Array) -> Any:
  bias, pull = jax.vjp(lambda p: _compute_bias(fn, p, query, key), params)
  if bias.shape[0] == 1:
    dlogits = jnp.sum(dlogits, axis=0, keepdims=True)
  (gradient,) = pull(dlogits)
  return jax.tree.map(to_sum_dtype, gradient)


def _dropout(formula: Formula, query: Queries, key: Keys) -> jax.Array | float:
  """Returns the factors of the probabilities: 0, or 1 / (1 - rate)."""
  if query.seeds is None:
    return 1.0
  return dropout_factors(query.seeds, jnp.asarray(key.at), formula.dropout_rate)


def dropout_factors(seeds: jax.Array, key_index_S: jax.Array, rate: float) -> jax.Array:
  """Returns the factors [..., S] of the probabilities of a query: 0 or 1 / (1 - rate).

  A factor is a hash of the query's seed and the key's index. So it does not depend on how attention is computed, and
  need not be kept for the backward pass.

  Args:
    seeds: [...] uint32, a random number for each query and head.
    key_index_S: index of each key in its row.
    rate: share of the probabilities that becomes 0.
  """
  x = seeds[..., None] ^ (key_index_S.astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
  for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
    x = (x ^ (x >> shift)) * jnp.uint32(factor)
  x ^= x >> 16
  return jnp.where(x >= jnp.uint32(int(rate * 2**32)), 1.0 / (1.0 - rate), 0.0)


def _product(dims: str, x: jax.Array, y: jax.Array) -> jax.Array:
  return jnp.einsum(dims, x, y, preferred_element_type=sum_dtype(x, y))


# ---------------------------------------------------------------- blocks of arrays


def _pick(blocks: T, i: jax.Array) -> T:
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(jnp.asarray(x), i, keepdims=False), blocks)


def _put(blocks: T, block: T, i: jax.Array) -> T:
  return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, i, 0), blocks, block)


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
  """Returns [B, S, K, H] for blocks of keys, [J, B, K, S, H]."""
  return join_blocks(jnp.moveaxis(x_JBKSH, 3, 2), length)


def block_indices(length: int, size: int) -> np.ndarray:
  """Returns [I, size] indices of a row in blocks; -1 beyond its end."""
  index = np.arange(-(-length // size) * size, dtype=np.int32).reshape(-1, size)
  return np.where(index < length, index, -1)


def even_block_size(length: int, largest: int) -> int:
  """Returns the size of equal blocks, at most `largest`, that need the least padding of `length`.

  If there are several blocks, the size is a multiple of 8.
  """
  count = -(-length // largest)
  size = -(-length // count)
  return size if count == 1 else -(-size // 8) * 8
