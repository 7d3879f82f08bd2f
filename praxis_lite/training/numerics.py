"""Checks that the gradients of a step are right on the devices on which it runs, for `train --verify_numerics`.

The norm of each variable's gradient, and of each repeated layer in it, is computed a second time, on one device. If one
device has too little memory, or there are several hosts, it is computed on the mesh, with the other `partitioning`.
Norms are compared instead of gradients, so the two computations need not share devices.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from praxis_lite.common.errors import ConfigError, NumericsError, first_lines
from praxis_lite.common.trees import NestedDict, leaves, path_name
from praxis_lite.sharding.layout import StateLayout
from praxis_lite.sharding.padding import slice_to
from praxis_lite.training.execution import EXECUTIONS
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.state import TrainState

# Largest relative difference of two correct norms: for float32 on a CPU; and for rounded products, such as float32
# products on accelerators.
_EXACT, _ROUNDED = 1e-3, 5e-2
# A norm below this fraction of the largest norm may be a rounding error, as for the bias of attention keys.
_NEGLIGIBLE = 1e-4

Norms = dict[str, np.ndarray]  # By variable: a scalar, or [layers, 1, ...] for a stack.


class Compared(NamedTuple):
  """The outcome of a comparison of norms with another computation."""

  reference: str  # The other computation, such as 'on one device'.
  num_norms: int
  worst: float  # The largest relative difference of two norms.


def compare_gradients(
  partitioned: PartitionedTask, state: TrainState, prng_key: jax.Array, batch: NestedDict
) -> Compared:
  """Compares the gradient norms of a step with another computation of the same step.

  The arguments of the step are not donated; the batch is on the mesh.

  Raises:
    NumericsError: a norm differs. The message names the variables, each with its spec.
    ConfigError: the norms cannot be computed in a second way. One device cannot compute them if it has too little
      memory or there are several hosts, and then the other partitioning must support the task. A task that draws random
      numbers in 'shard_map' cannot be compared at all.
  """
  found = _Norms(partitioned, partitioned.jax_task.partitioning)(state, prng_key, batch)
  reference, expected = _reference(partitioned, state, prng_key, batch)
  cpu = partitioned.mesh.devices.flat[0].platform == 'cpu'
  tolerance = _EXACT if cpu and partitioned.jax_task.model.fprop_dtype == jnp.float32 else _ROUNDED
  floor = _NEGLIGIBLE * max(float(np.max(norm)) for norm in expected.values())
  specs = {path_name(path): spec for path, spec in leaves(partitioned.state_specs.mdl_vars).items()}
  worst, wrong = 0.0, []
  for name, norm in expected.items():
    differences = np.abs(found[name] - norm) / np.maximum(norm, floor)
    worst = max(worst, float(np.max(differences)))
    if not np.all(differences <= tolerance):  # NaN counts as different.
      at = np.unravel_index(np.argmax(np.nan_to_num(differences, nan=np.inf)), norm.shape)
      layer = ', '.join(str(i) for i, size in zip(at, norm.shape) if size > 1)
      where = f', layer {layer}' if layer else ''
      spec = tuple(specs.get(name, ()))
      wrong.append(f'{name} {spec!r}{where}: {float(found[name][at]):.6g} instead of {float(norm[at]):.6g}')
  if wrong:
    norms = '; '.join(first_lines(wrong, 5))
    raise NumericsError(
      f'the gradients of the first step differ from those computed {reference}: norm of {norms}. '
      'Nothing was trained. `praxis-lite verify` looks for the mapping that is at fault'
    )
  return Compared(reference, sum(norm.size for norm in expected.values()), worst)


class _Norms:
  """Computes the gradient norms of a task's step, for any state and batch of its shapes; compiled once."""

  def __init__(self, partitioned: PartitionedTask, partitioning: str):
    layout = StateLayout(*(_drop_slots(tree) for tree in partitioned.layout))
    alone = PartitionedTask(partitioned.jax_task, partitioned.batch_shape, layout=layout)
    self._step = alone.gradient_norms(EXECUTIONS[partitioning](partitioned.jax_task, layout))

  def __call__(self, state: TrainState, prng_key: jax.Array, batch: NestedDict) -> Norms:
    norms = leaves(self._step(_drop_slots(state), prng_key, batch).mean_metrics)
    return {path_name(path): np.asarray(norm) for path, norm in norms.items()}


def _reference(
  partitioned: PartitionedTask, state: TrainState, prng_key: jax.Array, batch: NestedDict
) -> tuple[str, Norms]:
  """Computes the norms on one device or with the other partitioning; returns a text that says which, and the norms."""
  task, own = partitioned.jax_task, partitioned.jax_task.partitioning
  problem = 'there are several hosts'
  if jax.process_count() == 1:
    device = partitioned.mesh.devices.flat[0]
    one = Mesh(np.array([device]).reshape((1,) * len(partitioned.mesh.axis_names)), partitioned.mesh.axis_names)
    whole = jax.sharding.SingleDeviceSharding(device)
    try:
      norms = _Norms(PartitionedTask(task, jax.eval_shape(lambda: batch), mesh=one), 'auto')
      stored = jax.device_put((state.mdl_vars, state.step, batch), whole)
      there = state.replace(mdl_vars=slice_to(stored[0], partitioned.layout.mdl_vars.unpadded_shapes), step=stored[1])
      expected = norms(there, prng_key, stored[2])
      if own != 'auto':
        _refuse_random_numbers(expected, norms(there, jax.random.fold_in(prng_key, 1), stored[2]))
      return 'on one device', expected
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      problem = 'one device has too little memory'
  other = next(name for name in EXECUTIONS if name != own)
  try:
    by_name = {name: _Norms(partitioned, name) for name in ('auto', other)}
    one_key, another = (by_name['auto'](state, key, batch) for key in (prng_key, jax.random.fold_in(prng_key, 1)))
    _refuse_random_numbers(one_key, another)
    return f'with partitioning={other!r}', by_name[other](state, prng_key, batch)
  except ConfigError as error:
    raise ConfigError(f'{problem}, and partitioning={other!r} does not take this task: {error}') from error


def _drop_slots(tree: TrainState) -> TrainState:
  return tree.replace(opt_states={}, ema_vars=None)


def _refuse_random_numbers(one_key: Norms, another: Norms) -> None:
  """Raises a ConfigError if norms for two PRNG keys differ, because then the step draws random numbers.

  Under `shard_map`, each device draws its own numbers, so norms could not be compared.
  """
  if not all(np.allclose(one_key[name], another[name], rtol=_EXACT) for name in one_key):
    raise ConfigError('the model draws random numbers, such as dropout, and under shard_map each device draws its own')
