"""Accelerators that a step can be planned for, and their published figures.

Peaks are dense, in operations per second of one chip; bandwidths are of one direction, in bytes per second. What is not
published is marked as assumed. A data sheet's GB of memory are 1e9 bytes on GPUs, and GiB on TPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from praxis_lite.errors import ConfigError, did_you_mean

GIB = 2**30
_TERA, _GIGA = 1e12, 1e9


@dataclasses.dataclass(frozen=True)
class Efficiency:
  """Shares of the published figures that programs reach.

  Attributes:
    compute, memory, links, network: of the peak, the memory's bandwidth, fast links, and links across hosts.
    seconds_per_operation: what each operation takes at least.
    seconds_per_hop: what a message takes at least, between neighbours and across hosts alike.
    calibrated: what they were measured on; '' if they are assumed.
  """

  compute: float
  memory: float
  links: float
  network: float
  seconds_per_operation: float
  seconds_per_hop: float
  calibrated: str = ''


_TPU = Efficiency(0.85, 0.85, 0.9, 0.8, 0.5e-6, 1e-6)
_GPU = Efficiency(0.70, 0.85, 0.75, 0.75, 3e-6, 4e-6)
_CPU = Efficiency(0.5, 0.5, 0.5, 0.5, 5e-6, 10e-6)


@dataclasses.dataclass(frozen=True)
class Cuda:
  """What XLA's compiler for NVIDIA GPUs asks of a chip, beside the figures of the target."""

  capability: tuple[int, int]
  cores: int  # Streaming multiprocessors.
  clock_ghz: float
  l2_bytes: int
  name: str


@dataclasses.dataclass(frozen=True)
class Target:
  """One kind of accelerator.

  Attributes:
    name, kind: as in the name of a topology; 'tpu', 'gpu' or 'cpu'.
    peaks: operations per second by dtype, as HLO spells it.
    memory, bandwidth: bytes, and bytes per second, of a chip.
    link: bytes per second of one fast link (TPU), or of all of a chip's (GPU), in one direction.
    domain: chips that fast links connect; 0: all of a slice.
    chips_per_host: chips of one host.
    network: bytes per second of a chip's share of its host's network, in one direction.
    torus: number of dimensions of the torus; 0: each chip of a domain reaches each other one at full speed.
    wraps_at: a torus dimension is a ring if its size is a multiple of this; else a line.
    largest: sizes of the largest torus that is sold.
    devices_per_chip: JAX devices of a chip.
    source, network_source: where the figures are from.
    cuda: for the compiler for GPUs.
    efficiency: what programs reach of the figures.
  """

  name: str
  kind: str
  peaks: Mapping[str, float]
  memory: float
  bandwidth: float
  link: float
  domain: int
  chips_per_host: int
  network: float
  source: str
  network_source: str
  efficiency: Efficiency
  torus: int = 0
  wraps_at: int = 0
  largest: tuple[int, ...] = ()
  devices_per_chip: int = 1
  cuda: Cuda | None = None

  def peak(self, dtype: str) -> float:
    """Operations per second of a JAX device for operands of a dtype; that of float32 for one that is not listed."""
    return self.peaks.get(dtype, self.peaks['f32']) / self.devices_per_chip

  @property
  def device_memory(self) -> float:
    return self.memory / self.devices_per_chip

  @property
  def device_bandwidth(self) -> float:
    return self.bandwidth / self.devices_per_chip


# Google Cloud documents no network per chip of most; these are from "How to Scale Your Model" (JAX, 2025), chapter 2.
_DCN = 'How to Scale Your Model, chapter 2'
_TPU_DOCS = 'Google Cloud TPU documentation, page of {}'


def _tpu(name: str, bf16: float, eight_bit: float, memory: int, bandwidth: float, link: float, **more: Any) -> Target:
  # TPUs multiply float32 as several products of bfloat16: 3 at JAX's precision 'high', 1 by default.
  peaks = {'bf16': bf16 * _TERA, 'f32': bf16 * _TERA, 's8': eight_bit * _TERA, 'u8': eight_bit * _TERA}
  fields: dict[str, Any] = {'domain': 0, 'chips_per_host': 4, 'network_source': _DCN, 'efficiency': _TPU} | more
  return Target(
    *(name, 'tpu', peaks, memory * GIB, bandwidth * _GIGA, link * _GIGA), source=_TPU_DOCS.format(name), **fields
  )


def _gpu(
  name: str, bf16: float, f32: float, memory: float, bandwidth: float, link: float, cuda: Cuda, **more: Any
) -> Target:
  """Peaks in 1e12/s; int8 and, from Ada on, fp8 take half the time of bfloat16."""
  eight_bit = {'s8': 2 * bf16 * _TERA, 'u8': 2 * bf16 * _TERA}
  if cuda.capability >= (8, 9):
    eight_bit |= {f'f8{kind}': 2 * bf16 * _TERA for kind in ('e4m3fn', 'e5m2', 'e4m3', 'e4m3fnuz', 'e5m2fnuz')}
  peaks = {'bf16': bf16 * _TERA, 'f16': bf16 * _TERA, 'f32': f32 * _TERA, **eight_bit}
  fields: dict[str, Any] = {
    'domain': 8,
    'chips_per_host': 8,
    'source': f'NVIDIA data sheet: {cuda.name}',
    'efficiency': _GPU,
  } | more
  return Target(*(name, 'gpu', peaks, memory * _GIGA, bandwidth * _GIGA, link * _GIGA), cuda=cuda, **fields)


_NIC = 'NVIDIA {} data sheet: one {} Gb/s adapter for each GPU'
_A100: dict[str, Any] = {'network': 25 * _GIGA, 'network_source': _NIC.format('DGX A100', 200)}
_H100: dict[str, Any] = {'network': 50 * _GIGA, 'network_source': _NIC.format('DGX H100', 400)}
_B200: dict[str, Any] = {'network': 50 * _GIGA, 'network_source': _NIC.format('DGX B200', 400)}
_GB200: dict[str, Any] = {
  'network': 50 * _GIGA,
  'network_source': _NIC.format('GB200 NVL72', 400),
  'chips_per_host': 4,
  'domain': 72,
}
# Cards on PCIe: the link is that of one slot, x16, through the host.
_CARDS: dict[str, Any] = {'network': 3.125 * _GIGA, 'network_source': 'assumed: 200 Gb/s for a host of 8'}

_ALL = (
  # Links of TPUs: the documented bandwidth of a chip over its links, 4 on a 2D torus and 6 on a 3D torus.
  _tpu('v4', 275, 275, 32, 1228, 50, torus=3, wraps_at=4, largest=(12, 16, 16), network=6.25e9),
  _tpu('v5e', 197, 394, 16, 819, 50, torus=2, wraps_at=16, largest=(16, 16), network=3.125e9, chips_per_host=8),
  _tpu('v5p', 459, 918, 95, 2765, 100, torus=3, wraps_at=4, largest=(16, 16, 24), network=6.25e9),
  _tpu('v6e', 918, 1836, 32, 1640, 100, torus=2, wraps_at=16, largest=(16, 16), network=12.5e9, chips_per_host=8),
  _tpu(
    *('7x', 2307, 4614, 192, 7380, 100),
    torus=3,
    wraps_at=4,
    largest=(16, 24, 24),
    devices_per_chip=2,
    network=12.5e9,
    network_source='assumed: as of v6e',
  ),
  # f32 of A100 to GB200 is TF32, which XLA uses by default.
  _gpu('a100-40', 312, 156, 42.3, 1555, 300, Cuda((8, 0), 108, 1.41, 40 << 20, 'NVIDIA A100-SXM4-40GB'), **_A100),
  _gpu('a100', 312, 156, 85.0, 2039, 300, Cuda((8, 0), 108, 1.41, 40 << 20, 'NVIDIA A100-SXM4-80GB'), **_A100),
  _gpu('h100', 989, 495, 84.9, 3352, 450, Cuda((9, 0), 132, 1.98, 50 << 20, 'NVIDIA H100 80GB HBM3'), **_H100),
  _gpu('h200', 989, 495, 150.1, 4800, 450, Cuda((9, 0), 132, 1.98, 50 << 20, 'NVIDIA H200'), **_H100),
  _gpu('b200', 2250, 1125, 191.0, 7700, 900, Cuda((10, 0), 148, 1.965, 126 << 20, 'NVIDIA B200'), **_B200),
  _gpu('gb200', 2500, 1250, 198.0, 8000, 900, Cuda((10, 0), 152, 2.062, 126 << 20, 'NVIDIA GB200'), **_GB200),
  _gpu('l4', 121, 60, 23.9, 300, 32, Cuda((8, 9), 58, 2.04, 48 << 20, 'NVIDIA L4'), **_CARDS),
  _gpu('l40s', 362, 183, 47.6, 864, 32, Cuda((8, 9), 142, 2.52, 96 << 20, 'NVIDIA L40S'), **_CARDS),
  # With accumulation in float32, half of what GeForce cards reach in float16.
  _gpu('rtx3090', 71, 35.6, 25.3, 936, 32, Cuda((8, 6), 82, 1.695, 6 << 20, 'NVIDIA GeForce RTX 3090'), **_CARDS),
  _gpu('rtx4090', 165, 82.6, 25.2, 1008, 32, Cuda((8, 9), 128, 2.52, 72 << 20, 'NVIDIA GeForce RTX 4090'), **_CARDS),
  _gpu('rtx5090', 209, 104.8, 33.7, 1792, 64, Cuda((12, 0), 170, 2.407, 96 << 20, 'NVIDIA GeForce RTX 5090'), **_CARDS),
  _gpu('rtx6000ada', 182, 91.1, 50.9, 960, 32, Cuda((8, 9), 142, 2.505, 96 << 20, 'NVIDIA RTX 6000 Ada'), **_CARDS),
  # Devices that are simulated on one machine; the figures are for orders of magnitude alone.
  Target(
    *('cpu', 'cpu', {'f32': 50e9, 'bf16': 50e9}, 4 * GIB, 10e9, 5e9, 0, 1, 1e9, 'assumed', 'assumed', _CPU),
  ),
)
TARGETS: dict[str, Target] = {target.name: target for target in _ALL}
_ALIASES = {
  **{'v5litepod': 'v5e', 'v5lite': 'v5e', 'tpuv5e': 'v5e', 'tpuv4': 'v4', 'tpuv5p': 'v5p', 'tpuv6e': 'v6e'},
  **{'tpu7x': '7x', 'v7x': '7x', 'ironwood': '7x', 'trillium': 'v6e', 'a100-80': 'a100', 'gb200nvl72': 'gb200'},
  **{'a100-80gb': 'a100', 'a100-40gb': 'a100-40', '4090': 'rtx4090', '3090': 'rtx3090', '5090': 'rtx5090'},
}


def find_target(name: str) -> Target:
  """Returns the target of this name, also spelled 'TPU v5p' or 'RTX 4090'.

  Raises:
    ConfigError: there is none; the message names the nearest one.
  """
  plain = name.lower().replace(' ', '').replace('_', '-')
  plain = _ALIASES.get(plain, plain)
  if plain not in TARGETS:
    close = did_you_mean(plain, [*TARGETS, *_ALIASES])
    raise ConfigError(f'topology: there is no accelerator {name!r}.{close} There are {", ".join(TARGETS)}')
  return TARGETS[plain]


# Of a streaming multiprocessor, by compute capability: shared memory, threads, units for float32 (CUDA C++ Programming
# Guide, "Compute Capabilities"). A block may use all of the shared memory but 1 KiB.
_MULTIPROCESSOR = {
  (8, 0): (164 << 10, 2048, 64),
  (8, 6): (100 << 10, 1536, 128),
  (8, 9): (100 << 10, 1536, 128),
  (9, 0): (228 << 10, 2048, 128),
  (10, 0): (228 << 10, 2048, 128),
  (12, 0): (100 << 10, 1536, 128),
}


def gpu_target_config(target: Target) -> str:
  """Returns what XLA's compiler needs to know of a GPU, as a GpuTargetConfigProto in text form."""
  cuda = target.cuda
  assert cuda is not None, target.name
  shared, threads, units = _MULTIPROCESSOR[cuda.capability]
  major, minor = cuda.capability
  info = {
    'threads_per_block_limit': 1024,
    'threads_per_warp': 32,
    'shared_memory_per_block': 48 << 10,
    'shared_memory_per_core': shared,
    'shared_memory_per_block_optin': shared - 1024,
    'threads_per_core_limit': threads,
    'core_count': cuda.cores,
    'fpus_per_core': units,
    'block_dim_limit_x': 2**31 - 1,
    'block_dim_limit_y': 2**16 - 1,
    'block_dim_limit_z': 2**16 - 1,
    'registers_per_core_limit': 2**16,
    'registers_per_block_limit': 2**16,
    'memory_bandwidth': int(target.bandwidth),
    'l2_cache_size': cuda.l2_bytes,
    'clock_rate_ghz': cuda.clock_ghz,
    'device_memory_size': int(target.memory),
  }
  fields = ' '.join(f'{name}: {value}' for name, value in info.items())
  capability = f'cuda_compute_capability {{ major: {major} minor: {minor} }}'
  return (
    f'gpu_device_info {{ {fields} {capability} }} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} '
    f'device_description_str: "{cuda.name}"'
  )
