"""The processes of a run: devices, several hosts, the cache of compiled programs, and stopping.

Simulated devices, the other processes and the cache must be set up before JAX starts its backends.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils

from praxis_lite.errors import ConfigError

# Programs that compile faster than this are not cached.
_MIN_CACHED_COMPILE_SECONDS = 0.1


# Seconds that a simulated device waits for others in a collective. By default XLA ends the process after 40, which on a
# busy machine is too soon: each device is a thread.
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
  if _backends_have_started():
    if jax.default_backend() == 'cpu' and jax.device_count() == count:
      return
    raise ConfigError(
      f'cannot simulate {count} CPU devices: JAX already runs on {jax.device_count()} {jax.default_backend()} devices; '
      'call simulate_cpu_devices before anything that uses a device'
    )
  given = os.environ.get('XLA_FLAGS', '')
  flags = (f'--{name}={seconds}' for name, seconds in _PATIENCE.items() if name not in given)
  os.environ['XLA_FLAGS'] = ' '.join([*given.split(), *flags])
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', count)


def leave_accelerators_alone() -> None:
  """Makes JAX run on the CPU, for commands that need only shapes; does nothing if JAX already runs."""
  if not _backends_have_started():
    jax.config.update('jax_platforms', 'cpu')


def initialize_distributed(
  coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
  """Joins the processes of a run on several hosts. Does nothing if neither arguments nor variables are set.

  Each argument defaults to an environment variable: `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`.
  On a cluster that JAX knows (Cloud TPU, Slurm, Open MPI, Kubernetes), `coordinator_address='auto'` gets all three from
  the cluster.

  Args:
    coordinator_address: `host:port` of process 0, the same in all processes, or 'auto'.
    num_processes, process_id: the number of processes, and the index of this one, from 0.

  Raises:
    ConfigError: only some of the three are given, a value is invalid, or JAX has already started.
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


def set_up_compilation_cache(*, enabled: bool = True) -> Path | None:
  """Stores compiled programs on disk, so that a second start of the same run need not compile.

  The directory is the one JAX is set to (`JAX_COMPILATION_CACHE_DIR`), else `praxis_lite` under `$XDG_CACHE_HOME` or
  `~/.cache`. It is returned, or None if the cache is not enabled or it is not writable.
  """
  jax.config.update('jax_enable_compilation_cache', enabled)
  if not enabled:
    return None
  default = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'praxis_lite'
  cache = Path(getattr(jax.config, 'jax_compilation_cache_dir', None) or default)
  with contextlib.suppress(OSError):
    cache.mkdir(parents=True, exist_ok=True)
  if not os.access(cache, os.W_OK | os.X_OK):
    # With a read-only home the run continues without a cache.
    jax.config.update('jax_enable_compilation_cache', False)
    return None
  jax.config.update('jax_compilation_cache_dir', str(cache))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', _MIN_CACHED_COMPILE_SECONDS)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', 0)
  return cache


def is_primary_process() -> bool:
  """Whether this process is the one that writes logs and summaries."""
  return jax.process_index() == 0


def decided_by_primary_process(value: bool) -> bool:
  """Returns the value of process 0 in every process; all of them must call this."""
  return bool(multihost_utils.broadcast_one_to_all(np.asarray(value)))


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


class StopSignals:
  """Context manager that catches the signals that end a run; outside the main thread, it catches nothing.

  SIGTERM (sent by a scheduler that needs the machine) and SIGINT (Ctrl-C) only set a flag, which the training loop
  reads between steps: it finishes the step, saves and exits. A second signal ends the process at once.

  With several processes all must stop after the same step, or the others would wait for ever in a collective. JAX's
  preemption service ensures that: it catches SIGTERM in any process and names a step that none has passed yet.

  Attributes:
    received: name of the signal that this process received, or None.
  """

  def __init__(self) -> None:
    self.received: str | None = None
    self._agreed = False
    self._previous: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
    self._several_processes = jax.process_count() > 1

  def requested_at(self, step: int) -> bool:
    """Whether to stop after `step`; with several processes, each must call this at every step."""
    if self._several_processes and multihost_utils.reached_preemption_sync_point(step):
      self._agreed = True
      self.received = self.received or signal.SIGTERM.name
    return self.requested

  @property
  def requested(self) -> bool:
    """Whether to stop: with several processes, what all of them agreed on when `requested_at` was last called."""
    return self._agreed if self._several_processes else self.received is not None

  def request_of_all(self) -> None:
    """Asks all processes to stop after the same step, as a SIGTERM to this one does."""
    os.kill(os.getpid(), signal.SIGTERM)

  def interrupts(self) -> bool:
    """Whether to end an evaluation early; never with several processes, which have not agreed on it."""
    return self.received is not None and not self._several_processes

  def __enter__(self) -> StopSignals:
    if threading.current_thread() is threading.main_thread():
      # The preemption service has its own handler of SIGTERM, which ours would replace.
      caught = (signal.SIGINT,) if self._several_processes else (signal.SIGTERM, signal.SIGINT)
      self._previous = {s: signal.signal(s, self._handle) for s in caught}
    return self

  def __exit__(self, *exc_info: object) -> None:
    for s, handler in self._previous.items():
      signal.signal(s, handler)

  def _handle(self, number: int, frame: FrameType | None) -> None:
    if self.received is not None:
      if os.isatty(1):
        os.write(1, b'\x1b[?25h')  # Show the cursor: the progress bar has hidden it.
      signal.signal(number, signal.SIG_DFL)
      os.kill(os.getpid(), number)
      return
    self.received = signal.Signals(number).name
    text = f'{self.received}: finishing the step and saving; once more ends the run at once\n'
    if os.isatty(2):
      text = f'\n{text}\n'  # The progress bar, two lines high, is redrawn over the last line and the one before.
    # os.write: a handler that prints may interrupt another print, and buffered files are not re-entrant.
    os.write(2, text.encode())
    if self._several_processes:
      os.kill(os.getpid(), signal.SIGTERM)
