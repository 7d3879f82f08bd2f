"""XLA_FLAGS of tests: programs that are quick to compile rather than quick to run.

Four fifths of the suite's time would be XLA's. Without LLVM's optimizations and with the older emitters, the train step
of a small model compiles in a quarter of the time. What XLA's own passes do (sharding, collectives, fusion, memory)
stays as it is. Flags that are given are respected, so the suite can also run on programs as users compile them:

  XLA_FLAGS='--xla_backend_optimization_level=3 --xla_cpu_use_fusion_emitters=true' make test
"""

from __future__ import annotations

import os
import re

QUICK = {
  'xla_backend_optimization_level': '0',
  'xla_cpu_use_fusion_emitters': 'false',
  'xla_cpu_parallel_codegen_split_count': '1',
}
# On a busy machine a simulated device may be late for a collective by more than XLA's 40 s, after which it aborts.
PATIENT = {
  'xla_cpu_collective_call_warn_stuck_timeout_seconds': '300',
  'xla_cpu_collective_call_terminate_timeout_seconds': '900',
}
DEVICES = 'xla_force_host_platform_device_count'


def xla_flags(devices: int | None = None) -> str:
  """XLA_FLAGS of a process with this number of simulated devices; None leaves it to the process."""
  from praxis_lite.common.jax_internals.flags import add_flags  # not before conftest.py has made the environment

  given = re.sub(rf'--{DEVICES}=\d+', '', os.environ.get('XLA_FLAGS', ''))
  wanted = QUICK | PATIENT | ({} if devices is None else {DEVICES: str(devices)})
  return add_flags(given, wanted)


def simulate_devices(count: int) -> None:
  """Gives this process, and those that it starts, this number of simulated devices and the flags above."""
  os.environ['XLA_FLAGS'] = xla_flags(count)
  from praxis_lite.common.jax_internals.threads import provide_threads  # as above

  provide_threads(count)
