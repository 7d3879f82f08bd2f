"""Computes how long collectives take on the links that their groups of devices use.

A group has n devices, m in each of s domains of fast links (n = m s). Each device sends, in bytes:

                       over fast links                over the network between domains
    all-gather         R (m - 1) / m                  R (s - 1) / n              R: bytes of the result
    reduce-scatter     O (m - 1) / m                  O (s - 1) / n              O: bytes of the operand
    all-reduce         2 R (m - 1) / m                2 R (s - 1) / n
    all-to-all         O (m - 1) / n                  O (n - m) / n
    permute            O (1 - c)                      O c            c: share of the pairs that span two domains

Both transfers run at the same time, in pieces, so the slower one sets the time. On a torus, a group that forms a box
uses the links of all dimensions that it extends over: in both directions if the dimension is a ring, in one if it is a
line. If members are k chips apart along a dimension, k groups share its links. On a torus, the links across the longest
dimension of the group limit an all-to-all.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from praxis_lite.instruments.plan.topology import Topology

DeviceGroups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Traffic:
  """The bytes that each device sends over each kind of link in one collective, and the time of the collective."""

  fast_bytes: float
  network_bytes: float
  seconds: float

  @property
  def bytes(self) -> float:
    return self.fast_bytes + self.network_bytes


@dataclasses.dataclass(frozen=True)
class _Extent:
  """The placement of the members of a group, and their share of the fast links."""

  members: float  # The number of members in each domain of fast links.
  domains: int
  links: float  # The bandwidth of a device for sums and gathers, in units of one link; may be a fraction.
  across: float  # The bandwidth of a device for an all-to-all, in the same units.
  hops: float  # The number of hops of the farthest message.


class Links:
  """The links of a topology. `places` has the coordinates of the program's devices, by default `Topology.places`."""

  def __init__(self, topology: Topology, places: np.ndarray | None = None):
    self._topology, self._target = topology, topology.target
    self._places = topology.places if places is None else places
    self._slowest_extent = functools.cache(self._find_slowest_extent)

  def traffic(self, kind: str, groups: DeviceGroups, operand_bytes: float, result_bytes: float) -> Traffic:
    """Returns the bytes and the time of one collective of a kind in `hlo.KINDS`; sizes are those on one device.

    `groups` has the devices of each group; for a collective-permute, pairs (from, to).
    """
    if kind == 'collective-permute':
      return self._permute(groups, operand_bytes)
    extent = self._slowest_extent(groups)
    m, s = extent.members, extent.domains
    n = m * s
    if n <= 1:
      return Traffic(0.0, 0.0, 0.0)
    if kind == 'all-to-all':
      fast, network, links = operand_bytes * (m - 1) / n, operand_bytes * (n - m) / n, extent.across
    else:
      size = operand_bytes if kind == 'reduce-scatter' else result_bytes
      rounds = 2 if kind == 'all-reduce' else 1
      fast, network, links = rounds * size * (m - 1) / m, rounds * size * (s - 1) / n, extent.links
    return self._add_time(fast, network, links, extent.hops)

  def hops(self, groups: DeviceGroups) -> float:
    """Returns the number of hops of the farthest message in the groups."""
    return self._slowest_extent(groups).hops

  def _permute(self, pairs: DeviceGroups, operand_bytes: float) -> Traffic:
    """Returns the traffic if each device sends to another. On a ring, messages over h hops use each link h times."""
    moving = [(a, b) for a, b in (pair[:2] for pair in pairs if len(pair) > 1) if a != b]
    if not moving:
      return Traffic(0.0, 0.0, 0.0)
    start, end = (self._places[[pair[i] for pair in moving]] for i in (0, 1))
    crossing, hops = float(np.mean(start[:, 0] != end[:, 0])), 1
    for dim in range(self._target.torus):
      apart = np.abs(start[:, 1 + dim] - end[:, 1 + dim])
      size = self._topology.shape[dim]
      hops = max(hops, int((np.minimum(apart, size - apart) if self._topology.wraps(dim) else apart).max()))
    # A device sends either over fast links or over the network, and the slower ones set the time.
    fast, network = (operand_bytes if share else 0.0 for share in (1 - crossing, crossing))
    seconds = self._add_time(fast, network, 1 / hops, hops).seconds
    return Traffic(operand_bytes * (1 - crossing), operand_bytes * crossing, seconds)

  def _add_time(self, fast: float, network: float, links: float, hops: float) -> Traffic:
    target, efficiency = self._target, self._target.efficiency
    seconds = max(fast / (target.link * efficiency.links * links), network / (target.network * efficiency.network))
    return Traffic(float(fast), float(network), float(seconds + hops * efficiency.seconds_per_hop))

  def _find_slowest_extent(self, groups: DeviceGroups) -> _Extent:
    found = {self._extent_of(group) for group in _unlike(groups, self._places)}
    return min(found, key=lambda e: (e.links, -e.domains))

  def _extent_of(self, group: Sequence[int]) -> _Extent:
    places = self._places[list(group)]
    domains, first = np.unique(places[:, 0]), places[places[:, 0] == places[0, 0]]
    members = len(group) / len(domains)
    if not self._target.torus:
      return _Extent(members, len(domains), 1.0, 1.0, math.log2(max(len(group), 2)))
    chips = np.unique(first[:, 1:], axis=0)
    share = len(first) / len(chips) / self._target.devices_per_chip  # The devices of a chip share its links.
    links, across, hops, box = 0.0, math.inf, 0.0, 1
    for dim in range(self._target.torus):
      at = np.unique(chips[:, dim])
      if len(at) == 1:
        continue
      size = self._topology.shape[dim]
      apart = (at[-1] - at[0]) / (len(at) - 1)
      ring = self._topology.wraps(dim) and len(at) * apart == size
      links += (2 if ring else 1) / apart
      across = min(across, (8 if ring else 4) / len(at) / apart)
      hops += len(at) / (2 if ring else 1)
      box *= len(at)
    if not links:  # All members are on one chip.
      return _Extent(members, len(domains), float(self._target.torus), float(self._target.torus), 1.0)
    filled = len(chips) / box  # If the group does not fill its box, other groups share the links.
    busiest = across * (members - 1) / members  # A device sends n - 1 of the n parts of an all-to-all.
    return _Extent(members, len(domains), links * filled * share, busiest * filled * share, hops)


def _unlike(groups: DeviceGroups, places: np.ndarray) -> list[tuple[int, ...]]:
  """Returns one group of each shape. Two groups have one shape if they differ only by a shift of all coordinates."""
  found: dict[bytes, tuple[int, ...]] = {}
  for group in groups:
    at = places[list(group)]
    found.setdefault((at - at.min(axis=0)).tobytes(), group)
  return list(found.values())
