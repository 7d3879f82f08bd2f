"""`praxis-lite sweep`: trains an experiment with all combinations of some values, and prints the best run."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

from absl import flags

from praxis_lite.cli.command import Command, configured_experiment
from praxis_lite.cli.command_flags import CommandFlags, add_metric, add_track, add_tracked, run_flags
from praxis_lite.cli.sweep_runs import STOPPED, command_of, count_devices, print_results
from praxis_lite.common.errors import UserError, prefix_errors
from praxis_lite.common.figures import number_of

if TYPE_CHECKING:
  from praxis_lite.runs.sweep import Point


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
  from praxis_lite.common.config.text import to_text
  from praxis_lite.runs.records.record import has_record

  if has_record(values.job_log_dir):
    raise UserError(
      f'--job_log_dir={values.job_log_dir} is the directory of a run; name another one, for the runs of the sweep'
    )

  from praxis_lite.common.devices import leave_accelerators_alone
  from praxis_lite.runs.loop.job import check_configs
  from praxis_lite.runs.records.run_config import job_directory
  from praxis_lite.runs.sweep import FinishedPoints, grid, last_line, run_points

  points = grid(values.set)
  experiments = {}
  for point in points:
    with prefix_errors(point.name):
      experiments[point] = config = configured_experiment(values, point.overrides)
      config.task.train.loggers = add_tracked(config.task.train.loggers, values.track)
  num_devices = values.devices or count_devices([config.task for config in experiments.values()])
  leave_accelerators_alone()  # The training processes use the accelerators.
  check_configs({point.name: config for point, config in experiments.items()}, num_devices, values.metric)
  configs = {point: f'{to_text(config.roots())}\nseed {values.seed}' for point, config in experiments.items()}
  numbers = {point: f'[{i}/{len(points)}] {point.name}' for i, point in enumerate(points, 1)}
  own = points if part is None else points[part[0] - 1 :: part[1]]
  failed: list[Point] = []
  with job_directory(values.job_log_dir) as folder:
    finished = FinishedPoints(folder, part)
    to_run = [point for point in own if not finished.has(point, configs[point])]
    for point in own:
      if point not in to_run:
        print(f'{numbers[point]}: finished before', flush=True)

    def record_end(point: Point, code: int, seconds: float) -> None:
      if code == 0:
        finished.add(point, configs[point])
        print(f'{numbers[point]}: done in {seconds:.0f} s', flush=True)
      elif code in STOPPED:
        said = '' if code < 0 else last_line(folder, point)
        print(f'{numbers[point]}: stopped: {said or "interrupted before it trained"}', flush=True)
      else:
        failed.append(point)
        print(f'{numbers[point]}: exit code {code}: {last_line(folder, point) or "no output"}', flush=True)

    stopped = run_points(
      to_run, folder, lambda p: command_of(values, folder, p), parallel=values.parallel, ended=record_end
    )
  print_results(values, [folder / p.name for p in points if has_record(folder / p.name)], folder)
  if stopped:
    print('stopped; the same command resumes')
    return 128 + signal.SIGINT
  if failed:
    print(f'{len(failed)} of {number_of(len(own), "point")} failed; the same command runs them again')
  return 1 if failed else 0


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
