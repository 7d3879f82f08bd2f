"""`praxis-lite eval`: evaluates a checkpoint."""

from __future__ import annotations

from absl import flags

from praxis_lite.cli.command import Command, checkpoint_flags, configured_run, experiment_flags


def _run(values: flags.FlagValues) -> int:
  config, job_log_dir = configured_run(values)

  from praxis_lite.runtime.distributed import set_up_compilation_cache
  from praxis_lite.runtime.inference import run_eval

  set_up_compilation_cache(enabled=values.compilation_cache)
  run_eval(config, job_log_dir, step=values.step)
  return 0


def _flags() -> flags.FlagValues:
  values = experiment_flags()
  checkpoint_flags(values)
  return values


COMMAND = Command(
  'eval',
  'evaluate a checkpoint on all evaluation data of the experiment, on the mesh it was trained on or any other.',
  'praxis-lite eval --exp=lm.StdlibLmTiny --job_log_dir=runs/1',
  _flags(),
  _run,
)
