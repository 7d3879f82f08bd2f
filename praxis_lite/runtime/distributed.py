"""Process start-up: simulated devices, several hosts, and the cache of compiled programs.

All of it has to happen before JAX starts its backends, so a program calls these first.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import jax

from praxis_lite.errors import ConfigError

# A program that compiles faster than this is not worth a file.
_MIN_CACHED_COMPILE_SECONDS = 0.1


def simulate_cpu_devices(count: int) -> None:
  """Makes JAX run on `count` simulated CPU devices; an accelerator, if there is one, is left alone.

  Raises:
    ConfigError: `count` is not positive, or JAX already runs on something else.
  """
  if count < 1:
    raise ConfigError(f'devices = {count}: the number of simulated CPU devices must be at least 1')
  if _backends_have_started():
    if jax.default_backend() == 'cpu' and jax.device_count() == count:
      return
    raise ConfigError(
      f'cannot simulate {count} CPU devices: JAX already runs on {jax.device_count()} {jax.default_backend()} devices; '
      'call simulate_cpu_devices before anything that uses a device'
    )
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', count)


def leave_accelerators_alone() -> None:
  """Makes JAX run on the CPU, for what only looks at shapes; does nothing where JAX already runs."""
  if not _backends_have_started():
    jax.config.update('jax_platforms', 'cpu')


def initialize_distributed(
  coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
  """Joins the processes of a run on several hosts; without arguments and settings to that effect, does nothing.

  Each argument falls back to an environment variable: `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`.
  On a cluster that JAX knows (Cloud TPU, Slurm, Open MPI, Kubernetes), `coordinator_address='auto'` asks the cluster
  for all three.

  Args:
    coordinator_address: `host:port` of process 0, the same in all processes, or 'auto'.
    num_processes: number of processes.
    process_id: which of them this is, from 0.

  Raises:
    ConfigError: some of the three are given and others not, they do not fit, or JAX has already started.
  """
  address = coordinator_address or os.environ.get('JAX_COORDINATOR_ADDRESS')
  processes = _from_environment(num_processes, 'JAX_NUM_PROCESSES')
  process = _from_environment(process_id, 'JAX_PROCESS_ID')
  given = {'coordinator_address': address, 'num_processes': processes, 'process_id': process}
  if all(value is None for value in given.values()) or jax.distributed.is_initialized():
    return
  if _backends_have_started():
    raise ConfigError('cannot join the other processes: JAX has already started; call initialize_distributed first')
  if address == 'auto':
    try:
      jax.distributed.initialize()
    except ValueError as error:
      raise ConfigError(f'coordinator_address=auto: no cluster that JAX knows runs this process ({error})') from None
    return
  missing = [name for name, value in given.items() if value is None]
  if missing:
    raise ConfigError(
      f'to run on several hosts, {", ".join(missing)} must be set too; or coordinator_address=auto alone'
    )
  assert address is not None and processes is not None and process is not None
  if not re.fullmatch(r'.+:\d+', address):
    raise ConfigError(f'coordinator_address = {address!r}: expected host:port of process 0, as in 10.0.0.1:1234')
  if not 0 <= process < processes:
    raise ConfigError(f'process_id = {process}: expected 0 to num_processes - 1, and num_processes is {processes}')
  jax.distributed.initialize(address, processes, process)


def set_up_compilation_cache(directory: str | os.PathLike[str] | None = None, *, enabled: bool = True) -> Path | None:
  """Keeps compiled programs on disk, so that the second start of the same run need not compile.

  Args:
    directory: where; by default what JAX is already set to (`JAX_COMPILATION_CACHE_DIR`), else `praxis_lite` under
      `$XDG_CACHE_HOME` or `~/.cache`.
    enabled: False turns the cache off.

  Returns:
    The directory, or None where the cache is off or the directory cannot be written.
  """
  jax.config.update('jax_enable_compilation_cache', enabled)
  if not enabled:
    return None
  cache = Path(directory or getattr(jax.config, 'jax_compilation_cache_dir', None) or _default_cache_directory())
  try:
    cache.mkdir(parents=True, exist_ok=True)
    writable = os.access(cache, os.W_OK | os.X_OK)
  except OSError:
    writable = False
  if not writable:
    # A read-only home costs the cache, not the run.
    jax.config.update('jax_enable_compilation_cache', False)
    return None
  jax.config.update('jax_compilation_cache_dir', str(cache))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', _MIN_CACHED_COMPILE_SECONDS)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', 0)
  return cache


def is_primary_process() -> bool:
  """Whether this process writes logs and summaries: one does."""
  return jax.process_index() == 0


def _default_cache_directory() -> Path:
  base = os.environ.get('XDG_CACHE_HOME')
  return (Path(base) if base else Path.home() / '.cache') / 'praxis_lite'


def _from_environment(value: int | None, name: str) -> int | None:
  text = os.environ.get(name)
  if value is not None or not text:
    return value
  if not text.isdecimal():
    raise ConfigError(f'{name} = {text!r}: expected a number')
  return int(text)


def _backends_have_started() -> bool:
  from jax._src import xla_bridge  # JAX has no public way to ask.

  return xla_bridge.backends_are_initialized()
