"""Blockwise attention: memory linear in the length, forward and backward, in plain JAX.

Logits exist only for one block of queries and one block of keys at a time. For the backward pass, only queries, keys,
values, the output, and one number for each query are kept, and the blocks are computed again (Dao et al., 2022). The
arithmetic is in `blocks.py`. Pairs of blocks that are fully masked are skipped, so causal attention takes half the
time, and the time of a sliding window is linear in the length.

B batch, T length of the queries, S length of the keys, N heads, K kv heads, H dims per head.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

from praxis_lite.layers import blocks
from praxis_lite.layers.attention_spec import (
  DEFAULT_SPEC,
  AttentionSpec,
  Heads,
  Integers,
  LogitBias,
  ProbabilityDropout,
  Residuals,
  argument_specs,
  sort_arguments,
)
from praxis_lite.layers.block_arrays import (
  Keys,
  Queries,
  block_indices,
  even_block_size,
  key_blocks,
  mask_blocks,
  query_blocks,
  unblock_keys,
  unblock_queries,
)
from praxis_lite.layers.block_pairs import needed_pairs
from praxis_lite.layers.blocks import Formula
from praxis_lite.layers.masks import AttentionMask, split_offsets
from praxis_lite.layers.precision import sum_dtype, to_sum_dtype
from praxis_lite.sharding.constraints import manual_axes
from praxis_lite.sharding.specs import axes_to_entry

_LARGEST_BLOCK, _SMALLEST_BLOCK = 512, 128
_MOST_LOGITS = 2**25  # The most logits of one pair of blocks, in all rows and heads: 128 MiB.


@dataclasses.dataclass(frozen=True)
class RowSplit:
  """The mesh axes that split rows and heads, evenly; no other axes split the arrays.

  Each device then skips the blocks that are empty in its own rows. If the compiler split the rows, all devices would
  have to skip the same blocks, and so to wait for each other.
  """

  batch_axes: tuple[str, ...] = ()
  head_axes: tuple[str, ...] = ()
  stage_axes: tuple[str, ...] = ()  # The axes that split the stages of a pipeline, evenly. `vmap` maps the stages.

  def repeat_kv_heads(self, x_BSKH: jax.Array) -> jax.Array:
    """Returns [B, S, K', H], with kv heads repeated until K' is a multiple of the devices along `head_axes`."""
    sizes, K = jax.sharding.get_abstract_mesh().shape, x_BSKH.shape[2]
    repeats = math.lcm(K, math.prod(sizes[axis] for axis in self.head_axes)) // K
    return jnp.repeat(x_BSKH, repeats, axis=2) if repeats > 1 else x_BSKH

  def map_rows(self, fn: Any, heads: Heads, integers: Integers, *, backward: bool) -> Any:
    """Returns `fn`, the forward or backward pass, mapped over the devices."""
    rows, head = axes_to_entry(self.batch_axes), axes_to_entry(self.head_axes)
    specs = argument_specs(heads, integers, rows, None, head)
    queries, lse = specs[0].query, PartitionSpec(None, rows, head)
    if backward:
      return self._map(fn, (*specs, queries, lse, queries), specs[0])
    return self._map(fn, specs, (queries, lse))

  def _map(self, fn: Any, in_specs: Any, out_specs: Any) -> Any:
    """Returns `fn` in a `shard_map` over the mesh axes that no enclosing `shard_map` has.

    If `vmap` maps the result over the stages of a pipeline, `stage_axes` split the stages, and each device runs its own
    stages one after the other.
    """
    axes = {*jax.sharding.get_abstract_mesh().axis_names} - manual_axes()
    shard = functools.partial(jax.shard_map, axis_names=axes, check_vma=False)
    if not self.stage_axes:
      return shard(fn, in_specs=in_specs, out_specs=out_specs)
    stages = axes_to_entry(self.stage_axes)

    def stack_spec(spec: PartitionSpec, has_stages: bool = True) -> PartitionSpec:
      return PartitionSpec(stages, *spec) if has_stages else spec

    @custom_vmap
    def run(*args: Any) -> Any:
      return shard(fn, in_specs=in_specs, out_specs=out_specs)(*args)

    @run.def_vmap
    def run_stages(axis_size: int, in_batched: Any, *args: Any) -> tuple[Any, Any]:
      arrays, structure = jax.tree.flatten(args)
      has_stages = jax.tree.leaves(in_batched)

      def run_own(*arrays: jax.Array) -> Any:
        def run_stage(own: list[jax.Array]) -> Any:
          each = iter(own)
          return fn(*jax.tree.unflatten(structure, [next(each) if has else x for x, has in zip(arrays, has_stages)]))

        return jax.lax.map(run_stage, [x for x, has in zip(arrays, has_stages) if has])

      specs = tuple(map(stack_spec, jax.tree.leaves(in_specs), has_stages))
      out = shard(run_own, in_specs=specs, out_specs=jax.tree.map(stack_spec, out_specs))(*arrays)
      return out, jax.tree.map(lambda x: True, out)

    return run


def blockwise_attention(
  query_BTNH: jax.Array,
  key_BSKH: jax.Array,
  value_BSKH: jax.Array,
  mask: AttentionMask | None = None,
  *,
  spec: AttentionSpec = DEFAULT_SPEC,
  bias: LogitBias | None = None,
  dropout: ProbabilityDropout | None = None,
  sinks: jax.Array | None = None,
  split: RowSplit | None = None,
) -> jax.Array:
  """Returns softmax(scale * query . key) . value per head, [B, T, N, H], in the dtype of the queries.

  Computes the same as `dot_product_attention`, from the same arguments, but a query gets 0 if all its keys are masked.

  Args:
    split: how the ambient mesh splits rows and heads; None leaves it to the compiler.
  """
  formula, heads, integers = sort_arguments((query_BTNH, key_BSKH, value_BSKH), mask, bias, dropout, spec, sinks)
  rows = query_BTNH.shape[0] * query_BTNH.shape[2] // _compiler_parts()
  size = spec.block_size or largest_block(integers.mask, rows)
  return attend_in_blocks(formula, size, split, heads, integers)


def largest_block(mask: AttentionMask, rows: int) -> int:
  """Returns the largest size of a block; `rows` is the product of batch size and number of heads on a device.

  With a small window, large blocks would be mostly empty; with many rows, they would take much memory. In an exported
  program, the number of rows may be symbolic, and then counts as large.
  """
  size, behind = _LARGEST_BLOCK, split_offsets(mask)[0].behind
  if behind is not None:
    size = min(size, max(_SMALLEST_BLOCK, -(-(behind + 1) // _SMALLEST_BLOCK) * _SMALLEST_BLOCK // 2))
  if export.is_symbolic_dim(rows):
    return min(size, _SMALLEST_BLOCK)
  while size > _SMALLEST_BLOCK and rows * size * size > _MOST_LOGITS:
    size //= 2
  return size


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def attend_in_blocks(
  formula: Formula, block_size: int, split: RowSplit | None, heads: Heads, integers: Integers
) -> jax.Array:
  """Returns attention [B, T, N, H] in blocks of at most this size; its gradient is computed in blocks too."""
  return _forward(formula, block_size, split, heads, integers)[0]


def _forward(
  formula: Formula, block_size: int, split: RowSplit | None, heads: Heads, integers: Integers
) -> tuple[jax.Array, Residuals]:
  def local(heads: Heads, integers: Integers) -> tuple[jax.Array, jax.Array]:
    queries, keys, mask = _cut_blocks(block_size, heads, integers)
    pairs = needed_pairs(mask, queries, keys, all_rows=has_all_rows())
    sums = blocks.zero_sums(queries.x.shape, sum_dtype(*heads[:3]))
    sums = blocks.add_blocks(formula, mask, heads.bias, queries, keys, pairs, sums)
    out, lse = blocks.finish_sums(sums, blocks.group_sinks(heads.sinks, heads.key.shape[2]))
    return unblock_queries(out, heads.query.shape[1]).astype(heads.query.dtype), lse

  return compute_context(local, split, heads, integers)


def compute_context(
  local: Callable[[Heads, Integers], tuple[jax.Array, jax.Array]],
  split: RowSplit | None,
  heads: Heads,
  integers: Integers,
) -> tuple[jax.Array, Residuals]:
  """Returns the results of a forward pass, [B, T, N, H], and the residuals for its backward pass.

  `local` is the pass on the rows and heads of a device; with a `split` of None, `heads` already belong to one device.
  """
  if split is not None:
    local = split.map_rows(local, heads, integers, backward=False)
  return tag_context(local(heads, integers), heads, integers)


def tag_context(results: tuple[jax.Array, jax.Array], heads: Heads, integers: Integers) -> tuple[jax.Array, Residuals]:
  """Returns a pair: the output of attention, which is the first of the two `results`; and the residuals.

  Both results are tagged as 'context'; see `remat.py`.
  """
  # If only one of the two results were kept, the backward pass would compute both again.
  out_BTNH, more = (checkpoint_name(x, 'context') for x in results)
  return out_BTNH, (heads, integers, out_BTNH, more)


def compute_gradients(
  local: Callable[..., Heads], split: RowSplit | None, residuals: Residuals, do_BTNH: jax.Array
) -> tuple[Heads, None]:
  """Returns the gradients of queries, keys and values; `local` computes them from `residuals` and `do_BTNH`."""
  heads, integers, *results = residuals
  if split is not None:
    local = split.map_rows(local, heads, integers, backward=True)
  return local(heads, integers, *results, do_BTNH), None


def _backward(
  formula: Formula, block_size: int, split: RowSplit | None, residuals: Residuals, do_BTNH: jax.Array
) -> tuple[Heads, None]:
  def local(heads: Heads, integers: Integers, out_BTNH: jax.Array, lse: jax.Array, do_BTNH: jax.Array) -> Heads:
    queries, keys, mask = _cut_blocks(block_size, heads, integers)
    pairs = needed_pairs(mask, queries, keys, all_rows=has_all_rows())
    delta_BTN = jnp.sum(to_sum_dtype(do_BTNH) * out_BTNH, axis=-1)
    K = heads.key.shape[2]
    do, delta = (query_blocks(x, queries.at, K).x for x in (do_BTNH, delta_BTN))
    gradients = blocks.add_gradients(
      formula,
      mask,
      heads.bias,
      queries,
      blocks.BackwardInputs(lse, delta, do),
      keys,
      pairs,
      blocks.zero_gradients(queries, keys, heads.bias),
    )
    of_rows = gradients.bias, blocks.sink_gradients(blocks.group_sinks(heads.sinks, K), lse, delta)
    if split is not None and split.batch_axes:
      of_rows = jax.tree.map(lambda d: jax.lax.psum(d, split.batch_axes), of_rows)
    found = Heads(
      unblock_queries(gradients.q, heads.query.shape[1]),
      unblock_keys(gradients.k, heads.key.shape[1]),
      unblock_keys(gradients.v, heads.value.shape[1]),
      *of_rows,
    )
    return jax.tree.map(lambda g, x: g.astype(x.dtype), found, heads)

  return compute_gradients(local, split, residuals, do_BTNH)


attend_in_blocks.defvjp(_forward, _backward)


def _cut_blocks(block_size: int, heads: Heads, integers: Integers) -> tuple[Queries, Keys, AttentionMask]:
  """Returns the queries, the keys, and the mask, with all arrays cut into blocks."""
  query_index, key_index = (
    block_indices(x.shape[1], even_block_size(x.shape[1], block_size)) for x in (heads.query, heads.key)
  )
  K, pos, seeds = heads.key.shape[2], integers.query_pos, integers.seeds_BTN
  return (
    query_blocks(heads.query, query_index, K, pos_BT=pos, seeds_BTN=seeds),
    key_blocks(heads.key, heads.value, key_index, pos_BS=integers.key_pos),
    mask_blocks(integers.mask, query_index.shape[1], key_index.shape[1]),
  )


def has_all_rows() -> bool:
  """Whether no mesh axis can split the rows of a batch, so that a loop may depend on all rows without communication."""
  return _compiler_parts() == 1


def _compiler_parts() -> int:
  """Returns the number of parts into which the compiler may split an array over the ambient mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  manual = jax.sharding.AxisType.Manual
  return math.prod(size for size, kind in zip(mesh.axis_sizes, mesh.axis_types) if kind != manual)
