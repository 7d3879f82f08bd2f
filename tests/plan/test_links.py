"""Bytes and seconds of collectives against formulas, on rings, lines, tori, hosts and slices."""

import dataclasses

import numpy as np
import pytest

from praxis_lite.instruments.plan.links import Links
from praxis_lite.instruments.plan.topology import parse_topology

MIB = float(2**20)


def ideal(name):
  """The links of a topology that reach their published bandwidth at once."""
  topology = parse_topology(name)
  perfect = dataclasses.replace(topology.target.efficiency, links=1.0, network=1.0, seconds_per_hop=0.0)
  target = dataclasses.replace(topology.target, efficiency=perfect)
  return Links(dataclasses.replace(topology, target=target)), target


def groups(shape, axes):
  """DeviceGroups of the devices of a mesh of a shape, over some of its axes."""
  ids = np.moveaxis(np.arange(np.prod(shape)).reshape(shape), axes, range(-len(axes), 0))
  return tuple(map(tuple, ids.reshape(-1, int(np.prod([shape[a] for a in axes]))).tolist()))


def test_within_a_host_each_gpu_has_all_of_its_link():
  links, target = ideal('h100:1x8')
  gathered = links.traffic('all-gather', groups((8,), [0]), MIB / 8, MIB)
  assert (gathered.fast_bytes, gathered.network_bytes) == (MIB * 7 / 8, 0)
  assert gathered.seconds == pytest.approx(MIB * 7 / 8 / target.link)
  scattered = links.traffic('reduce-scatter', groups((8,), [0]), MIB, MIB / 8)
  assert scattered == gathered
  reduced = links.traffic('all-reduce', groups((8,), [0]), MIB, MIB)
  assert (reduced.fast_bytes, reduced.seconds) == (2 * gathered.fast_bytes, pytest.approx(2 * gathered.seconds))
  exchanged = links.traffic('all-to-all', groups((8,), [0]), MIB, MIB)
  assert exchanged.fast_bytes == MIB * 7 / 8


def test_across_hosts_what_the_members_of_a_host_share_is_sent_once():
  links, target = ideal('h100:4x8')
  reduced = links.traffic('all-reduce', groups((32,), [0]), MIB, MIB)
  assert reduced.fast_bytes == 2 * MIB * 7 / 8
  assert reduced.network_bytes == 2 * MIB / 8 * 3 / 4
  assert reduced.seconds == pytest.approx(max(reduced.fast_bytes / target.link, reduced.network_bytes / target.network))
  # One GPU of each host: all goes over the network.
  alone = links.traffic('all-gather', groups((4, 8), [0]), MIB / 4, MIB)
  assert (alone.fast_bytes, alone.network_bytes) == (0, MIB * 3 / 4)
  exchanged = links.traffic('all-to-all', groups((32,), [0]), MIB, MIB)
  assert exchanged.bytes == pytest.approx(MIB * 31 / 32)
  assert exchanged.network_bytes == pytest.approx(MIB * 24 / 32)


def test_a_dimension_of_a_torus_is_a_ring_or_a_line():
  ring, target = ideal('v5p:4x4x4')
  line, _ = ideal('v5p:2x2x1')
  x = groups((4, 4, 4), [2])  # Devices count along the first dimension of the torus first.
  assert ring.traffic('all-gather', x, MIB / 4, MIB).seconds == pytest.approx(MIB * 3 / 4 / (2 * target.link))
  assert line.traffic('all-gather', ((0, 1), (2, 3)), MIB / 2, MIB).seconds == pytest.approx(MIB / 2 / target.link)
  cube = ring.traffic('all-gather', groups((64,), [0]), MIB / 64, MIB)
  assert cube.seconds == pytest.approx(MIB * 63 / 64 / (6 * target.link))
  # A ring of n sends n/8 of an all-to-all over its busiest link.
  assert ring.traffic('all-to-all', x, MIB, MIB).seconds == pytest.approx(MIB / 2 / target.link)


def test_groups_that_interleave_share_links():
  links, target = ideal('v5e:16x16')
  whole = links.traffic('all-gather', groups((16, 16), [1]), MIB, 16 * MIB)
  every_other = links.traffic('all-gather', groups((16, 8, 2), [1]), MIB, 8 * MIB)
  assert whole.seconds == pytest.approx(15 * MIB / (2 * target.link))
  assert every_other.seconds == pytest.approx(7 * MIB / (2 * target.link / 2))


def test_slices_are_connected_by_the_network():
  links, target = ideal('v5e:4x4:2')
  reduced = links.traffic('all-reduce', groups((32,), [0]), MIB, MIB)
  assert reduced.network_bytes == MIB / 16
  assert reduced.seconds == pytest.approx(max(MIB / 16 / target.network, 2 * MIB * 15 / 16 / (2 * target.link)))


def test_a_permute_passes_each_link_as_often_as_it_is_far():
  links, target = ideal('v5p:8x4x4')
  shift = lambda by: tuple((i, i // 8 * 8 + (i + by) % 8) for i in range(128))  # noqa: E731
  for by, hops in ((1, 1), (3, 3), (7, 1)):
    assert links.traffic('collective-permute', shift(by), MIB, MIB).seconds == pytest.approx(hops * MIB / target.link)
  hosts, gpu = ideal('h100:2x8')
  some = hosts.traffic('collective-permute', tuple((i, (i + 1) % 16) for i in range(16)), MIB, MIB)
  assert (some.fast_bytes, some.network_bytes) == (MIB * 14 / 16, MIB * 2 / 16)  # 2 of 16 pairs span two hosts.
  assert some.seconds == pytest.approx(MIB / gpu.network)
  across = hosts.traffic('collective-permute', tuple((i, (i + 8) % 16) for i in range(16)), MIB, MIB)
  assert (across.fast_bytes, across.network_bytes) == (0, MIB)
  assert across.seconds == pytest.approx(MIB / gpu.network)


def test_a_group_of_one_sends_nothing():
  links, _ = ideal('h100:1x8')
  assert links.traffic('all-reduce', tuple((i,) for i in range(8)), MIB, MIB).seconds == 0
