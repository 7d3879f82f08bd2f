"""What sweeps over a grid and searches share: the commands of their runs, and the table at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from absl import flags

from praxis_lite.cli.command import experiment_arguments
from praxis_lite.cli.run_table import print_groups
from praxis_lite.common.errors import UserError

if TYPE_CHECKING:
  from collections.abc import Iterable
  from pathlib import Path

  from praxis_lite.common.config import Config
  from praxis_lite.runs.sweep import Point

# Exit codes after a signal: positive if `train` saved and exited, negative if the signal killed it before training.
STOPPED = {128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT}


def count_devices(tasks: Iterable[Config]) -> int | None:
  """Returns how many devices each run will have, counted in a separate process.

  Returns None if no run needs more than one.

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


def command_of(values: flags.FlagValues, folder: Path, point: Point) -> list[str]:
  """Returns the command line that trains a point of a sweep below a folder."""
  arguments = [*experiment_arguments(values, point.overrides), f'--job_log_dir={folder / point.name}']
  arguments += [f'--{name}={values[name].value}' for name in ('devices', 'seed') if values[name].present]
  arguments += [f'--track={name}' for name in values.track]
  arguments += [] if values.compilation_cache else ['--nocompilation_cache']
  return [sys.executable, '-m', 'praxis_lite', 'train', *arguments]


def print_results(values: flags.FlagValues, directories: list[Path], folder: Path) -> None:
  """Prints a table of runs, and the best one."""
  from praxis_lite.runs.records.comparing import best_run, group_runs, metric_to_compare
  from praxis_lite.runs.records.runs import format_number, read_run

  runs = [read_run(directory) for directory in directories]
  metric, mode = metric_to_compare(runs, values.metric, values.mode)
  print()
  print_groups(group_runs(runs, values.metric, values.mode), str(folder))
  best = best_run(runs, metric, mode)
  if best is not None:
    value, step = best.best(metric, mode) or (None, 0)
    print(f'\nbest {metric}: {format_number(value)} at step {step} of {best.directory.name}')
