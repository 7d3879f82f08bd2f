"""Every variable of a model, where it lies on a mesh and what it costs, from declarations alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from praxis_lite.partitioning.padding import local_shape, padded_shape
from praxis_lite.partitioning.placement import placed_specs
from praxis_lite.task import SingleTask
from praxis_lite.training.state import place_task_variables


class ParameterRow(NamedTuple):
  """One variable on a mesh.

  Attributes:
    path: path of the variable, as in the layer tree.
    shape: true shape, repeat prefix included.
    dtype: name of the dtype it is stored in.
    spec: how it is split.
    padded_shape: shape with padding.
    local_shape: shape of the part each device holds.
    bytes: size of the true array.
    bytes_per_device: size of the part each device holds, padding included.
    trainable: whether an optimizer may change it.
  """

  path: str
  shape: tuple[int, ...]
  dtype: str
  spec: PartitionSpec
  padded_shape: tuple[int, ...]
  local_shape: tuple[int, ...]
  bytes: int
  bytes_per_device: int
  trainable: bool


def parameter_table(jax_task: SingleTask, mesh_sizes: Mapping[str, int]) -> list[ParameterRow]:
  """Returns a row for each variable of a task's model.

  Args:
    jax_task: an instantiated task.
    mesh_sizes: size of each mesh axis by name, in the order of the mesh; `jax_task.mesh_sizes()`.

  Raises:
    ShardingError: a mapping does not fit its variable or the mesh.
  """
  specs = placed_specs(place_task_variables(jax_task, mesh_sizes))
  flat, _ = jax.tree_util.tree_flatten_with_path(jax_task.model.abstract_init())
  rows = []
  for (path, weight), spec in zip(flat, jax.tree.leaves(specs)):
    struct = weight.as_struct()
    local = local_shape(struct.shape, spec, mesh_sizes)
    rows.append(
      ParameterRow(
        path=jax.tree_util.keystr(path, simple=True, separator='.'),
        shape=struct.shape,
        dtype=struct.dtype.name,
        spec=spec,
        padded_shape=padded_shape(struct.shape, spec, mesh_sizes),
        local_shape=local,
        bytes=math.prod(struct.shape) * struct.dtype.itemsize,
        bytes_per_device=math.prod(local) * struct.dtype.itemsize,
        trainable=weight.trainable,
      )
    )
  return rows


def format_parameter_table(rows: Sequence[ParameterRow], mesh_sizes: Mapping[str, int]) -> str:
  """Returns the table as aligned text, with totals below it."""
  header = ('variable', 'shape', 'dtype', 'split', 'local shape', 'padding', 'bytes', 'per device')
  body = [
    (
      row.path,
      format_shape(row.shape),
      row.dtype,
      format_spec(row.spec),
      format_shape(row.local_shape),
      _format_padding(row),
      format_bytes(row.bytes),
      format_bytes(row.bytes_per_device),
    )
    for row in rows
  ]
  widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
  right = {6, 7}

  def aligned(line: Sequence[str]) -> str:
    return '  '.join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip()

  rule = '-' * len(aligned(header))
  return '\n'.join([aligned(header), rule, *map(aligned, body), rule, *_totals(rows, mesh_sizes)])


def _totals(rows: Sequence[ParameterRow], mesh_sizes: Mapping[str, int]) -> list[str]:
  devices = math.prod(mesh_sizes.values())
  count = sum(math.prod(row.shape) for row in rows)
  trainable = sum(math.prod(row.shape) for row in rows if row.trainable)
  stored = sum(math.prod(row.padded_shape) for row in rows)
  mesh = ' x '.join(f'{name} {size}' for name, size in mesh_sizes.items())
  return [
    f'{count:,} parameters ({trainable:,} trainable), {format_bytes(sum(r.bytes for r in rows))}',
    f'mesh {mesh} = {devices} device{"s" * (devices != 1)}: '
    f'{format_bytes(sum(r.bytes_per_device for r in rows))} of parameters on each, '
    f'{(stored - count) / max(count, 1):.2%} of it padding',
  ]


def format_shape(shape: Sequence[int]) -> str:
  """'512 x 2048', or 'scalar'."""
  return ' x '.join(map(str, shape)) or 'scalar'


def format_spec(spec: PartitionSpec) -> str:
  """'data, -, replica+mdl': the mesh axes of each dimension."""
  return ', '.join('-' if e is None else e if isinstance(e, str) else '+'.join(e) for e in spec) or '-'


def format_bytes(count: float) -> str:
  """'1.5 MiB': three digits and a binary unit."""
  for unit in ('B', 'KiB', 'MiB', 'GiB', 'TiB'):
    if count < 1024 or unit == 'TiB':
      break
    count /= 1024
  return f'{count:.0f} {unit}' if unit == 'B' else f'{count:.4g} {unit}'


def _format_padding(row: ParameterRow) -> str:
  """'+1, -': what each dimension is padded with."""
  added = [p - d for p, d in zip(row.padded_shape, row.shape)]
  return ', '.join(f'+{a}' if a else '-' for a in added) if any(added) else '-'
