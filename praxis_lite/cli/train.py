"""`praxis-lite train`: trains an experiment, or resumes an earlier run in the same directory."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from absl import flags

from praxis_lite.cli.command import Command, configured_run, experiment_arguments
from praxis_lite.cli.command_flags import CommandFlags, add_on_damage, add_tap, add_track, add_tracked, run_flags
from praxis_lite.cli.verify import is_worth_verifying, verify_first

if TYPE_CHECKING:
  from praxis_lite.runs.cluster.clusters import Job
  from praxis_lite.training.task import SingleTask


def _run(values: flags.FlagValues) -> int:
  began = time.perf_counter()
  from praxis_lite.runs.profiling import ProfiledSteps
  from praxis_lite.runs.throughput import StartupTimes

  startup = StartupTimes(began)
  profile_steps = None if values.profile_steps is None else ProfiledSteps.parse(values.profile_steps)
  config, job_log_dir = configured_run(values)
  config.task.train.loggers = add_tracked(config.task.train.loggers, values.track)

  from praxis_lite.checkpoints import saved_steps
  from praxis_lite.runs.records.record import has_record

  hosts = values.coordinator_address, values.num_processes, values.process_id
  job, is_new = _find_job(*hosts), not saved_steps(job_log_dir)
  is_first = job is None or job.process_id == 0
  if is_first and is_new and values.exp and has_record(values.exp) and config.task.train.init_from.path is None:
    print(f'weights begin from the seed; to begin with those of the run: --set task.train.init_from.path={values.exp}')
  if values.verify and is_new and is_worth_verifying(config.task, is_alone=job is None):
    if job is None and not values.elastic:
      config.task.instantiate().create_mesh()  # Reports missing devices before the verification takes time.
    startup.mark('import')
    verify_first(experiment_arguments(values), enabled=is_first)
    startup.mark('verify')

  from praxis_lite.cli.train_plan import PlanOfRun
  from praxis_lite.runs.executor import run_train
  from praxis_lite.runs.loop.options import TrainOptions

  startup.mark('import')
  if job is not None:
    from praxis_lite.runs.cluster.distributed import initialize_distributed

    initialize_distributed(*hosts, hang_timeout_s=values.hang_timeout_s)
  options: dict[str, Any] = {name: values[name].value for name in TrainOptions.names() if name in values}
  del options['devices']  # The --devices flag counts simulated devices, and is not an option of `train`.
  if not values['seed'].present:
    del options['seed']
  options |= {'profile_steps': profile_steps, 'advise': _warnings, 'observers': [PlanOfRun(values.plan)]}
  options['startup'] = startup
  result = run_train(config, job_log_dir, TrainOptions(**options))
  # The exit code that a shell reports for a process killed by this signal, so that `train && eval` stops.
  return 128 + signal.Signals[result.ended_by] if result.ended_by in signal.Signals.__members__ else 0


def _find_job(address: str | None, num_processes: int | None, process_id: int | None) -> Job | None:
  """Returns the job that this process belongs to; None for a single process, or if `runs/cluster` is missing."""
  try:
    from praxis_lite.runs.cluster.clusters import find_job
  except ModuleNotFoundError:
    if (address, num_processes, process_id) == (None, None, None):
      return None
    raise
  return find_job(address, num_processes, process_id)


def _warnings(task: SingleTask, batch_struct: Mapping[str, object]) -> Iterator[str]:
  """Yields the problems that `check` reports; none on a mesh of one device."""
  if math.prod(task.mesh_sizes().values()) > 1:
    from praxis_lite.instruments.explain import check

    yield from map(str, check(task, batch_struct))


def _flags() -> CommandFlags:
  seed = 'Seed of the initial values and of all random draws in training; by default that of the run, or 0.'
  values = run_flags(seed=seed)
  add_on_damage(values)
  data = 'Resume the training data where the checkpoint left it; --norestore_input starts it from its beginning.'
  values.add_switch('restore_input', data, default=True)
  changed = 'Resume the training data even if its files have changed since the checkpoint, which is an error otherwise.'
  values.add_switch('accept_changed_data', changed)
  numerics = 'Before the first step, compute its gradient norms a second time, on one device or by the other'
  values.add_switch('verify_numerics', f'{numerics} partitioning, and stop if they differ. For accelerators.')
  nans = 'Stop after the first step that is not finite, with an error that names the layer and the operation.'
  values.add_switch('debug_nans', f'{nans} Steps no longer overlap.')
  twice = 'Run every n-th step twice and compare the results bit by bit. If they differ, a device is faulty, and the'
  add_track(values)
  add_tap(values, 'activations, gradients, updates and weights')
  memory = 'exit code is 76. Needs memory for another train state.'
  values.add_integer('check_determinism', f'{twice} {memory}', 100, least=1)
  other = 'Run one of the two times of --check_determinism with each device doing the work of another one, which also'
  values.add_switch('other_devices', f'{other} finds a device that is always wrong. Compiles the step twice.')
  replicas = 'Compare the replicas of weights and optimizer state after every n-th step and before each save. If they'
  values.add_integer('check_replicas', f'{replicas} differ, a device is faulty, and the exit code is 76.', 100, least=1)
  again = (
    "If these checks find a difference: 'fail' ends the run; 'repeat' repeats the steps since the last checkpoint,"
  )
  quarantine = 'and with --elastic goes on without a device that was at fault twice.'
  values.add_choice('on_corruption', f'{again} {quarantine}', ['fail', 'repeat'], 'repeat', 'fail')
  profile = "Write a trace of these steps, first:last, below job_log_dir, for TensorBoard's profile plugin."
  values.add_text('profile_steps', profile, '10:15')
  hosts = 'With several hosts:'
  needless = 'Not needed under launch, Slurm, Open MPI and Kubernetes, and on Cloud TPU.'
  values.add_text('coordinator_address', f'{hosts} host:port of process 0. {needless}', '10.0.0.1:1234')
  values.add_integer('num_processes', f'{hosts} the number of processes.', 4)
  values.add_integer('process_id', f'{hosts} the number of this process, from 0.', 0)
  hang = 'seconds without a sign of life of one process, or without progress of any, until all end with exit code 75.'
  values.add_number('hang_timeout_s', f'{hosts} {hang}', '60', 300.0, least=1)
  late = 'Seconds to wait for a batch before the run saves a checkpoint and ends with exit code 75.'
  values.add_number('input_timeout_s', late, '600', 3600.0, least=0.001)
  grace = 'Seconds to save and end after SIGTERM. A process that needs longer ends without saving, with exit code 75.'
  values.add_number('grace_s', grace, '25')
  notice = 'File or URL that announces preemption: when the file exists, or the URL answers, it counts as SIGTERM.'
  values.add_text('preemption_notice', notice, '/run/preempted')
  elastic = 'With fewer devices than the mesh needs, shrink its axes replica and data, with more microbatches for the'
  values.add_switch('elastic', f'{elastic} same global batch.')
  alert = 'Command to run after a step that is not finite, when the run goes back or fails, and when it ends. It finds'
  alert_command = f'{alert} PRAXIS_LITE_EVENT, _MESSAGE, _RUN and _STEP in its environment.'
  values.add_text('alert_command', alert_command, '\'mail -s "$PRAXIS_LITE_MESSAGE" me\'')
  plan = 'Figures that `plan --figures` wrote: the run records them, and compares them with what it measures.'
  values.add_text('plan', plan, 'plan.json')
  verify = 'Before the first step of a long run on several devices, compare the gradients of a small version with'
  values.add_switch('verify', f'{verify} one device, for at most 20 seconds on the CPU.', default=True)
  return values


COMMAND = Command(
  'train',
  'train an experiment, or resume its training',
  'train an experiment. If job_log_dir has checkpoints, training resumes from the newest one, on any mesh; --exp can '
  'be left out then, because the run records its config. After Ctrl-C or SIGTERM, training ends the step, saves a '
  'checkpoint, and exits with 130 or 143. Exit code 75 means that a host was lost or that there was no time to save; '
  'the same command resumes.',
  'praxis-lite train --exp=lm.StdlibLmTiny --job_log_dir=runs/1 --set task.train.num_train_steps=20 --devices=8',
  _flags(),
  _run,
  stray='job_log_dir',
)
