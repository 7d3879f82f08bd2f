"""Joins the processes of a run on several hosts."""

from __future__ import annotations

import math
import os
import socket

import jax

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.jax_internals.devices import backends_have_started
from praxis_lite.runs.cluster.clusters import Job, find_job, resolve_job
from praxis_lite.runs.cluster.rendezvous import meet
from praxis_lite.runs.cluster.watchdog import HANG_TIMEOUT_S, watch_hosts


def initialize_distributed(
  coordinator_address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  *,
  hang_timeout_s: float = HANG_TIMEOUT_S,
) -> Job | None:
  """Joins the processes of a run on several hosts, and watches them from then on: see `watchdog.py`.

  Each argument defaults to an environment variable: `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`.
  If these are not set, the cluster provides the values: Slurm, Open MPI, Kubernetes or Cloud TPU.

  Args:
    coordinator_address: `host:port` of process 0, the same in all processes; or 'auto', which requires a cluster.
    num_processes, process_id: the number of processes, and the index of this one, from 0.
    hang_timeout_s: seconds to wait for the others to join, and later for a sign of life from each of them.

  Returns:
    The job of this process; None if this is the only process, and then nothing is done.

  Raises:
    ConfigError: only some of these values are known, a value is invalid, or JAX has already started.
    LostHostError: a process did not join in time.
  """
  job = find_job(coordinator_address, num_processes, process_id)
  if job is None or jax.distributed.is_initialized():
    return job
  if backends_have_started():
    raise ConfigError('cannot join the other processes: JAX has already started; call initialize_distributed first')
  job, address = resolve_job(job, math.ceil(hang_timeout_s))
  assert job.process_id is not None
  if job.process_id == 0:
    print(f'{job.num_processes} processes, found by {job.found_by}; process 0 is at {address}', flush=True)
  met = meet(job, address, hang_timeout_s, f'{socket.gethostname()}, process {os.getpid()}')
  jax.distributed.initialize(
    address,
    job.num_processes,
    job.process_id,
    cluster_detection_method=job.method or 'deactivate',
    initialization_timeout=math.ceil(hang_timeout_s),
    # The watchdog notices a lost host before JAX does. JAX would end this process without a message.
    heartbeat_timeout_seconds=math.ceil(3 * hang_timeout_s) + 60,
    shutdown_timeout_seconds=math.ceil(hang_timeout_s),
  )
  watch_hosts(met, job.process_id, hang_timeout_s)
  return job
