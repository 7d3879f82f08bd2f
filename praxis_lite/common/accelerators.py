"""Accelerators: their published figures, and the lookup of a JAX device's accelerator.

Peaks are dense, in operations per second of one chip; bandwidths are for one direction, in bytes per second. Memory and
bandwidth of GPUs are what the device itself reports, which differs a little from its name. Figures that are not
published are marked as assumed. Figures that could not be found in a source when the table was made are marked as not
checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from praxis_lite.common.errors import ConfigError, did_you_mean

GIB = 2**30
_TERA, _GIGA = 1e12, 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
  """The published figures of one kind of accelerator.

  Attributes:
    name: the name in a topology, such as 'v5p'.
    kind: 'tpu', 'gpu' or 'cpu'.
    device_kinds: beginnings of the words of `jax.Device.device_kind`, such as 'tpu v5 lite'; the longest match counts.
    peaks: operations per second by dtype, in the spelling of HLO.
    memory, bandwidth: bytes, and bytes per second, of a chip.
    link: bytes per second of one fast link (TPU), or of all fast links of a chip (GPU), in one direction.
    domain: number of chips that fast links connect; 0 means all chips of a slice.
    chips_per_host: chips in a host.
    network: bytes per second of a chip's share of its host's network, in one direction.
    torus: number of dimensions of the torus; 0 means that all chips of a domain reach each other at full speed.
    wraps_at: a torus dimension is a ring if its size is a multiple of this, otherwise a line.
    largest: sizes of the largest torus that is sold.
    devices_per_chip: JAX devices in a chip.
    source, network_source: sources of the figures.
  """

  name: str
  kind: str
  device_kinds: tuple[str, ...] = ()
  peaks: Mapping[str, float]
  memory: float
  bandwidth: float
  link: float
  domain: int
  chips_per_host: int
  network: float
  source: str
  network_source: str
  torus: int = 0
  wraps_at: int = 0
  largest: tuple[int, ...] = ()
  devices_per_chip: int = 1

  def peak(self, dtype: str) -> float:
    """Returns the operations per second of a JAX device for operands of a dtype; unlisted dtypes count as float32."""
    return self.peaks.get(dtype, self.peaks['f32']) / self.devices_per_chip

  @property
  def device_memory(self) -> float:
    return self.memory / self.devices_per_chip

  @property
  def device_bandwidth(self) -> float:
    return self.bandwidth / self.devices_per_chip


_FLOAT8 = tuple(f'f8{kind}' for kind in ('e4m3fn', 'e5m2', 'e4m3', 'e4m3fnuz', 'e5m2fnuz', 'e4m3b11fnuz'))


def _peaks(bf16: float, f32: float, int8: float, float8: float | None, **more: float) -> dict[str, float]:
  """Returns peaks by dtype, from figures in 1e12/s. If `float8` is None, float8 has the peak of float32."""
  eight_bit = {} if float8 is None else dict.fromkeys(_FLOAT8, float8)
  terms = {'bf16': bf16, 'f32': f32, 's8': int8, 'u8': int8, **eight_bit, **more}
  return {dtype: value * _TERA for dtype, value in terms.items()}


# ---------------------------------------------------------------- TPU

# The source of networks that the page of a chip does not document, and of the links of v2 to v4.
_BOOK = 'How to Scale Your Model (Austin et al., 2025), chapter 2'


def _tpu(
  name: str, bf16: float, int8: float, float8: float, memory: int, bandwidth: float, link: float, **more: Any
) -> Accelerator:
  """Returns a TPU. A float32 product takes one bfloat16 product by default, 3 at precision 'high', 6 at 'highest'."""
  fields: dict[str, Any] = {
    **{'domain': 0, 'chips_per_host': 4, 'network_source': _BOOK},
    'source': f'Google Cloud documentation: TPU {name}',
  }
  return Accelerator(
    name=name,
    kind='tpu',
    peaks=_peaks(bf16, bf16, int8, float8),
    memory=memory * GIB,
    bandwidth=bandwidth * _GIGA,
    link=link * _GIGA,
    **fields | more,
  )


def _torus(largest: tuple[int, ...], wraps_at: int, *kinds: str, devices: int = 1) -> dict[str, Any]:
  sizes = {'torus': len(largest), 'wraps_at': wraps_at, 'largest': largest}
  return {**sizes, 'device_kinds': kinds, 'devices_per_chip': devices}


_PAGE = 'Google Cloud documentation: TPU7x, comparison with v5p and v6e'
_TPUS = (
  # The figure of a link is for one link in one direction. It follows from the documented bandwidth of a chip over 4
  # links (2D) or 6 links (3D) in both directions; for v2 to v4, from the bisection bandwidth of a pod.
  _tpu(
    *('v2', 45, 45, 45, 16, 700, 62.5),
    **_torus((16, 16), 16, 'tpu v2', devices=2),
    network=6.25e9,
    source='Google Cloud documentation: TPU v2; link not checked',
    network_source='assumed: as of v4',
  ),
  _tpu(
    *('v3', 123, 123, 123, 32, 900, 100),
    **_torus((32, 32), 32, 'tpu v3', devices=2),
    network=6.25e9,
    network_source='assumed: as of v4',
  ),
  _tpu(
    *('v4', 275, 275, 275, 32, 1200, 46.9),
    **_torus((12, 16, 16), 4, 'tpu v4'),
    network=6.25e9,
  ),
  _tpu(
    *('v5e', 197, 393, 197, 16, 819, 50),
    **_torus((16, 16), 16, 'tpu v5 lite', 'tpu v5e'),
    chips_per_host=8,
    network=3.125e9,
    network_source='Google Cloud documentation: TPU v5e, 6.4 Tb/s of a pod of 256 chips',
  ),
  _tpu(
    *('v5p', 459, 918, 459, 95, 2765, 100),
    **_torus((16, 16, 24), 4, 'tpu v5'),
    network=6.25e9,
    network_source=_PAGE,
  ),
  _tpu(
    *('v6e', 918, 1836, 918, 32, 1638, 100),
    **_torus((16, 16), 16, 'tpu v6'),
    chips_per_host=8,
    network=12.5e9,
    network_source=_PAGE,
  ),
  _tpu(
    *('7x', 2307, 4614, 4614, 192, 7380, 100),
    **_torus((16, 24, 24), 4, 'tpu7x', 'tpu 7x', devices=2),
    network=12.5e9,
    source='Google Cloud documentation: TPU7x; int8 as float8, which is assumed',
    network_source=_PAGE,
  ),
)

# ---------------------------------------------------------------- GPU


def _gpu(
  name: str, peaks: Mapping[str, float], memory: float, bandwidth: float, link: float, source: str, **more: Any
) -> Accelerator:
  """Returns a GPU. Its float32 peak is the TF32 peak, because XLA uses TF32 by default."""
  fields: dict[str, Any] = {'domain': 8, 'chips_per_host': 8, 'device_kinds': (name,)} | more
  return Accelerator(
    name=name,
    kind='gpu',
    peaks={**peaks, 'f16': peaks['bf16']},
    memory=memory * _GIGA,
    bandwidth=bandwidth * _GIGA,
    link=link * _GIGA,
    source=source,
    **fields,
  )


def _adapters(system: str, gigabits: int) -> dict[str, Any]:
  return {
    'network': gigabits / 8 * _GIGA,
    'network_source': f'NVIDIA {system}: one {gigabits} Gb/s adapter for each GPU',
  }


# PCIe cards communicate over one x16 slot, through the host.
_CARD: dict[str, Any] = {'network': 3.125 * _GIGA, 'network_source': 'assumed: 200 Gb/s for a host of 8'}
_DEVICE = '; memory and bandwidth: specs of XLA for its compiler'
_A100, _HOPPER = _peaks(312, 156, 624, None), _peaks(989, 494.5, 1979, 1979)

_GPUS = (
  _gpu(
    *('a100-40', _A100, 42.33, 1555.2, 300, f'NVIDIA A100 data sheet{_DEVICE}'),
    **_adapters('DGX A100', 200) | {'device_kinds': ('a100 sxm4 40gb',)},
  ),
  _gpu(
    *('a100', _A100, 85.10, 2039.04, 300, f'NVIDIA A100 data sheet{_DEVICE}'),
    **_adapters('DGX A100', 200) | {'device_kinds': ('a100',)},
  ),
  _gpu(
    *('h100', _HOPPER, 84.94, 3352.32, 450, f'NVIDIA H100 data sheet, SXM{_DEVICE}'),
    **_adapters('DGX H100', 400) | {'device_kinds': ('h100',)},
  ),
  _gpu(
    *('h200', _HOPPER, 151.40, 4800, 450, f'NVIDIA H200 data sheet{_DEVICE}'),
    **_adapters('DGX H200', 400) | {'device_kinds': ('h200',)},
  ),
  _gpu(
    *('b200', _peaks(2250, 1125, 4500, 4500), 191.51, 7672.32, 900, f'NVIDIA DGX B200 data sheet{_DEVICE}'),
    **_adapters('DGX B200', 400),
  ),
  _gpu(
    *('gb200', _peaks(2500, 1250, 5000, 5000), 197.90, 7928.06, 900, f'NVIDIA GB200 NVL72 specifications{_DEVICE}'),
    **_adapters('GB200 NVL72', 400) | {'chips_per_host': 4, 'domain': 72},
  ),
  _gpu(*('l4', _peaks(121, 60, 242, 242), 23.9, 300, 32, 'NVIDIA L4 data sheet; memory not checked'), **_CARD),
  _gpu(
    *('l40s', _peaks(362, 183, 733, 733), 47.6, 864, 32, 'NVIDIA L40S data sheet; memory not checked'),
    **_CARD,
  ),
  # With float32 accumulation, GeForce cards multiply bfloat16 and float8 at half the rate that int8 suggests.
  _gpu(
    *('rtx3090', _peaks(71, 35.6, 284, None), 25.3, 936, 32, 'NVIDIA Ampere GA102 whitepaper; not checked'),
    **_CARD | {'device_kinds': ('rtx 3090',)},
  ),
  _gpu(
    *('rtx4090', _peaks(165.2, 82.6, 660.6, 330.3), 25.2, 1008, 32, 'NVIDIA Ada whitepaper; memory not checked'),
    **_CARD | {'device_kinds': ('rtx 4090',)},
  ),
  _gpu(
    *('rtx5090', _peaks(209.5, 104.8, 838, 419), 33.7, 1792, 64),
    source='NVIDIA RTX Blackwell whitepaper; peaks of bfloat16 and int8 not checked',
    **_CARD | {'device_kinds': ('rtx 5090',)},
  ),
  _gpu(
    *('rtx6000ada', _peaks(364.2, 182.1, 728.5, 728.5), 50.9, 960, 32),
    source='NVIDIA Ada whitepaper for professional cards; not checked',
    **_CARD | {'device_kinds': ('rtx 6000 ada',)},
  ),
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
ACCELERATORS: dict[str, Accelerator] = {found.name: found for found in (*_TPUS, *_GPUS, _CPU)}

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
  return ACCELERATORS[name].peak('bf16') if name in ACCELERATORS else _PEAKS_ALONE[kind] * _TERA


def _match(device_kind: str) -> tuple[str, str] | None:
  """Returns the longest matching kind, and the name of its accelerator or ''. 'TPU v5 lite' also matches 'tpu v5'."""
  words = device_kind.lower().replace('-', ' ').split()
  kinds = dict.fromkeys(_PEAKS_ALONE, '')
  kinds |= {kind: found.name for found in ACCELERATORS.values() for kind in found.device_kinds}
  matches = [k for k in kinds if all(any(word.startswith(part) for word in words) for part in k.split())]
  best = max(matches, key=len, default=None)
  return None if best is None else (best, kinds[best])
