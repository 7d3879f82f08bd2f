"""Blockwise attention: memory linear in the length, forward and backward, in plain JAX.

No array has a query for one dimension and a key for another, but one block of each at a time: the backward pass keeps
the queries, keys, values, the output, and one number a query (Dao et al., 2022), and computes the blocks again. The
arithmetic is in `blocks.py`. Pairs of blocks that the mask empties are skipped: causal attention takes half of the
time, and a sliding window takes a time linear in the length.

B batch, T length of the queries, S length of the keys, N heads, K kv heads, H dims per head.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from praxis_lite.layers import blocks
from praxis_lite.layers.attention_spec import (
  DEFAULT_SPEC,
  AttentionSpec,
  Heads,
  Integers,
  LogitBias,
  ProbabilityDropout,
  argument_specs,
  sort_arguments,
)
from praxis_lite.layers.blocks import Formula
from praxis_lite.layers.masks import AttentionMask, split_offsets
from praxis_lite.layers.precision import sum_dtype, widen
from praxis_lite.sharding.specs import axes_to_entry

_LARGEST_BLOCK, _SMALLEST_BLOCK = 512, 128
_MOST_LOGITS = 2**25  # Of all rows and heads, for one pair of blocks: 128 MiB.


@dataclasses.dataclass(frozen=True)
class RowSplit:
  """Mesh axes that split the rows of a batch, and the heads, evenly; no other axes split anything.

  With it, each device skips the blocks that the segments of its own rows leave empty. Left to the compiler, a loop
  skips the same blocks on all devices, so it would have to wait for all rows.
  """

  batch_axes: tuple[str, ...] = ()
  head_axes: tuple[str, ...] = ()

  def map_rows(self, fn: Any, heads: Heads, integers: Integers, *, backward: bool) -> Any:
    """Returns the forward or backward pass mapped over the devices."""
    rows, head = axes_to_entry(self.batch_axes), axes_to_entry(self.head_axes)
    specs = argument_specs(heads, integers, rows, None, head)
    queries, lse = specs[0].query, PartitionSpec(None, rows, head)
    if backward:
      return jax.shard_map(fn, in_specs=(*specs, queries, lse, queries), out_specs=specs[0], check_vma=False)
    return jax.shard_map(fn, in_specs=specs, out_specs=(queries, lse), check_vma=False)


def blockwise_attention(
  query_BTNH: jax.Array,
  key_BSKH: jax.Array,
  value_BSKH: jax.Array,
  mask: AttentionMask | None = None,
  *,
  spec: AttentionSpec = DEFAULT_SPEC,
  bias: LogitBias | None = None,
  dropout: ProbabilityDropout | None = None,
  split: RowSplit | None = None,
) -> jax.Array:
  """Returns softmax(scale * query . key) . value per head, [B, T, N, H], in the dtype of the queries.

  It computes what `dot_product_attention` does, whose arguments these are; but a query with every key masked gets 0.

  Args:
    split: how the ambient mesh splits rows and heads; None leaves it to the compiler.
  """
  formula, heads, integers = sort_arguments((query_BTNH, key_BSKH, value_BSKH), mask, bias, dropout, spec)
  rows = query_BTNH.shape[0] * query_BTNH.shape[2] // _compiler_parts()
  size = spec.block_size or largest_block(integers.mask, rows)
  return attend_in_blocks(formula, size, split, heads, integers)


def largest_block(mask: AttentionMask, rows: int) -> int:
  """Returns the largest size of a block.

  Of a small window, blocks as large as usual would be mostly empty; of many rows, they would take much memory.

  Args:
    mask: the mask.
    rows: batch times heads on one device.
  """
  size, behind = _LARGEST_BLOCK, split_offsets(mask)[0].behind
  if behind is not None:
    size = min(size, max(_SMALLEST_BLOCK, -(-(behind + 1) // _SMALLEST_BLOCK) * _SMALLEST_BLOCK // 2))
  while size > _SMALLEST_BLOCK and rows * size * size > _MOST_LOGITS:
    size //= 2
  return size


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def attend_in_blocks(
  formula: Formula, block_size: int, split: RowSplit | None, heads: Heads, integers: Integers
) -> jax.Array:
  """Returns attention [B, T, N, H] in blocks of at most this size; its gradient is computed in blocks too."""
  return _forward(formula, block_size, split, heads, integers)[0]


_Residuals = tuple[Heads, Integers, jax.Array, jax.Array]


def _forward(
  formula: Formula, block_size: int, split: RowSplit | None, heads: Heads, integers: Integers
) -> tuple[jax.Array, _Residuals]:
  def local(heads: Heads, integers: Integers) -> tuple[jax.Array, jax.Array]:
    queries, keys, mask = _cut_blocks(block_size, heads, integers)
    pairs = blocks.needed_pairs(mask, queries, keys, all_rows=has_all_rows())
    sums = blocks.zero_sums(queries.x.shape, sum_dtype(*heads[:3]))
    sums = blocks.add_blocks(formula, mask, heads.bias, queries, keys, pairs, sums)
    out, lse = blocks.finish_sums(sums)
    return blocks.unblock_queries(out, heads.query.shape[1]).astype(heads.query.dtype), lse

  if split is not None:
    local = split.map_rows(local, heads, integers, backward=False)
  out_BTNH, lse = local(heads, integers)
  # Both are kept together, or the backward pass would compute both again.
  out_BTNH, lse = checkpoint_name(out_BTNH, 'context'), checkpoint_name(lse, 'context')
  return out_BTNH, (heads, integers, out_BTNH, lse)


def _backward(
  formula: Formula, block_size: int, split: RowSplit | None, residuals: _Residuals, do_BTNH: jax.Array
) -> tuple[Heads, None]:
  def local(heads: Heads, integers: Integers, out_BTNH: jax.Array, lse: jax.Array, do_BTNH: jax.Array) -> Heads:
    queries, keys, mask = _cut_blocks(block_size, heads, integers)
    pairs = blocks.needed_pairs(mask, queries, keys, all_rows=has_all_rows())
    delta_BTN = jnp.sum(widen(do_BTNH) * out_BTNH, axis=-1)
    K = heads.key.shape[2]
    do, delta = (blocks.query_blocks(x, queries.at, K).x for x in (do_BTNH, delta_BTN))
    gradients = blocks.add_gradients(
      formula,
      mask,
      heads.bias,
      queries,
      blocks.Results(lse, delta, do),
      keys,
      pairs,
      blocks.zero_gradients(queries, keys, heads.bias),
    )
    dbias = gradients.bias
    if split is not None and split.batch_axes:
      dbias = jax.tree.map(lambda d: jax.lax.psum(d, split.batch_axes), dbias)
    found = Heads(
      blocks.unblock_queries(gradients.q, heads.query.shape[1]),
      blocks.unblock_keys(gradients.k, heads.key.shape[1]),
      blocks.unblock_keys(gradients.v, heads.value.shape[1]),
      dbias,
    )
    return jax.tree.map(lambda g, x: g.astype(x.dtype), found, heads)

  heads, integers, out_BTNH, lse = residuals
  if split is not None:
    local = split.map_rows(local, heads, integers, backward=True)
  return local(heads, integers, out_BTNH, lse, do_BTNH), None


attend_in_blocks.defvjp(_forward, _backward)


def _cut_blocks(block_size: int, heads: Heads, integers: Integers) -> tuple[blocks.Queries, blocks.Keys, AttentionMask]:
  """Returns queries, keys, and the arrays of the mask in blocks."""
  query_index, key_index = (
    blocks.block_indices(x.shape[1], blocks.even_block_size(x.shape[1], block_size)) for x in (heads.query, heads.key)
  )
  K, pos, seeds = heads.key.shape[2], integers.query_pos, integers.seeds_BTN
  return (
    blocks.query_blocks(heads.query, query_index, K, pos_BT=pos, seeds_BTN=seeds),
    blocks.key_blocks(heads.key, heads.value, key_index, pos_BS=integers.key_pos),
    blocks.mask_blocks(integers.mask, query_index.shape[1], key_index.shape[1]),
  )


def has_all_rows() -> bool:
  """Whether no mesh axis may split the rows of a batch, so that a loop may depend on all of them at no cost."""
  return _compiler_parts() == 1


def _compiler_parts() -> int:
  """Returns the number of parts into which the compiler may split an array over the ambient mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  manual = jax.sharding.AxisType.Manual
  return math.prod(size for size, kind in zip(mesh.axis_sizes, mesh.axis_types) if kind != manual)
