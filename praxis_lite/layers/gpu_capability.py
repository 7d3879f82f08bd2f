"""The compute capability of the GPUs that a program is for, on which the choice of kernels depends."""

from __future__ import annotations

import jax

from praxis_lite.common.accelerators import accelerator_of
from praxis_lite.sharding.mesh import ask_device

OLDEST_CAPABILITY = (8, 0)  # Ampere.
# Capabilities with at least 164 KiB of shared memory for each multiprocessor; others have 100 KiB.
LARGE_SHARED_MEMORY = frozenset({(8, 0), (9, 0), (10, 0)})


def compute_capability() -> tuple[int, int] | None:
  """Returns the compute capability of the ambient mesh's GPUs, or of this machine's; None if they are not NVIDIA's.

  If the chip of the mesh is not known and this machine has no GPU, the result is `OLDEST_CAPABILITY`.
  """
  known = ask_device(_capability_of)
  if known is not None:
    return known
  if jax.default_backend() != 'gpu':
    return OLDEST_CAPABILITY
  major, _, minor = str(getattr(jax.devices()[0], 'compute_capability', '')).partition('.')
  return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _capability_of(kind: str) -> tuple[int, int] | None:
  known = accelerator_of(kind)
  return None if known is None else known.capability
