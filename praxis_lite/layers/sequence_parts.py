"""Which part of a sequence that is split over a mesh axis a device has, and in which blocks.

Under a causal mask, a device with the first part of the sequence would have little to do in a ring, and one with the
last part much. So each device takes two half parts there, one from each end, which halves exchange beforehand:

    4 devices, 8 halves      device 0: 0 and 7     device 1: 1 and 6     device 2: 2 and 5     device 3: 3 and 4

A sliding window that reaches fewer devices than there are needs no such exchange.

B batch, T length of the queries, S length of the keys, L length on one device, P devices of the axis, N heads, K kv
heads, H dims per head; for blocks see `blocks.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.layers import blocks
from praxis_lite.layers.blocks import Keys, Queries
from praxis_lite.layers.blockwise import Heads, Integers
from praxis_lite.layers.masks import Visibility
from praxis_lite.partitioning.specs import axes_to_entry

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


@dataclasses.dataclass(frozen=True)
class SequencePlan:
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
  def of(cls, split: SequenceSplit, T: int, S: int, visible: Visibility, block_size: int) -> SequencePlan:
    P = jax.sharding.get_abstract_mesh().shape[split.axis]
    first, last = 0, P - 1
    if visible.window is not None and T == S:
      reach = -(-(visible.window - 1) // (multiple_of(T, P) // P))
      ahead = 0 if visible.causal and visible.prefix_B is None else reach
      if ahead + reach < P - 1:
        first, last = -ahead, reach
    return cls(split, T, S, block_size, P, visible.causal and T == S and last - first == P - 1, first, last)

  @property
  def device(self) -> jax.Array:
    return jax.lax.axis_index(self.split.axis)

  def part_len(self, length: int) -> int:
    """L, of a sequence of this length."""
    return multiple_of(length, self.devices) // self.devices

  def run_len(self, length: int) -> int:
    """How many neighbours in the sequence a device has in one piece: L, or half of it."""
    return -(-self.part_len(length) // 2) if self.zigzag else self.part_len(length)

  def block_len(self, length: int) -> int:
    return blocks.even_size(self.run_len(length), self.block_size)

  def indices(self, length: int, device: jax.Array) -> jax.Array:
    """Returns the indices [blocks, block_len] that a device has; -1 is padding."""
    part, run, size = self.part_len(length), self.run_len(length), self.block_len(length)
    offset = jnp.arange(multiple_of(run, size))
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


def own_blocks(plan: SequencePlan, heads: Heads, integers: Integers) -> tuple[Queries, Keys]:
  """The blocks that this device has, after the exchange of halves."""
  N = heads.query.shape[2]
  visible = integers.visible
  kv = jnp.concatenate([heads.key, heads.value], axis=2)
  if plan.zigzag:  # Queries, keys and values are sent together.
    both = in_runs(plan, jnp.concatenate([heads.query, kv], axis=2), plan.query_len)
    query, kv = both[:, :, :N], both[:, :, N:]
  else:
    query, kv = in_runs(plan, heads.query, plan.query_len), in_runs(plan, kv, plan.key_len)
  key, value = jnp.split(kv, 2, axis=2)

  def integer(x: jax.Array | None, length: int) -> jax.Array | None:
    return None if x is None else in_runs(plan, x, length, edge=True)

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


def in_runs(plan: SequencePlan, x: jax.Array, length: int, *, edge: bool = False) -> jax.Array:
  """Returns [B, held, ...] of a part [B, L, ...]: the runs that this device takes, each padded to whole blocks."""
  run = plan.run_len(length)
  pad = functools.partial(pad_len, mode='edge' if edge else 'constant')
  runs = [x]
  if plan.zigzag:
    x = pad(x, 2 * run)
    even, odd = (
      jax.lax.ppermute(half, plan.split.axis, plan.homes(parity)) for parity, half in enumerate(jnp.split(x, 2, axis=1))
    )
    runs = plan.in_turn(even, odd)
  padded = multiple_of(run, plan.block_len(length))
  return jnp.concatenate([pad(r, padded) for r in runs], axis=1)


def in_order(plan: SequencePlan, x: jax.Array, length: int) -> jax.Array:
  """The inverse of `in_runs`: returns the part [B, L, ...] of what a device holds, [B, held, ...]."""
  run = plan.run_len(length)
  runs = [r[:, :run] for r in jnp.split(x, 2 if plan.zigzag else 1, axis=1)]
  if plan.zigzag:
    back = [[(to, d) for d, to in plan.homes(parity)] for parity in (0, 1)]
    runs = [jax.lax.ppermute(r, plan.split.axis, pairs) for r, pairs in zip(plan.in_turn(*runs), back)]
  return jnp.concatenate(runs, axis=1)[:, : plan.part_len(length)]


def pad_len(x: jax.Array, length: int, mode: str) -> jax.Array:
  amounts = [(0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]
  return jnp.pad(x, amounts, mode=mode) if amounts[1][1] else x


def multiple_of(size: int, of: int) -> int:
  return -(-size // of) * of
