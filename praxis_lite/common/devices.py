"""Starts JAX on the devices that the environment asks for, on simulated ones, or only on the CPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

import jax

from praxis_lite.common.errors import ConfigError, UserError, did_you_mean, first_line
from praxis_lite.common.figures import number_of
from praxis_lite.common.jax_internals.devices import backends_have_started
from praxis_lite.common.jax_internals.flags import add_flags
from praxis_lite.common.jax_internals.threads import provide_threads

# Seconds that a simulated device waits for others in a collective. By default XLA ends the process after 40 seconds,
# which is too soon on a busy machine, because each device is a thread.
_PATIENCE = {
  'xla_cpu_collective_call_warn_stuck_timeout_seconds': 120,
  'xla_cpu_collective_call_terminate_timeout_seconds': 1200,
}


# What JAX_PLATFORMS may name on any machine. A plugin may add names; JAX lists these in its error.
_PLATFORMS = ('cpu', 'cuda', 'gpu', 'rocm', 'tpu')
_NVIDIA_FILES = ('/dev/nvidia0', '/dev/nvidiactl', '/dev/dxg')


def start_devices() -> None:
  """Starts JAX on the devices that JAX_PLATFORMS asks for, or on the best ones; does nothing if it already runs.

  Call it before anything else that starts JAX, such as `jax.process_count()`, because JAX's own errors are tracebacks.

  Raises:
    UserError: JAX_PLATFORMS is misspelled, or asks for an accelerator that this machine or this installation lacks.
  """
  settings: Any = jax.config
  provide_threads(max(settings.jax_num_cpu_devices, 1))
  try:
    jax.devices()
  except (RuntimeError, AssertionError) as error:
    if jax.distributed.is_initialized() and not isinstance(error, AssertionError):
      raise  # Another process may be using the devices.
    raise UserError(_why_not_started(first_line(error))) from None


def _why_not_started(reason: str) -> str:
  """Returns a message: the requested platform, what this machine has, and what to install; `reason` is JAX's error."""
  settings: Any = jax.config
  given = settings.jax_platforms or ''
  known = set(_PLATFORMS).union(re.findall(r"'(\w+)'", reason.partition('known backends: ')[2]))
  failed = re.search(r"[Bb]ackend:? '?(\w+)", reason)
  asked = [name for name in given.split(',') if name]
  wrong = next((name for name in asked if name not in known), None)
  if asked and wrong is None and len(asked) < given.count(',') + 1:
    return f'JAX_PLATFORMS={given}: it has a comma without a name; set JAX_PLATFORMS={",".join(asked)}'
  named = wrong or (failed[1] if failed and failed[1] in asked else next((n for n in asked if n != 'cpu'), 'cpu'))
  sees_nvidia = any(map(os.path.exists, _NVIDIA_FILES))
  start = f'JAX_PLATFORMS={given}: ' if given else ''
  use_cpu = 'leave out JAX_PLATFORMS, or set JAX_PLATFORMS=cpu'
  if wrong is not None:
    close = did_you_mean(wrong, known)
    return f'{start}JAX has no platform {wrong!r}.{close} It knows {", ".join(sorted(known))}'
  is_missing = 'known backends: ' in reason
  if named in ('cuda', 'gpu') and not sees_nvidia:
    gpu = 'NVIDIA GPU' if named == 'cuda' else 'GPU that JAX can use'
    install = "a GPU needs its driver, and pip install 'jax[cuda12]'"
    return f'{start}this machine has no {gpu}, only a CPU: {use_cpu}; {install}'
  if named == 'gpu' and is_missing and "'cuda'" in reason:
    return f'{start}JAX then wants GPUs of all makers: set JAX_PLATFORMS=cuda for the NVIDIA GPU of this machine'
  if is_missing and named in ('cuda', 'gpu'):
    return f"{start}JAX's package for the GPU of this machine is not installed: pip install 'jax[cuda12]'"
  if named == 'tpu' and 'libtpu' in reason:
    install = "on a machine with a TPU, pip install 'jax[tpu]'"
    return f'{start}libtpu, which JAX needs for TPUs, is not installed: {install}; for the CPU, {use_cpu}'
  if is_missing:
    return f"{start}JAX's package for {named} is not installed; without it, {use_cpu}"
  what = reason.removesuffix(" (set JAX_PLATFORMS='' to automatically choose an available backend)")
  return f'{start}JAX cannot start: {what}; for the CPU, set JAX_PLATFORMS=cpu'


def simulate_cpu_devices(count: int) -> None:
  """Makes JAX run on `count` simulated CPU devices, even if there is an accelerator.

  Raises:
    ConfigError: `count` is not positive, or JAX already runs on other devices.
  """
  if count < 1:
    raise ConfigError(f'devices = {count}: the number of simulated CPU devices must be at least 1')
  if backends_have_started():
    if jax.default_backend() == 'cpu' and jax.device_count() == count:
      return
    raise ConfigError(
      f'cannot simulate {count} CPU devices: JAX already runs on '
      f'{number_of(jax.device_count(), f"{jax.default_backend()} device")}; '
      'call simulate_cpu_devices before anything that uses a device'
    )
  os.environ['XLA_FLAGS'] = add_flags(os.environ.get('XLA_FLAGS', ''), _PATIENCE)
  provide_threads(count)
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', count)


def memory_of(devices: Iterable[jax.Device]) -> int:
  """Returns the total memory of devices in bytes; devices of a CPU share the memory of their machine."""
  local = jax.local_devices()
  devices = list(devices)
  each = (local[0].memory_stats() or {}).get('bytes_limit')
  if each is not None and devices[0].platform == local[0].platform:
    return each * len(devices)
  return machine_memory() * len({device.process_index for device in devices})


def machine_memory() -> int:
  """Returns the bytes of memory of this machine."""
  return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def leave_accelerators_alone() -> None:
  """Makes JAX run on the CPU, for commands that need only shapes; does nothing if JAX already runs."""
  if not backends_have_started():
    jax.config.update('jax_platforms', 'cpu')
