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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from praxis_lite.layers import blocks
from praxis_lite.layers.blocks import Formula, OffsetBias
from praxis_lite.layers.masks import Visibility
from praxis_lite.layers.precision import sum_dtype, widened
from praxis_lite.partitioning.specs import axes_to_entry

_LARGEST_BLOCK, _SMALLEST_BLOCK = 512, 128
_MOST_LOGITS = 2**25  # Of all rows and heads, for one pair of blocks: 128 MiB.


@dataclasses.dataclass(frozen=True)
class LogitBias:
  """A bias on logits as a function of positions, which attention calls for each pair of blocks. A tree of arrays.

  Attributes:
    fn: the function.
    params: its first argument, a tree of arrays, which has gradients.
    query_pos: int32 [B, T] or [1, T]; None: the index in the row.
    key_pos: int32 [B, S] or [1, S]; both are None, or neither.
  """

  fn: OffsetBias
  params: Any
  query_pos: jax.Array | None = None
  key_pos: jax.Array | None = None

  def whole(self, query_len: int, key_len: int) -> jax.Array:
    """Returns the bias of all pairs, [B, N, T, S] or [1, N, T, S]."""
    query_pos = jnp.arange(query_len)[None] if self.query_pos is None else self.query_pos
    key_pos = jnp.arange(key_len)[None] if self.key_pos is None else self.key_pos
    return self.fn(self.params, query_pos, key_pos)


@dataclasses.dataclass(frozen=True)
class ProbabilityDropout:
  """Dropout on the probabilities of attention. A tree of arrays.

  Attributes:
    rate: share of the probabilities that becomes 0; the others are scaled by 1 / (1 - rate).
    seeds_BTN: uint32, a random number for each query and head; see `blocks.dropout_factors`.
  """

  rate: float
  seeds_BTN: jax.Array


jax.tree_util.register_dataclass(LogitBias, data_fields=['params', 'query_pos', 'key_pos'], meta_fields=['fn'])
jax.tree_util.register_dataclass(ProbabilityDropout, data_fields=['seeds_BTN'], meta_fields=['rate'])


class Heads(NamedTuple):
  """What attention has gradients of: queries [B, T, N, H], keys and values [B, S, K, H], and the bias's parameters."""

  query: jax.Array
  key: jax.Array
  value: jax.Array
  bias: Any = None


class Integers(NamedTuple):
  """What attention goes by and has no gradients of: the mask, positions of the bias, and seeds of dropout."""

  visible: Visibility
  query_pos: jax.Array | None = None
  key_pos: jax.Array | None = None
  seeds_BTN: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class RowSplit:
  """Mesh axes that split the rows of a batch, and the heads, which all divide; of all axes that split anything.

  With it, each device skips the blocks that the segments of its own rows leave empty. Left to the compiler, what a
  loop skips is the same on all devices, so it would have to wait for all rows.
  """

  batch_axes: tuple[str, ...] = ()
  head_axes: tuple[str, ...] = ()

  def mapped(self, fn: Any, arrays: tuple[Heads, Integers], more: Any, results: Any) -> Any:
    """`fn(*arrays, *more)` on each device, with these specs of `more` and of the results."""
    heads, integers = arrays
    B = heads.query.shape[0]
    specs = jax.tree.map(lambda x: self.of_rows(x, B), (heads._replace(bias=None), integers))
    biases = jax.tree.map(lambda x: PartitionSpec(*(None,) * (x.ndim - 1), self._heads), heads.bias)
    specs = specs[0]._replace(bias=biases), specs[1]
    results = specs[0] if results is None else results
    return jax.shard_map(fn, in_specs=(*specs, *more), out_specs=results, check_vma=False)

  def of_rows(self, x: jax.Array, batch_size: int) -> PartitionSpec:
    """Of [B, T, N, ...], or the first of these dimensions; [1, T, ...] is the same for all rows."""
    rows = axes_to_entry(self.batch_axes) if x.shape[0] == batch_size else None
    return PartitionSpec(*(rows, None, self._heads)[: x.ndim])

  @property
  def of_blocks(self) -> PartitionSpec:
    """Of [I, B, K, ...]."""
    return PartitionSpec(None, axes_to_entry(self.batch_axes), self._heads)

  @property
  def _heads(self) -> str | tuple[str, ...] | None:
    return axes_to_entry(self.head_axes)


def blockwise_attention(
  query_BTNH: jax.Array,
  key_BSKH: jax.Array,
  value_BSKH: jax.Array,
  *,
  visible: Visibility | None = None,
  bias: LogitBias | None = None,
  dropout: ProbabilityDropout | None = None,
  scale: float | None = None,
  logit_soft_cap: float | None = None,
  block_size: int | None = None,
  split: RowSplit | None = None,
) -> jax.Array:
  """Returns softmax(scale * query . key) . value per head, [B, T, N, H], in the dtype of the queries.

  It is what `dot_product_attention` computes, whose arguments these are; but a query with every key masked gets 0.

  Args:
    block_size: largest number of queries and of keys in a block; None: 512, and less for a small window or many rows.
    split: how the ambient mesh splits rows and heads; None leaves it to the compiler.
  """
  formula, heads, integers = described(query_BTNH, key_BSKH, value_BSKH, visible, bias, dropout, scale, logit_soft_cap)
  rows = query_BTNH.shape[0] * query_BTNH.shape[2] // _compiler_parts()
  size = block_size or largest_block(integers.visible, rows)
  return attend_in_blocks(formula, size, split, heads, integers)


def described(
  query_BTNH: jax.Array,
  key_BSKH: jax.Array,
  value_BSKH: jax.Array,
  visible: Visibility | None,
  bias: LogitBias | None,
  dropout: ProbabilityDropout | None,
  scale: float | None,
  logit_soft_cap: float | None,
) -> tuple[Formula, Heads, Integers]:
  """Arguments of attention, sorted into what is static, what has gradients and what has none."""
  formula = Formula(
    scale=query_BTNH.shape[-1] ** -0.5 if scale is None else scale,
    soft_cap=logit_soft_cap,
    bias=bias.fn if bias else None,
    dropout_rate=dropout.rate if dropout else 0.0,
  )
  heads = Heads(query_BTNH, key_BSKH, value_BSKH, bias.params if bias else None)
  pos = (bias.query_pos, bias.key_pos) if bias else (None, None)
  return formula, heads, Integers(visible or Visibility(), *pos, dropout.seeds_BTN if dropout else None)


def largest_block(visible: Visibility, rows: int) -> int:
  """Returns the largest size of a block.

  Of a small window, blocks as large as usual would be mostly empty; of many rows, they would take much memory.

  Args:
    visible: the mask.
    rows: batch times heads on one device.
  """
  size = _LARGEST_BLOCK
  if visible.window is not None:
    size = min(size, max(_SMALLEST_BLOCK, -(-visible.window // _SMALLEST_BLOCK) * _SMALLEST_BLOCK // 2))
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
    queries, keys = _in_blocks(block_size, heads, integers)
    pairs = blocks.needed_pairs(integers.visible, queries, keys, by_segments=rows_are_at_hand())
    sums = blocks.no_sums(queries.x.shape, sum_dtype(*heads[:3]))
    sums = blocks.add_blocks(formula, integers.visible, heads.bias, queries, keys, pairs, sums)
    out, lse = blocks.normalized(sums)
    return blocks.of_queries(out, heads.query.shape[1]).astype(heads.query.dtype), lse

  if split is not None:
    results = split.of_rows(heads.query, heads.query.shape[0]), split.of_blocks
    local = split.mapped(local, (heads, integers), (), results)
  out_BTNH, lse = local(heads, integers)
  # Both are kept together, or the backward pass would compute both again.
  out_BTNH, lse = checkpoint_name(out_BTNH, 'context'), checkpoint_name(lse, 'context')
  return out_BTNH, (heads, integers, out_BTNH, lse)


def _backward(
  formula: Formula, block_size: int, split: RowSplit | None, residuals: _Residuals, do_BTNH: jax.Array
) -> tuple[Heads, None]:
  def local(heads: Heads, integers: Integers, out_BTNH: jax.Array, lse: jax.Array, do_BTNH: jax.Array) -> Heads:
    queries, keys = _in_blocks(block_size, heads, integers)
    pairs = blocks.needed_pairs(integers.visible, queries, keys, by_segments=rows_are_at_hand())
    delta_BTN = jnp.sum(widened(do_BTNH) * out_BTNH, axis=-1)
    K = heads.key.shape[2]
    do, delta = (blocks.query_blocks(x, queries.at, K).x for x in (do_BTNH, delta_BTN))
    gradients = blocks.add_gradients(
      formula,
      integers.visible,
      heads.bias,
      queries,
      blocks.Results(lse, delta, do),
      keys,
      pairs,
      blocks.no_gradients(queries, keys, heads.bias),
    )
    dbias = gradients.bias
    if split is not None and split.batch_axes:
      dbias = jax.tree.map(lambda d: jax.lax.psum(d, split.batch_axes), dbias)
    of_heads = Heads(
      blocks.of_queries(gradients.q, heads.query.shape[1]),
      blocks.of_keys(gradients.k, heads.key.shape[1]),
      blocks.of_keys(gradients.v, heads.value.shape[1]),
      dbias,
    )
    return jax.tree.map(lambda g, x: g.astype(x.dtype), of_heads, heads)

  heads, integers, out_BTNH, lse = residuals
  if split is not None:
    of_rows = split.of_rows(out_BTNH, out_BTNH.shape[0])
    local = split.mapped(local, (heads, integers), (of_rows, split.of_blocks, of_rows), None)
  return local(heads, integers, out_BTNH, lse, do_BTNH), None


attend_in_blocks.defvjp(_forward, _backward)


def _in_blocks(block_size: int, heads: Heads, integers: Integers) -> tuple[blocks.Queries, blocks.Keys]:
  query_index, key_index = (
    blocks.block_indices(x.shape[1], blocks.even_size(x.shape[1], block_size)) for x in (heads.query, heads.key)
  )
  visible = integers.visible
  queries = blocks.query_blocks(
    heads.query,
    query_index,
    heads.key.shape[2],
    segments_BT=visible.segments_BT,
    pos_BT=integers.query_pos,
    seeds_BTN=integers.seeds_BTN,
  )
  keys = blocks.key_blocks(
    heads.key, heads.value, key_index, segments_BS=visible.key_segments_BS, pos_BS=integers.key_pos
  )
  return queries, keys


def rows_are_at_hand() -> bool:
  """Whether no mesh axis may split the rows of a batch, so that a loop may depend on all of them at no cost."""
  return _compiler_parts() == 1


def _compiler_parts() -> int:
  """Into how many parts the compiler may split an array over the ambient mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  manual = jax.sharding.AxisType.Manual
  return math.prod(size for size, kind in zip(mesh.axis_sizes, mesh.axis_types) if kind != manual)
