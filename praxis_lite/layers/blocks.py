"""Attention over blocks of queries and blocks of keys: what one device computes for the pairs of blocks that matter.

For each pair (i, j), with the running maximum m, sum l and output o of the queries i (online softmax; Milakov and
Gimelshein, 2018; Dao et al., 2022):

    s = scale * q_i k_j + bias, masked            m' = max(m, max s)           p = exp(s - m')
    l = l exp(m - m') + sum p                     o = o exp(m - m') + p v_j

and backward, from the output's gradient do, delta = sum(do * out) and the logarithm of the sum, lse = m + log l:

    p = exp(s - lse)     dv_j += p do_i     ds = p (do_i v_j - delta)     dq_i += ds k_j     dk_j += ds q_i

A sink is a logit of a head that takes part in the softmax, as a key with the value 0 would. So it changes only `out`
and `lse`, from which all gradients follow as above, and its own gradient is -sum(exp(sink - lse) delta) over queries.

`block_arrays.py` cuts arrays into blocks, and `block_pairs.py` says which pairs of blocks a mask leaves.

I, J numbers of blocks, Q queries and S keys of a block, B batch, T length, N = K G heads, K kv heads, G query heads for
each, H dims per head.
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
from praxis_lite.layers.block_arrays import Keys, Queries, pick_block, put_block
from praxis_lite.layers.block_pairs import BlockPairs
from praxis_lite.layers.masks import AttentionMask, combine_masks
from praxis_lite.layers.precision import sum_dtype, to_sum_dtype

T = TypeVar('T')
MASKED = -0.7 * float(np.finfo(np.float32).max)


class OffsetBias(Protocol):
  """A hashable function from positions of queries and keys to a bias of logits, such as `positions.BucketedBias`."""

  def __call__(self, params: Any, query_pos: jax.Array, key_pos: jax.Array, /) -> jax.Array:
    """Returns [B, N, Q, S] for positions [B, Q] and [B, S], or [1, N, Q, S] for [1, Q] and [1, S]."""


@dataclasses.dataclass(frozen=True)
class Formula:
  """The hyperparameters that turn products of queries and keys into probabilities."""

  scale: float  # Factor of the products.
  soft_cap: float | None = None  # Bounds the logits smoothly, soft_cap * tanh(logits / soft_cap); None disables it.
  bias: OffsetBias | None = None  # Bias added to the bounded logits; None disables it.
  dropout_rate: float = 0.0  # Share of the probabilities that is set to 0; the others are scaled by 1 / (1 - rate).

  def to_logits(self, products: jax.Array) -> jax.Array:
    """Returns the bounded logits, without a bias, of products of queries and keys."""
    logits = self.scale * products
    return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)


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
    query, key, mask_ij = pick_block(queries, i), pick_block(keys, j), _pick_mask(mask, pairs, i, j)

    def attend(old: Sums) -> Sums:
      logits, _ = _compute_logits(formula, mask_ij, bias, query, key)
      return add_keys(old, logits, key.v, _dropout(formula, query, key))

    return put_block(sums, _skip_empty(pairs, n, attend, lambda old: old, pick_block(sums, i)), i)

  return _loop_over(pairs, add, sums)


def add_keys(sums: Sums, logits: jax.Array, value: jax.Array, factors: jax.Array | float = 1.0) -> Sums:
  """Returns the sums of a block of queries, [B, K, G, Q, ...], with a block of keys added.

  Logits, [B, K, G, Q, S] float32, are `MASKED` where a query does not attend. Values are [B, K, S, H], and `factors`
  multiply the probabilities.
  """
  m = jnp.maximum(sums.m, jnp.max(logits, axis=-1))
  probs, kept = jnp.exp(logits - m[..., None]), jnp.exp(sums.m - m)
  total = sums.l * kept + jnp.sum(probs, axis=-1)
  weights = (probs * factors).astype(value.dtype)
  return Sums(m, total, sums.o * kept[..., None] + _product('BKGQS,BKSH->BKGQH', weights, value))


def add_sinks(sums: Sums, sinks: jax.Array) -> Sums:
  """Returns the sums with one more key, whose value is 0. Its logits are `sinks`, broadcast to the shape of `sums.m`.

  See `group_sinks`.
  """
  sinks = sinks.astype(sums.m.dtype)
  m = jnp.maximum(sums.m, sinks)
  kept = jnp.exp(sums.m - m)
  return Sums(m, sums.l * kept + jnp.exp(sinks - m), sums.o * kept[..., None])


def finish_sums(sums: Sums, sinks: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
  """Returns (output, lse), with the sinks included if there are any; a query that has seen no key has output 0."""
  if sinks is not None:
    sums = add_sinks(sums, sinks)
  seen = sums.m > 0.5 * MASKED
  l = jnp.where(seen, sums.l, 1.0)  # noqa: E741
  out = jnp.where(seen[..., None], sums.o / l[..., None], 0.0)
  return out, jnp.where(seen, sums.m + jnp.log(l), -MASKED)


def group_sinks(sinks_N: jax.Array | None, num_kv_heads: int) -> jax.Array | None:
  """Returns sinks as [K, G, 1], which broadcasts to [I, B, K, G, Q]; None without sinks."""
  return None if sinks_N is None else sinks_N.reshape(num_kv_heads, -1, 1)


# ---------------------------------------------------------------- backward


def sink_gradients(sinks: jax.Array | None, lse: jax.Array, delta: jax.Array) -> jax.Array | None:
  """Returns the gradient of each head's sink, [N]; None without sinks.

  `sinks` are logits that can be broadcast to `lse`, which includes them. `delta`, in the shape of `lse`, is the product
  of each query's result and its gradient.
  """
  if sinks is None:
    return None
  of_queries = -jnp.exp(sinks.astype(lse.dtype) - lse) * delta
  shape = (1,) * (lse.ndim - sinks.ndim) + sinks.shape
  return jnp.sum(of_queries, axis=tuple(axis for axis, size in enumerate(shape) if size == 1)).reshape(-1)


def sum_sink_gradients(
  sinks: jax.Array | None, out: jax.Array, lse: jax.Array, do: jax.Array, axes: tuple[str, ...]
) -> jax.Array | None:
  """Returns the gradients of sinks, [N], summed over the mesh `axes`; None without sinks. `out`, `do`: [B, N, T, H]."""
  if sinks is None:
    return None
  delta = jnp.sum(to_sum_dtype(do) * out, axis=-1)
  found = sink_gradients(sinks[:, None], lse, delta)
  assert found is not None
  return jax.lax.psum(found, axes).astype(sinks.dtype) if axes else found.astype(sinks.dtype)


def zero_gradients(queries: Queries, keys: Keys, bias: Any) -> Gradients:
  """Returns gradients that are zero."""
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
  """Returns `gradients` plus what these pairs of blocks add to them."""

  def add(n: jax.Array, sums: Gradients) -> Gradients:
    i, j = pairs.table[n, 0], pairs.table[n, 1]
    query, key, mask_ij = pick_block(queries, i), pick_block(keys, j), _pick_mask(mask, pairs, i, j)

    def attend(of: BackwardInputs, old: Gradients) -> Gradients:
      added = _compute_gradients(formula, mask_ij, bias, query, key, of)
      return jax.tree.map(jnp.add, old, added)

    old = Gradients(pick_block(sums.q, i), pick_block(sums.k, j), pick_block(sums.v, j), sums.bias)
    new = _skip_empty(pairs, n, attend, lambda of, old: old, pick_block(results, i), old)
    return Gradients(put_block(sums.q, new.q, i), put_block(sums.k, new.k, j), put_block(sums.v, new.v, j), new.bias)

  return _loop_over(pairs, add, gradients)


def _compute_gradients(
  formula: Formula, mask: AttentionMask | None, bias: Any, query: Queries, key: Keys, of: BackwardInputs
) -> Gradients:
  """Returns what one pair of blocks adds to the gradients."""
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
  """Returns `leave(*args)` if the data mask all of pair n, so that it is empty; otherwise `attend(*args)`."""
  return attend(*args) if pairs.flags is None else jax.lax.cond(pairs.flags[n], attend, leave, *args)


def _loop_over(pairs: BlockPairs, add: Callable[[jax.Array, T], T], sums: T) -> T:
  """Runs `sums = add(n, sums)` for each pair n, and returns the last sums."""

  def body(n: jax.Array, sums: T) -> T:
    # JAX moves computations on constants out of a scan over layers. If n did not depend on the sums, JAX would
    # compute the masks of all pairs outside of that scan, and keep them.
    return add(*jax.lax.optimization_barrier((n, sums)))

  with nullcontext() if pairs.expected is None else expected_trips(pairs.expected):
    return jax.lax.fori_loop(0, pairs.used, body, sums)


# ---------------------------------------------------------------- one pair of blocks


def _pick_mask(mask: AttentionMask, pairs: BlockPairs, i: jax.Array, j: jax.Array) -> AttentionMask | None:
  """Returns the mask of a pair of blocks; None if no pair is partly masked."""
  return mask.map_arrays(query=lambda x: pick_block(x, i), key=lambda x: pick_block(x, j)) if pairs.masked else None


def _compute_logits(
  formula: Formula, mask: AttentionMask | None, bias: Any, query: Queries, key: Keys
) -> tuple[jax.Array, jax.Array | float]:
  """Returns the float32 logits [B, K, G, Q, S] of a pair of blocks, and the derivative of the cap (1 without a cap)."""
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
  """Returns the factors of the probabilities, [B, K, G, Q, S], 0 or 1 / (1 - rate); 1.0 without dropout."""
  if query.seeds is None:
    return 1.0
  return dropout_factors(query.seeds, jnp.asarray(key.at), formula.dropout_rate)


def dropout_factors(seeds: jax.Array, key_index_S: jax.Array, rate: float) -> jax.Array:
  """Returns the factors [..., S] of the probabilities of a query: 0 or 1 / (1 - rate).

  A factor is a hash of the query's seed, a random uint32, and the key's index in its row. So it does not depend on how
  attention is computed, and need not be kept for the backward pass. `rate` is the share that becomes 0.
  """
  x = seeds[..., None] ^ (key_index_S.astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
  for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
    x = (x ^ (x >> shift)) * jnp.uint32(factor)
  x ^= x >> 16
  return jnp.where(x >= jnp.uint32(int(rate * 2**32)), 1.0 / (1.0 - rate), 0.0)


def _product(dims: str, x: jax.Array, y: jax.Array) -> jax.Array:
  return jnp.einsum(dims, x, y, preferred_element_type=sum_dtype(x, y))
