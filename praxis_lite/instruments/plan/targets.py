"""The accelerators that plans support: their published figures, and the shares of these that programs reach.

The shares are assumptions unless `praxis-lite plan --calibrate` has measured them on local devices; see
`calibration.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from praxis_lite.common.accelerators import ACCELERATORS, Accelerator, accelerator_name


@dataclasses.dataclass(frozen=True)
class Efficiency:
  """Shares of the published figures that programs reach; see `calibration.py`.

  Attributes:
    compute: share of the peak in matrix products.
    attention: share of the peak in a fused attention kernel whose heads fill the matrix units.
    memory, links, network: shares of the bandwidth of memory, of fast links, and of links between hosts.
    seconds_per_operation: minimal time of an operation.
    seconds_per_hop: minimal time of a message between neighbours, or between hosts.
    calibrated: where the shares were measured, and which are still assumptions; '' if all are assumed.
  """

  compute: float
  attention: float
  memory: float
  links: float
  network: float
  seconds_per_operation: float
  seconds_per_hop: float
  calibrated: str = ''


# The best matrix products reach 86 % on A100 and 78 % on B200 (Machine Learning Engineering Open Book, "Maximum
# Achievable Matmul FLOPS"). We assume 0.9 of that for the products of a step, because their shapes are not optimal and
# they share the chip's power with other work. Links of TPUs reach 45 of 50 and 90 of 100 GB/s; links of 8 H100 reach
# 370 of 450 GB/s (How to Scale Your Model, chapters 2 and 12). The other shares are assumptions.
_TPU = Efficiency(0.9, 0.6, 0.85, 0.9, 0.8, 0.5e-6, 1e-6)
_GPU = Efficiency(0.70, 0.5, 0.85, 0.8, 0.8, 3e-6, 4e-6)
_CPU = Efficiency(0.5, 0.5, 0.5, 0.5, 0.5, 5e-6, 10e-6)
# A profile of Llama 3 8B on v6e with sequences of 8,192 tokens ("TPU model performance auto-optimization", A. Vlasenko,
# 2026) has 3.17 s of products for 2.26 to 2.31e15 FLOPs, 78 % of the peak. Its attention, with tokamax's kernels,
# reaches 36 % of the peak; from the time of a step with JAX's splash attention, we compute 30 % for the latter. On v6e,
# 128 dims per head fill half of a matrix unit, so we assume 60 % for heads that fill it, on all TPUs.
_COMPUTE = {'a100-40': 0.77, 'a100': 0.77, 'b200': 0.70, 'gb200': 0.70, 'v6e': 0.78}
# The developers of praxis_lite measured one H100 SXM of 700 W (docs/benchmarks.md): a product of matrices of 16,384
# rows and columns; attention of 128 dims per head, by the difference of steps of 16,384 and of 2,048 tokens; and x + 1.
# Links and network were not measured. Small operations in a row took 0.9 us each, but the assumed 3 us predict steps
# with many small operations better. An H200 has the same processor; 12 steps were measured on it, and these
# shares predicted them well, except for the share of products.
_H100 = dataclasses.replace(_GPU, compute=0.69, attention=0.56, memory=0.87)
_H200 = dataclasses.replace(_H100, compute=0.66)
# The speed of our kernels for grouped products, relative to plain products, measured with 8 and 64 groups.
_GROUPED = 0.8
# The speed of attention with 64 dims per head, relative to 128, from the difference of steps of 8,192 and 1,024 tokens.
_NARROW_HEADS = 0.77
MEASURED = {'h100': _H100, 'h200': _H200}


def _assume_efficiency(accelerator: Accelerator) -> Efficiency:
  if accelerator.name in MEASURED:
    return MEASURED[accelerator.name]
  assumed = {'gpu': _GPU, 'tpu': _TPU}.get(accelerator.kind, _CPU)
  return dataclasses.replace(assumed, compute=_COMPUTE.get(accelerator.name, assumed.compute))


# The side of the matrix units of TPUs (Google Cloud documentation); 128 for other TPUs.
_LARGE_UNITS = {'v6e': 256, '7x': 256}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target(Accelerator):
  """An accelerator that steps can be planned for.

  Attributes:
    efficiency: the shares of its figures that programs reach.
  """

  efficiency: Efficiency

  @property
  def grouped_share(self) -> float:
    """The speed of a kernel for grouped products, relative to a plain product."""
    return _GROUPED if self.kind == 'gpu' else 1.0

  def attention_share(self, dims_per_head: int) -> float:
    """Returns the share of the peak that a fused attention kernel reaches.

    On a TPU, products with few dims per head leave rows or columns of the matrix units unused. On a GPU, narrow heads
    need more exponentials for the same FLOPs in products.
    """
    if self.kind == 'gpu':
      return self.efficiency.attention * (_NARROW_HEADS if dims_per_head <= 64 else 1.0)
    side = _LARGE_UNITS.get(self.name, 128) if self.kind == 'tpu' else 1
    return self.efficiency.attention * min(1.0, dims_per_head / side)


TARGETS: Mapping[str, Target] = {
  name: Target(**vars(accelerator), efficiency=_assume_efficiency(accelerator))
  for name, accelerator in ACCELERATORS.items()
}
"""The chips that `plan` knows, by name."""


def find_target(name: str) -> Target:
  """Returns the target of this name; spellings such as 'TPU v5p' and 'RTX 4090' work, too.

  Raises:
    ConfigError: no target has this name; the message suggests the nearest name.
  """
  return TARGETS[accelerator_name(name)]


def gpu_target_config(target: Target) -> str:
  """Returns the properties of a GPU that XLA's compiler needs, as a GpuTargetConfigProto in text form."""
  cuda = target.cuda
  assert cuda is not None and target.capability is not None, target.name
  major, minor = target.capability
  info = {
    'threads_per_block_limit': 1024,
    'threads_per_warp': 32,
    'shared_memory_per_block': 48 << 10,
    'shared_memory_per_core': cuda.shared_memory,
    'shared_memory_per_block_optin': cuda.shared_memory - 1024,  # CUDA reserves 1 KiB.
    'threads_per_core_limit': cuda.threads,
    'core_count': cuda.cores,
    'fpus_per_core': cuda.units,
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
