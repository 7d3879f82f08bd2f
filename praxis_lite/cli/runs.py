"""`praxis-lite runs`: prints and compares the runs below a directory."""

from __future__ import annotations

import sys

from absl import flags

from praxis_lite.cli.command import Command
from praxis_lite.cli.command_flags import CommandFlags, add_metric
from praxis_lite.common.errors import UserError
from praxis_lite.common.foreign_text import printable


def _run(values: flags.FlagValues) -> int:
  from praxis_lite.cli.run_table import format_markdown, print_groups, write_csv
  from praxis_lite.runs.records.comparing import group_runs, value_shared_by_all
  from praxis_lite.runs.records.runs import find_runs, read_run

  if values.csv and values.markdown:
    raise UserError('--csv and --markdown are two forms of one output; use one of them')
  if values.html == '':
    raise UserError('--html is empty: name a file, as in --html=runs.html')
  found = [read_run(directory) for directory in find_runs(values.dir)]
  if not found:
    print(f'there are no runs in {values.dir}', file=sys.stderr if values.csv else sys.stdout)
    return 0
  for fault in (run.fault for run in found if run.fault):
    print(f'note: {printable(fault, one_line=True)}', file=sys.stderr)
  columns = values.columns or (['all'] if values.csv else [])
  groups = group_runs(found, values.metric, values.mode, sort=values.sort, columns=columns)
  if (same := value_shared_by_all(found, values.sort)) is not None:
    note = f'note: --sort={values.sort}: all runs have the same value, {same}; the best run is first'
    print(printable(note, one_line=True), file=sys.stderr)
  if values.html:
    from praxis_lite.cli.run_page import write_run_page

    is_read = values.csv or values.markdown
    print(f'wrote {write_run_page(values.html, groups, values.dir)}', file=sys.stderr if is_read else sys.stdout)
  if values.markdown:
    print(format_markdown(groups, values.dir))
  elif values.csv:
    write_csv(groups, values.dir, sys.stdout)
  elif not values.html:
    print_groups(groups, values.dir, all_columns=bool(values.columns))
  return 0


def _flags() -> CommandFlags:
  values = CommandFlags()
  values.add_text('dir', 'Directory that contains the runs, at any depth.', 'runs', 'runs')
  add_metric(values)
  columns = 'Fields and metrics to show, by path or by the end of the path; by default the fields that differ.'
  values.add_list('columns', columns, 'learning_rate,eval/validation/accuracy')
  sort = 'best, name, step, age, loss, or a field or metric; a minus in front reverses the order.'
  values.add_text('sort', f'Order of the runs: {sort}', 'learning_rate', 'best')
  values.add_switch('csv', 'Print all runs and fields that differ as CSV.')
  markdown = 'Print tables in Markdown, with planned and measured figures, as for a comment in CI.'
  values.add_switch('markdown', markdown)
  values.add_text('html', 'Write an HTML page with the curves of the runs.', 'runs.html')
  return values


COMMAND = Command(
  'runs',
  'compare the runs below a directory',
  'list the runs below a directory, in a table for each experiment, best first: step, age (or whether it is running), '
  'last training loss, best value of a metric with its step, and the fields in which the configs differ.',
  'praxis-lite runs runs --metric=eval/validation/loss --columns=learning_rate',
  _flags(),
  _run,
  bare='dir',
)
