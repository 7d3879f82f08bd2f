"""`praxis-lite replay`: runs one step of a run again, and prints what each layer computes."""

from __future__ import annotations

from absl import flags

from praxis_lite.cli.command import Command, configured_run
from praxis_lite.cli.command_flags import CommandFlags, run_flags
from praxis_lite.common.errors import UserError


def _run(values: flags.FlagValues) -> int:
  if values.step is None:
    raise UserError('--step is missing: name the step to run again, as in --step=812')
  config, job_log_dir = configured_run(values)

  from praxis_lite.runs.records.record import has_record, read_record
  from praxis_lite.runs.replay import replay

  is_recorded = not values['seed'].present and has_record(job_log_dir)
  replay(config, job_log_dir, values.step, read_record(job_log_dir).seed if is_recorded else values.seed)
  return 0


def _flags() -> CommandFlags:
  values = run_flags(seed='Seed of the run; by default the one that it records.')
  values.add_integer('step', 'The step to run again.', 812)
  return values


COMMAND = Command(
  'replay',
  'run one step of a run again, layer by layer',
  'run one step of a run again from the checkpoint before it, operation by operation, and print what each layer '
  'computes and where the first value that is not finite comes from. The run is not changed.',
  'praxis-lite replay runs/1 --step=812',
  _flags(),
  _run,
  bare='job_log_dir',
  usage='RUN [--flags]',
)
