"""`praxis-lite runs`: prints the runs below a directory."""

from __future__ import annotations

from absl import flags

from praxis_lite.cli.command import Command
from praxis_lite.cli.run_table import print_runs


def _run(values: flags.FlagValues) -> int:
  from praxis_lite.runs.records.runs import find_runs, metric_to_compare, read_run

  found = [read_run(directory) for directory in find_runs(values.dir)]
  if not found:
    print(f'there are no runs in {values.dir}')
    return 0
  print_runs(found, values.dir, *metric_to_compare(found, values.metric, values.mode))
  return 0


def metric_flags(values: flags.FlagValues) -> None:
  """Defines the flags of commands that compare runs."""
  metric = 'Metric to compare runs by; by default best_metric of their configs, or the loss of the evaluation.'
  flags.DEFINE_string('metric', None, f'{metric} Example: --metric=eval/validation/accuracy', flag_values=values)
  mode = 'Whether lower (min) or higher (max) is better. Example: --mode=max'
  flags.DEFINE_enum('mode', None, ['min', 'max'], mode, flag_values=values)


def _flags() -> flags.FlagValues:
  values = flags.FlagValues()
  flags.DEFINE_string('dir', 'runs', 'Directory that the runs are below. Example: --dir=runs', flag_values=values)
  metric_flags(values)
  return values


COMMAND = Command(
  'runs',
  'list the runs below a directory',
  'list the runs below a directory, with their steps, age (or running), last training loss, best value of a metric and '
  'its step, and the fields in which their configs differ.',
  'praxis-lite runs runs --metric=eval/validation/loss',
  _flags(),
  _run,
  bare='dir',
)
