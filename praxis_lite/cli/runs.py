"""`praxis-lite runs`: prints the runs below a directory."""

from __future__ import annotations

from absl import flags

from praxis_lite.cli.command import Command
from praxis_lite.cli.command_flags import CommandFlags, add_metric
from praxis_lite.cli.run_table import print_runs


def _run(values: flags.FlagValues) -> int:
  from praxis_lite.runs.records.runs import find_runs, metric_to_compare, read_run

  found = [read_run(directory) for directory in find_runs(values.dir)]
  if not found:
    print(f'there are no runs in {values.dir}')
    return 0
  print_runs(found, values.dir, *metric_to_compare(found, values.metric, values.mode))
  return 0


def _flags() -> CommandFlags:
  values = CommandFlags()
  values.add_text('dir', 'Directory that contains the runs, at any depth.', 'runs', 'runs')
  add_metric(values)
  return values


COMMAND = Command(
  'runs',
  'list the runs below a directory',
  'list the runs below a directory: step, age (or whether it is running), last training loss, best value of a metric '
  'with its step, and the fields in which the configs differ.',
  'praxis-lite runs runs --metric=eval/validation/loss',
  _flags(),
  _run,
  bare='dir',
  usage='[DIRECTORY] [--flags]',
)
