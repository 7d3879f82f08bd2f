"""Finds silent data corruption: runs a step twice, and compares the results bit by bit on each device.

On the same devices, the same program and arguments give the same bits. A difference is a fault of the hardware, or
comes from an operation that is not deterministic, such as scatters on some GPUs (--xla_gpu_deterministic_ops=true).
"""

from __future__ import annotations

import socket
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from praxis_lite.common.errors import first_lines
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
  step: PartitionedStep[TrainStepOutput], state: TrainState, prng_key: jax.Array, batch: NestedDict, number: int
) -> TrainStepOutput:
  """Runs a step twice, from two copies of the state, and returns the result.

  This needs memory for a second state.

  Args:
    step, state, prng_key, batch: the step and its arguments; it donates the state.
    number: the number of the step, for the message.

  Raises:
    DeterminismError: the new states differ. If they differ in one of several processes, all processes raise.
  """
  copy = jax.tree.map(jnp.copy, state)
  first = step(copy, prng_key, batch)
  second = step(state, prng_key, batch)
  found = bit_differences(first.state, second.state)
  anywhere = len(found)
  if jax.process_count() > 1:
    anywhere = int(np.sum(multihost_utils.process_allgather(np.asarray(anywhere))))
  if anywhere:
    host = f'host {socket.gethostname()}, process {jax.process_index()}'
    where = f'{host}: {"; ".join(first_lines(found, _SHOWN)) or "no difference here, but on another host"}'
    raise DeterminismError(f'step {number} was run twice and gave different bits. {where}')
  return second


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
