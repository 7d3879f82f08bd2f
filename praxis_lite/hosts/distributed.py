"""The processes of a run on several hosts: how they join, and what they tell each other."""

from __future__ import annotations

import math
import os
import socket

import jax
import numpy as np
from jax.experimental import multihost_utils

from praxis_lite.errors import ConfigError
from praxis_lite.hosts.clusters import Job, find_job, resolved
from praxis_lite.hosts.devices import backends_have_started
from praxis_lite.hosts.rendezvous import meet
from praxis_lite.hosts.watchdog import HANG_TIMEOUT_S, watch_hosts

# Bytes that a process tells all others at once.
_MOST_TOLD = 400


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
  if backends_have_started():
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


def is_primary_process() -> bool:
  """Whether this process is the one that writes logs and summaries."""
  return jax.process_index() == 0


def decided_by_primary_process(value: bool) -> bool:
  """Returns the value of process 0 in every process; all of them must call this."""
  return bool(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def told_by_all(text: str) -> list[str]:
  """Returns the texts of all processes, by their index, in every process; all of them must call this.

  At most 400 bytes of each text are sent.
  """
  if jax.process_count() == 1:
    return [text]
  told = np.frombuffer(text.encode()[:_MOST_TOLD].ljust(_MOST_TOLD, b'\0'), np.uint8)
  of_all = np.asarray(multihost_utils.process_allgather(told))
  return [bytes(row).rstrip(b'\0').decode(errors='ignore') for row in of_all]


def by_host(texts: list[str]) -> str:
  """Returns in one the texts of `told_by_all` that are not empty; of several hosts, with those that say so."""
  hosts: dict[str, list[str]] = {}
  for i, text in enumerate(texts):
    if text:
      hosts.setdefault(text, []).append(str(i))
  if len(texts) == 1:
    return texts[0]
  return '; '.join(f'host {", ".join(those)}: {text}' for text, those in hosts.items())
