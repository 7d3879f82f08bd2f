"""What a step costs by formulas, where its compiler is not at hand or refuses it.

    FLOPs         of the products of the traced step, recomputation included, in equal parts on all devices
    memory        the state: exact; gradients: as much as the trained variables; activations that a scan over layers
                  saves: those of the trace, in equal parts on the devices that share the batch
    collectives   weights that the batch's axes split: gathered in the forward pass and again in the backward, and their
                  gradients reduce-scattered; gradients of others: all-reduced over the axes of the batch

What it does not know: other temporaries, communication of activations (tensor parallelism, experts, sequences), what
the compiler moves besides, the time of what is between products, and what overlaps; nothing does here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from praxis_lite.partitioning.specs import all_axes
from praxis_lite.plan.cost import Communication, Cost, Operation
from praxis_lite.plan.links import Links
from praxis_lite.plan.memory import Live, Memory, StateBytes
from praxis_lite.plan.targets import Target
from praxis_lite.training.flops import count_flops
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.trees import leaves_by_path, path_name

UNCERTAIN = (
  'analytic: no compiler was asked. State and FLOPs are exact; gradients, saved activations and collectives of weights '
  'are estimates; other temporaries, communication of activations and overlap are not known, and what is between '
  'products takes no time here'
)


def analytic_memory(task: PartitionedTask, state: StateBytes, target: Target, jaxpr: ClosedJaxpr) -> Memory:
  """Returns the memory of a step by formulas; see above."""
  gradients = sum(size for _, size in _trained(task))
  batch = math.prod(task.mesh.shape[axis] for axis in _batch_axes(task))
  saved = max(_saved_by_scans(jaxpr.jaxpr), default=0) // max(batch, 1)
  live = [Live('gradients', '', 'backward', gradients, ''), Live('saved activations', '', 'forward', saved, '')]
  return Memory(
    int(target.device_memory), state, state.total, state.total, state.total, gradients + saved, live=tuple(live)
  )


def analytic_cost(task: PartitionedTask, target: Target, links: Links, jaxpr: ClosedJaxpr, dtype: str) -> Cost:
  """Returns the cost of a step by formulas; see above. `dtype` is what the model computes in, as HLO spells it."""
  flops = count_flops(jaxpr) / task.mesh.size
  compute = flops / (target.peak(dtype) * target.efficiency.compute)
  state = sum(
    2 * math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves((task.state_shapes.mdl_vars, task.state_shapes.opt_states))
    if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
  )
  update = state / (target.device_bandwidth * target.efficiency.memory)
  operations = (
    Operation('products', 'dot', '', 'forward and backward', 1, flops, 0.0, compute),
    Operation('optimizer', 'fusion', '', 'update', 1, 0.0, state, update),
  )
  collectives = tuple(_collectives(task, links, dtype))
  return Cost(operations, collectives, compute + update + sum(c.count * c.seconds for c in collectives))


def _collectives(task: PartitionedTask, links: Links, dtype: str) -> Iterator[Communication]:
  mesh, batch = dict(task.mesh.shape), _batch_axes(task)
  compute_size = 2 if dtype in ('bf16', 'f16') else 4
  shapes, specs = (leaves_by_path(tree.mdl_vars) for tree in (task.state_shapes, task.state_specs))
  for path, local in _trained(task):
    size, layer = shapes[path].dtype.itemsize, path_name(path[:-1])
    split = tuple(a for a in batch if a in all_axes(specs[path]))
    whole = tuple(a for a in batch if a not in split)
    gathered = local // size * math.prod(mesh[a] for a in split)
    if split:
      part, result = (count * compute_size for count in (local // size, gathered))
      for phase in ('forward', 'backward'):
        yield _communication(links, mesh, 'all-gather', layer, phase, split, part, result, dtype)
      yield _communication(links, mesh, 'reduce-scatter', layer, 'backward', split, gathered * size, local, 'f32')
    if whole:
      yield _communication(links, mesh, 'all-reduce', layer, 'backward', whole, local, local, 'f32')


def _communication(
  links: Links,
  mesh: Mapping[str, int],
  kind: str,
  layer: str,
  phase: str,
  axes: tuple[str, ...],
  operand: int,
  result: int,
  dtype: str,
) -> Communication:
  ids = np.arange(math.prod(mesh.values())).reshape(*mesh.values())
  last = np.moveaxis(ids, [list(mesh).index(a) for a in axes], range(-len(axes), 0))
  groups = tuple(map(tuple, last.reshape(-1, math.prod(mesh[a] for a in axes)).tolist()))
  traffic = links.traffic(kind, groups, operand, result)
  return Communication(
    *(f'{kind} of {layer}', kind, layer, phase, 1, dtype, axes, len(groups[0]), result),
    *(traffic.fast_bytes, traffic.network_bytes, traffic.seconds, traffic.seconds),
  )


def _trained(task: PartitionedTask) -> Iterator[tuple[tuple[str, ...], int]]:
  """Yields the path of each trained variable, and its bytes on each device."""
  learner = task.jax_task.learner.bind(task.jax_task.model.abstract_init())
  for path, x in leaves_by_path(task.state_shapes.mdl_vars).items():
    if learner.is_trained(path):
      yield path, math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _batch_axes(task: PartitionedTask) -> tuple[str, ...]:
  """The mesh axes over which a step splits the rows of a batch."""
  rows = [task.execution.place_input(x).spec for x in jax.tree.leaves(task.inputs_shape)]
  used = {axis for spec in rows for axis in all_axes(tuple(spec)[:1])}
  return tuple(a for a, size in task.mesh.shape.items() if a in used and size > 1)


def _saved_by_scans(jaxpr: Jaxpr) -> Iterator[int]:
  """Yields the bytes of what each scan stacks, over all devices."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'scan':
      stacked: list[Any] = [v.aval for v in equation.outvars[equation.params['num_carry'] :]]
      yield sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in stacked)
    for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)):
      if isinstance(inner, ClosedJaxpr | Jaxpr):
        yield from _saved_by_scans(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)
