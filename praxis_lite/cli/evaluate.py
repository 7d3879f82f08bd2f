"""`praxis-lite eval`: evaluates a checkpoint."""

from __future__ import annotations

from absl import flags

from praxis_lite.cli.command import Command, configured_run, say_how_config_differs
from praxis_lite.cli.command_flags import CommandFlags, add_on_damage, add_tap, run_flags


def _run(values: flags.FlagValues) -> int:
  config, job_log_dir = configured_run(values)

  from praxis_lite.runs.inference import run_eval

  run_eval(config, job_log_dir, step=values.step, on_damage=values.on_damage, tap=values.tap)
  say_how_config_differs(values, config)
  return 0


def _flags() -> CommandFlags:
  values = run_flags(restores=True)
  add_on_damage(values)
  add_tap(values, 'activations')
  return values


COMMAND = Command(
  'eval',
  'evaluate a checkpoint',
  'evaluate a checkpoint on all evaluation data of the experiment, on any mesh.',
  'praxis-lite eval --job_log_dir=runs/1',
  _flags(),
  _run,
)
