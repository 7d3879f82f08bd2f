"""`praxis-lite train`: trains an experiment, or resumes an earlier run in the same directory."""

from __future__ import annotations

import functools
import math
import signal
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from absl import flags

from praxis_lite.cli.command import Command, configured_run, damage_flag, experiment_arguments, run_flags
from praxis_lite.cli.verify import is_worth_verifying, verify_first

if TYPE_CHECKING:
  from praxis_lite.runs.cluster.clusters import Job
  from praxis_lite.training.task import SingleTask


def _run(values: flags.FlagValues) -> int:
  from praxis_lite.runs.profiling import ProfiledSteps

  profile_steps = None if values.profile_steps is None else ProfiledSteps.parse(values.profile_steps)
  config, job_log_dir = configured_run(values)

  from praxis_lite.checkpoints import saved_steps

  hosts = values.coordinator_address, values.num_processes, values.process_id
  job = _find_job(*hosts)
  if values.verify and not saved_steps(job_log_dir) and is_worth_verifying(config.task):
    verify_first(experiment_arguments(values), enabled=job is None or job.process_id == 0)

  from praxis_lite.runs.executor import run_train
  from praxis_lite.runs.loop.options import TrainOptions

  if job is not None:
    from praxis_lite.runs.cluster.distributed import initialize_distributed

    initialize_distributed(*hosts, hang_timeout_s=values.hang_timeout_s)
  options: dict[str, Any] = {name: values[name].value for name in TrainOptions.names() if name in values}
  del options['devices']  # The flag of this name counts simulated devices.
  if not values['seed'].present:
    del options['seed']
  options |= {'profile_steps': profile_steps, 'advise': _warnings}
  result = run_train(config, job_log_dir, TrainOptions(**options))
  # The same code as a shell reports for a process that a signal ended, so that `train && eval` stops.
  return 128 + signal.Signals[result.ended_by] if result.ended_by in signal.Signals.__members__ else 0


def _find_job(address: str | None, num_processes: int | None, process_id: int | None) -> Job | None:
  """Returns the job that this process belongs to; None for a run of one process, or without `runs/cluster`."""
  try:
    from praxis_lite.runs.cluster.clusters import find_job
  except ModuleNotFoundError:
    if (address, num_processes, process_id) == (None, None, None):
      return None
    raise
  return find_job(address, num_processes, process_id)


def _warnings(task: SingleTask, batch_struct: Mapping[str, object]) -> Iterator[str]:
  """Yields the problems that `check` reports, on a mesh of several devices."""
  if math.prod(task.mesh_sizes().values()) > 1:
    from praxis_lite.instruments.explain import check

    yield from map(str, check(task, batch_struct))


def _flags() -> flags.FlagValues:
  drawn = 'Seed of the initial values and of all random draws in training; by default that of the run, or 0.'
  values = run_flags(seed=f'{drawn} Example: --seed=1')
  damage_flag(values)
  flags.DEFINE_boolean(
    'restore_input',
    True,
    'Resume the training data where the checkpoint left it; --norestore_input starts at its beginning, for a changed '
    'dataset. Example: --norestore_input',
    flag_values=values,
  )
  flags.DEFINE_boolean(
    'accept_changed_data',
    False,
    'Resume at the saved position though files of the training data have changed since it was saved, which is an error '
    'otherwise. Example: --accept_changed_data',
    flag_values=values,
  )
  flags.DEFINE_boolean(
    'verify_numerics',
    False,
    'Before the first step, compute the norms of its gradients a second time, on one device or by the other '
    'partitioning, and stop if they differ: for accelerators. Example: --verify_numerics',
    flag_values=values,
  )
  flags.DEFINE_boolean(
    'debug_nans',
    False,
    'Wait for each step, and after the first one that is not finite end with an error that names the layer and the '
    'operation. Example: --debug_nans',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'check_determinism',
    None,
    'Run every such step twice and compare the results bit by bit; a difference is a fault of a device, and the exit '
    'code is then 76. It takes the memory of one more train state. Example: --check_determinism=100',
    lower_bound=1,
    flag_values=values,
  )
  flags.DEFINE_string(
    'profile_steps',
    None,
    "Write a trace of these steps, the first to the last, below job_log_dir, for TensorBoard's profile plugin. "
    'Example: --profile_steps=10:15',
    flag_values=values,
  )
  address = 'host:port of process 0; not needed under launch, Slurm, Open MPI, Kubernetes and on Cloud TPU'
  example = 'Example: --coordinator_address=10.0.0.1:1234'
  flags.DEFINE_string('coordinator_address', None, f'With several hosts: {address}. {example}', flag_values=values)
  integer = functools.partial(flags.DEFINE_integer, flag_values=values)
  integer('num_processes', None, 'With several hosts: how many processes. Example: --num_processes=4')
  integer('process_id', None, 'With several hosts: which of them this is. Example: --process_id=0')
  number = functools.partial(flags.DEFINE_float, flag_values=values)
  hang = 'With several hosts: seconds without a sign of life of one, or without progress of any, after which all end'
  number('hang_timeout_s', 300.0, f'{hang}, with exit code 75. Example: --hang_timeout_s=60', lower_bound=1)
  late = 'Seconds to wait for a batch; then the run is saved, and ends with exit code 75'
  number('input_timeout_s', 3600.0, f'{late}. Example: --input_timeout_s=600', lower_bound=0.001)
  grace = 'Seconds from SIGTERM to the end, the checkpoint included; later the run ends with exit code 75'
  number('grace_s', None, f'{grace}. Example: --grace_s=25')
  notice = 'Treat this file, once it exists, or an answer of this address as SIGTERM'
  flags.DEFINE_string(
    'preemption_notice', None, f'{notice}. Example: --preemption_notice=/run/preempted', flag_values=values
  )
  flags.DEFINE_boolean(
    'elastic',
    False,
    'With fewer devices than the mesh needs, make its axes replica and data smaller, with more microbatches for the '
    'same global batch. Example: --elastic',
    flag_values=values,
  )
  flags.DEFINE_boolean(
    'verify',
    True,
    'Before the first step of a long run on several devices, compare the gradients of a small version with one device, '
    'for at most 20 seconds on the CPU. Example: --noverify',
    flag_values=values,
  )
  return values


COMMAND = Command(
  'train',
  'train an experiment, or resume its training',
  'train an experiment. If job_log_dir has checkpoints, training resumes from the newest, on any mesh; the run '
  'records its config, so --exp can be left out then. Ctrl-C and SIGTERM end it after a step, with a checkpoint; the '
  'exit code is then 130 or 143. With several hosts, 75 says that one was lost: the same command goes on.',
  'praxis-lite train --exp=lm.StdlibLmTiny --job_log_dir=runs/1 --set task.train.num_train_steps=20 --devices=8',
  _flags(),
  _run,
)
