"""`praxis-lite launch`: trains in several processes on this machine, and restarts them if one dies.

With --jobset, --slurm or --skypilot, it prints what starts them on a cluster instead.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from praxis_lite.cli import train
from praxis_lite.cli.command import Command, configured_experiment
from praxis_lite.cli.command_flags import CommandFlags
from praxis_lite.common.errors import UserError
from praxis_lite.common.files import local_path

# Modules that together import everything that `train` needs. None of them starts a device.
_IMPORTS = (
  *('praxis_lite.cli.train', 'praxis_lite.cli.train_plan', 'praxis_lite.instruments.explain'),
  *('praxis_lite.runs.cluster.distributed', 'praxis_lite.runs.cluster.observers'),
  *('praxis_lite.checkpoints.orbax.handlers', 'praxis_lite.experiments.lm'),
)


# The flags that each way to start a run takes, beyond --processes and --max_restarts.
_ON_THIS_MACHINE = ('devices', 'min_processes', 'spares', 'backoff_s', 'end_within_s', 'stop_within_s')
_RECIPES = {
  'jobset': ('name', 'resource', 'spares', 'image', 'volume_claim', 'tpu', 'slices'),
  'slurm': ('name', 'resource', 'spares', 'processes_per_node'),
  'skypilot': ('name', 'resource', 'image', 'volume_claim'),
}


def _run(values: flags.FlagValues) -> int:
  from praxis_lite.runs.cluster.launch import Launcher, launched_command

  if values.processes is None:
    raise UserError('--processes is missing: say how many, as in --processes=2')
  recipes = [name for name in _RECIPES if values[name].value]
  if len(recipes) > 1:
    raise UserError(f'--{recipes[0]} and --{recipes[1]} are given: choose one')
  _check_flags(values, recipes[0] if recipes else '')
  if values.min_processes is not None and values.min_processes > values.processes:
    raise UserError(f'--min_processes={values.min_processes} is more than --processes={values.processes}')
  command = launched_command(values.train, devices=values.devices, elastic=values.min_processes is not None)
  if recipes:
    print(_recipe(values, recipes[0]))
    return 0
  return Launcher(
    command,
    values.processes,
    max_restarts=values.max_restarts,
    min_processes=values.min_processes,
    spares=values.spares,
    grace_s=values.end_within_s,
    stop_s=values.stop_within_s,
    backoff_s=values.backoff_s,
    directory=_directory(values.train[1:]),
    imports=_IMPORTS,
  ).run()


def _check_flags(values: flags.FlagValues, recipe: str) -> None:
  """Raises UserError for a flag that has no effect with a recipe; the recipe '' stands for this machine."""
  taken = _RECIPES.get(recipe, _ON_THIS_MACHINE)
  where = f'with --{recipe}' if recipe else 'on this machine'
  for name in dict.fromkeys((*_ON_THIS_MACHINE, *itertools.chain(*_RECIPES.values()))):
    if values[name].present and name not in taken:
      listed = ', '.join(f'--{each}' for each in taken)
      raise UserError(f'--{name} has no effect {where}: leave it out; flags with an effect there are {listed}')


def _directory(arguments: Sequence[str]) -> Path | None:
  """Returns the run directory in the arguments of `train`; None if they are invalid, which `train` reports."""
  try:
    name = _train_flags(arguments).job_log_dir
    return local_path(name).absolute() if name else None
  except (flags.Error, UserError):
    return None


def _recipe(values: flags.FlagValues, kind: str) -> str:
  """Checks the experiment, and returns the file that starts its processes on a cluster. `kind` is one of `_RECIPES`."""
  from praxis_lite.common.devices import leave_accelerators_alone
  from praxis_lite.runs.cluster.jobset import MOST_NAME, jobset
  from praxis_lite.runs.cluster.recipe import ClusterJob
  from praxis_lite.runs.cluster.skypilot import skypilot_task
  from praxis_lite.runs.cluster.slurm import slurm_script
  from praxis_lite.runs.loop.job import check_configs

  if not values.image and kind != 'slurm':
    raise UserError('--image is missing: name an image that contains praxis_lite and the experiment')
  given = _train_flags(values.train[1:])
  if not given.job_log_dir:
    raise UserError('--job_log_dir is missing after --: a directory on a volume that all processes see')
  leave_accelerators_alone()
  check_configs({given.exp or given.job_log_dir: configured_experiment(given)})
  name = values.name or _name_of(given.exp or given.job_log_dir)
  if not re.fullmatch(r'[a-z]([-a-z0-9]*[a-z0-9])?', name) or len(name) > MOST_NAME:
    raise UserError(
      f'--name={name}: expected at most {MOST_NAME} lower-case letters, digits and hyphens, beginning with a letter'
    )
  names = ('processes', 'max_restarts', 'image', 'spares', 'processes_per_node', 'slices', 'tpu')
  own: dict[str, Any] = {field: values[field].value for field in names if values[field].value is not None}
  job = ClusterJob(
    name,
    ['praxis-lite', *values.train],
    volume=values.volume_claim,
    resources=values.resource,
    grace_s=int(given.grace_s or 30),
    **own,
  )
  if kind == 'slurm':
    return slurm_script(job)
  return json.dumps(skypilot_task(job) if kind == 'skypilot' else jobset(job), indent=2)


def _train_flags(arguments: Sequence[str]) -> flags.FlagValues:
  values = copy.deepcopy(train.COMMAND.flags)
  rest = values(['praxis-lite train', *arguments])[1:]
  if rest:
    raise UserError(f'unexpected argument {rest[0]!r} after train; flags are written --name=value')
  return values


def _name_of(experiment: str) -> str:
  """Returns a valid Kubernetes name, such as 'stdlib-lm' for 'lm.StdlibLm', and 'run-1' for 'runs/1'."""
  last = re.split(r'[.:/]', experiment.rstrip('/'))[-1]
  words = re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '-', last).lower()
  name = re.sub(r'[^a-z0-9]+', '-', words).strip('-')
  return (name if name[:1].isalpha() else f'run-{name}')[:48].strip('-')


def _flags() -> CommandFlags:
  values = CommandFlags()
  values.add_texts('train', 'What each process runs: each argument after --.', 'train')
  values.add_integer('processes', 'Number of processes.', 2, least=1)
  values.add_integer('devices', 'Simulate this many CPU devices in each process.', 4, least=1)
  restarts = 'Restart the job at most this many times after losing a process.'
  values.add_integer('max_restarts', restarts, 10, 3, least=0)
  fewer = 'If a process is lost twice in a row, go on with at least this many, on a smaller mesh; by default with all.'
  values.add_integer('min_processes', fewer, 1, least=1)
  spares = (
    'Places beyond --processes that take over from places which were lost twice, are slow, or have a faulty device. '
    'Each process finds its place in PRAXIS_LITE_PLACE. With --jobset or --slurm: nodes that take over from lost ones.'
  )
  values.add_integer('spares', spares, 1, 0, least=0)
  backoff = 'Seconds before the first restart. Each further restart waits twice as long, at most 60 s.'
  values.add_number('backoff_s', backoff, '5', 1, least=0)
  late = 'After losing a process, seconds that the others have to notice it and end before they are killed.'
  values.add_number('end_within_s', late, '90', 330, least=0)
  stop = 'After Ctrl-C or SIGTERM, seconds that all processes have to save and end before they are killed.'
  values.add_number('stop_within_s', stop, '120', 600, least=0)
  values.add_switch('jobset', 'Print a JobSet for Kubernetes, for kubectl apply, and start nothing.')
  values.add_switch('slurm', 'Print a batch script for Slurm, for sbatch, and start nothing.')
  values.add_switch('skypilot', 'Print a task for SkyPilot, for sky jobs launch, and start nothing.')
  kind = 'With --jobset: the kind and the topology of TPU slices on Google Cloud.'
  values.add_text('tpu', kind, 'tpu-v5-lite-podslice:4x8')
  values.add_integer('slices', 'With --jobset and --tpu: the number of slices.', 2, 1, least=1)
  values.add_text('image', 'With --jobset or --skypilot: the container image.', 'registry.example/lm:1')
  values.add_text('name', 'On a cluster: name of the job; by default made from the name of the experiment.', 'lm')
  values.add_text(
    'volume_claim',
    'With --jobset: the PersistentVolumeClaim, with --skypilot: the volume, to mount at /runs.',
    'runs',
  )
  needs = 'With --jobset: a resource that each pod needs. With --slurm: an option of sbatch, such as gpus-per-node=8.'
  values.add_texts(
    'resource', f'{needs} With --skypilot: a field of its resources, such as accelerators=H100:8.', 'nvidia.com/gpu=8'
  )
  values.add_integer('processes_per_node', 'With --slurm: the number of processes of each node.', 8, 1, least=1)
  return values


COMMAND = Command(
  'launch',
  'train in several processes here, or on a cluster',
  'train in several processes on this machine, each in the place of a host, with simulated or real devices. Each line '
  'of output begins with the name of its process. After Ctrl-C or SIGTERM, all processes save the same step. If a '
  'process dies, or exits with 75 because another one was lost, all are restarted and resume from the last '
  'checkpoint. The exit code is the one that train returns.',
  'praxis-lite launch --processes=2 --devices=2 -- train --exp=lm.SyntheticLmTiny --job_log_dir=runs/two '
  "--set 'task.ici_mesh_shape=(1,4,1)'",
  _flags(),
  _run,
  bare_rest='train',
  usage='[--flags] -- train [flags of train]',
)
