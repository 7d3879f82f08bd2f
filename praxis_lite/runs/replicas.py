"""Checksums of replicas: each device sums the bits of its part of each array, and devices with equal parts compare.

Shapes: D devices in the order of the mesh, A arrays of the state.

    sum of a part     sum over i of mix(word_i + odd * i), modulo 2^32, where word_i holds the bits of number i
    table_DA          one row for each device; rows of devices with replicas of the same part must agree in a column

`mix` is a bijection of words, so a change of a single number is always found. It spreads each bit over the whole word,
so several changes, such as flips of the same bit in two numbers, or of the signs of all numbers, cancel only with a
probability of about 2^-32. An array has replicas unless all mesh axes with more than one device split it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from praxis_lite.common.trees import Path, leaves_by_path
from praxis_lite.sharding.layout import StateLayout, is_prng_key
from praxis_lite.sharding.specs import all_axes
from praxis_lite.training.state import TrainState

_ODD = 0x9E3779B1  # Equal words add different terms at different positions.


class ReplicaDifference(NamedTuple):
  """A difference between replicas of one part of an array; devices are numbered in the order of the mesh.

  Attributes:
    odd: if more than half of the replicas have the same checksum, the devices with another one; otherwise ().
  """

  path: Path
  replicas: tuple[int, ...]
  odd: tuple[int, ...]


class Suspects(NamedTuple):
  """The devices that may have caused differences, in mesh order, and whether a majority of replicas outvoted them."""

  devices: tuple[int, ...]
  is_voted: bool


class ReplicaSums:
  """Computes the checksums of a train state, in one program.

  Attributes:
    replicated: the number of replicas of each part of an array, by the array's path.
    part_bytes: the bytes of a part of each array, by path; a call reads them once on each device.
  """

  def __init__(self, layout: StateLayout):
    self._mesh = layout.mesh
    shapes, specs = leaves_by_path(layout.padded_shapes), leaves_by_path(layout.specs)
    sizes = dict(self._mesh.shape)
    self._splits = {path: frozenset(a for a in all_axes(spec) if sizes[a] > 1) for path, spec in specs.items()}
    self.replicated = {p: int(np.prod([n for a, n in sizes.items() if a not in s])) for p, s in self._splits.items()}
    self.part_bytes = {path: _shard_bytes(shape) for path, shape in shapes.items()}
    mapped = jax.shard_map(
      self._sum_own, mesh=self._mesh, in_specs=(layout.specs,), out_specs=PartitionSpec(), check_vma=False
    )
    self._shapes = layout.padded_shapes
    self._program = jax.jit(lambda state: mapped(layout.fetch(state)))

  def compile(self) -> None:
    """Compiles the program before the first call."""
    self._program = self._program.lower(self._shapes).compile()  # type: ignore[assignment]

  def __call__(self, state: TrainState) -> jax.Array:
    """Returns the checksums, uint32 [D, A], the same on every device, without waiting for the result."""
    return self._program(state)

  def compare(self, table_DA: np.ndarray) -> list[ReplicaDifference]:
    """Returns the differences between replicas in a table of checksums, in the order of the arrays."""
    sizes = tuple(self._mesh.shape.values())
    numbers = np.arange(self._mesh.size).reshape(sizes)
    found = []
    for column, (path, split) in enumerate(self._splits.items()):
      split_axes = [i for i, axis in enumerate(self._mesh.axis_names) if axis in split]
      others = [i for i in range(len(sizes)) if i not in split_axes]
      parts = int(np.prod([sizes[i] for i in split_axes]))
      of_parts = numbers.transpose(*split_axes, *others).reshape(parts, -1)
      sums = table_DA[of_parts, column]
      for part in np.flatnonzero((sums != sums[:, :1]).any(1)):
        found.append(_vote(path, of_parts[part], sums[part]))
    return found

  def _sum_own(self, state: TrainState) -> jax.Array:
    own_A = jnp.stack([_sum_bits(part) for part in jax.tree.leaves(state)])
    return jax.lax.all_gather(own_A, self._mesh.axis_names)


def find_suspects(differences: Iterable[ReplicaDifference]) -> Suspects:
  """Returns the devices that majorities have outvoted most often; without any majority, all devices that differ.

  A wrong value spreads through the gradients to other arrays and devices. The device where it began differs in at least
  as many arrays as any other device.
  """
  differences = list(differences)
  if votes := Counter(device for difference in differences for device in difference.odd):
    most = max(votes.values())
    return Suspects(tuple(sorted(device for device, count in votes.items() if count == most)), True)
  return Suspects(tuple(sorted({device for difference in differences for device in difference.replicas})), False)


def _vote(path: Path, devices: Sequence[int], sums: Sequence[int]) -> ReplicaDifference:
  (value, count), *_ = Counter(int(s) for s in sums).most_common(1)
  replicas = tuple(int(device) for device in devices)
  odd = tuple(d for d, s in zip(replicas, sums) if s != value) if 2 * count > len(replicas) else ()
  return ReplicaDifference(path, replicas, odd)


def _shard_bytes(shape: jax.ShapeDtypeStruct) -> int:
  return int(np.prod(shape.sharding.shard_shape(shape.shape))) * shape.dtype.itemsize


def _sum_bits(x: jax.Array) -> jax.Array:
  words = _words(x)
  position, stride = jnp.uint32(0), 1
  for dim in reversed(range(words.ndim)):  # The index is computed here, because flattening the array might copy it.
    position += jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) * jnp.uint32(stride % 2**32)
    stride *= words.shape[dim]
  return jnp.sum(_mix(words + position * jnp.uint32(_ODD)), dtype=jnp.uint32)


def _mix(words: jax.Array) -> jax.Array:
  """Returns a hash of each uint32 word by the last steps of MurmurHash3, which are a bijection."""
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    words = (words ^ (words >> shift)) * jnp.uint32(factor)
  return words ^ (words >> 16)


def _words(x: jax.Array) -> jax.Array:
  """Returns the bits of an array as uint32; numbers of 64 bits become two words along a new last dimension."""
  if is_prng_key(x):
    x = jax.random.key_data(x)
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    x = jnp.stack([jnp.real(x), jnp.imag(x)], -1)
  if x.dtype.itemsize == 8:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)
  if jnp.issubdtype(x.dtype, jnp.floating):
    x = jax.lax.bitcast_convert_type(x, getattr(jnp, f'uint{jnp.finfo(x.dtype).bits}'))
  return x.astype(jnp.uint32)
