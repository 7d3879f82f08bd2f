"""Finds the processes of a run: from flags, from variables, or from the cluster that started this process.

    praxis-lite launch   JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID, PRAXIS_LITE_LAUNCHER
    Slurm (srun)         SLURM_JOB_ID, SLURM_STEP_NODELIST, SLURM_NTASKS, SLURM_PROCID, SLURM_LOCALID
    Open MPI (mpirun)    OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK, OMPI_MCA_orte_hnp_uri
    Kubernetes JobSet    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JOB_COMPLETION_INDEX
    SkyPilot             SKYPILOT_NODE_IPS, SKYPILOT_NUM_NODES, SKYPILOT_NODE_RANK
    Cloud TPU            TPU_WORKER_HOSTNAMES or TPU_PROCESS_ADDRESSES, TPU_WORKER_ID; or the metadata of the machine

This file only reads variables. JAX finds the address of process 0 under Slurm and Open MPI and on Cloud TPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.jax_internals.processes import cluster_kinds, is_cloud_tpu_machine

# `praxis-lite launch` sets this variable, in the processes that it starts, to its own process id.
LAUNCHER = 'PRAXIS_LITE_LAUNCHER'
# The port of process 0 where the cluster gives only its host.
COORDINATOR_PORT = 8476


class Job(NamedTuple):
  """The processes of a run, as one of them sees them."""

  found_by: str  # Where this information comes from, such as 'Slurm job 17'.
  num_processes: int | None  # None if only JAX can find out.
  process_id: int | None  # The index of this process; None if only JAX can find out.
  coordinator_address: str | None = None  # `host:port` of process 0; None if JAX finds it.
  method: str | None = None  # JAX's name of the cluster, which lets JAX find what is missing here.


def find_job(
  coordinator_address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  *,
  environ: Mapping[str, str] = os.environ,
) -> Job | None:
  """Returns the job that this process belongs to; None for a run of one process.

  Args:
    coordinator_address: `host:port` of process 0; or 'auto', which requires a cluster. None reads the three values from
      `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, or else from the cluster.
    num_processes, process_id: see `Job`.

  Raises:
    ConfigError: only some of the three are known, or a value is invalid.
  """
  address = coordinator_address or environ.get('JAX_COORDINATOR_ADDRESS') or None
  processes = _number('JAX_NUM_PROCESSES', environ) if num_processes is None else num_processes
  process = _number('JAX_PROCESS_ID', environ) if process_id is None else process_id
  names = ('coordinator_address', 'num_processes', 'process_id')
  given = [name for name, value in zip(names, (address, processes, process)) if value is not None]
  cluster = _cluster(environ)
  if address == 'auto' or not given:
    if cluster is None and address == 'auto':
      known = 'Slurm, Open MPI, Kubernetes, SkyPilot, Cloud TPU'
      raise ConfigError(f'coordinator_address=auto: this process runs in no known cluster ({known})')
    return cluster if cluster is not None and cluster.num_processes != 1 else None
  if cluster is not None and (processes is None or process is None):
    processes = cluster.num_processes if processes is None else processes
    process = cluster.process_id if process is None else process
    found_by = f'{", ".join(given)}, and {cluster.found_by}'
  else:
    found_by = 'praxis-lite launch' if LAUNCHER in environ else 'flags or variables'
  if address is None or processes is None or process is None:
    missing = [name for name, value in zip(names, (address, processes, process)) if value is None]
    raise ConfigError(
      f'to run on several hosts, {", ".join(missing)} must be set too; or only coordinator_address=auto'
    )
  if not re.fullmatch(r'.+:\d+', address):
    raise ConfigError(f'coordinator_address = {address!r}: expected host:port of process 0, as in 10.0.0.1:1234')
  if not 0 <= process < processes:
    raise ConfigError(f'process_id = {process}: expected 0 to num_processes - 1, and num_processes is {processes}')
  return Job(found_by, processes, process, address)


def resolve_job(job: Job, timeout_s: int) -> tuple[Job, str]:
  """Asks JAX for what is missing in a job; returns the complete job, and the `host:port` of process 0.

  May wait up to `timeout_s` seconds until the name of process 0 is known. Raises ConfigError if JAX cannot find it.
  """
  if job.coordinator_address is not None:
    return job, job.coordinator_address
  try:
    kind = cluster_kinds().get(job.method or '')
    if kind is None or not kind.is_env_present():
      raise ValueError('JAX does not recognize it')
    return job._replace(
      num_processes=kind.get_process_count() if job.num_processes is None else job.num_processes,
      process_id=kind.get_process_id() if job.process_id is None else job.process_id,
    ), kind.get_coordinator_address(timeout_s, os.environ.get('JAX_COORDINATOR_PORT'))
  except Exception as error:
    raise ConfigError(
      f'{job.found_by} runs this process, but the address of process 0 was not found ({error}); set '
      'coordinator_address to its host:port'
    ) from error


def _cluster(environ: Mapping[str, str]) -> Job | None:
  """Returns the job that a cluster's variables describe; None if there are none."""

  def has(*names: str) -> bool:
    return all(environ.get(name) for name in names)

  def number(name: str) -> int:
    value = _number(name, environ)
    if value is None:
      raise ConfigError(f'{name} is not set')
    return value

  # A program that a batch script starts without srun belongs to no Slurm step. Then the run has one process, even if
  # the job asked for more.
  if has('SLURM_JOB_ID', 'SLURM_STEP_NODELIST', 'SLURM_NTASKS', 'SLURM_PROCID', 'SLURM_LOCALID'):
    name = f'Slurm job {environ["SLURM_JOB_ID"]}'
    return Job(name, number('SLURM_NTASKS'), number('SLURM_PROCID'), method='slurm')
  if has('OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_RANK'):
    # Open MPI 5 does not give the address of its launcher, so --coordinator_address is needed.
    method = 'ompi' if has('OMPI_MCA_orte_hnp_uri') else None
    job = Job('Open MPI', number('OMPI_COMM_WORLD_SIZE'), number('OMPI_COMM_WORLD_RANK'), method=method)
    if method is None and job.num_processes != 1 and not has('JAX_COORDINATOR_ADDRESS'):
      raise ConfigError(
        'this version of Open MPI does not say where process 0 is: set coordinator_address to its host:port'
      )
    return job
  workers = environ.get('TPU_PROCESS_ADDRESSES') or environ.get('TPU_WORKER_HOSTNAMES')
  is_tpu = bool(workers) and has('TPU_WORKER_ID')
  # Pods with TPUs also have an index, but it begins with 0 in each slice.
  is_counted = has('JAX_NUM_PROCESSES') or (has('KUBERNETES_SERVICE_HOST') and not is_tpu)
  if has('JOB_COMPLETION_INDEX') and is_counted:
    processes = _number('JAX_NUM_PROCESSES', environ)
    return Job('a Kubernetes job', processes, number('JOB_COMPLETION_INDEX'))
  if has('SKYPILOT_NODE_IPS', 'SKYPILOT_NUM_NODES', 'SKYPILOT_NODE_RANK'):
    first = environ['SKYPILOT_NODE_IPS'].split()[0]
    return Job('SkyPilot', number('SKYPILOT_NUM_NODES'), number('SKYPILOT_NODE_RANK'), f'{first}:{COORDINATOR_PORT}')
  if workers and is_tpu:
    slices = _number('MEGASCALE_NUM_SLICES', environ) or 1
    in_slice, of_slice = number('TPU_WORKER_ID'), _number('MEGASCALE_SLICE_ID', environ) or 0
    count = len(workers.split(','))
    return Job('Cloud TPU', count * slices, of_slice * count + in_slice, method='gketpu')
  # JAX reads the names of the other machines from the metadata of this one.
  if is_cloud_tpu_machine() and 'TPU_SKIP_MDS_QUERY' not in os.environ:
    return Job('Cloud TPU', None, None, method='gcetpu')
  return None


def _number(name: str, environ: Mapping[str, str]) -> int | None:
  text = environ.get(name)
  if not text:
    return None
  if not text.isdecimal():
    raise ConfigError(f'{name} = {text!r}: expected a number')
  return int(text)
