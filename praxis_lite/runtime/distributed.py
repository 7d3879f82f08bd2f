"""The processes of a run: devices, several hosts, the cache of compiled programs, and stopping.

Simulated devices, the other processes and the cache must be set up before JAX starts its backends.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils

from praxis_lite.errors import ConfigError
from praxis_lite.runtime.clusters import Job, find_job, resolved
from praxis_lite.runtime.rendezvous import meet
from praxis_lite.runtime.watchdog import HANG_TIMEOUT_S, watch_hosts

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
  coordinator_address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  *,
  hang_timeout_s: float = HANG_TIMEOUT_S,
) -> Job | None:
  """Joins the processes of a run on several hosts, and watches them from then on: see `watchdog.py`.

  Each argument defaults to an environment variable: `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`;
  what none of them says comes from the cluster that runs this process: Slurm, Open MPI, Kubernetes, Cloud TPU.

  Args:
    coordinator_address: `host:port` of process 0, the same in all processes; or 'auto': there must be a cluster.
    num_processes, process_id: the number of processes, and the index of this one, from 0.
    hang_timeout_s: seconds to wait for the others to join, and later for a sign of life from each of them.

  Returns:
    What was found; None if this process is alone, and nothing was done.

  Raises:
    ConfigError: only some of the three are given, a value is invalid, or JAX has already started.
    LostHostError: not all of them have joined in time.
  """
  job = find_job(coordinator_address, num_processes, process_id)
  if job is None or jax.distributed.is_initialized():
    return job
  if _backends_have_started():
    raise ConfigError('cannot join the other processes: JAX has already started; call initialize_distributed first')
  job, address = resolved(job, math.ceil(hang_timeout_s))
  assert job.process_id is not None
  _print_job(job, address)
  names = meet(job, address, hang_timeout_s, f'{socket.gethostname()}, process {os.getpid()}')
  jax.distributed.initialize(
    address,
    job.num_processes,
    job.process_id,
    cluster_detection_method=job.method or 'deactivate',
    initialization_timeout=math.ceil(hang_timeout_s),
    # The watchdog notices a lost host before JAX does, which would end this process without a word.
    heartbeat_timeout_seconds=math.ceil(3 * hang_timeout_s) + 60,
    shutdown_timeout_seconds=math.ceil(hang_timeout_s),
  )
  watch_hosts(names, job.process_id, hang_timeout_s)
  return job


def _print_job(job: Job, address: str) -> None:
  """Prints the first line of the log of a run on several hosts: who they are, and what said so."""
  if job.process_id == 0:
    print(f'{job.num_processes} processes, found by {job.found_by}; process 0 is at {address}', flush=True)


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


def _backends_have_started() -> bool:
  from jax._src import xla_bridge  # JAX has no public way to ask.

  return xla_bridge.backends_are_initialized()


class StopSignals:
  """Context manager that catches the signals that end a run; outside the main thread, it catches nothing.

  SIGTERM (sent by a scheduler that needs the machine) and SIGINT (Ctrl-C) only set a flag, which the training loop
  reads between steps: it finishes the step, saves and exits. A second signal ends the process at once.

  With several processes all must stop after the same step, or the others would wait for ever in a collective. JAX's
  preemption service ensures that: it catches SIGTERM in any process and names a step that none has passed yet.

  An evaluation is interrupted likewise: after a batch that all agree on.

  Attributes:
    received: name of the signal that this process received, or None.
    since: when it came, by `time.monotonic`.
  """

  def __init__(self) -> None:
    self.received: str | None = None
    self.since: float | None = None
    self._calls = 0
    self._agreed = False
    self._previous: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
    self._several_processes = jax.process_count() > 1

  def requested_now(self) -> bool:
    """Whether to stop now; with several processes, each must call this equally often, at the same points."""
    if self._several_processes:
      self._calls += 1
      if multihost_utils.reached_preemption_sync_point(self._calls):
        self._agreed = True
        self.received = self.received or signal.SIGTERM.name
    return self.requested

  @property
  def requested(self) -> bool:
    """Whether to stop: with several processes, what all of them agreed on when `requested_now` was last called."""
    return self._agreed if self._several_processes else self.received is not None

  def request_of_all(self) -> None:
    """Asks all processes to stop after the same step, as a SIGTERM to this one does."""
    os.kill(os.getpid(), signal.SIGTERM)

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
    self.received, self.since = signal.Signals(number).name, time.monotonic()
    text = f'{self.received}: finishing the step and saving; once more ends the run at once\n'
    if os.isatty(2):
      text = f'\n{text}\n'  # The progress bar, two lines high, is redrawn over the last line and the one before.
    # os.write: a handler that prints may interrupt another print, and buffered files are not re-entrant.
    os.write(2, text.encode())
    if self._several_processes:
      os.kill(os.getpid(), signal.SIGTERM)
