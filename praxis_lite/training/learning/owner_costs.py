"""Costs per step of owner placement: bytes that are sent and FLOPs, computed from the layout.

The formulas are those at the top of `owners.py`; compiled programs have the same numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from praxis_lite.common.figures import format_bytes
from praxis_lite.common.trees import Path
from praxis_lite.training.learning.owners import (
  LEAST_SIDE,
  MatrixDims,
  MatrixGroup,
  OwnerExchange,
  Splits,
  axes_size,
  group_matrices,
)


@dataclasses.dataclass(frozen=True)
class MatrixExchange:
  """The costs of one group of matrices in a step."""

  paths: tuple[Path, ...]  # The variables of the group.
  rows: int  # The smaller side of each matrix.
  columns: int
  matrices: int  # The number of matrices in the group.
  computed: int  # The number of matrices that each device computes.
  devices: int  # The number of owners over which matrices are distributed; 1 if matrices are not distributed.
  all_to_all: int  # The number of entries that a device gets from all-to-alls.
  all_gather: int  # The number of entries that a device gets from all-gathers.
  flops: int  # FLOPs of each device.
  why: str  # The reason why the matrices are distributed or not.

  def describe(self, itemsize: int) -> str:
    """Returns a sentence about the exchange, for reports; each exchanged entry has `itemsize` bytes."""
    kinds = {'all-to-alls': self.all_to_all, 'an all-gather': self.all_gather}
    received = [f'{format_bytes(entries * itemsize)} of {kind}' for kind, entries in kinds.items() if entries]
    what = f'{self.matrices:,} {"matrix" if self.matrices == 1 else "matrices"} of {self.rows:,} x {self.columns:,}'
    dealt = f'dealt out over {self.devices} devices' if self.devices > 1 else 'not dealt out'
    work = f'each computes {self.computed:,}, {self.flops:.2e} FLOPs'
    return f'{what}, {dealt} ({self.why}); {", and receives ".join(filter(None, (work, " and ".join(received))))}'


class MatrixTraffic(NamedTuple):
  """The arrays that an optimizer sends for each matrix in a step, and the FLOPs that it computes."""

  flops: Callable[[int, int], float]  # (m, n) -> FLOPs for one matrix with sides m <= n.
  matrices: tuple[int, int] = (1, 1)  # The numbers of arrays [m, n] that the owner receives, and that it returns.
  squares: tuple[int, int] = (
    0,
    0,
  )  # The numbers of square arrays that the owner receives, and that it returns, by the length of a side.
  largest: int = 0  # The length of the largest side for which there are square arrays.


def plan_exchanges(
  dims: Mapping[Path, MatrixDims], splits: Splits, placement: str, traffic: MatrixTraffic
) -> list[MatrixExchange]:
  """Returns the costs of each group of matrices in a step; [] on one device, or if products are left to the compiler.

  See `change_batches` for the other arguments.
  """
  found: list[MatrixExchange] = []
  if math.prod(splits.sizes.values()) == 1 or (placement == 'split' and not splits.inside):
    return found
  for group, members in group_matrices(dims, splits, dims).items():
    exchange = OwnerExchange(group, group.owner_axes(splits.sizes, placement), splits.sizes)
    owners, spread = exchange.owners, exchange.spread
    number = sum(matrix.count(splits.sizes) for matrix in members.values())
    computed = -(-number // owners)
    rows, columns = (
      math.prod(-(-size // axes_size(axes, splits.sizes)) * axes_size(axes, splits.sizes) for size, axes in zip(*side))
      for side in (group.rows, group.columns)
    )
    entries = computed * rows * columns  # Entries on a device, with padding.
    of_squares = sum(
      computed * -(-side.size // owners) * owners * side.size
      for side in (group.rows, group.columns)
      if side.size <= traffic.largest and owners > 1
    )
    found.append(
      MatrixExchange(
        tuple(members),
        group.rows.size,
        group.columns.size,
        sum(math.prod(matrix.batch.sizes) for matrix in members.values()),
        computed,
        owners,
        sum(traffic.matrices) * len(group.split) * entries + sum(traffic.squares) * of_squares,
        traffic.matrices[1] * entries * axes_size(spread, splits.sizes) if spread else 0,
        round(computed * traffic.flops(group.rows.size, group.columns.size)),
        _reason(group, placement, splits.sizes),
      )
    )
  return found


def _reason(group: MatrixGroup, placement: str, sizes: Mapping[str, int]) -> str:
  if group.split:
    return 'the mesh splits them'
  if not group.spread(sizes, whole=True):
    return 'no mesh axis is left'
  if placement == 'owner':
    return "placement='owner'"
  large = group.rows.size >= LEAST_SIDE
  return f'the mesh does not split them, and sides {"from" if large else "below"} {LEAST_SIDE} take ' + (
    'longer to compute than to send' if large else 'longer to send than to compute'
  )
