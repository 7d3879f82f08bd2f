"""`praxis-lite eval`: evaluates a checkpoint."""

from __future__ import annotations

from absl import flags

from praxis_lite.cli.command import Command, configured_run, run_flags


def _run(values: flags.FlagValues) -> int:
  config, job_log_dir = configured_run(values)

  from praxis_lite.runtime.inference import run_eval

  run_eval(config, job_log_dir, step=values.step)
  return 0


COMMAND = Command(
  'eval',
  'evaluate a checkpoint',
  'evaluate a checkpoint on all evaluation data of the experiment, on the mesh it was trained on or any other.',
  'praxis-lite eval --job_log_dir=runs/1',
  run_flags(restores=True),
  _run,
)
