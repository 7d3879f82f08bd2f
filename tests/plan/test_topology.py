"""Topologies by name, and the figures of their chips."""

import pathlib
import re

import pytest

from praxis_lite.common.accelerators import _PEAKS_ALONE, accelerator_of
from praxis_lite.common.errors import ConfigError, ShardingError
from praxis_lite.instruments.plan.links import Links
from praxis_lite.instruments.plan.report import chips_text
from praxis_lite.instruments.plan.targets import TARGETS, gpu_target_config
from praxis_lite.instruments.plan.topology import check_mesh, parse_topology
from praxis_lite.runs.throughput import peak_flops


@pytest.mark.parametrize(
  ('text', 'name', 'devices', 'domains'),
  [
    ('v5p:8x16x16', 'v5p:8x16x16', 2048, 1),
    ('TPU v5e:16x16:2', 'v5e:16x16:2', 512, 2),
    ('tpu7x:2x2x1', '7x:2x2x1', 8, 1),  # Two devices a chip.
    ('h100:512x8', 'h100:512x8', 4096, 512),
    ('h100:64', 'h100:8x8', 64, 8),
    ('a100:4', 'a100:1x4', 4, 1),
    ('v4:4x4x2:2', 'v4:4x4x2:2', 64, 2),
    ('v6e:16x8', 'v6e:16x8', 128, 1),
    ('v5e:1x1', 'v5e:1x1', 1, 1),
    ('gb200:2x72', 'gb200:2x72', 144, 2),
    ('RTX 4090:2', 'rtx4090:1x2', 2, 1),
    ('cpu:64', 'cpu:64', 64, 1),
  ],
)
def test_names(text, name, devices, domains):
  topology = parse_topology(text)
  assert (topology.name, topology.num_devices) == (name, devices)
  assert len(topology.places) == devices
  assert len(set(topology.places[:, 0])) == domains
  assert parse_topology(topology.name) == topology


@pytest.mark.parametrize(
  ('text', 'remedy'),
  [
    ('h10:8', "no accelerator 'h10'. Did you mean 'h100'"),
    ('v5p', 'expected a form such as v5p:8x16x16'),
    ('v5p:4x0x4', 'expected a form such as'),
    ('v5p:64', '3 dimensions, not 1. Did you mean v5p:4x4x4?'),
    ('v5p:3x5x7', 'no slice of v5p has these sizes; they are multiples of 4, or 1x1x1, 2x2x1'),
    ('v5p:3x5x7', 'Did you mean v5p:4x4x8?'),
    ('v5p:2x1x1', 'Did you mean v5p:2x2x1?'),
    ('v5e:2x8', 'they are 1x1, 2x2, 2x4, 4x4, 4x8 and so on, to powers of two. Did you mean v5e:4x4?'),
    ('v5e:1x2', 'Did you mean v5e:2x2?'),
    ('v6e:12x12', 'Did you mean v6e:8x16?'),
    ('v5e:32x32', 'the largest slice of v5e is 16x16, 256 chips; several slices are written v5e:16x16:2'),
    ('h100:12', 'Did you mean h100:1x8 or h100:2x8?'),
    ('h100:2x16', 'fast links connect 8 h100 GPUs at most, not 16. Did you mean h100:4x8?'),
    ('h100:8x8:2', 'a number of TPU slices'),
  ],
)
def test_a_mistake_is_told_with_what_would_be_right(text, remedy):
  with pytest.raises(ConfigError, match=re.escape(remedy)):
    parse_topology(text)


def test_a_mesh_that_does_not_fit_is_told_with_those_that_do():
  check_mesh({'replica': 1, 'data': 16, 'mdl': 4}, parse_topology('h100:8x8'))
  with pytest.raises(ShardingError, match=r'has 64 devices.*512x8 has 4,096.*task.ici_mesh_shape=\(1, 1024, 4\)'):
    check_mesh({'replica': 1, 'data': 16, 'mdl': 4}, parse_topology('h100:512x8'))


class Device:
  def __init__(self, kind):
    self.device_kind, self.platform = kind, 'gpu'


@pytest.mark.parametrize(
  ('target', 'kind'),
  [
    *[('v2', 'TPU v2'), ('v3', 'TPU v3'), ('v4', 'TPU v4'), ('v5e', 'TPU v5 lite'), ('v5p', 'TPU v5')],
    *[('v6e', 'TPU v6 lite'), ('7x', 'TPU7x')],
    *[
      ('h100', 'NVIDIA H100 80GB HBM3'),
      ('a100', 'NVIDIA A100-SXM4-80GB'),
      ('a100-40', 'NVIDIA A100-SXM4-40GB'),
      ('l4', 'NVIDIA L4'),
      ('b200', 'NVIDIA B200'),
    ],
    *[('l40s', 'NVIDIA L40S'), ('gb200', 'NVIDIA GB200'), ('h200', 'NVIDIA H200')],
    *[(card, TARGETS[card].cuda.name) for card in ('rtx3090', 'rtx4090', 'rtx5090', 'rtx6000ada')],
  ],
)
def test_a_device_is_known_by_its_kind_and_its_peak_is_that_of_its_mfu(target, kind):
  assert accelerator_of(kind).name == target
  assert TARGETS[target].peak('bf16') == peak_flops(Device(kind))


def test_a_chip_of_plan_has_no_peak_elsewhere():
  twice = _PEAKS_ALONE.keys() & {kind for target in TARGETS.values() for kind in target.device_kinds}
  assert not twice, f'remove {sorted(twice)} from _PEAKS_ALONE in common/accelerators.py: they have all figures now'


@pytest.mark.parametrize('target', TARGETS.values(), ids=TARGETS)
def test_figures_are_in_their_units_and_have_a_source(target):
  assert target.source and target.network_source
  assert 1e9 <= target.network <= target.link <= target.bandwidth <= 1e13, 'are these bytes per second?'
  assert 2**30 < target.memory < 2**40, 'is the memory in bytes?'
  assert target.peak('bf16') >= target.peak('f32') > 0
  assert target.peak('bf16') / target.device_bandwidth < 1000
  if target.kind == 'gpu':
    text = gpu_target_config(target)
    assert f'core_count: {target.cuda.cores} ' in text
    guide = pathlib.Path(__file__).parents[2] / 'docs' / 'planning.md'
    assert re.search(rf'\b{target.name}\b', guide.read_text()), f'the table in docs/planning.md lacks {target.name}'
    assert text.count('{') == text.count('}')


def test_hosts_may_have_other_networks():
  published = parse_topology('h100:8x8')
  assert published.change_network() == published
  assert published.change_network(host_gigabits=8 * 400) == published  # One adapter of 400 Gbit/s for each GPU.
  halved = published.change_network(host_gigabits=4 * 400)
  assert halved == published.change_network(oversubscription=2)
  assert halved.target.network == published.target.network / 2 and halved.target.link == published.target.link
  assert chips_text(halved).endswith('fast links among 8, 1,600 Gbit/s from each host')
  groups = tuple((i, i + 8) for i in range(8))  # Between two hosts.
  slow, fast = (Links(topology).traffic('all-gather', groups, 1e9, 2e9) for topology in (halved, published))
  assert slow.network_bytes == fast.network_bytes and slow.seconds == pytest.approx(2 * fast.seconds, rel=0.01)
