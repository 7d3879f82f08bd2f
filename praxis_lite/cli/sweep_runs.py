"""A sweep over a grid, and what it shares with searches: the commands of the runs, and the table at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from absl import flags

from praxis_lite.cli.command import configured_experiment, experiment_arguments
from praxis_lite.cli.command_flags import add_tracked
from praxis_lite.cli.run_table import print_groups
from praxis_lite.common.config import Config
from praxis_lite.common.config.text import to_text
from praxis_lite.common.devices import leave_accelerators_alone
from praxis_lite.common.errors import UserError, prefix_errors
from praxis_lite.common.figures import number_of
from praxis_lite.runs import sweep
from praxis_lite.runs.loop.job import check_configs
from praxis_lite.runs.records.comparing import best_run, group_runs, metric_to_compare
from praxis_lite.runs.records.record import has_record
from praxis_lite.runs.records.run_config import job_directory
from praxis_lite.runs.records.runs import format_number, read_run

# Exit codes after a signal: positive if `train` saved and exited, negative if the signal killed it before training.
STOPPED = {128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT}


def run_grid(values: flags.FlagValues, part: tuple[int, int] | None) -> int:
  """Trains the unfinished points of a grid; returns the exit code.

  `part` is (number, count): only this one of `count` parts of the grid is trained. None trains the whole grid.
  """
  if has_record(values.job_log_dir):
    raise UserError(
      f'--job_log_dir={values.job_log_dir} is the directory of a run; name another one, for the runs of the sweep'
    )
  points = sweep.grid(values.set)
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
  failed: list[sweep.Point] = []
  with job_directory(values.job_log_dir) as folder:
    finished = sweep.FinishedPoints(folder, part)
    to_run = [point for point in own if not finished.has(point, configs[point])]
    for point in own:
      if point not in to_run:
        print(f'{numbers[point]}: finished before', flush=True)

    def record_end(point: sweep.Point, code: int, seconds: float) -> None:
      if code == 0:
        finished.add(point, configs[point])
        print(f'{numbers[point]}: done in {seconds:.0f} s', flush=True)
      elif code in STOPPED:
        said = '' if code < 0 else sweep.last_line(folder, point)
        print(f'{numbers[point]}: stopped: {said or "interrupted before it trained"}', flush=True)
      else:
        failed.append(point)
        print(f'{numbers[point]}: exit code {code}: {sweep.last_line(folder, point) or "no output"}', flush=True)

    stopped = sweep.run_points(
      to_run, folder, lambda p: command_of(values, folder, p), parallel=values.parallel, ended=record_end
    )
  print_results(values, [folder / p.name for p in points if has_record(folder / p.name)], folder)
  if stopped:
    return say_stopped()
  if failed:
    print(f'{len(failed)} of {number_of(len(own), "point")} failed; the same command runs them again')
  return 1 if failed else 0


def say_stopped() -> int:
  """Says that a signal has stopped a sweep; returns its exit code."""
  print('stopped; the same command resumes')
  return 128 + signal.SIGINT


def count_devices(tasks: Iterable[Config]) -> int | None:
  """Returns how many devices each run will have, counted in a separate process; None if no run needs more than one.

  Raises UserError if JAX_PLATFORMS names accelerators that do not start, or the process fails for another reason.
  """
  shapes = [(*(task.ici_mesh_shape or ()), *(task.dcn_mesh_shape or ())) for task in tasks]
  if os.environ.get('JAX_PLATFORMS', '') in ('', 'cpu') and all(size == 1 for shape in shapes for size in shape):
    return None
  code = 'import jax; from praxis_lite.common.devices import start_devices; start_devices(); print(jax.device_count())'
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False)
  error, _, message = (done.stderr.strip().splitlines() or [''])[-1].partition(': ')
  if done.returncode:
    if error.endswith('UserError'):
      raise UserError(message)
    last = ''.join(f': {part}' for part in (error, message) if part)
    raise UserError(f'the process that counts the devices ended with exit code {done.returncode}{last}')
  return int(done.stdout.split()[-1])


def command_of(values: flags.FlagValues, folder: Path, point: sweep.Point) -> list[str]:
  """Returns the command line that trains a point of a sweep below a folder."""
  arguments = [*experiment_arguments(values, point.overrides), f'--job_log_dir={folder / point.name}']
  arguments += [f'--{name}={values[name].value}' for name in ('devices', 'seed') if values[name].present]
  arguments += [f'--track={name}' for name in values.track]
  arguments += [] if values.compilation_cache else ['--nocompilation_cache']
  return [sys.executable, '-m', 'praxis_lite', 'train', *arguments]


def print_results(values: flags.FlagValues, directories: list[Path], folder: Path) -> None:
  """Prints a table of runs, and the best one."""
  runs = [read_run(directory) for directory in directories]
  metric, mode = metric_to_compare(runs, values.metric, values.mode)
  print()
  print_groups(group_runs(runs, values.metric, values.mode), str(folder))
  best = best_run(runs, metric, mode)
  if best is not None:
    value, step = best.best(metric, mode) or (None, 0)
    print(f'\nbest {metric}: {format_number(value)} at step {step} of {best.directory.name}')
