"""The rows of a global batch: how they enter a step, and which of them the step computes.

Each process puts its own rows on its own devices, and adds rows of zeros so that they divide evenly. In most layouts
the step computes all rows that enter. But if a mesh axis splits the length of sequences, the devices along it share
rows; and if these devices belong to several processes, no process has all of the shared rows. Then a batch enters with
its rows split over all devices, and the step selects the examples, so that it computes little or no padding. For 32
rows on 256 devices of 32 processes:

    [256, T]  rows over all devices                what enters: from each process, one example and 7 rows of zeros
    [256, T]  length over all devices              one all-to-all
    [32, T]   length over all devices              the examples
    [32, T]   as `inputs_split_mapping` says       what is computed, after an all-to-all and gathers of parts
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from praxis_lite.common.trees import NestedDict
from praxis_lite.sharding.batch import batch_size, padded_rows
from praxis_lite.sharding.constraints import with_sharding_constraint
from praxis_lite.sharding.padding import pad_to
from praxis_lite.sharding.specs import all_axes


class BatchRows(NamedTuple):
  """Rows of a global batch, in a step and before it."""

  axes: tuple[str, ...]  # The mesh axes that split the rows when a batch enters.
  inner_axes: tuple[str, ...]  # Those among them that split rows or another dimension inside the step.
  entering: int  # The number of rows that enter: examples, and each process's padding after its own examples.
  computed: int  # The number of rows that the step computes.
  examples: np.ndarray  # int [B], the indices of the examples among the entering rows, process after process.
  apart: bool  # Whether the computed rows differ from the entering ones.

  def take_rows(self, batch: NestedDict) -> NestedDict:
    """Inside a step: returns the rows to compute, [computed, ...], from the entering rows, [entering, ...]."""
    return jax.tree.map(self._take, batch) if self.apart else batch

  def return_rows(self, x: jax.Array) -> jax.Array:
    """Inside a step: returns the rows of examples, [B, ...], from the computed rows, [computed, ...]."""
    size = len(self.examples)
    if self.apart or (self.examples == np.arange(size)).all():
      return x[:size]
    return with_sharding_constraint(x, PartitionSpec())[self.examples]

  def _take(self, x: jax.Array) -> jax.Array:
    x = self._split_longest(x, self.axes)[self.examples]  # No communication: rows are not split here.
    # The split of the rows changes in two steps; if it changed in a single one, XLA would gather whole arrays.
    return pad_to(self._split_longest(x, self.inner_axes), (self.computed, *x.shape[1:]))

  def _split_longest(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns x with its longest dimension after dimension 0 split over `axes`; no other dimension is split."""
    longest = 1 + int(np.argmax(x.shape[1:])) if x.ndim > 1 else None
    return with_sharding_constraint(x, PartitionSpec(*(axes if dim == longest else None for dim in range(x.ndim))))


def row_axes(mesh: Mesh | AbstractMesh, specs: Iterable[PartitionSpec | None]) -> tuple[str, ...]:
  """Returns the mesh axes that split the rows of a batch, whose arrays are split by `specs` inside the step.

  These are all axes except those that split another dimension inside the step, such as the length of sequences. Devices
  along the excepted axes share rows, so a batch may have fewer rows than there are devices.
  """
  others = {axis for spec in specs for axis in all_axes((spec or ())[1:])}
  return tuple(axis for axis in mesh.axis_names if axis not in others)


def batch_rows(
  mesh: Mesh | AbstractMesh, specs: Sequence[PartitionSpec | None], batch: NestedDict, num_microbatches: int = 1
) -> BatchRows:
  """Returns how the rows of a global batch of arrays or shapes enter a step, which cuts them into equal microbatches.

  Each process has an equal share of the rows. For `mesh` and `specs`, see `row_axes`.
  """
  axes, size = row_axes(mesh, specs), batch_size(batch)
  computed = padded_rows(size, math.prod(mesh.shape[axis] for axis in axes) * num_microbatches)
  inner = {axis for spec in specs for axis in all_axes(spec or ())}
  shared = tuple(axis for axis in mesh.axis_names if axis not in axes)
  owners = _owners(mesh, (*axes, *shared)).reshape(math.prod(mesh.shape[axis] for axis in axes), -1)
  apart = bool((owners != owners[:, :1]).any())
  if apart:
    # Axes that split the length come first, so that it is split as inside the step. Unused axes come last.
    axes = tuple(sorted((*shared, *axes), key=lambda axis: axis not in inner))
    owners = _owners(mesh, axes).reshape(-1, 1)
  entering = padded_rows(size, mesh.size) if apart else computed
  owner_of_row = np.repeat(owners[:, 0], entering // len(owners))
  processes = np.unique(owner_of_row)
  share = -(-size // len(processes))
  examples = np.concatenate([np.flatnonzero(owner_of_row == process)[:share] for process in processes])[:size]
  return BatchRows(axes, tuple(axis for axis in axes if axis in inner), entering, computed, examples, apart)


def _owners(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> np.ndarray:
  """Returns the process of each device as an array whose dimensions are `axes`."""
  return processes_of(mesh).transpose([mesh.axis_names.index(axis) for axis in axes])


def processes_of(mesh: Mesh | AbstractMesh) -> np.ndarray:
  """Returns the process of each device of a mesh, in the mesh's shape; all 0 for a mesh without devices."""
  if isinstance(mesh, AbstractMesh):
    return np.zeros([*mesh.shape.values()], int)
  return np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
