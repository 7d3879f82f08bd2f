"""Context parallelism: attention of sequences that are split over a mesh axis.

Two methods, both in `jax.shard_map`, both with the memory of blockwise attention:

    ring         each device keeps its queries; keys and values go round, one collective-permute a block of them (Liu et
                 al., 2023). The backward pass sends them round again, and their gradients with them.
    all_to_all   an all-to-all gives each device the whole sequence for some of the heads, and another one takes the
                 result back (Jacobs et al., 2023)

Under a causal mask, a device with the first part of the sequence would have little to do in a ring, and one with the
last part much. So each device takes two half parts there, one from each end, which halves exchange beforehand:

    4 devices, 8 halves      device 0: 0 and 7     device 1: 1 and 6     device 2: 2 and 5     device 3: 3 and 4

A sliding window that reaches fewer devices than there are stops the ring early, and needs no such exchange. Whatever
does not divide, be it length, batch or heads, is padded inside.

B batch, T length of the queries, S length of the keys, L length on one device, P devices of the axis, N heads, K kv
heads, H dims per head; for blocks see `blocks.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from praxis_lite.layers import blocks
from praxis_lite.layers.blocks import Formula, Keys, Queries
from praxis_lite.layers.blockwise import (
  Heads,
  Integers,
  LogitBias,
  ProbabilityDropout,
  attend_in_blocks,
  described,
  largest_block,
  rows_are_at_hand,
)
from praxis_lite.layers.masks import Visibility
from praxis_lite.partitioning.padding import pad_to, slice_to
from praxis_lite.partitioning.specs import axes_to_entry

T = TypeVar('T')
ContextMethod = Literal['ring', 'all_to_all']
CONTEXT_METHODS = ('ring', 'all_to_all')


@dataclasses.dataclass(frozen=True)
class SequenceSplit:
  """How queries, keys and values are split over the ambient mesh.

  Attributes:
    axis: the mesh axis that splits the length.
    method: one of `CONTEXT_METHODS`.
    batch_axes, head_axes: mesh axes that split the batch and the heads.
    others_split: whether the compiler may split them over further axes; False: further axes hold copies.
  """

  axis: str
  method: ContextMethod = 'ring'
  batch_axes: tuple[str, ...] = ()
  head_axes: tuple[str, ...] = ()
  others_split: bool = False

  def mapped(self) -> frozenset[str]:
    """The mesh axes that `shard_map` maps."""
    named = {self.axis, *self.batch_axes, *self.head_axes}
    return frozenset(named if self.others_split else jax.sharding.get_abstract_mesh().axis_names)


def context_parallel_attention(
  query_BTNH: jax.Array,
  key_BSKH: jax.Array,
  value_BSKH: jax.Array,
  *,
  split: SequenceSplit,
  visible: Visibility | None = None,
  bias: LogitBias | None = None,
  dropout: ProbabilityDropout | None = None,
  scale: float | None = None,
  logit_soft_cap: float | None = None,
  block_size: int | None = None,
) -> jax.Array:
  """Returns what `blockwise_attention` returns, whose other arguments these are, on the ambient mesh.

  Args:
    split: how the arrays are split. Of a bias, the last dimension of each parameter is that of the heads.
  """
  mesh = jax.sharding.get_abstract_mesh()
  formula, heads, integers = described(query_BTNH, key_BSKH, value_BSKH, visible, bias, dropout, scale, logit_soft_cap)
  T, S = query_BTNH.shape[1], key_BSKH.shape[1]
  head_parts = math.prod(mesh.shape[a] for a in split.head_axes)
  if split.method == 'all_to_all':
    head_parts *= mesh.shape[split.axis]
  heads, integers = _divisible(split, heads, integers, head_parts)
  rows = heads.query.shape[0] * heads.query.shape[2]
  rows //= math.prod(mesh.shape[a] for a in (*split.batch_axes, *split.head_axes))
  plan = _Plan.of(split, T, S, integers.visible, block_size or largest_block(integers.visible, rows))
  attend = _ring if split.method == 'ring' else _all_to_all
  return slice_to(attend(plan, formula, heads, integers), query_BTNH.shape)


# ---------------------------------------------------------------- dimensions that do not divide


def _divisible(split: SequenceSplit, heads: Heads, integers: Integers, head_parts: int) -> tuple[Heads, Integers]:
  """Pads heads so that each part has whole groups of them, and batch and length so that they divide."""
  B, _, N, H = heads.query.shape
  K = heads.key.shape[2]
  repeats, kv_heads = aligned_heads(N, K, head_parts)
  all_heads = kv_heads * (N // (K * repeats))
  sizes = jax.sharding.get_abstract_mesh().shape
  rows = _multiple(B, math.prod(sizes[a] for a in split.batch_axes))

  def keys(x: jax.Array) -> jax.Array:
    x = jnp.repeat(x, repeats, axis=2) if repeats > 1 else x
    return pad_to(x, (rows, _multiple(x.shape[1], sizes[split.axis]), kv_heads, H))

  def queries(x: jax.Array) -> jax.Array:
    """[B or 1, T, ...]."""
    shape = (x.shape[0] if x.shape[0] == 1 < B else rows, _multiple(x.shape[1], sizes[split.axis]), all_heads, H)
    return pad_to(x, shape[: x.ndim])

  padded = Heads(
    queries(heads.query),
    keys(heads.key),
    keys(heads.value),
    jax.tree.map(lambda p: pad_to(p, (*p.shape[:-1], all_heads)), heads.bias),
  )
  visible = integers.visible
  prefix_B = visible.prefix_B
  visible = dataclasses.replace(
    jax.tree.map(queries, dataclasses.replace(visible, prefix_B=None)),
    prefix_B=None if prefix_B is None else pad_to(prefix_B, (rows,)),
  )
  pos_and_seeds = (None if x is None else queries(x) for x in integers[1:])
  return padded, Integers(visible, *pos_and_seeds)


def aligned_heads(num_heads: int, num_kv_heads: int, parts: int) -> tuple[int, int]:
  """Returns (repeats of each kv head, number of kv heads then, padding included) that divide by `parts`.

  Query heads stay with their kv head, so padding by one kv head pads by its whole group; a kv head that is repeated
  has smaller groups. What makes the fewest query heads is taken.
  """
  group = num_heads // num_kv_heads
  choices = [r for r in range(1, group + 1) if group % r == 0]
  repeats = min(choices, key=lambda r: (_multiple(num_kv_heads * r, parts) * (group // r), r))
  return repeats, _multiple(num_kv_heads * repeats, parts)


def _multiple(size: int, of: int) -> int:
  return -(-size // of) * of


# ---------------------------------------------------------------- what the devices do, and with which parts


@dataclasses.dataclass(frozen=True)
class _Plan:
  """What is known of a call before it is traced.

  Attributes:
    query_len, key_len: T and S, without padding.
    block_size: largest number of queries or keys in a block.
    devices: P.
    zigzag: whether each device takes two half parts.
    first, last: a device attends to the parts of the devices before it by `first`, ..., `last`, going round.
  """

  split: SequenceSplit
  query_len: int
  key_len: int
  block_size: int
  devices: int
  zigzag: bool
  first: int
  last: int

  @classmethod
  def of(cls, split: SequenceSplit, T: int, S: int, visible: Visibility, block_size: int) -> _Plan:
    P = jax.sharding.get_abstract_mesh().shape[split.axis]
    first, last = 0, P - 1
    if visible.window is not None and T == S:
      reach = -(-(visible.window - 1) // (_multiple(T, P) // P))
      ahead = 0 if visible.causal and visible.prefix_B is None else reach
      if ahead + reach < P - 1:
        first, last = -ahead, reach
    return cls(split, T, S, block_size, P, visible.causal and T == S and last - first == P - 1, first, last)

  @property
  def device(self) -> jax.Array:
    return jax.lax.axis_index(self.split.axis)

  def part_len(self, length: int) -> int:
    """L, of a sequence of this length."""
    return _multiple(length, self.devices) // self.devices

  def run_len(self, length: int) -> int:
    """How many neighbours in the sequence a device has in one piece: L, or half of it."""
    return -(-self.part_len(length) // 2) if self.zigzag else self.part_len(length)

  def block_len(self, length: int) -> int:
    return blocks.even_size(self.run_len(length), self.block_size)

  def indices(self, length: int, device: jax.Array) -> jax.Array:
    """Returns the indices [blocks, block_len] that a device has; -1 is padding."""
    part, run, size = self.part_len(length), self.run_len(length), self.block_len(length)
    offset = jnp.arange(_multiple(run, size))
    if self.zigzag:
      halves = jnp.stack([device, 2 * self.devices - 1 - device])[:, None]
      start, true = halves // 2 * part + halves % 2 * run, jnp.where(halves % 2 == 0, run, part - run)
    else:
      start, true = (device * part)[None, None], jnp.full((1, 1), part)
    index = start + offset
    return jnp.where((offset < true) & (index < length), index, -1).reshape(-1, size)

  def homes(self, parity: int) -> list[tuple[int, int]]:
    """(device, device that takes its first or second half) of all devices."""
    halves = range(parity, 2 * self.devices, 2)
    return [(h // 2, min(h, 2 * self.devices - 1 - h)) for h in halves]

  def in_turn(self, x: jax.Array, y: jax.Array) -> list[jax.Array]:
    """[x, y] on devices with an even number, [y, x] on the others: there, halves come in the other order."""
    even = self.device % 2 == 0
    return [jnp.where(even, x, y), jnp.where(even, y, x)]

  def spec(self, x: jax.Array) -> PartitionSpec:
    """Of an array [B, T, N, ...] or the first of these dimensions; [1, T, ...] is the same for all rows."""
    return PartitionSpec(*(_entry(self.split.batch_axes, x.shape[0]), self.split.axis, self._heads)[: x.ndim])

  def bias_spec(self, x: jax.Array) -> PartitionSpec:
    """Of a parameter [..., N] of a bias."""
    return PartitionSpec(*(None,) * (x.ndim - 1), self._heads)

  def specs(self, heads: Heads, integers: Integers) -> tuple[Heads, Integers]:
    arrays = jax.tree.map(self.spec, heads._replace(bias=None))
    return arrays._replace(bias=jax.tree.map(self.bias_spec, heads.bias)), jax.tree.map(self.spec, integers)

  @property
  def lse_spec(self) -> PartitionSpec:
    """Of blocks [I, B, K, G, Q]."""
    return PartitionSpec(self.split.axis, axes_to_entry(self.split.batch_axes), self._heads)

  @property
  def _heads(self) -> str | tuple[str, ...] | None:
    return axes_to_entry(self.split.head_axes)

  def mapped(self, fn: Any, in_specs: Any, out_specs: Any) -> Any:
    """`fn` on each device."""
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names=self.split.mapped(), check_vma=False)


def _entry(axes: tuple[str, ...], size: int) -> str | tuple[str, ...] | None:
  return axes_to_entry(axes) if size > 1 else None


# ---------------------------------------------------------------- ring


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(plan: _Plan, formula: Formula, heads: Heads, integers: Integers) -> jax.Array:
  return _ring_forward(plan, formula, heads, integers)[0]


_Residuals = tuple[Heads, Integers, jax.Array, jax.Array]


def _ring_forward(plan: _Plan, formula: Formula, heads: Heads, integers: Integers) -> tuple[jax.Array, _Residuals]:
  def local(heads: Heads, integers: Integers) -> tuple[jax.Array, jax.Array]:
    queries, keys = _own_blocks(plan, heads, integers)

    def add(sums: blocks.Sums, keys: Keys) -> blocks.Sums:
      pairs = blocks.needed_pairs(integers.visible, queries, keys, by_segments=rows_are_at_hand())
      return blocks.add_blocks(formula, integers.visible, heads.bias, queries, keys, pairs, sums)

    sums = _around(plan, keys, blocks.no_sums(queries.x.shape), add)
    out, lse = blocks.normalized(sums)
    out_BLNH = _in_order(plan, blocks.of_queries(out, queries.at.size), plan.query_len)
    return out_BLNH.astype(heads.query.dtype), lse

  specs = plan.specs(heads, integers)
  out, lse = plan.mapped(local, specs, (specs[0].query, plan.lse_spec))(heads, integers)
  # Both are kept together, or the backward pass would compute both again.
  out, lse = checkpoint_name(out, 'context'), checkpoint_name(lse, 'context')
  return out, (heads, integers, out, lse)


def _ring_backward(plan: _Plan, formula: Formula, residuals: _Residuals, do: jax.Array) -> tuple[Heads, None]:
  def local(heads: Heads, integers: Integers, out: jax.Array, lse: jax.Array, do: jax.Array) -> Heads:
    queries, keys = _own_blocks(plan, heads, integers)
    delta = jnp.sum(do.astype(jnp.float32) * out, axis=-1)
    do_blocks, delta_blocks = (
      blocks.query_blocks(_in_runs(plan, x, plan.query_len), queries.at, heads.key.shape[2]).x for x in (do, delta)
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
      _in_order(
        plan, jnp.concatenate([dk.astype(heads.key.dtype), dv.astype(heads.value.dtype)], axis=2), plan.key_len
      ),
      2,
      axis=2,
    )
    dq = _in_order(plan, blocks.of_queries(dq, queries.at.size).astype(heads.query.dtype), plan.query_len)
    dbias = jax.tree.map(
      lambda d, p: jax.lax.psum(d, (plan.split.axis, *plan.split.batch_axes)).astype(p.dtype), dbias, heads.bias
    )
    return Heads(dq, dk, dv, dbias)

  heads, integers, out, lse = residuals
  specs = plan.specs(heads, integers)
  in_specs = (*specs, specs[0].query, plan.lse_spec, specs[0].query)
  return plan.mapped(local, in_specs, specs[0])(heads, integers, out, lse, do), None


_ring.defvjp(_ring_forward, _ring_backward)


def _around(plan: _Plan, keys: Keys, sums: T, add: Callable[[T, Keys], T]) -> T:
  """Adds to `sums` what each block of keys gives that comes by, this device's own among them."""
  send, start = functools.partial(_send, plan), _send(plan, _travelling(keys), plan.first)

  def step(carry: tuple[Any, T], offset: jax.Array) -> tuple[tuple[Any, T], None]:
    travelling, sums = carry
    following = send(travelling, 1)
    return (following, add(sums, _arrived(plan, travelling, offset))), None

  (travelling, sums), _ = jax.lax.scan(step, (start, sums), jnp.arange(plan.first, plan.last))
  return add(sums, _arrived(plan, travelling, jnp.int32(plan.last)))


def _around_with_gradients(
  plan: _Plan,
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


def _arrived(plan: _Plan, travelling: tuple[jax.Array, jax.Array | None, jax.Array | None], offset: jax.Array) -> Keys:
  """The keys of the device that is `offset` before this one."""
  kv, segments, pos = travelling
  at = plan.indices(plan.key_len, (plan.device - offset) % plan.devices)
  return Keys(kv[0], kv[1], at, segments, pos)


def _send(plan: _Plan, tree: T, by: int) -> T:
  """Each device sends its arrays to the device that is `by` after it."""
  if by % plan.devices == 0:
    return tree
  pairs = [(d, (d + by) % plan.devices) for d in range(plan.devices)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, plan.split.axis, pairs), tree)


# ---------------------------------------------------------------- which part of a sequence a device has


def _own_blocks(plan: _Plan, heads: Heads, integers: Integers) -> tuple[Queries, Keys]:
  """The blocks that this device has, after the exchange of halves."""
  N = heads.query.shape[2]
  visible = integers.visible
  kv = jnp.concatenate([heads.key, heads.value], axis=2)
  if plan.zigzag:  # Queries, keys and values are sent together.
    both = _in_runs(plan, jnp.concatenate([heads.query, kv], axis=2), plan.query_len)
    query, kv = both[:, :, :N], both[:, :, N:]
  else:
    query, kv = _in_runs(plan, heads.query, plan.query_len), _in_runs(plan, kv, plan.key_len)
  key, value = jnp.split(kv, 2, axis=2)

  def integer(x: jax.Array | None, length: int) -> jax.Array | None:
    return None if x is None else _in_runs(plan, x, length, edge=True)

  queries = blocks.query_blocks(
    query,
    plan.indices(plan.query_len, plan.device),
    heads.key.shape[2],
    segments_BT=integer(visible.segments_BT, plan.query_len),
    pos_BT=integer(integers.query_pos, plan.query_len),
    seeds_BTN=integer(integers.seeds_BTN, plan.query_len),
  )
  keys = blocks.key_blocks(
    key,
    value,
    plan.indices(plan.key_len, plan.device),
    segments_BS=integer(visible.key_segments_BS, plan.key_len),
    pos_BS=integer(integers.key_pos, plan.key_len),
  )
  return queries, keys


def _in_runs(plan: _Plan, x: jax.Array, length: int, *, edge: bool = False) -> jax.Array:
  """Returns [B, held, ...] of a part [B, L, ...]: the runs that this device takes, each padded to whole blocks."""
  run = plan.run_len(length)
  pad = functools.partial(_pad_len, mode='edge' if edge else 'constant')
  runs = [x]
  if plan.zigzag:
    x = pad(x, 2 * run)
    even, odd = (
      jax.lax.ppermute(half, plan.split.axis, plan.homes(parity)) for parity, half in enumerate(jnp.split(x, 2, axis=1))
    )
    runs = plan.in_turn(even, odd)
  padded = _multiple(run, plan.block_len(length))
  return jnp.concatenate([pad(r, padded) for r in runs], axis=1)


def _in_order(plan: _Plan, x: jax.Array, length: int) -> jax.Array:
  """The inverse of `_in_runs`: returns the part [B, L, ...] of what a device holds, [B, held, ...]."""
  run = plan.run_len(length)
  runs = [r[:, :run] for r in jnp.split(x, 2 if plan.zigzag else 1, axis=1)]
  if plan.zigzag:
    back = [[(to, d) for d, to in plan.homes(parity)] for parity in (0, 1)]
    runs = [jax.lax.ppermute(r, plan.split.axis, pairs) for r, pairs in zip(plan.in_turn(*runs), back)]
  return jnp.concatenate(runs, axis=1)[:, : plan.part_len(length)]


def _pad_len(x: jax.Array, length: int, mode: str) -> jax.Array:
  amounts = [(0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]
  return jnp.pad(x, amounts, mode=mode) if amounts[1][1] else x


# ---------------------------------------------------------------- all-to-all


def _all_to_all(plan: _Plan, formula: Formula, heads: Heads, integers: Integers) -> jax.Array:
  """Attention to whole sequences by a part of the heads."""
  axis, (T, S) = plan.split.axis, (plan.query_len, plan.key_len)
  exchange = functools.partial(jax.lax.all_to_all, axis_name=axis, tiled=True)

  def local(heads: Heads, integers: Integers) -> jax.Array:
    B, L, N, H = heads.query.shape
    K, visible = heads.key.shape[2], integers.visible

    def whole(x: jax.Array | None, length: int) -> jax.Array | None:
      return None if x is None else jax.lax.all_gather(x, axis, axis=1, tiled=True)[:, :length]

    def own_heads(x: jax.Array) -> jax.Array:
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
    out = attend_in_blocks(
      formula,
      plan.block_size,
      None,
      Heads(
        query.reshape(*query.shape[:2], -1, H)[:, :T], key[:, :S], value[:, :S], jax.tree.map(own_heads, heads.bias)
      ),
      Integers(
        dataclasses.replace(
          visible,
          segments_BT=whole(visible.segments_BT, T),
          key_segments_BS=whole(visible.key_segments_BS, S),
        ),
        whole(integers.query_pos, T),
        whole(integers.key_pos, S),
        None if seeds is None else exchange(seeds, split_axis=2, concat_axis=1)[:, :T],
      ),
    )
    return exchange(_pad_len(out, L * plan.devices, 'constant'), split_axis=1, concat_axis=2)

  specs = plan.specs(heads, integers)
  return plan.mapped(local, specs, specs[0].query)(heads, integers)
