"""Attention of one token to the slots of a cache on TPUs, by a kernel that reads the pages with tokens once.

The kernel reads the cache in place, also from a stack of layers, and with the slots in any order and with gaps. The
seen slots are an array, so any mask can be used. For each row, it reads the pages from the first seen slot to the last.
(JAX's own kernels for pages support neither gaps nor sinks, and the one that supports windows needs keys and values in
one array, so a cache would be copied for each token.)

The kernel has no backward pass. Its derivative is computed by plain attention, which keeps the logits of one token for
all rows.

L layers of a loop, B batch, S slots, P slots of a page, N heads, K kv heads, G = N / K, H dims per head.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from praxis_lite.layers.blocks import MASKED, Formula, add_keys, finish_sums, group_sinks, zero_sums
from praxis_lite.layers.blockwise import RowSplit
from praxis_lite.sharding.mesh import platform
from praxis_lite.sharding.specs import axes_to_entry

LANES = 128
_MOST_SLOTS, _MOST_BYTES = 1024, 2**20  # Of a page, and of its keys in all heads; four such arrays are on chip at once.


def attend_by_kernel(
  query_BNH: jax.Array,
  key_LBKSH: jax.Array,
  value_LBKSH: jax.Array,
  seen_BS: jax.Array,
  layer: jax.Array | int = 0,
  *,
  formula: Formula,
  sinks: jax.Array | None = None,
  split: RowSplit | None = None,
) -> jax.Array:
  """Returns softmax(scale * query . key) . value of one token of each row, [B, N, H], in the dtype of the queries.

  On a CPU, the kernel is interpreted.

  Args:
    query_BNH: queries; head n uses kv head n // (N / K).
    key_LBKSH, value_LBKSH: the stacked caches of L layers; for a single one, L = 1.
    seen_BS: bool, the slots that the token of a row attends to. A row without any has the result 0.
    layer: int32, the layer whose cache is read.
    formula: scale and soft cap.
    sinks: [N], see `dot_product_attention`.
    split: how the ambient mesh splits rows and kv heads, evenly; None if each device has its part already.
  """
  fill = jnp.full(query_BNH.shape[1], MASKED, jnp.float32)
  sinks = fill if sinks is None else sinks.astype(jnp.float32)
  local = functools.partial(_attend, formula)
  if split is not None:
    rows, head = axes_to_entry(split.batch_axes), axes_to_entry(split.head_axes)
    cache, queries = PartitionSpec(None, rows, head), PartitionSpec(rows, head)
    specs = queries, cache, cache, PartitionSpec(rows), PartitionSpec(), PartitionSpec(head)
    local = jax.shard_map(local, in_specs=specs, out_specs=queries, check_vma=False)
  return local(query_BNH, key_LBKSH, value_LBKSH, seen_BS, jnp.asarray(layer, jnp.int32), sinks)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(
  formula: Formula,
  query_BNH: jax.Array,
  key_LBKSH: jax.Array,
  value_LBKSH: jax.Array,
  seen_BS: jax.Array,
  layer: jax.Array,
  sinks_N: jax.Array,
) -> jax.Array:
  (B, N, H), (K, S), V = query_BNH.shape, key_LBKSH.shape[2:4], value_LBKSH.shape[4]
  G, P = N // K, _page_len(S, K * max(H, V) * key_LBKSH.dtype.itemsize)
  pages = -(-S // P)
  seen_BS = jnp.pad(seen_BS, [(0, 0), (0, pages * P - S)])
  has_BI = jnp.any(seen_BS.reshape(B, pages, P), axis=2)
  first_B = jnp.argmax(has_BI, axis=1).astype(jnp.int32)
  end_B = jnp.where(jnp.any(has_BI, axis=1), pages - jnp.argmax(has_BI[:, ::-1], axis=1), first_B).astype(jnp.int32)

  def page_of(b: Any, i: Any, first: Any, end: Any) -> Any:  # Stays at the last page, so nothing more is fetched.
    return jnp.maximum(jnp.minimum(first[b] + i, end[b] - 1), 0)

  def vectors(b: Any, i: Any, layer: Any, first: Any, end: Any) -> Any:
    return layer[0], b, 0, page_of(b, i, first, end), 0

  def row(b: Any, i: Any, *_: Any) -> Any:
    return b, 0, 0, 0

  out_BKGV = pl.pallas_call(
    functools.partial(_kernel, formula=formula, num_slots=S),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(B, pages),
      in_specs=[
        pl.BlockSpec((None, K, G, H), row),
        pl.BlockSpec((None, None, K, P, H), vectors),
        pl.BlockSpec((None, None, K, P, V), vectors),
        pl.BlockSpec((None, 1, P), lambda b, i, layer, first, end: (b, 0, page_of(b, i, first, end))),
        pl.BlockSpec((K, G, 1), lambda b, i, *_: (0, 0, 0)),
      ],
      out_specs=pl.BlockSpec((None, K, G, V), row),
      scratch_shapes=[pltpu.VMEM((K, G, n), jnp.float32) for n in (1, 1, V)],
    ),
    out_shape=jax.ShapeDtypeStruct((B, K, G, V), query_BNH.dtype),
    cost_estimate=pl.CostEstimate(
      flops=2 * B * N * S * (H + V),
      transcendentals=B * N * S,
      bytes_accessed=B * (K * S * (H + V) * key_LBKSH.dtype.itemsize + N * (H + V) * query_BNH.dtype.itemsize),
    ),
    interpret=platform() == 'cpu',
    name='attention_to_cache',
  )(
    layer[None],
    first_B,
    end_B,
    query_BNH.reshape(B, K, G, H),
    key_LBKSH,
    value_LBKSH,
    seen_BS[:, None].astype(jnp.int32),
    sinks_N.reshape(K, G, 1),
  )
  return out_BKGV.reshape(B, N, V)


@_attend.defjvp
def _attend_jvp(
  formula: Formula, primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
  _, tangent_BNV = jax.jvp(functools.partial(_attend_plainly, formula), primals, tangents)
  return _attend(formula, *primals), tangent_BNV


def _attend_plainly(
  formula: Formula,
  query_BNH: jax.Array,
  key_LBKSH: jax.Array,
  value_LBKSH: jax.Array,
  seen_BS: jax.Array,
  layer: jax.Array,
  sinks_N: jax.Array,
) -> jax.Array:
  """Returns what the kernel returns, with all logits at once."""
  (B, N, H), dtype = query_BNH.shape, query_BNH.dtype
  key_BKSH, value_BKSV = key_LBKSH[layer].astype(dtype), value_LBKSH[layer].astype(dtype)
  K, V = key_BKSH.shape[1], value_BKSV.shape[3]
  query_BKGH = query_BNH.reshape(B, K, N // K, H)
  logits_BKGS = formula.scale * jnp.einsum('BKGH,BKSH->BKGS', query_BKGH, key_BKSH, preferred_element_type=jnp.float32)
  if formula.soft_cap is not None:
    logits_BKGS = formula.soft_cap * jnp.tanh(logits_BKGS / formula.soft_cap)
  logits_BKG1S = jnp.where(seen_BS[:, None, None], logits_BKGS, MASKED)[:, :, :, None]
  sums = add_keys(zero_sums((B, K, N // K, 1, V), jnp.dtype(jnp.float32)), logits_BKG1S, value_BKSV)
  out_BKG1V, _ = finish_sums(sums, group_sinks(sinks_N, K))
  return out_BKG1V.reshape(B, N, V).astype(dtype)


def _page_len(num_slots: int, slot_bytes: int) -> int:
  """Returns the number of slots that are read at once: all of them, or a multiple of 128."""
  most = min(_MOST_SLOTS, max(LANES, _MOST_BYTES // slot_bytes // LANES * LANES))
  return min(num_slots, most)


def _kernel(
  layer: Any,
  first: Any,
  end: Any,
  query_KGH: Any,
  key_KPH: Any,
  value_KPV: Any,
  seen_1P: Any,
  sinks_KG1: Any,
  out_KGV: Any,
  top_KG1: Any,
  total_KG1: Any,
  sum_KGV: Any,
  *,
  formula: Formula,
  num_slots: int,
) -> None:
  """Adds a page to the sums of the online softmax of a row; the last page writes the result."""
  b, i = pl.program_id(0), pl.program_id(1)
  K, P, _ = key_KPH.shape

  @pl.when(i == 0)
  def _begin() -> None:  # A sink counts as a key with the value 0.
    top_KG1[...] = sinks_KG1[...]
    total_KG1[...] = jnp.where(sinks_KG1[...] > MASKED, 1.0, 0.0)
    sum_KGV[...] = jnp.zeros_like(sum_KGV)

  @pl.when(first[b] + i < end[b])
  def _add() -> None:
    seen = seen_1P[...] != 0
    slot_P1 = (first[b] + i) * P + jax.lax.broadcasted_iota(jnp.int32, (P, 1), 0)
    for k in range(K):
      query_GH = query_KGH[k]
      key_PH, value_PV = key_KPH[k].astype(query_GH.dtype), value_KPV[k].astype(query_GH.dtype)
      if num_slots % P:  # Beyond the end of the cache, the page may hold anything, even NaN.
        value_PV = jnp.where(slot_P1 < num_slots, value_PV, jnp.zeros_like(value_PV))
      logits_GP = formula.scale * _product(query_GH, key_PH, 1)
      if formula.soft_cap is not None:
        logits_GP = formula.soft_cap * jnp.tanh(logits_GP / formula.soft_cap)
      logits_GP = jnp.where(seen, logits_GP, MASKED)
      top_G1 = jnp.maximum(top_KG1[k], jnp.max(logits_GP, axis=1, keepdims=True))
      weights_GP = jnp.where(seen, jnp.exp(logits_GP - top_G1), 0.0)
      kept_G1 = jnp.exp(top_KG1[k] - top_G1)
      total_KG1[k] = kept_G1 * total_KG1[k] + jnp.sum(weights_GP, axis=1, keepdims=True)
      sum_KGV[k] = kept_G1 * sum_KGV[k] + _product(weights_GP.astype(value_PV.dtype), value_PV, 0)
      top_KG1[k] = top_G1

  @pl.when(i == pl.num_programs(1) - 1)
  def _end() -> None:
    total = total_KG1[...]
    out_KGV[...] = (sum_KGV[...] / jnp.where(total > 0, total, 1.0)).astype(out_KGV.dtype)


def _product(left: jax.Array, right: jax.Array, summed: int) -> jax.Array:
  """Returns the product in float32; `summed` is the dimension of `right` that is summed over."""
  exact = jax.lax.Precision.HIGHEST if right.dtype == jnp.float32 else None
  dims = (((1,), (summed,)), ((), ()))
  return jax.lax.dot_general(left, right, dims, precision=exact, preferred_element_type=jnp.float32)
