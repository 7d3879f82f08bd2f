"""Enough threads for simulated CPU devices.

XLA starts a thread for each simulated device, or for each core if there are more. A device can wait in several
collectives at the same time, one thread in each: for example in an all-gather over one mesh axis and in a permute over
another. On a busy machine, once in some hundred steps, the devices that were ahead held all threads. The others could
not go on, and all waited for ever (jaxlib 0.10.2, 8 devices on 2 cores).
"""

from __future__ import annotations

import os
import re

from praxis_lite.common.jax_internals.flags import split_flags

# Environment variables that XLA reads when JAX starts. If one of them is set, its value is kept.
THREADS, _ALSO_THREADS = 'PJRT_NPROC', 'NPROC'
_THREADS_PER_DEVICE = 4
_MAX_THREADS = 256  # XLA starts at most this many threads.


def provide_threads(num_devices: int | None = None) -> None:
  """Makes XLA start 4 threads for each simulated CPU device. For a single device, XLA chooses the number itself.

  Call it before JAX starts its backends; later, it has no effect. If `num_devices` is None, the number comes from
  XLA_FLAGS or JAX_NUM_CPU_DEVICES.
  """
  if num_devices is None:
    num_devices = _num_devices_in_environment()
  if num_devices > 1 and _ALSO_THREADS not in os.environ:
    wanted = min(max(os.cpu_count() or 1, _THREADS_PER_DEVICE * num_devices), _MAX_THREADS)
    os.environ.setdefault(THREADS, str(wanted))


def _num_devices_in_environment() -> int:
  flags = ' '.join(split_flags(os.environ.get('XLA_FLAGS', '')))
  counts = re.findall(r'--xla_force_host_platform_device_count=(\d+)', flags)
  counts += re.findall(r'^\d+$', os.environ.get('JAX_NUM_CPU_DEVICES', ''))
  return max(map(int, counts), default=1)
