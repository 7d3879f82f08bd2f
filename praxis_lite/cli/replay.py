"""`praxis-lite replay`: runs one step of a run again, and prints what each layer computes."""

from __future__ import annotations

from absl import flags

from praxis_lite.cli.command import Command, configured_run
from praxis_lite.cli.command_flags import CommandFlags, add_tap, run_flags
from praxis_lite.common.errors import UserError


def _run(values: flags.FlagValues) -> int:
  if values.step is None:
    raise UserError('--step is missing: name the step to run again, as in --step=812')
  config, job_log_dir = configured_run(values)

  from praxis_lite.runs.records.record import has_record, read_record
  from praxis_lite.runs.replay import compare_with_checkpoint, replay, replay_taps

  is_recorded = not values['seed'].present and has_record(job_log_dir)
  seed = read_record(job_log_dir).seed if is_recorded else values.seed
  if values.compare and values.tap:
    raise UserError('--tap and --compare exclude each other: leave out one of them')
  if values.compare:
    other = values.other_devices
    return int(bool(compare_with_checkpoint(config, job_log_dir, values.step, seed, other_devices=other)))
  if values.other_devices:
    raise UserError('--other_devices needs --compare: a step is traced on one device')
  if values.tap:
    replay_taps(config, job_log_dir, values.step, seed, values.tap)
  else:
    replay(config, job_log_dir, values.step, seed)
  return 0


def _flags() -> CommandFlags:
  values = run_flags(seed='Seed of the run; by default the recorded one.')
  values.add_integer('step', 'The step to run again.', 812)
  compare = 'Instead, repeat the steps from the checkpoint before --step, and compare the result bit by bit with the'
  values.add_switch('compare', f'{compare} checkpoint of --step. The exit code is 1 if they differ.')
  values.add_switch('other_devices', 'With --compare: each device does the work of another one.')
  add_tap(values, 'activations, gradients, updates and weights', 'Instead, print')
  return values


COMMAND = Command(
  'replay',
  'run one step of a run again, layer by layer',
  'run one step of a run again from the checkpoint before it, operation by operation, and print what each layer '
  'computes and where the first value that is not finite comes from. With --compare, repeat the steps between two '
  'checkpoints and compare the bits. The run is not changed.',
  'praxis-lite replay runs/1 --step=812',
  _flags(),
  _run,
  bare='job_log_dir',
)
