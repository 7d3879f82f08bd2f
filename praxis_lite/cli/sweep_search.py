"""`praxis-lite sweep --search`: runs whose values Optuna proposes, and how much each field matters."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from absl import flags

from praxis_lite.cli.command import configured_experiment
from praxis_lite.cli.command_flags import add_tracked
from praxis_lite.cli.sweep_runs import STOPPED, command_of, count_devices, print_results, say_stopped
from praxis_lite.common.config.overrides import alternatives
from praxis_lite.common.config.text import to_text
from praxis_lite.common.devices import leave_accelerators_alone
from praxis_lite.common.errors import UserError, prefix_errors
from praxis_lite.common.files import replace_file
from praxis_lite.runs.loop.job import check_configs
from praxis_lite.runs.records.record import has_record
from praxis_lite.runs.records.run_config import is_held, job_directory
from praxis_lite.runs.search import Search, SearchRange, import_optuna, parse_ranges
from praxis_lite.runs.search_picture import draw_search
from praxis_lite.runs.sweep import Point, last_line, run_points
from praxis_lite.training.experiment import ExperimentConfig

_PICTURE = 'search.svg'
_BAR = 24  # The length, in characters, of the bar of an importance of 1.


def run_search(values: flags.FlagValues) -> int:
  """Runs the trials that are missing; returns the exit code.

  Raises:
    UserError: a range is not valid or does not fit its field, Optuna is not installed, the directory has another
      search, or runs lack the metric; for some metrics, this is known only when the first run ends.
  """
  import_optuna()
  for override in values.set:
    if len(alternatives(override)) > 1:
      raise UserError(f'--set {override}: with --search, write several values as --search {override}')
  ranges = parse_ranges(values.search)
  configs, texts = {}, []
  for name, overrides in _ends(ranges):
    with prefix_errors(name):
      try:
        configs[name] = config = configured_experiment(values, (*values.set, *overrides))
      except UserError as error:
        in_integers = {'uniform': 'int', 'log': 'log_int'}
        for each in ranges:
          if each.kind in in_integers and f'{each.path}: expected int' in str(error):
            raise UserError(
              f'{error}; integers are drawn by --search {each.path}={in_integers[each.kind]}(...)'
            ) from None
        raise
      texts.append(to_text(config.roots()))
      config.task.train.loggers = add_tracked(config.task.train.loggers, values.track)
  num_devices = values.devices or count_devices([config.task for config in configs.values()])
  leave_accelerators_alone()  # The training processes use the accelerators.
  try:
    check_configs(configs, num_devices, values.metric)
  except UserError as error:
    raise _name_failing(ranges, configs, num_devices, values.metric) or error from None
  with job_directory(values.job_log_dir) as folder:
    compared = {'metric': values.metric, 'mode': values.mode, 'prunes': values.prune}
    shared = '\n'.join([*texts, f'seed {values.seed}'])
    search = Search(folder, ranges, values.set, seed=values.seed, config=shared, **compared)
    _wait_for_orphans(search, folder)

    wrong: list[UserError] = []

    def record_end(point: Point, code: int, seconds: float) -> None:
      is_ours = search.was_pruned(point)
      if code in STOPPED and not is_ours:
        print(f'{point.name}: stopped: {last_line(folder, point)}', flush=True)
        return
      try:
        trial = search.end(point, code)
      except UserError as error:
        wrong.append(error)
        return
      what = f'{trial.state} in {seconds:.0f} s'
      if trial.state == 'failed':
        what = f'exit code {code}: {last_line(folder, point) or "no output"}'
      print(f'[{int(point.name[:3]) + 1}/{values.trials}] {point.name}: {what}', flush=True)

    stopped = run_points(
      search.points(values.trials),
      folder,
      lambda point: command_of(values, folder, point),
      parallel=values.parallel,
      ended=record_end,
      is_hopeless=search.is_hopeless,
    )
    if wrong:
      raise wrong[0]
    directories = [folder / search.point(i).name for i in range(len(search.trials))]
  print_results(values, [directory for directory in directories if has_record(directory)], folder)
  for line in _describe_importances(search, ranges):
    print(line)
  if shares := search.importances():
    replace_file(folder / _PICTURE, draw_search(search.trials, ranges, shares, search.sign))
    print(f'drawn in {folder / _PICTURE}')
  if stopped:
    return say_stopped()
  failed = sum(trial.state == 'failed' for trial in search.trials)
  if failed:
    print(f'{failed} of {len(search.trials)} trials failed')
  return 1 if failed else 0


def _wait_for_orphans(search: Search, folder: Path) -> None:
  """Waits until the processes that a killed search left behind have ended, so that their trials can resume."""
  for number, trial in enumerate(search.trials):
    name = search.point(number).name
    if trial.state == 'running' and is_held(folder / name):
      print(f'{name}: a process of the killed search still trains it; waiting for it', flush=True)
      while is_held(folder / name):
        time.sleep(0.5)


def _ends(ranges: list[SearchRange]) -> Iterator[tuple[str, tuple[str, ...]]]:
  """Yields points to check before training, as (name, overrides). Each end of a range is in at least one of them."""
  columns = itertools.zip_longest(*(each.ends() for each in ranges))
  for column in columns:
    chosen = [each.ends()[0] if value is None else value for each, value in zip(ranges, column)]
    overrides = tuple(f'{each.path}={value}' for each, value in zip(ranges, chosen))
    yield ','.join(overrides), overrides


def _name_failing(
  ranges: list[SearchRange], configs: Mapping[str, ExperimentConfig], num_devices: int | None, metric: str | None
) -> UserError | None:
  """Returns an error that names all points that fail; for a single range, also the values that work.

  None if none fails.
  """
  failing: dict[str, str] = {}
  for name, config in configs.items():
    try:
      check_configs({name: config}, num_devices, metric)
    except UserError as error:
      failing[name] = str(error)
  if not failing:
    return None
  told = f'--search: fails with {"; ".join(failing)}'
  good = [name.partition('=')[2] for name in configs if name not in failing]
  if len(ranges) == 1 and ranges[0].kind not in ('log', 'uniform') and len(good) > 1:
    told += f'. Search what works, as in --search {ranges[0].path}={",".join(good)}'
  return UserError(f'{told}. {next(iter(failing.values()))}')


def _describe_importances(search: Search, ranges: list[SearchRange]) -> Iterator[str]:
  """Yields a table of how much each field matters, with bars, and of the values in the best trial.

  Yields nothing if it is not known how much fields matter.
  """
  shares, best = search.importances(), search.best()
  if not shares or best is None:
    return
  yield '\nwhat matters for the metric, by the trials that were not pruned:'
  width = max(len(each.path) for each in ranges)
  for path, share in shares.items():
    bar = '█' * max(round(_BAR * share), 1)
    yield f'  {path:<{width}} {share:>5.0%}  {bar:<{_BAR}}  best {best.values[path]}'
