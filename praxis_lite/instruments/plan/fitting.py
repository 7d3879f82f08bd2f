"""Fits the mesh of an experiment to another number of chips.

Each axis keeps the largest factor of its size that divides the number of chips. The largest axis that splits the rows
of a batch takes the remaining factor. So tensor, expert, context and stage axes keep their sizes where possible. With
several TPU slices, the same batch axis also extends across the slices. The axis may also split a large weight, along a
dimension with so few entries that half of the devices would get none. Then another axis that splits the batch takes a
part of the factor.

    replica 1, data 16, mdl 4    on 4,096 chips    1 x 1024 x 4
                                 on 2 chips        1 x 1 x 2
    replica 1, data 8, mdl 1     on 4,096 chips    2 x 2048 x 1, if weights have 2,048 entries for `data`
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from praxis_lite.common.config import Config
from praxis_lite.common.errors import UserError, prefix_errors
from praxis_lite.common.figures import number_of
from praxis_lite.instruments.explain.report import parameter_table
from praxis_lite.instruments.plan.topology import Topology
from praxis_lite.sharding.mesh import fill_mesh_shape
from praxis_lite.sharding.specs import all_axes


def made_to_fit(task: Config, topology: Topology) -> tuple[list[str], str]:
  """Returns overrides that fit the mesh of a task to the devices of a topology, and a sentence about the change.

  Both are empty if the mesh already has the right number of devices, or if its shape does not match its axes. The
  sentence is also empty if a size was -1, which asks for this change.
  """
  names: tuple[str, ...] = task.mesh_axis_names or ('data',)
  ici = task.ici_mesh_shape or (1,) * len(names)
  dcn = task.dcn_mesh_shape or (1,) * len(names)
  if -1 in ici:
    with prefix_errors('task'):
      return [f'task.ici_mesh_shape={fill_mesh_shape(ici, task.dcn_mesh_shape, names, topology.num_devices)}'], ''
  sizes = {name: i * d for name, i, d in zip(names, ici, dcn)}
  if math.prod(sizes.values()) == topology.num_devices or len(ici) != len(names) or len(dcn) != len(names):
    return [], ''
  # The largest axis that splits the batch. If several are equally large, 'data': by convention it also splits weights.
  rest = max(_batch_axes(sizes, task) or sizes, key=lambda name: (sizes[name], name == 'data'))
  fitted, more = _shared_rest(fitted_mesh(sizes, topology.num_devices, rest), rest, task)
  across = topology.slices if fitted[rest] % topology.slices == 0 else 1
  overrides = [f'task.ici_mesh_shape={tuple(n // (across if name == rest else 1) for name, n in fitted.items())}']
  if across > 1 or math.prod(dcn) > 1:
    overrides.append(f'task.dcn_mesh_shape={tuple(across if name == rest else 1 for name in fitted)}')
  before, after = (' x '.join(f'{name} {n:,}' for name, n in mesh.items()) for mesh in (sizes, fitted))
  return overrides, (
    f'the mesh of the experiment, {before}, is made to fit {number_of(topology.num_devices, "device")}: {after}. Each '
    f'axis keeps the largest factor of its size that divides the number of devices, and {rest}, the largest that '
    f'splits the batch, takes the rest{more}'
  )


def fitted_mesh(sizes: Mapping[str, int], devices: int, rest: str) -> dict[str, int]:
  """Returns a mesh of `devices` devices: axes keep what they can of their sizes; `rest` takes what is left."""
  fitted, left = dict(sizes), devices
  for name in sizes:
    if name != rest:
      fitted[name] = math.gcd(sizes[name], left)
      left //= fitted[name]
  return fitted | {rest: left}


def _shared_rest(mesh: dict[str, int], rest: str, task: Config) -> tuple[dict[str, int], str]:
  """Moves factors of 2 from `rest` to another batch axis until most devices along `rest` have a part of large weights.

  Returns the mesh, and a text about the change.
  """
  other = next((axis for axis in _batch_axes(mesh, task) if axis != rest), None)
  if other is None:
    return mesh, ''
  changed = dict(mesh)
  with contextlib.suppress(UserError):  # The plan reports errors of the task.
    weights = parameter_table(task.instantiate(), mesh)
    largest = max((math.prod(weight.shape) for weight in weights), default=0)
    large = [weight for weight in weights if 8 * math.prod(weight.shape) > largest]
    dims = [dim for weight in large for dim in weight.dims if rest in dim.axes]
    while changed[rest] % 2 == 0 and any(2 * d.size <= math.prod(changed[axis] for axis in d.axes) for d in dims):
      changed |= {rest: changed[rest] // 2, other: 2 * changed[other]}
  if changed == mesh:
    return mesh, ''
  return changed, (
    f', except that {other} takes {changed[other]:,}, because half of the {mesh[rest]:,} devices would have no part of '
    'a weight'
  )


def _batch_axes(sizes: Mapping[str, int], task: Config) -> list[str]:
  """Returns the mesh axes that split the rows of a batch, in the order of the mesh."""
  mapping: Mapping[str, Any] = task.train.inputs_split_mapping or {}
  rows = {axis for entries in mapping.values() if entries for axis in all_axes(tuple(entries)[:1])}
  return [name for name in sizes if name in rows]
