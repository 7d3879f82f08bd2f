"""Finds silent data corruption: runs a step twice, and compares the results bit by bit on each device.

The same program and arguments give the same bits, also on other devices of the same kind. A difference is a fault of
the hardware, or comes from an operation that is not deterministic, such as scatters on some GPUs
(--xla_gpu_deterministic_ops=true).
"""

from __future__ import annotations

import socket
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from praxis_lite.common.errors import UserError, first_lines
from praxis_lite.common.figures import number_of
from praxis_lite.common.trees import NestedDict, leaves_by_path, path_name
from praxis_lite.runs.corruption import CorruptionError
from praxis_lite.training.partitioned_step import PartitionedStep
from praxis_lite.training.state import TrainState
from praxis_lite.training.steps import TrainStepOutput

_SHOWN = 5


class DeterminismError(CorruptionError):
  """The same step with the same arguments gave different bits; `what` says where, without the remedy."""

  def __init__(self, what: str):
    super().__init__(
      f'{what}. Nothing of this step is saved; remove the device from the run, and start the run again from its last '
      'checkpoint'
    )
    self.what = what


def step_twice(
  step: PartitionedStep[TrainStepOutput],
  state: TrainState,
  prng_key: jax.Array,
  batch: NestedDict,
  number: int,
  elsewhere: tuple[PartitionedStep[TrainStepOutput], jax.Array] | None = None,
) -> TrainStepOutput:
  """Runs a step twice, from two copies of the state, and returns the result.

  This needs memory for a second state.

  Args:
    step, state, prng_key, batch: the step and its arguments; it donates the state.
    number: the number of the step, for the message.
    elsewhere: the same step and key on the mesh of `rotate_devices`. It takes the place of the first of the two runs,
      and so finds a device that computes the same wrong values each time. None runs `step` twice.

  Raises:
    DeterminismError: the new states differ. If they differ in one of several processes, all processes raise.
  """
  if elsewhere is None:
    first = step(jax.tree.map(jnp.copy, state), prng_key, batch).state
    second = step(state, prng_key, batch)
  else:
    other_step, other_key = elsewhere
    other_state, _, other_batch = other_step.arguments
    here, there, of_batch = (jax.tree.map(lambda x: x.sharding, arrays) for arrays in (state, other_state, other_batch))
    moved = other_step(_move(state, there), other_key, _move(batch, of_batch)).state
    # Two programs that order the devices differently must not run at the same time: each may wait for the other.
    first = jax.block_until_ready(_move(moved, here))
    second = step(state, prng_key, batch)
  found = bit_differences(first, second.state)
  anywhere = len(found)
  if jax.process_count() > 1:
    anywhere = int(np.sum(multihost_utils.process_allgather(np.asarray(anywhere))))
  if anywhere:
    host = f'host {socket.gethostname()}, process {jax.process_index()}'
    where = f'{host}: {"; ".join(first_lines(found, _SHOWN)) or "no difference here, but on another host"}'
    twice = 'twice' if elsewhere is None else 'twice, on two orders of devices,'
    raise DeterminismError(f'step {number} was run {twice} and gave different bits. {where}')
  return second


def rotate_devices(mesh: Mesh) -> Mesh:
  """Returns the mesh with each device replaced by the next one of its process, so that each does another's work.

  If the mesh has only one device of a process, that device is replaced by one of the process's other devices.

  Raises:
    UserError: a process has only one device.
  """
  following: dict[jax.Device, jax.Device] = {}
  for process in {device.process_index for device in mesh.devices.flat}:
    ours = [device for device in mesh.devices.flat if device.process_index == process]
    if len(ours) == 1:
      ours += [device for device in jax.devices() if device.process_index == process and device not in ours][:1]
    if len(ours) == 1:
      raise UserError(f'other_devices: process {process} has only one device')
    following |= zip(ours, [*ours[1:], ours[0]])
  others = np.reshape([following[device] for device in mesh.devices.flat], mesh.devices.shape)
  return Mesh(others, mesh.axis_names, axis_types=mesh.axis_types)


def _move(arrays: Any, shardings: Any) -> Any:
  """Returns copies of arrays with other shardings, whose meshes have the same devices of each process in another order.

  What a device holds goes to the device at its place in the other mesh; so each replica stays one of its own.
  """

  def move(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    before: Any = x.sharding
    target, moved = dict(zip(before.mesh.devices.flat, sharding.mesh.devices.flat)), []
    for shard in x.addressable_shards:
      place = SingleDeviceSharding(target[shard.device], memory_kind=sharding.memory_kind)
      moved.append(jax.device_put(shard.data, place, may_alias=False))  # Steps donate their state.
    return jax.make_array_from_single_device_arrays(x.shape, sharding, moved)

  return jax.tree.map(move, arrays, shardings)


def bit_differences(first: TrainState, second: TrainState) -> list[str]:
  """Compares two states bit by bit; returns a line for each shard on a local device that differs.

  A line names the device and the array, and says how many values differ.
  """
  found = []
  others = leaves_by_path(second)
  for path, a in leaves_by_path(first).items():
    for one, other in zip(a.addressable_shards, others[path].addressable_shards, strict=True):
      if count := int(_count_differences(one.data, other.data)):
        device = f'device {one.device.id} ({one.device.device_kind})'
        found.append(f'{device}, {count} of {number_of(one.data.size, "value")} of {path_name(path)}')
  return sorted(found)


@jax.jit
def _count_differences(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.sum(_bits(a) != _bits(b))


def _bits(x: jax.Array) -> Any:
  if x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.integer):
    return x
  return jax.lax.bitcast_convert_type(x, jnp.dtype(f'uint{8 * x.dtype.itemsize}'))
