"""`praxis-lite launch`: trains in several processes of this machine, and starts them again when one is lost."""

from __future__ import annotations

from absl import flags

from praxis_lite.cli.command import Command
from praxis_lite.errors import UserError


def _run(values: flags.FlagValues) -> int:
  from praxis_lite.runtime.launch import Launcher, launched_command

  if values.processes is None:
    raise UserError('--processes is missing: say how many, as in --processes=2')
  if values.min_processes is not None and values.min_processes > values.processes:
    raise UserError(f'--min_processes={values.min_processes} is more than --processes={values.processes}')
  elastic = values.min_processes is not None
  return Launcher(
    launched_command(values.train or [], devices=values.devices, elastic=elastic),
    values.processes,
    max_restarts=values.max_restarts,
    min_processes=values.min_processes,
    grace_s=values.end_within_s,
    backoff_s=values.backoff_s,
  ).run()


def _flags() -> flags.FlagValues:
  values = flags.FlagValues()
  flags.DEFINE_multi_string(
    'train', [], 'What each process runs. Example: -- train --exp=lm.StdlibLm', flag_values=values
  )

  def integer(name: str, default: int | None, text: str, least: int = 1) -> None:
    flags.DEFINE_integer(name, default, text, lower_bound=least, flag_values=values)

  integer('processes', None, 'How many processes. Example: --processes=2')
  integer('devices', None, 'Simulate this many CPU devices in each process. Example: --devices=4')
  restarts = 'How often the job is started again after a process was lost.'
  integer('max_restarts', 3, f'{restarts} Example: --max_restarts=10', least=0)
  fewer = 'With how many processes the job goes on when one is lost twice in a row, on a smaller mesh'
  integer('min_processes', None, f'{fewer}; by default all are needed. Example: --min_processes=1')
  wait = 'Seconds before the first restart; doubled for each further one, up to 60'
  flags.DEFINE_float('backoff_s', 1.0, f'{wait}. Example: --backoff_s=5', lower_bound=0, flag_values=values)
  late = 'Seconds that the other processes have to notice and end when one was lost, before they are killed'
  flags.DEFINE_float('end_within_s', 330.0, f'{late}. Example: --end_within_s=90', lower_bound=0, flag_values=values)
  traced = 'After a mistake, print where in the code it was found. Example: --traceback'
  flags.DEFINE_boolean('traceback', False, traced, flag_values=values)
  return values


COMMAND = Command(
  'launch',
  'train in several processes of this machine, as on several hosts',
  'train in several processes of this machine, each a host of its own, with simulated devices or real ones. Each line '
  'of their output begins with the name of its host. Ctrl-C and SIGTERM are passed on: all save the same step. When a '
  'process dies, or ends with 75 because another one was lost, all are started again and continue from the last '
  'checkpoint. The exit code is that of train.',
  'praxis-lite launch --processes=2 --devices=2 -- train --exp=lm.SyntheticLmTiny --job_log_dir=runs/two',
  _flags(),
  _run,
  bare_rest='train',
)
