"""Ring attention: each device keeps its queries; keys and values go round, one collective-permute a block of them.

The backward pass sends them round again, and their gradients with them (Liu et al., 2023).

B batch, T length of the queries, S length of the keys, L length on one device, P devices of the axis, N heads, K kv
heads, H dims per head; for blocks see `blocks.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from praxis_lite.layers import blocks
from praxis_lite.layers.blocks import Formula, Keys
from praxis_lite.layers.blockwise import Heads, Integers, rows_are_at_hand
from praxis_lite.layers.precision import sum_dtype, widened
from praxis_lite.layers.sequence_parts import SequencePlan, in_order, in_runs, own_blocks

T = TypeVar('T')


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def ring_attention(plan: SequencePlan, formula: Formula, heads: Heads, integers: Integers) -> jax.Array:
  """Returns what each query attends to, [B, T, N, H], padded and split as the queries are."""
  return _forward(plan, formula, heads, integers)[0]


_Residuals = tuple[Heads, Integers, jax.Array, jax.Array]


def _forward(plan: SequencePlan, formula: Formula, heads: Heads, integers: Integers) -> tuple[jax.Array, _Residuals]:
  def local(heads: Heads, integers: Integers) -> tuple[jax.Array, jax.Array]:
    queries, keys = own_blocks(plan, heads, integers)

    def add(sums: blocks.Sums, keys: Keys) -> blocks.Sums:
      pairs = blocks.needed_pairs(integers.visible, queries, keys, by_segments=rows_are_at_hand())
      return blocks.add_blocks(formula, integers.visible, heads.bias, queries, keys, pairs, sums)

    sums = _around(plan, keys, blocks.no_sums(queries.x.shape, sum_dtype(*heads[:3])), add)
    out, lse = blocks.normalized(sums)
    out_BLNH = in_order(plan, blocks.of_queries(out, queries.at.size), plan.query_len)
    return out_BLNH.astype(heads.query.dtype), lse

  specs = plan.specs(heads, integers)
  out, lse = plan.mapped(local, specs, (specs[0].query, plan.lse_spec))(heads, integers)
  # Both are kept together, or the backward pass would compute both again.
  out, lse = checkpoint_name(out, 'context'), checkpoint_name(lse, 'context')
  return out, (heads, integers, out, lse)


def _backward(plan: SequencePlan, formula: Formula, residuals: _Residuals, do: jax.Array) -> tuple[Heads, None]:
  def local(heads: Heads, integers: Integers, out: jax.Array, lse: jax.Array, do: jax.Array) -> Heads:
    queries, keys = own_blocks(plan, heads, integers)
    delta = jnp.sum(widened(do) * out, axis=-1)
    do_blocks, delta_blocks = (
      blocks.query_blocks(in_runs(plan, x, plan.query_len), queries.at, heads.key.shape[2]).x for x in (do, delta)
    )
    results = blocks.Results(lse, delta_blocks, do_blocks)

    def add(sums: tuple[jax.Array, Any], keys: Keys, of_keys: jax.Array) -> tuple[tuple[jax.Array, Any], jax.Array]:
      pairs = blocks.needed_pairs(integers.visible, queries, keys, by_segments=rows_are_at_hand())
      gradients = blocks.Gradients(sums[0], of_keys[0], of_keys[1], sums[1])
      gradients = blocks.add_gradients(formula, integers.visible, heads.bias, queries, results, keys, pairs, gradients)
      return (gradients.q, gradients.bias), jnp.stack([gradients.k, gradients.v])

    none = blocks.no_gradients(queries, keys, heads.bias)
    (dq, dbias), dkv = _around_with_gradients(plan, keys, (none.q, none.bias), jnp.stack([none.k, none.v]), add)
    dk, dv = (blocks.of_keys(x, keys.at.size) for x in dkv)
    dk, dv = jnp.split(
      in_order(plan, jnp.concatenate([dk.astype(heads.key.dtype), dv.astype(heads.value.dtype)], axis=2), plan.key_len),
      2,
      axis=2,
    )
    dq = in_order(plan, blocks.of_queries(dq, queries.at.size).astype(heads.query.dtype), plan.query_len)
    dbias = jax.tree.map(
      lambda d, p: jax.lax.psum(d, (plan.split.axis, *plan.split.batch_axes)).astype(p.dtype), dbias, heads.bias
    )
    return Heads(dq, dk, dv, dbias)

  heads, integers, out, lse = residuals
  specs = plan.specs(heads, integers)
  in_specs = (*specs, specs[0].query, plan.lse_spec, specs[0].query)
  return plan.mapped(local, in_specs, specs[0])(heads, integers, out, lse, do), None


ring_attention.defvjp(_forward, _backward)


def _around(plan: SequencePlan, keys: Keys, sums: T, add: Callable[[T, Keys], T]) -> T:
  """Adds to `sums` what each block of keys gives that comes by, this device's own among them."""
  send, start = functools.partial(_send, plan), _send(plan, _travelling(keys), plan.first)

  def step(carry: tuple[Any, T], offset: jax.Array) -> tuple[tuple[Any, T], None]:
    travelling, sums = carry
    following = send(travelling, 1)
    return (following, add(sums, _arrived(plan, travelling, offset))), None

  (travelling, sums), _ = jax.lax.scan(step, (start, sums), jnp.arange(plan.first, plan.last))
  return add(sums, _arrived(plan, travelling, jnp.int32(plan.last)))


def _around_with_gradients(
  plan: SequencePlan,
  keys: Keys,
  sums: T,
  of_keys: jax.Array,
  add: Callable[[T, Keys, jax.Array], tuple[T, jax.Array]],
) -> tuple[T, jax.Array]:
  """As `_around`; the gradients of keys go along with them, and home at the end."""

  def step(carry: tuple[Any, jax.Array, T], offset: jax.Array) -> tuple[tuple[Any, jax.Array, T], None]:
    travelling, of_keys, sums = carry
    following = _send(plan, travelling, 1)
    sums, of_keys = add(sums, _arrived(plan, travelling, offset), of_keys)
    return (following, _send(plan, of_keys, 1), sums), None

  start = _send(plan, _travelling(keys), plan.first)
  (travelling, of_keys, sums), _ = jax.lax.scan(step, (start, of_keys, sums), jnp.arange(plan.first, plan.last))
  sums, of_keys = add(sums, _arrived(plan, travelling, jnp.int32(plan.last)), of_keys)
  return sums, _send(plan, of_keys, -plan.last)


def _travelling(keys: Keys) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
  """What of a block is sent: keys and values in one array, and its integers."""
  return jnp.stack([keys.k, keys.v]), keys.segments, keys.pos


def _arrived(
  plan: SequencePlan, travelling: tuple[jax.Array, jax.Array | None, jax.Array | None], offset: jax.Array
) -> Keys:
  """The keys of the device that is `offset` before this one."""
  kv, segments, pos = travelling
  at = plan.indices(plan.key_len, (plan.device - offset) % plan.devices)
  return Keys(kv[0], kv[1], at, segments, pos)


def _send(plan: SequencePlan, tree: T, by: int) -> T:
  """Each device sends its arrays to the device that is `by` after it."""
  if by % plan.devices == 0:
    return tree
  pairs = [(d, (d + by) % plan.devices) for d in range(plan.devices)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, plan.split.axis, pairs), tree)
