"""`praxis-lite status`: prints whether the processes of a run are alive, and the progress of the run."""

from __future__ import annotations

from absl import flags

from praxis_lite.cli.command import Command
from praxis_lite.cli.command_flags import CommandFlags
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
  if values.html == '':
    raise UserError('--html is empty: name a file, as in --html=status.html')
  held = is_held(directory)
  status = status_of(beats, is_held=held)
  if status.life == 'dead':  # Its process may have saved after its last heartbeat.
    from praxis_lite.checkpoints import saved_steps

    status = status_of(beats, is_held=held, newest=max(saved_steps(directory), default=None))
  print('\n'.join([f'{directory}: {status.lines[0]}', *status.lines[1:]]))
  if values.html:
    from praxis_lite.cli.status_page import write_status_page

    print(f'wrote {write_status_page(values.html, str(directory), beats, status)}')
  return 0 if status.is_well else 1


def _flags() -> CommandFlags:
  values = CommandFlags()
  values.add_text('job_log_dir', 'Directory of the run.', 'runs/1')
  page = "Write an HTML page over the run's whole life: attempts, losses, saves, failures, and where its time went."
  values.add_text('html', page, 'status.html')
  return values


COMMAND = Command(
  'status',
  'say whether a run is alive, and how far it has come',
  'say whether the processes of a run are alive, what they are doing, which step the run has reached, when it was last '
  'saved, and what it has spent its time on. The exit code is 0 if the run is alive or has ended by itself, and 1 if a '
  'process is gone or shows no sign of life.',
  'praxis-lite status runs/1',
  _flags(),
  _run,
  bare='job_log_dir',
)
