"""Explanation: where one array lies on a mesh, what decided it, and what it costs. Plain numbers; no array, no device.

dimension   size   mesh axes   parts   each device   padding   why
0           50257  mdl         4       12565         3         lm.softmax.weight_split_dims_mapping.wt
1           768    data        2       384           0         strategy '.*': fsdp(axis="data")
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping

import numpy as np
from jax.sharding import PartitionSpec

from praxis_lite.explain.parameter_table import format_bytes, format_shape, format_spec
from praxis_lite.partitioning.specs import axes_to_entry


class Kind(enum.StrEnum):
  """What an explained array is."""

  VARIABLE = 'variable'
  SLOT = 'optimizer slot'
  ACTIVATION = 'activation'
  INPUT = 'input'


@dataclasses.dataclass(frozen=True)
class Dimension:
  """One dimension of an array on a mesh.

  Attributes:
    size: true size.
    axes: mesh axes that split it.
    parts: into how many parts they split it.
    local: its size on each device, padding included.
    source: the field, rule or strategy that says so, or why it is not split.
  """

  size: int
  axes: tuple[str, ...]
  parts: int
  local: int
  source: str

  @property
  def padded(self) -> int:
    return self.local * self.parts

  @property
  def padding(self) -> int:
    return self.padded - self.size


@dataclasses.dataclass(frozen=True)
class Explanation:
  """Where an array lies and why.

  Attributes:
    path: what it is called.
    kind: what it is.
    dims: its dimensions.
    dtype: in which it is held.
    mesh_sizes: size of each mesh axis.
    remarks: what is worth knowing besides.
    owner: of an optimizer slot, the variable it belongs to.
    constrained: False for an activation without a mapping: the compiler decides, and what stands here is the most it
      can be.
  """

  path: str
  kind: Kind
  dims: tuple[Dimension, ...]
  dtype: np.dtype
  mesh_sizes: Mapping[str, int]
  remarks: tuple[str, ...] = ()
  owner: str = ''
  constrained: bool = True

  @property
  def spec(self) -> PartitionSpec:
    return PartitionSpec(*(axes_to_entry(d.axes) for d in self.dims))

  @property
  def mesh_axes(self) -> tuple[str, ...]:
    """All mesh axes that split it."""
    return tuple(axis for d in self.dims for axis in d.axes)

  @property
  def shape(self) -> tuple[int, ...]:
    """Global shape, without padding."""
    return tuple(d.size for d in self.dims)

  @property
  def padded_shape(self) -> tuple[int, ...]:
    return tuple(d.padded for d in self.dims)

  @property
  def local_shape(self) -> tuple[int, ...]:
    """Shape of what each device holds, padding included."""
    return tuple(d.local for d in self.dims)

  @property
  def num_devices(self) -> int:
    return math.prod(self.mesh_sizes.values())

  @property
  def replication(self) -> int:
    """How many devices hold each element."""
    return self.num_devices // math.prod(d.parts for d in self.dims)

  @property
  def bytes(self) -> int:
    """Of the array, once, without padding."""
    return math.prod(self.shape) * self.dtype.itemsize

  @property
  def bytes_per_device(self) -> int:
    return math.prod(self.local_shape) * self.dtype.itemsize

  @property
  def wasted_bytes(self) -> int:
    """Bytes of padding in one copy of the array, over all the devices that share it."""
    return (math.prod(self.padded_shape) - math.prod(self.shape)) * self.dtype.itemsize

  @property
  def sources(self) -> tuple[str, ...]:
    """For each dimension what decided it."""
    return tuple(d.source for d in self.dims)

  @property
  def why(self) -> str:
    """What decided the split dimensions, or, where none is split, the last one."""
    split = dict.fromkeys(d.source for d in self.dims if d.axes)
    return '; '.join(split or self.sources[-1:] or self.remarks[:1])

  def __str__(self) -> str:
    lines = [f'{self.path}: {self.kind}, {format_shape(self.shape)} {self.dtype.name}', '']
    rows = [('dimension', 'size', 'mesh axes', 'parts', 'each device', 'padding', 'why')]
    for i, d in enumerate(self.dims):
      axes = '+'.join(d.axes) or '-'
      rows.append((str(i), str(d.size), axes, str(d.parts), str(d.local), str(d.padding), d.source))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += ['  ' + '  '.join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
    share = self.wasted_bytes / max(self.bytes + self.wasted_bytes, 1)
    lines += [
      '',
      f'  spec ({format_spec(self.spec)}) on mesh {format_mesh(self.mesh_sizes)}',
      f'  {format_bytes(self.bytes)} in all, {"" if self.constrained else "at most "}'
      f'{format_bytes(self.bytes_per_device)} on each device; {format_copies(self)}',
      f'  padding {format_bytes(self.wasted_bytes)}, {share:.2%} of what is stored',
    ]
    return '\n'.join(lines + [f'  {remark}' for remark in self.remarks])


def format_mesh(sizes: Mapping[str, int]) -> str:
  """'replica 1 x data 16 x mdl 4 = 64 devices'."""
  devices = math.prod(sizes.values())
  axes = ' x '.join(f'{name} {size}' for name, size in sizes.items())
  return f'{axes} = {devices} device{"s" * (devices != 1)}'


def format_copies(explanation: Explanation) -> str:
  """'each part on 4 devices'."""
  parts = explanation.num_devices // explanation.replication
  if parts == 1:
    return 'whole on every device' if explanation.num_devices > 1 else 'on the one device'
  copies = explanation.replication
  return f'{parts} parts, each on {copies} device{"s" * (copies != 1)}'
