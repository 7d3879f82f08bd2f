"""Bits that are flipped on purpose: in arrays on devices, and inside a step, where a test builds it.

A step is built with `build_faulty_steps`: on each device it asks the host, by a callback, whether a bit of the first
gradient is flipped, before the gradients are summed over the devices or after. So one program serves all faults.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.trees import leaves_by_path
from praxis_lite.training import execution
from praxis_lite.training.state import TrainState


class Flip(NamedTuple):
  """A bit to flip: of which array, on which device of the mesh, in which number of its part."""

  path: tuple[str, ...]
  device: int
  number: int
  bit: int


def flip_bit(x: jax.Array, device: int, number: int, bit: int) -> jax.Array:
  """Returns an array with one bit flipped in the part that one device, counted from 0 on the mesh, holds."""
  wanted = list(x.sharding.mesh.devices.flat)[device]
  parts = []
  for shard in x.addressable_shards:
    part = np.array(shard.data)
    if shard.device == wanted:
      bits = part.reshape(-1).view(np.uint8)
      bits[(number % part.size) * part.itemsize + bit // 8] ^= 1 << bit % 8
    parts.append(jax.device_put(part, shard.device))
  return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def flip_in_state(state: TrainState, flip: Flip) -> TrainState:
  """Returns a state with one bit flipped."""
  leaves, tree = jax.tree.flatten(state)
  place = list(leaves_by_path(state)).index(flip.path)
  leaves[place] = flip_bit(leaves[place], *flip[1:])
  return jax.tree.unflatten(tree, leaves)


class FaultySteps:
  """What is flipped in the steps that follow.

  Attributes:
    before, after: the flip of a gradient before and after it is summed over devices; None for none.
  """

  before: Flip | None = None
  after: Flip | None = None

  def corrupt(self, tree, when: str, names):
    """Inside `shard_map`: returns a tree of arrays in which the flip is done."""
    paths = list(leaves_by_path(tree))
    leaves, structure = jax.tree.flatten(tree)
    sizes = [jax.lax.axis_size(name) for name in names]
    device = jnp.ravel_multi_index(tuple(jax.lax.axis_index(name) for name in names), sizes, mode='clip')

    def mask(device, size, path):
      flip = getattr(self, when)
      out = np.zeros(size, np.uint32)
      if flip is not None and flip.path == path and flip.device == int(device):
        out[flip.number % size] = np.uint32(1) << np.uint32(flip.bit)
      return out

    def corrupt(x, path):
      shape = jax.ShapeDtypeStruct((x.size,), jnp.uint32)
      flips = jax.pure_callback(lambda device: mask(device, x.size, path), shape, device)
      return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.uint32) ^ flips.reshape(x.shape), x.dtype)

    return jax.tree.unflatten(structure, [corrupt(x, path) for x, path in zip(leaves, paths)])


@contextlib.contextmanager
def build_faulty_steps(names):
  """Steps that are traced in this block, with `partitioning='shard_map'` on a mesh with axes `names`, can be faulty."""
  faults, sync = FaultySteps(), execution.sync_gradients

  def sync_with_faults(gradients, axes, specs=None):
    return faults.corrupt(sync(faults.corrupt(gradients, 'before', names), axes, specs), 'after', names)

  execution.sync_gradients = sync_with_faults
  try:
    yield faults
  finally:
    execution.sync_gradients = sync
