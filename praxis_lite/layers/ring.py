"""Ring attention: each device keeps its queries, and sends blocks of keys and values around a ring of devices.

Each step around the ring is one collective-permute. The backward pass sends the blocks around again, with their
gradients (Liu et al., 2023).

B batch, T length of the queries, S length of the keys, L length on one device, P devices of the axis, N heads, K kv
heads, H dims per head; for blocks see `blocks.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from praxis_lite.layers import blocks
from praxis_lite.layers.attention_spec import Heads, Integers, Residuals
from praxis_lite.layers.block_arrays import Keys, query_blocks, unblock_keys, unblock_queries
from praxis_lite.layers.block_pairs import needed_pairs
from praxis_lite.layers.blocks import Formula
from praxis_lite.layers.blockwise import has_all_rows, tag_context
from praxis_lite.layers.masks import AttentionMask
from praxis_lite.layers.precision import sum_dtype, to_sum_dtype
from praxis_lite.layers.sequence_parts import SequencePlan, cut_local_blocks, join_runs, to_runs

A = TypeVar('A')
T = TypeVar('T')
D = TypeVar('D')


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def ring_attention(plan: SequencePlan, formula: Formula, heads: Heads, integers: Integers) -> jax.Array:
  """Returns the results of attention, [B, T, N, H], padded and split like the queries."""
  return _forward(plan, formula, heads, integers)[0]


def _forward(plan: SequencePlan, formula: Formula, heads: Heads, integers: Integers) -> tuple[jax.Array, Residuals]:
  def local(heads: Heads, integers: Integers) -> tuple[jax.Array, jax.Array]:
    queries, local_keys, local_mask = cut_local_blocks(plan, heads, integers)
    expected = plan.mean_pairs(local_mask)

    def add(sums: blocks.Sums, dkv: None, arrays: _KeyArrays, offset: jax.Array) -> tuple[blocks.Sums, None]:
      keys, mask = _unpack_keys(plan, arrays, local_mask, offset)
      pairs = needed_pairs(mask, queries, keys, all_rows=has_all_rows(), expected=expected)
      return blocks.add_blocks(formula, mask, heads.bias, queries, keys, pairs, sums), dkv

    zeros = blocks.zero_sums(queries.x.shape, sum_dtype(*heads[:3]))
    sums, _ = go_round(plan, _pack_keys(local_keys, local_mask), zeros, None, add)
    out, lse = blocks.finish_sums(sums, blocks.group_sinks(heads.sinks, heads.key.shape[2]))
    out_BLNH = join_runs(plan, unblock_queries(out, queries.at.size), plan.query_len)
    return out_BLNH.astype(heads.query.dtype), lse

  return tag_context(plan.map_parts(local, heads, integers)(heads, integers), heads, integers)


def _backward(plan: SequencePlan, formula: Formula, residuals: Residuals, do: jax.Array) -> tuple[Heads, None]:
  def local(heads: Heads, integers: Integers, out: jax.Array, lse: jax.Array, do: jax.Array) -> Heads:
    queries, local_keys, local_mask = cut_local_blocks(plan, heads, integers)
    expected = plan.mean_pairs(local_mask)
    delta = jnp.sum(to_sum_dtype(do) * out, axis=-1)
    do_blocks, delta_blocks = (
      query_blocks(to_runs(plan, x, plan.query_len), queries.at, heads.key.shape[2]).x for x in (do, delta)
    )
    results = blocks.BackwardInputs(lse, delta_blocks, do_blocks)

    def add(
      sums: tuple[jax.Array, Any], dkv: jax.Array, arrays: _KeyArrays, offset: jax.Array
    ) -> tuple[tuple[jax.Array, Any], jax.Array]:
      keys, mask = _unpack_keys(plan, arrays, local_mask, offset)
      pairs = needed_pairs(mask, queries, keys, all_rows=has_all_rows(), expected=expected)
      gradients = blocks.Gradients(sums[0], dkv[0], dkv[1], sums[1])
      gradients = blocks.add_gradients(formula, mask, heads.bias, queries, results, keys, pairs, gradients)
      return (gradients.q, gradients.bias), jnp.stack([gradients.k, gradients.v])

    zeros = blocks.zero_gradients(queries, local_keys, heads.bias)
    dkv = jnp.stack([zeros.k, zeros.v])
    packed = _pack_keys(local_keys, local_mask)
    (dq, dbias), dkv = go_round(plan, packed, (zeros.q, zeros.bias), dkv, add)
    dk, dv = (unblock_keys(x, local_keys.at.size) for x in dkv)
    dkv = jnp.concatenate([dk.astype(heads.key.dtype), dv.astype(heads.value.dtype)], axis=2)
    dk, dv = jnp.split(join_runs(plan, dkv, plan.key_len), 2, axis=2)
    dq = join_runs(plan, unblock_queries(dq, queries.at.size).astype(heads.query.dtype), plan.query_len)
    dsinks = blocks.sink_gradients(blocks.group_sinks(heads.sinks, heads.key.shape[2]), lse, delta_blocks)
    of_rows = jax.tree.map(
      lambda d, p: jax.lax.psum(d, (plan.split.axis, *plan.split.batch_axes)).astype(p.dtype),
      (dbias, dsinks),
      (heads.bias, heads.sinks),
    )
    return Heads(dq, dk, dv, *of_rows)

  heads, integers, out, lse = residuals
  return plan.map_parts(local, heads, integers, backward=True)(heads, integers, out, lse, do), None


ring_attention.defvjp(_forward, _backward)


def go_round(
  plan: SequencePlan, arrays: A, sums: T, dkv: D, add: Callable[[T, D, A, jax.Array], tuple[T, D]]
) -> tuple[T, D]:
  """Sends the arrays of keys around the ring; returns what `add` has computed from them, and the gradients.

  In each step, each device runs `sums, dkv = add(sums, dkv, arrays, offset)`, where `arrays` come from the device
  `offset` places before it in the ring; offsets go from `plan.first` to `plan.last`. `dkv`, the gradients of keys and
  values, travels with the arrays, and returns to its device at the end; in the forward pass it is None.
  """

  def step(carry: tuple[A, D, T], offset: jax.Array) -> tuple[tuple[A, D, T], None]:
    arrays, dkv, sums = carry
    following = _send(plan, arrays, 1)
    sums, dkv = add(sums, dkv, arrays, offset)
    return (following, _send(plan, dkv, 1), sums), None

  start = _send(plan, arrays, plan.first)
  (arrays, dkv, sums), _ = jax.lax.scan(step, (start, dkv, sums), jnp.arange(plan.first, plan.last))
  sums, dkv = add(sums, dkv, arrays, jnp.int32(plan.last))
  return sums, _send(plan, dkv, -plan.last)


# The data to send: keys and values in one array, arrays of the mask that belong to keys, and positions of the bias.
_KeyArrays = tuple[jax.Array, list[jax.Array], jax.Array | None]


def _pack_keys(keys: Keys, mask: AttentionMask) -> _KeyArrays:
  return jnp.stack([keys.k, keys.v]), mask.arrays('key'), keys.pos


def _unpack_keys(
  plan: SequencePlan, arrays: _KeyArrays, mask: AttentionMask, offset: jax.Array
) -> tuple[Keys, AttentionMask]:
  """Returns the keys of the device `offset` places before this one in the ring, and the mask for these keys."""
  kv, of_mask, pos = arrays
  at = plan.indices(plan.key_len, (plan.device - offset) % plan.devices)
  return Keys(kv[0], kv[1], at, pos), mask.replace_arrays('key', of_mask)


def _send(plan: SequencePlan, tree: T, by: int) -> T:
  """Returns the arrays of the device that is `by` places before this one in the ring; each device sends its `tree`."""
  if by % plan.devices == 0:
    return tree
  pairs = [(d, (d + by) % plan.devices) for d in range(plan.devices)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, plan.split.axis, pairs), tree)
