"""Estimates the cost of a step from its lowered program, without the compiler of the target.

Plans use this if that compiler is not installed, refuses the step or would take too long.

    FLOPs, collectives    as Shardy splits the program: exact, except where XLA combines, moves or removes operations
    memory                the state is exact; temporaries are the live values, with guesses of what XLA fuses
    seconds               products and fusions run one after the other; if a collective can overlap with the work of its
                          loop, only its time beyond that work is exposed

An estimate takes a second or two for any model and mesh. Fields set to 'auto' get the value for the target.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from praxis_lite.instruments.plan.compilers import pretend_cudnn_for_plans
from praxis_lite.instruments.plan.cost import Communication, Cost, Operation, axes_between
from praxis_lite.instruments.plan.layer_names import HiddenWork, LayerNames
from praxis_lite.instruments.plan.links import DeviceGroups, Links
from praxis_lite.instruments.plan.local_program import LocalCollective, LocalOperation, LocalProgram, local_program
from praxis_lite.instruments.plan.lowering import lower_without_devices
from praxis_lite.instruments.plan.memory import FILLED_IN, LiveBuffer, Memory, StateBytes, group_by_layer
from praxis_lite.instruments.plan.targets import Target
from praxis_lite.instruments.plan.topology import Topology
from praxis_lite.instruments.plan.work import CountedProduct, operation_seconds
from praxis_lite.training.partitioned_step import PartitionedStep

UNCERTAIN = (
  'analytic: the step was not compiled. State, FLOPs and collectives are of the program before XLA optimizes it, '
  'and temporaries, what is fused and what overlaps are estimates'
)


def program_for(step: PartitionedStep, topology: Topology, hidden: HiddenWork) -> LocalProgram:
  """Returns the program that each device runs for a step. The step's mesh may lack devices."""
  with pretend_cudnn_for_plans():
    lowered = lower_without_devices(step.jitted.trace(*step.arguments), topology.target.kind)
  return local_program(lowered, hidden, on_tpu=topology.target.kind == 'tpu')


def analytic_memory(
  program: LocalProgram, needs: int | None, state: StateBytes, target: Target, names: LayerNames
) -> Memory:
  """Returns the estimated memory of a step on each device.

  `needs` is the number of bytes that the step needs, if a compiler that refused the step has reported it, else None.
  `state` are the arrays among the arguments of the step.
  """
  kinds = [FILLED_IN.get(names.phase(b.loop), 'temporaries') if b.loop else 'temporaries' for b in program.peak.buffers]
  buffers = [LiveBuffer(kind, b.name, b.shape, b.bytes) for kind, b in zip(kinds, program.peak.buffers)]
  temporaries = max(needs - state.total, 0) if needs else program.peak.bytes
  sizes = (state.total, state.total, state.total, temporaries)
  return Memory(int(target.device_memory), state, *sizes, live=group_by_layer(buffers, names))


def analytic_cost(program: LocalProgram, mesh: Mapping[str, int], topology: Topology, names: LayerNames) -> Cost:
  """Returns the estimated cost of a step. `names` finds the layer of an operation by its name."""
  target, links = topology.target, Links(topology)
  groups = functools.cache(functools.partial(groups_over, mesh))
  operations = [_operation(local, target, names) for local in (*program.products, *program.fusions)]
  collectives = [
    _communication(c, links, groups(c.axes) if c.axes else c.groups, c.axes or axes_between(c.groups, mesh), names)
    for c in program.collectives
  ]
  if target.kind != 'cpu':
    collectives = _set_exposed(program, operations, collectives)
  seconds = sum(op.count * op.seconds for op in operations) + sum(c.count * c.exposed for c in collectives)
  return Cost(
    tuple(operations), tuple(collectives), seconds, tuple(names.layer(loop) or loop for loop in program.unknown_loops)
  )


def _set_exposed(
  program: LocalProgram, operations: Sequence[Operation], collectives: Sequence[Communication]
) -> list[Communication]:
  """Returns the collectives with their exposed time.

  For collectives that may overlap with the work of their loop, this is the time that exceeds the time of this work.
  """
  work, waiting = collections.defaultdict[int, float](float), collections.defaultdict[int, float](float)
  for local, op in zip((*program.products, *program.fusions), operations):
    work[local.loop] += op.count * op.seconds
  for found, c in zip(program.collectives, collectives):
    waiting[found.loop] += c.count * c.seconds * found.is_beside_work
  # A loop that runs zero times exposes nothing. An example is the loop over later tokens if only one token is drawn.
  exposed = {loop: max(1 - work[loop] / seconds, 0.0) for loop, seconds in waiting.items() if seconds}
  return [
    dataclasses.replace(c, exposed=c.seconds * exposed.get(found.loop, 0.0)) if found.is_beside_work else c
    for found, c in zip(program.collectives, collectives)
  ]


def groups_over(mesh: Mapping[str, int], axes: tuple[str, ...]) -> DeviceGroups:
  """Returns groups of device numbers, in mesh order; the members of a group differ only along `axes`."""
  ids = np.arange(math.prod(mesh.values())).reshape(*mesh.values())
  last = np.moveaxis(ids, [list(mesh).index(a) for a in axes], range(-len(axes), 0))
  return tuple(map(tuple, last.reshape(-1, math.prod(mesh[a] for a in axes)).tolist()))


def _operation(local: LocalOperation, target: Target, names: LayerNames) -> Operation:
  name, opcode = local.name.rpartition('/')[2], 'dot' if local.dtype else 'fusion'
  products = [CountedProduct(local.flops, local.dtype, local.name, local.attention_dims)] if local.dtype else []
  seconds = operation_seconds(target, products, local.bytes)
  layer, phase = names.layer(local.name), names.phase(local.name)
  return Operation(name, opcode, layer, phase, local.count, local.flops, float(local.bytes), seconds)


def _communication(
  found: LocalCollective, links: Links, groups: DeviceGroups, axes: tuple[str, ...], names: LayerNames
) -> Communication:
  traffic = links.traffic(found.kind, groups, found.operand_bytes, found.result_bytes)
  return Communication(
    f'{found.kind} of {found.name.rpartition("/")[2]}',
    *(found.kind, names.layer(found.name), names.phase(found.name), found.count, found.dtype),
    *(axes, len(groups[0]), found.result_bytes),
    *(traffic.fast_bytes, traffic.network_bytes, traffic.seconds, traffic.seconds),
  )
