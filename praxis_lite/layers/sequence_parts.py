"""Splits sequences over a mesh axis: which part each device has, and how the part is cut into blocks.

With a causal mask, the device with the first part of the sequence would have the least work in a ring, and the device
with the last part the most. So before the ring, device i of P swaps the second half of its part with device P - 1 - i:

    4 devices, 8 halves      device 0: 0 and 7     device 1: 2 and 5     device 2: 4 and 3     device 3: 6 and 1

If a sliding window reaches fewer devices than there are, this exchange is not needed.

B batch, T length of the queries, S length of the keys, L length on one device, P devices of the axis, N heads, K kv
heads, H dims per head; for blocks see `blocks.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from praxis_lite.layers.attention_spec import Heads, Integers, argument_specs
from praxis_lite.layers.block_arrays import Keys, Queries, even_block_size, key_blocks, mask_blocks, query_blocks
from praxis_lite.layers.block_pairs import count_pairs
from praxis_lite.layers.masks import Array, AttentionMask, has_causal, split_offsets
from praxis_lite.sharding.specs import axes_to_entry

ContextMethod = Literal['ring', 'all_to_all']
CONTEXT_METHODS = ('ring', 'all_to_all')


@dataclasses.dataclass(frozen=True)
class SequenceSplit:
  """How queries, keys and values are split over the ambient mesh.

  Attributes:
    axis: the mesh axis that splits the length.
    method: one of `CONTEXT_METHODS`.
    batch_axes, head_axes: mesh axes that split the batch and the heads.
    others_split: whether the compiler may split the arrays over other axes too; if False, other axes hold copies.
  """

  axis: str
  method: ContextMethod = 'ring'
  batch_axes: tuple[str, ...] = ()
  head_axes: tuple[str, ...] = ()
  others_split: bool = False

  @property
  def mapped_axes(self) -> frozenset[str]:
    """The mesh axes that `shard_map` maps over."""
    named = {self.axis, *self.batch_axes, *self.head_axes}
    return frozenset(named if self.others_split else jax.sharding.get_abstract_mesh().axis_names)


@dataclasses.dataclass(frozen=True)
class SequencePlan:
  """The static properties of a call of attention to split sequences."""

  split: SequenceSplit
  query_len: int  # T, without padding.
  key_len: int  # S, without padding.
  block_size: int  # Largest number of queries or keys in a block.
  devices: int  # P.
  zigzag: bool  # Whether devices swap the second halves of their parts.
  # Device i attends to the parts of the devices i - first, i - first - 1, ..., i - last in the ring.
  first: int
  last: int
  lanes: int = 1  # Lengths of blocks are multiples of this.

  @classmethod
  def make(cls, split: SequenceSplit, T: int, S: int, mask: AttentionMask, block_size: int) -> SequencePlan:
    P = jax.sharding.get_abstract_mesh().shape[split.axis]

    def parts_within(distance: int | None) -> int:
      return P - 1 if distance is None else -(-distance // (multiple_of(T, P) // P))

    first, last, offsets = 0, P - 1, split_offsets(mask)[0]
    behind, ahead = parts_within(offsets.behind), parts_within(offsets.ahead)
    if T == S and ahead + behind < P - 1:
      first, last = -ahead, behind
    return cls(split, T, S, block_size, P, has_causal(mask) and T == S and last - first == P - 1, first, last)

  @property
  def device(self) -> jax.Array:
    return jax.lax.axis_index(self.split.axis)

  def part_len(self, length: int) -> int:
    """Returns L for a sequence of this length."""
    return multiple_of(length, self.devices) // self.devices

  def run_len(self, length: int) -> int:
    """Returns the length of a contiguous run of the sequence on a device: L, or half of it."""
    return -(-self.part_len(length) // 2) if self.zigzag else self.part_len(length)

  def block_len(self, length: int) -> int:
    return multiple_of(even_block_size(self.run_len(length), self.block_size), self.lanes)

  def indices(self, length: int, device: jax.Array | int) -> Array:
    """Returns the indices of the sequence elements on a device, [blocks, block_len]; -1 marks padding.

    Returns a NumPy array if `device` is an int.
    """
    xp: Any = np if isinstance(device, int) else jnp
    part, run, size = self.part_len(length), self.run_len(length), self.block_len(length)
    offset = xp.arange(multiple_of(run, size), dtype=np.int32)
    if self.zigzag:
      halves = xp.stack([2 * device, 2 * (self.devices - device) - 1])[:, None]
      start, true = halves // 2 * part + halves % 2 * run, xp.where(halves % 2 == 0, run, part - run)
    else:
      start, true = device * part, part
    index = start + offset
    return xp.where((offset < true) & (index < length), index, -1).reshape(-1, size).astype(np.int32)

  def mean_pairs(self, mask: AttentionMask) -> float:
    """Returns how many pairs of blocks a device computes per step of the ring: the mean over devices and steps."""
    steps = range(self.first, self.last + 1)
    queries, keys = (
      [self.indices(length, device) for device in range(self.devices)] for length in (self.query_len, self.key_len)
    )
    pairs = [(query, keys[(d - step) % self.devices]) for d, query in enumerate(queries) for step in steps]
    return sum(count_pairs(mask, *pair) for pair in pairs) / len(pairs)

  def exchange(self, half: jax.Array) -> jax.Array:
    """Swaps halves of parts between devices i and P - 1 - i: returns the array `half` of the other device."""
    return jax.lax.ppermute(half, self.split.axis, [(d, self.devices - 1 - d) for d in range(self.devices)])

  def map_parts(self, fn: Any, heads: Heads, integers: Integers, *, backward: bool = False, keeps: bool = True) -> Any:
    """Returns `fn`, a forward or backward pass, mapped over the devices.

    If `keeps`, the forward pass also returns lse, the logarithms of the softmax's denominators.
    """
    rows, head = axes_to_entry(self.split.batch_axes), axes_to_entry(self.split.head_axes)
    specs = argument_specs(heads, integers, rows, self.split.axis, head)
    queries, lse = specs[0].query, PartitionSpec(self.split.axis, rows, head)
    shard = functools.partial(jax.shard_map, fn, axis_names=self.split.mapped_axes, check_vma=False)
    if backward:
      return shard(in_specs=(*specs, queries, lse, queries), out_specs=specs[0])
    return shard(in_specs=specs, out_specs=(queries, lse) if keeps else queries)


def cut_local_blocks(plan: SequencePlan, heads: Heads, integers: Integers) -> tuple[Queries, Keys, AttentionMask]:
  """Returns this device's queries, keys and mask after the swap of halves, cut into blocks."""
  query, key, value = heads_to_runs(plan, heads)

  def query_runs(x: jax.Array) -> jax.Array:
    return to_runs(plan, x, plan.query_len, edge=True)

  def key_runs(x: jax.Array) -> jax.Array:
    return to_runs(plan, x, plan.key_len, edge=True)

  query_pos, seeds_BTN = jax.tree.map(query_runs, (integers.query_pos, integers.seeds_BTN))
  query_index, key_index = plan.indices(plan.query_len, plan.device), plan.indices(plan.key_len, plan.device)
  queries = query_blocks(query, query_index, heads.key.shape[2], pos_BT=query_pos, seeds_BTN=seeds_BTN)
  keys = key_blocks(key, value, key_index, pos_BS=jax.tree.map(key_runs, integers.key_pos))
  mask = integers.mask.map_arrays(query=query_runs, key=key_runs)
  return queries, keys, mask_blocks(mask, query_index.shape[1], key_index.shape[1])


def heads_to_runs(plan: SequencePlan, heads: Heads) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the queries, keys and values of this device after the swap of halves; see `to_runs`."""
  N = heads.query.shape[2]
  kv = jnp.concatenate([heads.key, heads.value], axis=2)
  if plan.zigzag:  # Queries, keys and values are sent together.
    both = to_runs(plan, jnp.concatenate([heads.query, kv], axis=2), plan.query_len)
    query, kv = both[:, :, :N], both[:, :, N:]
  else:
    query, kv = to_runs(plan, heads.query, plan.query_len), to_runs(plan, kv, plan.key_len)
  key, value = jnp.split(kv, 2, axis=2)
  return query, key, value


def to_runs(plan: SequencePlan, x: jax.Array, length: int, *, edge: bool = False) -> jax.Array:
  """Returns this device's contiguous runs of the sequence, for its part [B, L, ...].

  These are the whole part or, with `plan.zigzag`, the first half of the part and the half received by the swap. Each is
  padded to whole blocks, and they are concatenated along dimension 1.
  """
  run = plan.run_len(length)
  pad = functools.partial(pad_len, mode='edge' if edge else 'constant')
  runs = [x]
  if plan.zigzag:
    own, other = jnp.split(pad(x, 2 * run), 2, axis=1)
    runs = [own, plan.exchange(other)]
  padded = multiple_of(run, plan.block_len(length))
  return jnp.concatenate([pad(r, padded) for r in runs], axis=1)


def join_runs(plan: SequencePlan, x: jax.Array, length: int) -> jax.Array:
  """The inverse of `to_runs`: returns the part [B, L, ...] of a device, for its runs."""
  run = plan.run_len(length)
  runs = [r[:, :run] for r in jnp.split(x, 2 if plan.zigzag else 1, axis=1)]
  if plan.zigzag:
    runs = [runs[0], plan.exchange(runs[1])]
  return jnp.concatenate(runs, axis=1)[:, : plan.part_len(length)]


def pad_len(x: jax.Array, length: int, mode: str) -> jax.Array:
  amounts = [(0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]
  return jnp.pad(x, amounts, mode=mode) if amounts[1][1] else x


def multiple_of(size: int, of: int) -> int:
  return -(-size // of) * of
