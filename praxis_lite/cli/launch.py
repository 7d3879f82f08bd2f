"""`praxis-lite launch`: trains in several processes on this machine, and restarts them when one is lost.

With --jobset, it prints a JobSet that starts them on a Kubernetes cluster instead.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from praxis_lite.cli import train
from praxis_lite.cli.command import Command, configured_experiment
from praxis_lite.common.errors import UserError
from praxis_lite.common.files import local_path


def _run(values: flags.FlagValues) -> int:
  from praxis_lite.runs.cluster.launch import Launcher, launched_command

  if values.processes is None:
    raise UserError('--processes is missing: say how many, as in --processes=2')
  if values.min_processes is not None and values.min_processes > values.processes:
    raise UserError(f'--min_processes={values.min_processes} is more than --processes={values.processes}')
  command = launched_command(values.train, devices=values.devices, elastic=values.min_processes is not None)
  if values.jobset:
    _print_jobset(values)
    return 0
  return Launcher(
    command,
    values.processes,
    max_restarts=values.max_restarts,
    min_processes=values.min_processes,
    grace_s=values.end_within_s,
    stop_s=values.stop_within_s,
    backoff_s=values.backoff_s,
    directory=_directory(values.train[1:]),
  ).run()


def _directory(arguments: Sequence[str]) -> Path | None:
  """Returns the run directory in the arguments of `train`; None if they are invalid, which `train` itself reports."""
  try:
    name = _train_flags(arguments).job_log_dir
    return local_path(name).absolute() if name else None
  except (flags.Error, UserError):
    return None


def _print_jobset(values: flags.FlagValues) -> None:
  from praxis_lite.runs.cluster.jobset import jobset, parse_resources
  from praxis_lite.runs.records.run_config import check_configs

  if not values.image:
    raise UserError('--image is missing: name the image that has praxis_lite and the experiment')
  given = _train_flags(values.train[1:])
  if not given.job_log_dir:
    raise UserError('--job_log_dir is missing after --: a directory on a volume that all pods see')
  check_configs({given.exp or given.job_log_dir: configured_experiment(given)})
  manifest = jobset(
    values.name or _name_of(given.exp or given.job_log_dir),
    values.image,
    ['praxis-lite', *values.train],
    values.processes,
    max_restarts=values.max_restarts,
    grace_s=int(given.grace_s or 30) + 5,
    resources=parse_resources(values.resource),
    volume_claim=values.volume_claim,
  )
  print(json.dumps(manifest, indent=2))


def _train_flags(arguments: Sequence[str]) -> flags.FlagValues:
  values = copy.deepcopy(train.COMMAND.flags)
  rest = values(['praxis-lite train', *arguments])[1:]
  if rest:
    raise UserError(f'unexpected argument {rest[0]!r} after train; flags are written --name=value')
  return values


def _name_of(experiment: str) -> str:
  """Returns a valid Kubernetes name, such as 'stdlib-lm' for 'lm.StdlibLm'."""
  last = re.split(r'[.:/]', experiment.rstrip('/'))[-1]
  words = re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '-', last).lower()
  return re.sub(r'[^a-z0-9]+', '-', words).strip('-')[:48].strip('-')


def _flags() -> flags.FlagValues:
  values = flags.FlagValues()

  def text(name: str, what: str) -> None:
    flags.DEFINE_string(name, None, what, flag_values=values)

  def integer(name: str, default: int | None, what: str, least: int = 1) -> None:
    flags.DEFINE_integer(name, default, what, lower_bound=least, flag_values=values)

  def number(name: str, default: float, what: str) -> None:
    flags.DEFINE_float(name, default, what, lower_bound=0, flag_values=values)

  what = 'What each process runs, as after --. Example: --train=train --train=--exp=lm.StdlibLm'
  flags.DEFINE_multi_string('train', [], what, flag_values=values)
  integer('processes', None, 'How many processes. Example: --processes=2')
  integer('devices', None, 'Simulate this many CPU devices in each process. Example: --devices=4')
  restarts = 'How often the job is started again after a process was lost.'
  integer('max_restarts', 3, f'{restarts} Example: --max_restarts=10', least=0)
  fewer = 'With how many processes the job goes on when one is lost twice in a row, on a smaller mesh'
  integer('min_processes', None, f'{fewer}; by default all are needed. Example: --min_processes=1')
  number('backoff_s', 1, 'Seconds before the first restart; doubled for each, up to 60. Example: --backoff_s=5')
  late = 'Seconds that the others have to notice and end when a process was lost, before they are killed.'
  number('end_within_s', 330, f'{late} Example: --end_within_s=90')
  stop = 'Seconds that all processes have to save and end after Ctrl-C or SIGTERM, before they are killed.'
  number('stop_within_s', 600, f'{stop} Example: --stop_within_s=120')
  jobset = 'Print a JobSet for Kubernetes, for kubectl apply, and start nothing. Example: --jobset'
  flags.DEFINE_boolean('jobset', False, jobset, flag_values=values)
  text('image', 'With --jobset: the container image. Example: --image=registry.example/lm:1')
  text('name', 'With --jobset: its name; by default that of the experiment. Example: --name=lm')
  text('volume_claim', 'With --jobset: the PersistentVolumeClaim mounted at /runs. Example: --volume_claim=runs')
  resource = 'With --jobset: what each pod needs; may be repeated. Example: --resource=nvidia.com/gpu=8'
  flags.DEFINE_multi_string('resource', [], resource, flag_values=values)
  traced = 'After a mistake, print where in the code it was found. Example: --traceback'
  flags.DEFINE_boolean('traceback', False, traced, flag_values=values)
  return values


COMMAND = Command(
  'launch',
  'train in several processes, each a host; or print a JobSet',
  'train in several processes of this machine, each a host of its own, with simulated devices or real ones. Each line '
  'of their output begins with the name of its host. Ctrl-C and SIGTERM are passed on: all save the same step. When a '
  'process dies, or ends with 75 because another one was lost, all are started again and continue from the last '
  'checkpoint. The exit code is that of train.',
  'praxis-lite launch --processes=2 --devices=2 -- train --exp=lm.SyntheticLmTiny --job_log_dir=runs/two '
  '--set task.ici_mesh_shape=(1,4,1)',
  _flags(),
  _run,
  bare_rest='train',
)
