"""Silent data corruption: a step is run twice, and its results are compared bit by bit, on each device.

On the same devices, one program computes the same bits of the same arguments; a difference is a fault of the hardware,
or an operation that is not deterministic by design, such as scatters on some GPUs (--xla_gpu_deterministic_ops=true).
"""

from __future__ import annotations

import socket
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from praxis_lite.common.errors import UserError
from praxis_lite.common.trees import NestedDict, leaves_by_path, path_name
from praxis_lite.training.partitioned_step import PartitionedStep
from praxis_lite.training.state import TrainState
from praxis_lite.training.steps import TrainStepOutput

_SHOWN = 5


class DeterminismError(UserError):
  """The same step of the same arguments has given different bits."""

  exit_code = 76  # Not to be started again on the same devices: see docs/durable-runs.md.


def step_twice(
  step: PartitionedStep[TrainStepOutput], state: TrainState, prng_key: jax.Array, batch: NestedDict, number: int
) -> TrainStepOutput:
  """Runs a step twice, from two copies of the state, and returns the result.

  It takes the memory of one more state.

  Args:
    step, state, prng_key, batch: the step and its arguments; the state is donated.
    number: of the step, for the message.

  Raises:
    DeterminismError: the new states differ. With several processes, in all of them.
  """
  copy = jax.tree.map(jnp.copy, state)
  first = step(copy, prng_key, batch)
  second = step(state, prng_key, batch)
  found = differences(first.state, second.state)
  anywhere = len(found)
  if jax.process_count() > 1:
    anywhere = int(np.sum(multihost_utils.process_allgather(np.asarray(anywhere))))
  if anywhere:
    host = f'host {socket.gethostname()}, process {jax.process_index()}'
    shown = '; '.join(found[:_SHOWN]) + (f'; and {len(found) - _SHOWN} more' if len(found) > _SHOWN else '')
    where = f'{host}: {shown}' if found else f'{host}: no difference here, but on another host'
    raise DeterminismError(
      f'step {number} was run twice and has given different bits. {where}. Nothing of this step is saved; take the '
      'device out of the run, and start it again from its last checkpoint'
    )
  return second


def differences(first: TrainState, second: TrainState) -> list[str]:
  """Returns where the parts of two states on the devices of this process differ in bits: device, array, how many."""
  found = []
  others = leaves_by_path(second)
  for path, a in leaves_by_path(first).items():
    for one, other in zip(a.addressable_shards, others[path].addressable_shards, strict=True):
      count = int(_count_differences(one.data, other.data))
      if count:
        device = f'device {one.device.id} ({one.device.device_kind})'
        found.append(f'{device}, {count} of {one.data.size} values of {path_name(path)}')
  return sorted(found)


@jax.jit
def _count_differences(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.sum(_bits(a) != _bits(b))


def _bits(x: jax.Array) -> Any:
  if x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.integer):
    return x
  return jax.lax.bitcast_convert_type(x, jnp.dtype(f'uint{8 * x.dtype.itemsize}'))
