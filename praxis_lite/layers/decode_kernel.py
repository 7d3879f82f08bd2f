"""Attention of one or a few tokens to the slots of a cache on TPUs, by a kernel that reads each page at most once.

The kernel reads the cache in place. The cache may be part of a stack of layers; its slots may be in any order and have
gaps; entries may be int8 with scales; and keys may also be the values. (JAX's kernels for pages refuse such caches, or
need copies of them: docs/planning-figures.md.) The seen slots and the bias are arrays, so any mask and any bias can be
used. For each row, the kernel reads the pages from the first slot that a token sees to the last.

TPUs would pad vectors whose dims are no multiple of 128. They store such arrays with the slots as the last dimension
instead, and the kernel takes them in this layout, so nothing is copied.

The kernel has no backward pass. Its derivative is computed by plain attention, which keeps the logits of the tokens for
all rows.

L layers of a loop, B batch, T tokens, S slots, P slots of a page, N heads, K kv heads, G = N / K, Q = G T queries of a
kv head, C kv heads at once, H dims per head, V dims of values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from praxis_lite.layers.blocks import MASKED, Formula, add_keys, finish_sums, zero_sums
from praxis_lite.layers.blockwise import RowSplit
from praxis_lite.layers.kv_cache import KVCache
from praxis_lite.sharding.mesh import platform
from praxis_lite.sharding.specs import axes_to_entry

LANES = 128
# The most slots of a page, and the most bytes of its keys. The chip holds four arrays as large as a page's keys.
_MOST_SLOTS, _MOST_BYTES = 1024, 2**20
_MOST_QUERIES = 2**17  # The most entries of queries that the chip holds at once.


class _Arrays(NamedTuple):
  """The arguments of the kernel; an argument that a layer does not have is None."""

  query: Any  # [B, K, Q, H]; query g T + t belongs to token t and to head g of the group.
  key: Any  # [L, B, K, S, H]
  value: Any  # [L, B, K, S, V]; None if the values are the keys.
  key_scale: Any  # [L, B, K, S]; None unless entries are int8.
  value_scale: Any
  bias: Any  # [B or 1, K, Q, S]
  sinks: Any  # [K, Q, 1]
  seen: Any  # [B, T, S] bool
  layer: Any  # int32


_ENTRIES = ('key', 'value', 'key_scale', 'value_scale')


def attend_by_kernel(
  query_BTNH: jax.Array,
  cache: KVCache,
  seen_BTS: jax.Array,
  *,
  formula: Formula,
  bias: jax.Array | None = None,
  sinks: jax.Array | None = None,
  split: RowSplit | None = None,
) -> jax.Array:
  """Returns softmax(scale * query . key) . value of the tokens, [B, T, N, H], in the dtype of the queries.

  On a CPU, the kernel is interpreted.

  Args:
    query_BTNH: queries; head n uses kv head n // (N / K).
    cache: a cache in bfloat16, float32, int8 or 8-bit floats; or a stack of the caches of several layers, in which the
      field `turn` selects one layer. The positions in the cache are not used.
    seen_BTS: bool, the slots that each token attends to. A token that attends to no slot gets 0.
    formula: scale and soft cap.
    bias: added to the logits, [B or 1, N, T, S]; None adds nothing.
    sinks: [N], see `dot_product_attention`.
    split: how the ambient mesh splits rows and heads, evenly; a cache with one kv head is not split along heads. None
      if each device has its part already.
  """
  (B, T, N, H), K = query_BTNH.shape, cache.key.shape[-3]
  fill = jnp.full(N, MASKED, jnp.float32)
  entries = {name: getattr(cache, name) for name in _ENTRIES}
  if cache.turn is None:
    entries = {name: None if x is None else x[None] for name, x in entries.items()}
  Q = N // K * T
  arrays = _Arrays(
    query=jnp.moveaxis(query_BTNH.reshape(B, T, K, N // K, H), 1, 3).reshape(B, K, Q, H),
    **entries,
    bias=None if bias is None else bias.astype(jnp.float32).reshape(len(bias), K, Q, -1),
    sinks=jnp.repeat(fill if sinks is None else sinks.astype(jnp.float32), T).reshape(K, Q, 1),
    seen=seen_BTS,
    layer=jnp.int32(0) if cache.turn is None else cache.turn,
  )
  local = functools.partial(_attend, formula)
  if split is not None:
    rows, head = axes_to_entry(split.batch_axes), axes_to_entry(split.head_axes)
    kv_head, group = (None, head) if K == 1 else (head, None)
    specs = _Arrays(
      query=PartitionSpec(rows, kv_head, group),
      **dict.fromkeys(_ENTRIES, PartitionSpec(None, rows, kv_head)),
      bias=PartitionSpec(rows if bias is not None and len(bias) > 1 else None, kv_head, group),
      sinks=PartitionSpec(kv_head, group),
      seen=PartitionSpec(rows),
      layer=PartitionSpec(),
    )
    specs = specs._replace(**{name: None for name, x in arrays._asdict().items() if x is None})
    local = jax.shard_map(local, in_specs=(specs,), out_specs=specs.query, check_vma=False)
  out_BKQV = local(arrays)
  return jnp.moveaxis(out_BKQV.reshape(B, K, N // K, T, -1), 3, 1).reshape(B, T, N, -1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(formula: Formula, arrays: _Arrays) -> jax.Array:
  """Returns the results of attention, [B, K, Q, V]."""
  (B, K, Q, H), (_, T, S) = arrays.query.shape, arrays.seen.shape
  V = H if arrays.value is None else arrays.value.shape[4]
  # A product of float32 is computed from parts of its operands. An entry takes 4 bytes, and its parts another 4.
  itemsize = 8 if arrays.query.dtype == jnp.float32 else max(arrays.key.dtype.itemsize, arrays.query.dtype.itemsize)
  slot_bytes = max(max(H, V) * itemsize, 0 if arrays.bias is None else 4 * Q)
  C = _heads_at_once(K, slot_bytes, Q * max(H, V), has_scales=arrays.key_scale is not None)
  P = _page_len(S, C * slot_bytes)
  pages = -(-S // P)
  seen_BTS = jnp.pad(arrays.seen, [(0, 0), (0, 0), (0, pages * P - S)])
  has_BI = jnp.any(seen_BTS.reshape(B, T, pages, P), axis=(1, 3))
  first_B = jnp.argmax(has_BI, axis=1).astype(jnp.int32)
  end_B = jnp.where(jnp.any(has_BI, axis=1), pages - jnp.argmax(has_BI[:, ::-1], axis=1), first_B).astype(jnp.int32)

  def page_of(b: Any, i: Any, first: Any, end: Any) -> Any:  # After the last page, the kernel fetches nothing.
    return jnp.maximum(jnp.minimum(first[b] + i, end[b] - 1), 0)

  def row_spec(dims: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, C, Q, dims), lambda b, c, i, *_: (b, c, 0, 0))

  def page_spec(lead: Callable[[Any, Any, Any], tuple[Any, ...]], *dims: int | None) -> pl.BlockSpec:
    """Returns the spec of one page of an array. Each of `dims` is a block size, -1 for slots, or None for one index.

    `lead(layer, b, c)` returns the block indices of the first dimensions. The dimension of slots has the index of the
    page, and all other dimensions have the index 0.
    """

    def index(b: Any, c: Any, i: Any, layer: Any, first: Any, end: Any) -> tuple[Any, ...]:
      begin = lead(layer[0], b, c)
      return *begin, *(page_of(b, i, first, end) if n == -1 else 0 for n in dims[len(begin) :])

    return pl.BlockSpec(tuple(P if n == -1 else n for n in dims), index)

  cached = functools.partial(page_spec, lambda layer, b, c: (layer, b, c), None, None, C)
  has_one = arrays.bias is not None and len(arrays.bias) == 1
  blocks = _Arrays(
    query=row_spec(H),
    key=cached(H, -1) if _has_slots_last(H) else cached(-1, H),
    value=cached(V, -1) if _has_slots_last(V) else cached(-1, V),
    key_scale=cached(-1),
    value_scale=cached(-1),
    bias=page_spec(lambda layer, b, c: (0 if has_one else b, c), None, C, Q, -1),
    sinks=pl.BlockSpec((C, Q, 1), lambda b, c, i, *_: (c, 0, 0)),
    seen=page_spec(lambda layer, b, c: (b,), None, T, -1),
    layer=None,
  )
  inputs = arrays._replace(
    key=_to_slots_last(arrays.key),
    value=None if arrays.value is None else _to_slots_last(arrays.value),
    seen=seen_BTS.astype(jnp.int32),
    layer=None,
  )
  present = [x is not None for x in inputs]
  read = sum(x.nbytes // len(x) for x in inputs[1:5] if x is not None)
  return pl.pallas_call(
    functools.partial(_kernel, formula=formula, num_slots=S, present=present),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(B, K // C, jnp.maximum(jnp.max(end_B - first_B), 1)),
      in_specs=[block for block, has in zip(blocks, present) if has],
      out_specs=row_spec(V),
      scratch_shapes=[pltpu.VMEM((C, Q, n), jnp.float32) for n in (1, 1, V)],
    ),
    out_shape=jax.ShapeDtypeStruct((B, K, Q, V), arrays.query.dtype),
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel', 'arbitrary')),
    cost_estimate=pl.CostEstimate(
      flops=2 * B * K * Q * S * (H + V),
      transcendentals=B * K * Q * S,
      bytes_accessed=read + B * K * Q * (H + V) * arrays.query.dtype.itemsize,
    ),
    interpret=platform() == 'cpu',
    name='attention_to_cache',
  )(arrays.layer[None], first_B, end_B, *(x for x in inputs if x is not None))


@_attend.defjvp
def _attend_jvp(formula: Formula, primals: tuple[_Arrays], tangents: tuple[_Arrays]) -> tuple[jax.Array, jax.Array]:
  return _attend(formula, *primals), jax.jvp(functools.partial(_attend_plainly, formula), primals, tangents)[1]


def _attend_plainly(formula: Formula, arrays: _Arrays) -> jax.Array:
  """Returns the result of `_attend`, computed in plain JAX from all logits at once."""
  (B, K, Q, _), T, dtype = arrays.query.shape, arrays.seen.shape[1], arrays.query.dtype

  def vectors(entries: jax.Array, scale: jax.Array | None) -> jax.Array:
    own = entries[arrays.layer]
    return (own if scale is None else own * scale[arrays.layer][..., None]).astype(dtype)

  key_BKSH = vectors(arrays.key, arrays.key_scale)
  value_BKSV = key_BKSH if arrays.value is None else vectors(arrays.value, arrays.value_scale)
  products = jnp.einsum('BKQH,BKSH->BKQS', arrays.query, key_BKSH, preferred_element_type=jnp.float32)
  logits_BKQS = formula.to_logits(products)
  if arrays.bias is not None:
    logits_BKQS += arrays.bias
  logits_BKQS = jnp.where(jnp.tile(arrays.seen, (1, Q // T, 1))[:, None], logits_BKQS, MASKED)
  sums = zero_sums((B, K, 1, Q, value_BKSV.shape[3]), jnp.dtype(jnp.float32))
  sums = add_keys(sums, logits_BKQS[:, :, None], value_BKSV)
  out_BK1QV, _ = finish_sums(sums, arrays.sinks[:, None, :, 0])
  return out_BK1QV[:, :, 0].astype(dtype)


def _has_slots_last(dims: int) -> bool:
  """Whether TPUs store a cache of vectors with `dims` dims in a layout whose last dimension is the slots."""
  return dims % LANES != 0


def _to_slots_last(x_LBKSH: jax.Array) -> jax.Array:
  return jnp.swapaxes(x_LBKSH, 3, 4) if _has_slots_last(x_LBKSH.shape[4]) else x_LBKSH


def _heads_at_once(num_heads: int, slot_bytes: int, queries: int, *, has_scales: bool) -> int:
  """Returns how many kv heads are computed at once: the largest divisor of K for which the chip has room.

  The chip needs room for 128 slots and the queries of these heads. If it has room for none of the allowed divisors,
  returns the smallest of them. A slot of one head has `slot_bytes`, and the queries of a kv head have `queries`
  entries. The chip stores the scales of a page in tiles of 8 heads. So if entries have scales, only K and multiples of
  8 are allowed.
  """
  most = min(_MOST_BYTES // (LANES * slot_bytes), _MOST_QUERIES // queries)
  parts = [
    n for n in range(1, num_heads + 1) if num_heads % n == 0 and (not has_scales or n % 8 == 0 or n == num_heads)
  ]
  return max((n for n in parts if n <= most), default=parts[0])


def _page_len(num_slots: int, slot_bytes: int) -> int:
  """Returns the number of slots that are read at once: all of them, or a multiple of 128."""
  most = min(_MOST_SLOTS, max(LANES, _MOST_BYTES // slot_bytes // LANES * LANES))
  return min(num_slots, most)


def _kernel(
  layer: Any, first: Any, end: Any, *refs: Any, formula: Formula, num_slots: int, present: list[bool]
) -> None:
  """Adds a page to the sums of the online softmax of a row; the last page writes the result."""
  given = iter(refs)
  of = _Arrays(*(next(given) if has else None for has in present))
  out_CQV, top_CQ1, total_CQ1, sum_CQV = given
  b, i = pl.program_id(0), pl.program_id(2)
  (C, Q, H), V, (T, P) = of.query.shape, out_CQV.shape[-1], of.seen.shape
  value_scale = of.key_scale if of.value is None else of.value_scale

  @pl.when(i == 0)
  def _begin() -> None:  # A sink is a key of value 0.
    top_CQ1[...] = of.sinks[...]
    total_CQ1[...] = jnp.where(of.sinks[...] > MASKED, 1.0, 0.0)
    sum_CQV[...] = jnp.zeros_like(sum_CQV)

  @pl.when(first[b] + i < end[b])
  def _add() -> None:
    seen = _repeat(of.seen[...], 1 if T == 1 else Q // T) != 0
    for c in range(C):
      query_QH = of.query[c]
      key = of.key[c].astype(query_QH.dtype)
      value = key if of.value is None else of.value[c].astype(query_QH.dtype)
      if num_slots % P:  # After the end of the cache, memory may hold anything, even values that are not finite.
        slot = (first[b] + i) * P + jax.lax.broadcasted_iota(jnp.int32, value.shape, _has_slots_last(V))
        value = jnp.where(slot < num_slots, value, jnp.zeros_like(value))
      products_QP = _product(query_QH, key, int(not _has_slots_last(H)))
      logits_QP = formula.to_logits(products_QP if of.key_scale is None else products_QP * of.key_scale[c : c + 1])
      if of.bias is not None:
        logits_QP += of.bias[c]
      logits_QP = jnp.where(seen, logits_QP, MASKED)
      top_Q1 = jnp.maximum(top_CQ1[c], jnp.max(logits_QP, axis=1, keepdims=True))
      weights_QP = jnp.where(seen, jnp.exp(logits_QP - top_Q1), 0.0)
      kept_Q1 = jnp.exp(top_CQ1[c] - top_Q1)
      total_CQ1[c] = kept_Q1 * total_CQ1[c] + jnp.sum(weights_QP, axis=1, keepdims=True)
      if value_scale is not None:
        weights_QP = jnp.where(seen, weights_QP * value_scale[c : c + 1], 0.0)
      context_QV = _product(weights_QP.astype(value.dtype), value, int(_has_slots_last(V)))
      sum_CQV[c] = kept_Q1 * sum_CQV[c] + context_QV
      top_CQ1[c] = top_Q1

  @pl.when(i == pl.num_programs(2) - 1)
  def _end() -> None:
    total = total_CQ1[...]
    out_CQV[...] = (sum_CQV[...] / jnp.where(total > 0, total, 1.0)).astype(out_CQV.dtype)


def _repeat(x_TP: jax.Array, count: int) -> jax.Array:
  return x_TP if count == 1 else jnp.concatenate([x_TP] * count)


def _product(left: jax.Array, right: jax.Array, summed: int) -> jax.Array:
  """Returns the product in float32; `summed` is the dimension of `right` that is summed over."""
  exact = jax.lax.Precision.HIGHEST if right.dtype == jnp.float32 else None
  dims = (((1,), (summed,)), ((), ()))
  return jax.lax.dot_general(left, right, dims, precision=exact, preferred_element_type=jnp.float32)
