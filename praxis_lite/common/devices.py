"""Selects simulated devices, or only the CPU, for JAX. Must be called before JAX starts its backends."""

from __future__ import annotations

import os

import jax

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.jax_internals.devices import backends_have_started
from praxis_lite.common.jax_internals.flags import add_flags

# Seconds that a simulated device waits for others in a collective. By default XLA ends the process after 40 seconds,
# which is too soon on a busy machine, because each device is a thread.
_PATIENCE = {
  'xla_cpu_collective_call_warn_stuck_timeout_seconds': 120,
  'xla_cpu_collective_call_terminate_timeout_seconds': 1200,
}


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
      f'cannot simulate {count} CPU devices: JAX already runs on {jax.device_count()} {jax.default_backend()} devices; '
      'call simulate_cpu_devices before anything that uses a device'
    )
  os.environ['XLA_FLAGS'] = add_flags(os.environ.get('XLA_FLAGS', ''), _PATIENCE)
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', count)


def leave_accelerators_alone() -> None:
  """Makes JAX run on the CPU, for commands that need only shapes; does nothing if JAX already runs."""
  if not backends_have_started():
    jax.config.update('jax_platforms', 'cpu')
