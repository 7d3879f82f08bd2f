"""`praxis-lite sweep`: trains an experiment with all combinations of some values, and prints the best run."""

from __future__ import annotations

import re

from absl import flags

from praxis_lite.cli.command import Command
from praxis_lite.cli.command_flags import CommandFlags, add_metric, add_track, run_flags
from praxis_lite.common.errors import UserError


def _run(values: flags.FlagValues) -> int:
  if not values.exp:
    raise UserError('--exp is missing: name an experiment, as in --exp=lm.StdlibLm; `praxis-lite list` prints them')
  if not values.job_log_dir:
    raise UserError('--job_log_dir is missing: name a directory for the runs, as in --job_log_dir=runs/rates')

  part = _to_part(values.part) if values.part else None
  if values.search and part:
    raise UserError('--part: a search proposes values by what earlier trials reached; leave it out, and use --parallel')
  if values.search:
    from praxis_lite.cli.sweep_search import run_search

    return run_search(values)
  if unused := next((name for name in ('trials', 'prune') if values[name].present), ''):
    raise UserError(
      f'--{unused} has an effect only with --search; a sweep trains all combinations of the values of --set. Leave it '
      "out, or search, as in --search 'task.train.learner.learning_rate=log(1e-4,1e-2)'"
    )
  from praxis_lite.cli.sweep_runs import run_grid

  return run_grid(values, part)


def _to_part(text: str) -> tuple[int, int]:
  match = re.fullmatch(r'(\d+)/(\d+)', text)
  part, parts = map(int, match.groups()) if match else (0, 0)
  if not 1 <= part <= parts:
    raise UserError(f'--part={text}: expected the number of a part, from 1 on, and that of all, as in --part=3/8')
  return part, parts


def _flags() -> CommandFlags:
  values = run_flags(seed='Seed of each run.')
  search = 'Let Optuna choose from log(low,high), uniform, int, log_int or a,b,c, given the results of earlier trials.'
  values.add_texts('search', search, "'task.train.learner.learning_rate=log(1e-4,1e-2)'")
  values.add_integer('trials', 'With --search: the number of runs in all.', 20, 20, least=1)
  values.add_switch('prune', 'With --search: end runs that are worse than the median at the same step.', default=True)
  values.add_integer('parallel', 'Number of runs that train at the same time, on the same devices.', 2, 1, least=1)
  part = 'Train only every Nth point, from the Kth on, as K/N: one job of an array of N jobs.'
  values.add_text('part', part, '3/8')
  add_metric(values)
  add_track(values)
  return values


COMMAND = Command(
  'sweep',
  'train with all combinations of some values',
  'train an experiment with all combinations of the values of each --set path=a,b,c, one run after the other, each in '
  'its own directory below job_log_dir; then print a table of the runs, and the best one. Commas outside of brackets '
  'and quotes separate values, so write tuples with parentheses. The same command resumes an interrupted sweep. If a '
  'run fails, the others still run, and the exit code is 1.',
  'praxis-lite sweep --exp=lm.StdlibLmTiny --job_log_dir=runs/rates '
  '--set task.train.learner.learning_rate=1e-3,3e-3 --set task.model.num_layers=1,2',
  _flags(),
  _run,
  stray='job_log_dir',
)
