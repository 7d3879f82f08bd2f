"""`praxis-lite status`: prints whether the processes of a run are alive, and the progress of the run."""

from __future__ import annotations

from absl import flags

from praxis_lite.cli.command import Command
from praxis_lite.common.errors import UserError
from praxis_lite.common.files import user_path


def _run(values: flags.FlagValues) -> int:
  from praxis_lite.runs.records.heartbeat import read_heartbeats
  from praxis_lite.runs.records.run_config import is_held
  from praxis_lite.runs.records.runs import runs_near
  from praxis_lite.runs.records.status import status_of

  if not values.job_log_dir:
    raise UserError('name the directory of a run, as in praxis-lite status runs/1')
  directory = user_path(values.job_log_dir)
  beats = read_heartbeats(directory)
  if not beats:
    raise UserError(f'there are no heartbeats of a run in {directory}{runs_near(directory)}')
  status = status_of(beats, is_held=is_held(directory))
  print('\n'.join([f'{directory}: {status.lines[0]}', *status.lines[1:]]))
  return 0 if status.is_well else 1


def _flags() -> flags.FlagValues:
  values = flags.FlagValues()
  directory = 'Directory of the run. Example: --job_log_dir=runs/1'
  flags.DEFINE_string('job_log_dir', None, directory, flag_values=values)
  return values


COMMAND = Command(
  'status',
  'whether a run lives, and how far it is',
  'say whether the processes of a run live, what they do, at which step the run is, when it was saved, and on what its '
  'time was spent. The exit code is 0 if it lives or has ended by itself, and 1 if a process is gone or gives no sign '
  'of life.',
  'praxis-lite status runs/1',
  _flags(),
  _run,
  bare='job_log_dir',
)
