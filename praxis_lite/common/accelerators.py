"""Accelerators: their published figures, and the lookup of a JAX device's accelerator.

Peaks are dense, in operations per second of one chip; bandwidths are for one direction, in bytes per second. Memory and
bandwidth of GPUs are as the device reports them, so they may differ a little from its name, as in 'A100 40GB'.
Figures that are not published are marked as assumed. Figures without a source are marked as not checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from praxis_lite.common.errors import ConfigError, did_you_mean

T = TypeVar('T')

GIB = 2**30
_TERA, _GIGA = 1e12, 1e9


@dataclasses.dataclass(frozen=True)
class Cuda:
  """Properties of a chip that XLA's compiler for NVIDIA GPUs needs besides those in `Accelerator`."""

  name: str  # Of the device.
  cores: int  # Streaming multiprocessors.
  clock_ghz: float
  l2_bytes: int  # Bytes of the L2 cache.
  shared_memory: int  # Bytes of shared memory in a multiprocessor.
  threads: int  # The most threads in a multiprocessor.
  units: int  # Float32 units of a multiprocessor.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
  """The published figures of one kind of accelerator; bandwidths are in bytes per second, in one direction."""

  name: str  # The name in a topology, such as 'v5p'.
  kind: str  # 'tpu', 'gpu' or 'cpu'.
  # What to look for in `jax.Device.device_kind`, such as 'tpu v5 lite'; see `_match`.
  device_kinds: tuple[str, ...] = ()
  peaks: Mapping[str, float]  # Operations per second, by dtype as HLO spells it.
  memory: float  # Bytes of memory of a chip.
  bandwidth: float  # Bandwidth of the memory of a chip.
  link: float  # Bandwidth of one fast link (TPU), or of all fast links of a chip (GPU).
  domain: int  # Number of chips that fast links connect; 0 means all chips of a slice.
  chips_per_host: int
  network: float  # Bandwidth of a chip's share of its host's network.
  source: str  # Where all figures but `network` were published.
  network_source: str  # Where `network` was published.
  torus: int = 0  # Dimensions of the torus; 0 means that all chips of a domain reach each other at full speed.
  wraps_at: int = 0  # A torus dimension is a ring if its size is a multiple of this, otherwise a line.
  largest: tuple[int, ...] = ()  # Sizes of the largest torus that is sold.
  devices_per_chip: int = 1  # JAX devices in a chip.
  capability: tuple[int, int] | None = None  # Compute capability of a GPU of NVIDIA.
  cuda: Cuda | None = None  # What the compiler for GPUs of NVIDIA needs.

  def peak(self, dtype: str) -> float:
    """Returns a JAX device's peak for operands of a dtype, in operations per second.

    For a dtype without an entry in `peaks`, that is the peak of float32.
    """
    return self.peaks.get(dtype, self.peaks['f32']) / self.devices_per_chip

  @property
  def device_memory(self) -> float:
    return self.memory / self.devices_per_chip

  @property
  def device_bandwidth(self) -> float:
    return self.bandwidth / self.devices_per_chip


_FLOAT8 = tuple(f'f8{kind}' for kind in ('e4m3fn', 'e5m2', 'e4m3', 'e4m3fnuz', 'e5m2fnuz', 'e4m3b11fnuz'))


def _peaks(bf16: str, f32: str, int8: str, float8: str) -> dict[str, float]:
  """Returns peaks by dtype, from figures in 1e12/s. If `float8` is '-', 8-bit floats have no entry, see `peak`."""
  peaks = {'bf16': bf16, 'f32': f32, 's8': int8, 'u8': int8}
  if float8 != '-':
    peaks |= dict.fromkeys(_FLOAT8, float8)
  return {dtype: float(peak) * _TERA for dtype, peak in peaks.items()}


def _entry(table: Mapping[str, T], table_name: str, key: str) -> T:
  if key not in table:
    raise LookupError(f'{table_name} in {__name__} has no entry for {key!r}, which a row of the figures needs')
  return table[key]


# ---------------------------------------------------------------- TPU

# Peaks in 1e12/s; memory in GiB; in GB/s, the bandwidth of the memory, of one link and of a chip's network; and the
# number of chips in a host. The figure of a link is for one direction. It follows from the documented bandwidth of a
# chip over 4 links (2D) or 6 links (3D) in both directions; for v2 to v4, from the bisection bandwidth of a pod. Each
# row needs an entry in `_TPU_NETWORK_SOURCES`.
_TPU_FIGURES = """
       bf16  int8  float8  memory  bandwidth  link  network  host  largest   wraps_at  devices  device kinds
  v2     45    45      45      16        700  62.5     6.25     4  16x16           16        2  tpu v2
  v3    123   123     123      32        900   100     6.25     4  32x32           32        2  tpu v3
  v4    275   275     275      32       1200  46.9     6.25     4  12x16x16         4        1  tpu v4
  v5e   197   393     197      16        819    50    3.125     8  16x16           16        1  tpu v5 lite, tpu v5e
  v5p   459   918     459      95       2765   100     6.25     4  16x16x24         4        1  tpu v5
  v6e   918  1836     918      32       1638   100     12.5     8  16x16           16        1  tpu v6
  7x   2307  4614    4614     192       7380   100     12.5     4  16x24x24         4        2  tpu7x, tpu 7x
"""
_TPU_SOURCES = {
  'v2': 'Google Cloud documentation: TPU v2; link not checked',
  '7x': 'Google Cloud documentation: TPU7x; int8 as float8, which is assumed',
}
_PAGE = 'Google Cloud documentation: TPU7x, comparison with v5p and v6e'
_TPU_NETWORK_SOURCES = {
  **dict.fromkeys(('v2', 'v3'), 'assumed: as of v4'),
  # This book also documents the links of v2 to v4.
  'v4': 'How to Scale Your Model (Austin et al., 2025), chapter 2',
  'v5e': 'Google Cloud documentation: TPU v5e, 6.4 Tb/s of a pod of 256 chips',
  **dict.fromkeys(('v5p', 'v6e', '7x'), _PAGE),
}


def _tpu(row: str) -> Accelerator:
  """Returns a TPU. A float32 product takes one bfloat16 product by default, 3 at precision 'high', 6 at 'highest'."""
  name, bf16, int8, float8, *figures, kinds = row.split(maxsplit=12)
  memory, bandwidth, link, network, host, torus, wraps_at, devices = figures
  largest = tuple(map(int, torus.split('x')))
  return Accelerator(
    name=name,
    kind='tpu',
    device_kinds=tuple(kinds.split(', ')),
    peaks=_peaks(bf16, bf16, int8, float8),
    memory=int(memory) * GIB,
    bandwidth=float(bandwidth) * _GIGA,
    link=float(link) * _GIGA,
    domain=0,
    chips_per_host=int(host),
    network=float(network) * _GIGA,
    source=_TPU_SOURCES.get(name, f'Google Cloud documentation: TPU {name}'),
    network_source=_entry(_TPU_NETWORK_SOURCES, '_TPU_NETWORK_SOURCES', name),
    torus=len(largest),
    wraps_at=int(wraps_at),
    largest=largest,
    devices_per_chip=int(devices),
  )


# ---------------------------------------------------------------- GPU

# Each GPU has two lines, and each capability has an entry in `_MULTIPROCESSORS`. When you add a GPU, remove its device
# kind from `_PEAKS_ALONE` if it is there.
#
# First line: peaks in 1e12/s ('-' means none); memory in GB; in GB/s, the bandwidth of the memory, of all links of a
# chip, and of its network; domain, the number of GPUs that fast links connect; and host, the number of GPUs in a host.
# The peak f32 is for TF32, which XLA uses by default. With float32 accumulation, GeForce cards multiply bfloat16
# and float8 at half the rate that int8 suggests. Cards without fast links communicate over one x16 slot of PCIe,
# through the host: 32 GB/s for generation 4, 64 for generation 5.
#
# Second line: streaming multiprocessors, clock in GHz, MiB of the L2 cache, and the name of the device, which
# XLA's compiler needs; the system whose network the figures have ('-' if the network is assumed); and the source of the
# other figures.
_BY_XLA = '; memory and bandwidth: specs of XLA for its compiler'
_GPU_FIGURES = f"""
               bf16     f32   int8  float8  memory  bandwidth  links  network  domain  host  capability  device kind
  a100-40       312     156    624       -   42.33     1555.2    300       25       8     8         8.0  a100 sxm4 40gb
    108  1.41   40     | NVIDIA A100-SXM4-40GB | DGX A100 | NVIDIA A100 data sheet{_BY_XLA}
  a100          312     156    624       -   85.10    2039.04    300       25       8     8         8.0  a100
    108  1.41   40     | NVIDIA A100-SXM4-80GB | DGX A100 | NVIDIA A100 data sheet{_BY_XLA}
  h100          989   494.5   1979    1979   84.94    3352.32    450       50       8     8         9.0  h100
    132  1.98   50     | NVIDIA H100 80GB HBM3 | DGX H100 | NVIDIA H100 data sheet, SXM{_BY_XLA}
  h200          989   494.5   1979    1979  151.40       4800    450       50       8     8         9.0  h200
    132  1.98   50     | NVIDIA H200 | DGX H200 | NVIDIA H200 data sheet{_BY_XLA}
  b200         2250    1125   4500    4500  191.51    7672.32    900       50       8     8        10.0  b200
    148  1.965  126.5  | NVIDIA B200 | DGX B200 | NVIDIA DGX B200 data sheet{_BY_XLA}
  gb200        2500    1250   5000    5000  197.90    7928.06    900       50      72     4        10.0  gb200
    152  2.062  129.25 | NVIDIA GB200 | GB200 NVL72 | NVIDIA GB200 NVL72 specifications{_BY_XLA}
  l4            121      60    242     242    23.9        300     32    3.125       8     8         8.9  l4
     58  2.04   48     | NVIDIA L4 | - | NVIDIA L4 data sheet; memory not checked
  l40s          362     183    733     733    47.6        864     32    3.125       8     8         8.9  l40s
    142  2.52   96     | NVIDIA L40S | - | NVIDIA L40S data sheet; memory not checked
  rtx3090        71    35.6    284       -    25.3        936     32    3.125       8     8         8.6  rtx 3090
     82  1.695  6      | NVIDIA GeForce RTX 3090 | - | NVIDIA Ampere GA102 whitepaper; not checked
  rtx4090     165.2    82.6  660.6   330.3    25.2       1008     32    3.125       8     8         8.9  rtx 4090
    128  2.52   72     | NVIDIA GeForce RTX 4090 | - | NVIDIA Ada whitepaper; memory not checked
  rtx5090     209.5   104.8    838     419    33.7       1792     64    3.125       8     8        12.0  rtx 5090
    170  2.407  96     | NVIDIA GeForce RTX 5090 | - | NVIDIA RTX Blackwell whitepaper; bfloat16 and int8 not checked
  rtx6000ada  364.2   182.1  728.5   728.5    50.9        960     32    3.125       8     8         8.9  rtx 6000 ada
    142  2.505  96     | NVIDIA RTX 6000 Ada Generation | - | NVIDIA Ada whitepaper for professional cards; not checked
"""
# KiB of shared memory, threads and float32 units of a streaming multiprocessor, by compute capability (CUDA C++
# Programming Guide, "Compute Capabilities").
_MULTIPROCESSORS = {
  '8.0': (164, 2048, 64),
  '8.6': (100, 1536, 128),
  '8.9': (100, 1536, 128),
  '9.0': (228, 2048, 128),
  '10.0': (228, 2048, 128),
  '12.0': (100, 1536, 128),
}


def _gpu(row: str, details: str) -> Accelerator:
  """Returns a GPU from its two lines of `_GPU_FIGURES`."""
  name, bf16, f32, int8, float8, *figures, capability, kind = row.split(maxsplit=12)
  major, minor = map(int, capability.split('.'))
  memory, bandwidth, links, network, domain, host = map(float, figures)
  peaks = _peaks(bf16, f32, int8, float8)
  numbers, device_name, system, source = details.strip().split(' | ')
  cores, clock, l2_mib = map(float, numbers.split())
  shared_kib, threads, units = _entry(_MULTIPROCESSORS, '_MULTIPROCESSORS', capability)
  assumed = 'assumed: 200 Gb/s for a host of 8'
  return Accelerator(
    name=name,
    kind='gpu',
    device_kinds=(kind,),
    capability=(major, minor),
    cuda=Cuda(device_name, int(cores), clock, int(l2_mib * 2**20), shared_kib << 10, threads, units),
    peaks={**peaks, 'f16': peaks['bf16']},
    memory=memory * _GIGA,
    bandwidth=bandwidth * _GIGA,
    link=links * _GIGA,
    domain=int(domain),
    chips_per_host=int(host),
    network=network * _GIGA,
    source=source,
    network_source=assumed if system == '-' else f'NVIDIA {system}: one {8 * network:.0f} Gb/s adapter for each GPU',
  )


# Simulated devices on one machine. The figures give only orders of magnitude.
_CPU = Accelerator(
  name='cpu',
  kind='cpu',
  peaks={'f32': 50e9, 'bf16': 50e9},
  memory=4 * GIB,
  bandwidth=10e9,
  link=5e9,
  domain=0,
  chips_per_host=1,
  network=1e9,
  source='assumed',
  network_source='assumed',
)


def _rows(table: str) -> list[str]:
  return table.strip().splitlines()[1:]


_GPU_LINES = _rows(_GPU_FIGURES)
ACCELERATORS: dict[str, Accelerator] = {
  found.name: found for found in (*map(_tpu, _rows(_TPU_FIGURES)), *map(_gpu, _GPU_LINES[::2], _GPU_LINES[1::2]), _CPU)
}

_ALIASES = {
  **{'v5litepod': 'v5e', 'v5lite': 'v5e', 'tpuv5e': 'v5e', 'tpuv4': 'v4', 'tpuv5p': 'v5p', 'tpuv6e': 'v6e'},
  **{'tpu7x': '7x', 'v7x': '7x', 'ironwood': '7x', 'trillium': 'v6e', 'a100-80': 'a100', 'gb200nvl72': 'gb200'},
  **{'a100-80gb': 'a100', 'a100-40gb': 'a100-40', '4090': 'rtx4090', '3090': 'rtx3090', '5090': 'rtx5090'},
  **{'tpuv2': 'v2', 'tpuv3': 'v3'},
}


def accelerator_name(text: str) -> str:
  """Returns the name in `ACCELERATORS` for a spelling such as 'TPU v5p' or 'RTX 4090'.

  Raises:
    ConfigError: no accelerator has this name; the message suggests the nearest name.
  """
  plain = text.lower().replace(' ', '').replace('_', '-')
  plain = _ALIASES.get(plain, plain)
  if plain not in ACCELERATORS:
    close = did_you_mean(plain, [*ACCELERATORS, *_ALIASES])
    raise ConfigError(f'topology: there is no accelerator {text!r}.{close} There are {", ".join(ACCELERATORS)}')
  return plain


# ---------------------------------------------------------------- of a JAX device

# Devices that `plan` does not support: dense bfloat16 peak (float16 for V100) in 1e12/s, from their data sheets.
_PEAKS_ALONE: dict[str, float] = {
  **{'tpu v4 lite': 138, 'h100 nvl': 835, 'h100 pcie': 756, 'h800': 989, 'gh200': 989, 'a800': 312},
  **{'l40': 181, 'a10': 125, 'a10g': 70, 'v100': 125},
}


def accelerator_of(device_kind: str) -> Accelerator | None:
  """Returns the accelerator of a device kind such as 'NVIDIA H100 80GB HBM3'; None if `ACCELERATORS` lacks it."""
  found = _match(device_kind)
  return ACCELERATORS.get(found[1]) if found else None


def bf16_peak_of(device_kind: str) -> float | None:
  """Returns the dense bfloat16 operations per second of a device kind; None if it is not known."""
  found = _match(device_kind)
  if found is None:
    return None
  kind, name = found
  return ACCELERATORS[name].peak('bf16') if name else _PEAKS_ALONE[kind] * _TERA


def _match(device_kind: str) -> tuple[str, str] | None:
  """Returns the longest known kind that matches `device_kind`, and its name in `ACCELERATORS` ('' if it has none).

  A kind matches if each of its words begins a word of `device_kind`, so the kind 'tpu v5' also matches the device
  'TPU v5 lite'. Returns None if none matches.
  """
  words = device_kind.lower().replace('-', ' ').split()
  kinds = dict.fromkeys(_PEAKS_ALONE, '')
  kinds |= {kind: found.name for found in ACCELERATORS.values() for kind in found.device_kinds}
  matches = [k for k in kinds if all(any(word.startswith(part) for word in words) for part in k.split())]
  best = max(matches, key=len, default=None)
  return None if best is None else (best, kinds[best])
