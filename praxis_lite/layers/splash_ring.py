"""Ring attention with the kernels of splash attention; see `ring.py` and `splash.py`.

In each step of the ring, the kernels get the queries of the device and a contiguous run of keys. It depends on the
device which blocks of queries and keys meet, so each device computes its own tables of these blocks. The position of a
query is relative to the first key of the run. The results for different runs of keys are joined by means of lse, the
logarithms of the softmax's denominators:

    lse = log(exp lse_1 + exp lse_2)        out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

B batch, T length, L length of the queries on one device, S length of a run of keys, N heads, K kv heads, H dims per
head; I, J numbers of blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.jax_internals.splash import BlockTable, SplashArrays, SplashCall
from praxis_lite.layers.attention_spec import Heads, Integers, Residuals
from praxis_lite.layers.blocks import MASKED, Formula, sum_sink_gradients
from praxis_lite.layers.blockwise import tag_context
from praxis_lite.layers.masks import BlockRanges
from praxis_lite.layers.ring import go_round
from praxis_lite.layers.sequence_parts import SequencePlan, heads_to_runs, join_runs, to_runs
from praxis_lite.layers.splash import NO_KEY, MaskParts, backward_rows, forward_rows, sort_parts
from praxis_lite.sharding.mesh import platform

_NEVER = 2**30  # Stands for the index of padding where the smallest index of a block is computed.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def splash_ring_attention(plan: SequencePlan, formula: Formula, heads: Heads, integers: Integers) -> jax.Array:
  """Returns the results of attention, [B, T, N, H], padded and split like the queries; see `ring_attention`."""
  return _forward(plan, formula, heads, integers)[0]


def _forward(plan: SequencePlan, formula: Formula, heads: Heads, integers: Integers) -> tuple[jax.Array, Residuals]:
  def local(heads: Heads, integers: Integers) -> tuple[jax.Array, jax.Array]:
    queries, keys = _cut(plan, formula, heads, integers)

    def add(sums: _Results, dkv: None, keys: _Keys, offset: jax.Array) -> tuple[_Results, None]:
      for call, arrays in queries.meet(keys, offset):
        sums = sums.join(*forward_rows(call, arrays))
      return sums, dkv

    shape = queries.x_BNLH.shape
    zeros = _Results(jnp.zeros(shape, jnp.float32), jnp.full(shape[:3], MASKED, jnp.float32))
    sums, _ = go_round(plan, keys, zeros, None, add)
    if heads.sinks is not None:
      sums = sums.join(zeros.out, jnp.broadcast_to(heads.sinks[:, None].astype(jnp.float32), shape[:3]))
    out_BNLH, lse_BNL = sums
    out_BLNH = jnp.swapaxes(out_BNLH, 1, 2).astype(heads.query.dtype)
    return join_runs(plan, out_BLNH, plan.query_len), jnp.moveaxis(lse_BNL, 2, 0)

  return tag_context(plan.map_parts(local, heads, integers)(heads, integers), heads, integers)


def _backward(plan: SequencePlan, formula: Formula, residuals: Residuals, do: jax.Array) -> tuple[Heads, None]:
  def local(heads: Heads, integers: Integers, out: jax.Array, lse: jax.Array, do: jax.Array) -> Heads:
    queries, keys = _cut(plan, formula, heads, integers)
    both = to_runs(plan, jnp.concatenate([out, do], axis=2), plan.query_len)
    out_BNLH, do_BNLH = jnp.split(jnp.swapaxes(both, 1, 2), 2, axis=1)
    results = out_BNLH, jnp.moveaxis(lse, 0, 2), do_BNLH

    def add(dq: jax.Array, dkv: jax.Array, keys: _Keys, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
      of_runs = []
      for call, arrays in queries.meet(keys, offset):
        of_queries, *of_keys = backward_rows(call, arrays, *results)
        dq += of_queries
        of_runs.append(jnp.stack(of_keys))
      return dq, dkv + jnp.concatenate(of_runs, axis=3)

    zero_dq, zero_dkv = (jnp.zeros(x.shape, jnp.float32) for x in (queries.x_BNLH, keys.kv))
    dq_BNLH, dkv = go_round(plan, keys, zero_dq, zero_dkv, add)
    dk, dv = (jnp.swapaxes(x, 1, 2).astype(heads.key.dtype) for x in dkv)
    dk, dv = jnp.split(join_runs(plan, jnp.concatenate([dk, dv], axis=2), plan.key_len), 2, axis=2)
    dq = jnp.swapaxes(dq_BNLH * formula.scale, 1, 2).astype(heads.query.dtype)
    dsinks = sum_sink_gradients(heads.sinks, *results, (plan.split.axis, *plan.split.batch_axes))
    return Heads(join_runs(plan, dq, plan.query_len), dk, dv, sinks=dsinks)

  heads, integers, out, lse = residuals
  return plan.map_parts(local, heads, integers, backward=True)(heads, integers, out, lse, do), None


splash_ring_attention.defvjp(_forward, _backward)


# ---------------------------------------------------------------- what a device has


class _Results(NamedTuple):
  """The result of attention to some of the keys, float32 [B, N, L, H]; and lse, see the top of this file, [B, N, L]."""

  out: jax.Array
  lse: jax.Array

  def join(self, out: jax.Array, lse: jax.Array) -> _Results:
    """Returns the result of attention to these keys and others together.

    `out` and `lse` belong to the other keys; `out` may be arbitrary for a query that attends to none of them.
    """
    has_key = lse > MASKED / 2
    others = _Results(jnp.where(has_key[..., None], out, 0), jnp.where(has_key, lse, MASKED))
    total = jnp.logaddexp(self.lse, others.lse)
    parts = (results.out * jnp.exp(results.lse - total)[..., None] for results in (self, others))
    return _Results(sum(parts, start=jnp.zeros(())), total)


class _Keys(NamedTuple):
  """The keys and values of a device, [2, B, K, R S, H], where R is the number of its runs; and the ids of the keys.

  The ids are None if the mask needs none.
  """

  kv: jax.Array
  ids_BS: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Queries:
  """The queries of a device, and the arrays of the mask that belong to them."""

  plan: SequencePlan
  parts: MaskParts
  soft_cap: float | None
  x_BNLH: jax.Array
  pos: jax.Array  # [L] or [B, L]; compared with the indices of keys.
  ids_BL: jax.Array | None

  def meet(self, keys: _Keys, offset: jax.Array) -> Iterator[tuple[SplashCall, SplashArrays]]:
    """Yields the kernels' arguments for the keys of the device `offset` places before this one, once for each run."""
    plan = self.plan
    sizes = plan.block_len(plan.query_len), plan.block_len(plan.key_len)
    query_IQ = jnp.asarray(plan.indices(plan.query_len, plan.device))
    runs = jnp.asarray(plan.indices(plan.key_len, (plan.device - offset) % plan.devices))
    runs = runs.reshape(2 if plan.zigzag else 1, -1, sizes[1])
    mask_fn, num_runs = self.parts.compare(), len(runs)
    of_runs = jnp.split(keys.kv, num_runs, axis=3)
    ids = [None] * num_runs if keys.ids_BS is None else jnp.split(keys.ids_BS, num_runs, axis=1)
    pairs = plan.mean_pairs(self.parts.offsets) / num_runs
    for key_JS, (key, value), ids_BS in zip(runs, of_runs, ids):
      tables = _tables(self.parts, query_IQ, key_JS)
      call = SplashCall(tables, pairs, sizes, mask_fn, self.soft_cap, interpret=platform() == 'cpu')
      pos = None if mask_fn is None else self.pos - key_JS[0, 0]
      pair = None if self.ids_BL is None or ids_BS is None else (self.ids_BL, ids_BS)
      yield call, SplashArrays(self.x_BNLH, key, value, pos, pair)


def _cut(plan: SequencePlan, formula: Formula, heads: Heads, integers: Integers) -> tuple[_Queries, _Keys]:
  """Returns the queries and keys of this device after the swap of halves; see `sequence_parts.py`."""
  parts = sort_parts(integers.mask)
  assert isinstance(parts, MaskParts)  # `mask_obstacle` has checked it.
  query, key, value = (jnp.swapaxes(x, 1, 2) for x in heads_to_runs(plan, heads))
  lengths = plan.query_len, plan.key_len
  query_index, key_index = (jnp.asarray(plan.indices(length, plan.device)).reshape(-1) for length in lengths)
  ids_BL: jax.Array | None = None
  ids_BS: jax.Array | None = None
  if parts.segments or parts.paddings or key_index.size * plan.devices != plan.key_len:
    ids = parts.ids(heads.query.shape[1], heads.key.shape[1])
    ids_BL, ids_BS = (
      jnp.broadcast_to(to_runs(plan, x, length, edge=True), (len(query), size))
      for x, length, size in zip(ids, lengths, (query_index.size, key_index.size))
    )
    ids_BS = jnp.where(key_index < 0, NO_KEY, ids_BS)
  pos = parts.positions(query_index, plan.key_len)
  scaled = query * jnp.asarray(formula.scale, query.dtype)
  return _Queries(plan, parts, formula.soft_cap, scaled, pos, ids_BL), _Keys(jnp.stack([key, value]), ids_BS)


def _tables(parts: MaskParts, query_IQ: jax.Array, key_JS: jax.Array) -> tuple[BlockTable, BlockTable]:
  """Returns two tables of blocks that meet, by block of queries and by block of keys.

  Unused entries repeat the last used one, so that the kernel fetches nothing for them.
  """
  low_I, low_J = (jnp.where(index < 0, _NEVER, index).min(axis=1) for index in (query_IQ, key_JS))
  high_I, high_J = query_IQ.max(axis=1), key_JS.max(axis=1)
  some_IJ = parts.offsets.some_allowed(BlockRanges(low_I[:, None], high_I[:, None], low_J, high_J)).by_index
  meet_IJ = (high_I >= 0)[:, None] & (high_J >= 0)
  meet_IJ = meet_IJ if some_IJ is None else meet_IJ & some_IJ
  at_J, at_I1 = jnp.arange(len(key_JS), dtype=jnp.int32), jnp.arange(len(query_IQ), dtype=jnp.int32)[:, None]
  by_query, by_key = (jax.lax.cummax(jnp.where(meet_IJ, at, 0), axis) for at, axis in ((at_J, 1), (at_I1, 0)))
  used = meet_IJ.astype(jnp.int32)[None]
  return BlockTable(by_query[None], used), BlockTable(by_key[None], used)
