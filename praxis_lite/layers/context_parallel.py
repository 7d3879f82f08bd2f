"""Context parallelism: attention of sequences that are split over a mesh axis.

There are two methods. Both run in `jax.shard_map`, and need no more memory than blockwise attention, or splash
attention on TPUs:

    ring         each device keeps its queries, and blocks of keys and values are sent around a ring of devices, by one
                 collective-permute in each step (Liu et al., 2023). The backward pass sends them again, with their
                 gradients.
    all_to_all   an all-to-all gives each device the whole sequence for some of the heads, and another one returns the
                 results (Jacobs et al., 2023)

`sequence_parts.py` decides which part of a sequence a device has. If a sliding window reaches fewer devices than there
are, the ring stops early. Lengths, batches and heads that do not divide evenly are padded inside.

B batch, T length of the queries, S length of the keys, L length on one device, P devices of the axis, N heads, K kv
heads, H dims per head; for blocks see `blocks.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.layers.attention_spec import (
  DEFAULT_SPEC,
  AttentionSpec,
  Heads,
  Integers,
  LogitBias,
  ProbabilityDropout,
  sort_arguments,
)
from praxis_lite.layers.blocks import Formula
from praxis_lite.layers.blockwise import attend_in_blocks, largest_block
from praxis_lite.layers.masks import AttentionMask
from praxis_lite.layers.ring import ring_attention
from praxis_lite.layers.sequence_parts import SequencePlan, SequenceSplit, multiple_of, pad_len
from praxis_lite.layers.splash import LANES, attend_by_splash, largest_splash_block
from praxis_lite.layers.splash_ring import splash_ring_attention
from praxis_lite.sharding.padding import pad_to, slice_to


def context_parallel_attention(
  query_BTNH: jax.Array,
  key_BSKH: jax.Array,
  value_BSKH: jax.Array,
  mask: AttentionMask | None = None,
  *,
  split: SequenceSplit,
  spec: AttentionSpec = DEFAULT_SPEC,
  bias: LogitBias | None = None,
  dropout: ProbabilityDropout | None = None,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Returns the result of `blockwise_attention`, [B, T, N, H], for sequences that are split over the ambient mesh.

  Args:
    split: how the arrays are split. Sinks, and the last dimension of each parameter of a bias, are split like heads.
    Other arguments: the same as for `blockwise_attention`.
  """
  mesh = jax.sharding.get_abstract_mesh()
  formula, heads, integers = sort_arguments((query_BTNH, key_BSKH, value_BSKH), mask, bias, dropout, spec, sinks)
  T, S = query_BTNH.shape[1], key_BSKH.shape[1]
  head_parts = math.prod(mesh.shape[a] for a in split.head_axes)
  if split.method == 'all_to_all':
    head_parts *= mesh.shape[split.axis]
  heads, integers = _pad_to_divide(split, heads, integers, head_parts)
  rows = heads.query.shape[0] * heads.query.shape[2]
  rows //= math.prod(mesh.shape[a] for a in (*split.batch_axes, *split.head_axes))
  plan = SequencePlan.make(split, T, S, integers.mask, spec.block_size or largest_block(integers.mask, rows))
  attend: Any = ring_attention if split.method == 'ring' else functools.partial(_attend_all_to_all, spec)
  if split.method == 'ring' and spec.implementation == 'splash':
    block_size = largest_splash_block(spec.block_size, query_BTNH, formula.soft_cap)
    plan = dataclasses.replace(plan, block_size=block_size, lanes=LANES)
    attend = splash_ring_attention
  return slice_to(attend(plan, formula, heads, integers), query_BTNH.shape)


# ---------------------------------------------------------------- dimensions that do not divide


def _pad_to_divide(split: SequenceSplit, heads: Heads, integers: Integers, head_parts: int) -> tuple[Heads, Integers]:
  """Pads heads so that each part has whole groups, and pads batch and length so that they divide evenly."""
  B, _, N, _ = heads.query.shape
  K = heads.key.shape[2]
  repeats, kv_heads = aligned_heads(N, K, head_parts)
  all_heads = kv_heads * (N // (K * repeats))
  sizes = jax.sharding.get_abstract_mesh().shape
  rows = multiple_of(B, math.prod(sizes[a] for a in split.batch_axes))

  def whole_parts(length: int) -> int:
    return multiple_of(length, sizes[split.axis])

  def pad(x: jax.Array, *shape: int) -> jax.Array:
    """Pads [B or 1, ...]: dimension 0 to the padded batch size unless it is 1, and the next dimensions to `shape`."""
    B_or_1 = 1 if x.shape[0] == 1 < B else rows
    return pad_to(x, (B_or_1, *shape, *x.shape[1 + len(shape) :])[: x.ndim])

  def pad_keys(x: jax.Array) -> jax.Array:
    return pad(jnp.repeat(x, repeats, axis=2) if repeats > 1 else x, whole_parts(x.shape[1]), kv_heads)

  def pad_queries(x: jax.Array) -> jax.Array:
    return pad(x, whole_parts(x.shape[1]), all_heads)

  def pad_mask(x: jax.Array) -> jax.Array:
    return pad(x, whole_parts(x.shape[1]))

  padded = Heads(
    pad_queries(heads.query),
    pad_keys(heads.key),
    pad_keys(heads.value),
    *jax.tree.map(lambda p: pad_to(p, (*p.shape[:-1], all_heads)), heads[3:]),
  )
  mask = integers.mask.map_arrays(query=pad_mask, key=pad_mask, row=pad)
  return padded, Integers(mask, *jax.tree.map(pad_queries, integers[1:]))


def aligned_heads(num_heads: int, num_kv_heads: int, parts: int) -> tuple[int, int]:
  """Returns (repeats of each kv head, number of kv heads with repeats and padding), so that `parts` divides the latter.

  Query heads stay with their kv head. So one padded kv head adds a whole group of query heads; if kv heads are
  repeated, groups are smaller. The function chooses the result with the fewest query heads.
  """
  group = num_heads // num_kv_heads
  choices = [r for r in range(1, group + 1) if group % r == 0]
  repeats = min(choices, key=lambda r: (multiple_of(num_kv_heads * r, parts) * (group // r), r))
  return repeats, multiple_of(num_kv_heads * repeats, parts)


# ---------------------------------------------------------------- all-to-all


def _attend_all_to_all(
  spec: AttentionSpec, plan: SequencePlan, formula: Formula, heads: Heads, integers: Integers
) -> jax.Array:
  """Computes attention of whole sequences for some of the heads."""
  attend = functools.partial(attend_in_blocks, formula, plan.block_size, None)
  if spec.implementation == 'splash':
    attend = functools.partial(attend_by_splash, formula, spec.block_size, None)
  axis, (T, S) = plan.split.axis, (plan.query_len, plan.key_len)
  exchange = functools.partial(jax.lax.all_to_all, axis_name=axis, tiled=True)

  def local(heads: Heads, integers: Integers) -> jax.Array:
    B, L, N, H = heads.query.shape
    K = heads.key.shape[2]

    def gather_queries(x: jax.Array) -> jax.Array:
      return jax.lax.all_gather(x, axis, axis=1, tiled=True)[:, :T]

    def gather_keys(x: jax.Array) -> jax.Array:
      return jax.lax.all_gather(x, axis, axis=1, tiled=True)[:, :S]

    def slice_heads(x: jax.Array) -> jax.Array:
      return jax.lax.dynamic_slice_in_dim(x, plan.device * (N // plan.devices), N // plan.devices, axis=-1)

    grouped = heads.query.reshape(B, L, K, N // K * H)
    if heads.key.shape[1] == L:
      query, key, value = jnp.split(
        exchange(jnp.concatenate([grouped, heads.key, heads.value], axis=-1), split_axis=2, concat_axis=1),
        [N // K * H, (N // K + 1) * H],
        axis=-1,
      )
    else:
      query = exchange(grouped, split_axis=2, concat_axis=1)
      kv = exchange(jnp.concatenate([heads.key, heads.value], axis=-1), split_axis=2, concat_axis=1)
      key, value = jnp.split(kv, 2, axis=-1)
    seeds = integers.seeds_BTN
    out = attend(
      Heads(
        query.reshape(*query.shape[:2], -1, H)[:, :T], key[:, :S], value[:, :S], *jax.tree.map(slice_heads, heads[3:])
      ),
      Integers(
        integers.mask.map_arrays(query=gather_queries, key=gather_keys),
        jax.tree.map(gather_queries, integers.query_pos),
        jax.tree.map(gather_keys, integers.key_pos),
        None if seeds is None else exchange(seeds, split_axis=2, concat_axis=1)[:, :T],
      ),
    )
    return exchange(pad_len(out, L * plan.devices, 'constant'), split_axis=1, concat_axis=2)

  return plan.map_parts(local, heads, integers, keeps=False)(heads, integers)
