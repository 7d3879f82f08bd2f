"""`praxis-lite plan`: predicts memory, time and communication of a train step on chips that this machine lacks."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from praxis_lite.cli.command import Command, configured_experiment
from praxis_lite.cli.command_flags import CommandFlags, experiment_flags
from praxis_lite.cli.plan_changes import PlanJob, add_change_flags, more_about, search_table, topologies_of
from praxis_lite.common.errors import UserError
from praxis_lite.common.foreign_text import printable, unfiltered_stream
from praxis_lite.common.native_log import collected_log

if TYPE_CHECKING:
  from praxis_lite.instruments.plan import Plan, Topology
  from praxis_lite.training.experiment import ExperimentConfig


def _run(values: flags.FlagValues) -> int:
  import_jax()
  if values.check:
    _named_by_snapshot(values)
  if values.calibrate:
    return _calibrate()
  _check_flags(values)

  from praxis_lite.instruments.plan import apply_calibration, calibration_file, parse_topology, plan
  from praxis_lite.instruments.plan.child import VARIABLE, go_first_when_memory_is_short, outcome_of

  topology, *others = (apply_calibration(parse_topology(name), calibration_file()) for name in topologies_of(values))
  prepare(topology, *others)
  config = configured_experiment(values)
  if VARIABLE in os.environ:  # This is a child process that only compiles.
    go_first_when_memory_is_short()
    print(outcome_of(plan(config, None, topology, cache=Path(os.environ[VARIABLE]))))
    return 0
  fitted = _made_to_fit(values, config, topology)
  with _live_line(topology.name) as report, _cache(values.cache) as cache:
    job = PlanJob(values, config, topology, fitted, cache, report)
    show = _search(job) if values.search else _plan(job)
  return 0 if show() else 1


def _search(job: PlanJob) -> Callable[[], bool]:
  """Searches. Returns a function that prints the table, once the live line is gone, and returns if any setting fits."""
  table, fits = search_table(job)

  def show() -> bool:
    print(table)
    return fits

  return show


def _plan(job: PlanJob) -> Callable[[], bool]:
  """Makes the plan, and returns a function that prints and writes it.

  The returned function returns whether the step fits and is not worse than the snapshot of --check.
  """
  from praxis_lite.instruments.plan import format_plan, plan

  values, elsewhere = job.values, job.elsewhere()
  found = plan(
    job.config, None, job.topology, compile=values.compile, cache=job.cache, elsewhere=elsewhere, report=job.report
  )
  sections = [format_plan(found, every_cause=values.why), *more_about(job, found)]

  def show() -> bool:
    print('\n\n'.join(sections))
    if values.html:
      from praxis_lite.instruments.plan.page import write_plan_page

      print(f'\nwrote {write_plan_page(values.html, found, values.exp or values.job_log_dir)}')
    return _compare_with_snapshot(values, found) and found.fits

  return show


def _check_flags(values: flags.FlagValues) -> None:
  if values.html == '':
    raise UserError('--html is empty: name a file, as in --html=plan.html')
  if values.html and os.path.isdir(values.html):
    file = os.path.join(values.html, 'plan.html')
    raise UserError(f'--html={values.html} is a directory: name a file, as in --html={file}')
  if values.html and values.search:
    raise UserError('--html shows one plan, and --search compares many; search first, then --set what it found')
  if not values.topology:
    raise UserError('--topology is missing: name the chips, as in --topology=v5p:4x4x4 or --topology=h100:8x8')


def _made_to_fit(values: flags.FlagValues, config: ExperimentConfig, topology: Topology) -> list[str]:
  """Fits the mesh to the topology unless --set gives a mesh; prints the change, and returns its overrides.

  For --search, it only prints the change, because the search itself fits the mesh.
  """
  from praxis_lite.common.config.overrides import apply_overrides
  from praxis_lite.instruments.plan.fitting import made_to_fit

  if any('mesh_shape' in override for override in values.set):
    return []
  overrides, what = made_to_fit(config.task, topology)
  if what:
    print(f'{what}: {" ".join(f"--set {line!r}" for line in overrides)}', file=sys.stderr)
  if values.search:
    return []
  apply_overrides(config.roots(), overrides)
  return overrides


@contextlib.contextmanager
def _cache(kept: bool) -> Iterator[Path]:
  """Yields the directory of compiled programs; a temporary one if `kept` is False."""
  if kept:
    yield cache_of_plans()
    return
  with tempfile.TemporaryDirectory() as directory:
    yield Path(directory)


def _named_by_snapshot(values: flags.FlagValues) -> None:
  """Takes the experiment, its overrides and the chips from the snapshot of --check, unless flags give them."""
  from praxis_lite.instruments.plan.snapshot import read

  kept = read(Path(values.check))
  values['topology'].value = values.topology or kept.topology
  if not values.exp and not values.job_log_dir:
    values['exp'].value, values['set'].value = kept.experiment, [*kept.overrides, *values.set]


def _compare_with_snapshot(values: flags.FlagValues, found: Plan) -> bool:
  """Writes a snapshot of a plan if asked, and compares it with an earlier one. Returns False if it is worse."""
  from praxis_lite.instruments.plan.snapshot import keep, read, regressions, snapshot_of

  new = snapshot_of(found, values.exp or '', values.set)
  worse = regressions(read(Path(values.check)), new) if values.check else []
  if values.check:
    text = 'is as good as in the snapshot, or better' if not worse else '\n  '.join(['is worse:', *worse])
    print(f'\n{values.check}: the step {text}')
  if values.snapshot:
    keep(new, Path(values.snapshot))
    print(f'\nwrote {values.snapshot}')
  return not worse


def import_jax() -> None:
  """Imports JAX and hides the messages of its plugins about missing drivers. Call it before other imports of JAX."""
  with collected_log():
    importlib.import_module('jax')


def prepare(*topologies: Topology) -> None:
  """Prepares JAX to plan for some chips. Call it before anything uses a device."""
  import jax

  from praxis_lite.common.devices import leave_accelerators_alone, simulate_cpu_devices

  if os.environ.get('TF_CPP_MIN_LOG_LEVEL') == '2':
    os.environ['TF_CPP_MIN_LOG_LEVEL'] = '1'  # Enables the partitioner's warnings, which the plan explains.
  simulated = [topology.num_devices for topology in topologies if topology.target.kind == 'cpu']
  if simulated:
    simulate_cpu_devices(max(simulated))
  else:
    leave_accelerators_alone()
    with collected_log():
      jax.devices()


def cache_of_plans() -> Path:
  """Returns the directory of compiled programs."""
  return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'praxis_lite' / 'plans'


def _calibrate() -> int:
  """Measures the devices of this machine for later plans."""
  from praxis_lite.instruments.plan.calibration import calibrate, calibration_file

  file = calibration_file()
  with _live_line('calibrating') as report:
    target = calibrate(file, report=report)
  for name, value in dataclasses.asdict(target.efficiency).items():
    print(f'{name:<22} {value if isinstance(value, str) else f"{value:.3g}"}')
  print(f'later plans for {target.name} read these from {file}')
  return 0


@contextlib.contextmanager
def _live_line(name: str) -> Iterator[Callable[[str], None]]:
  """Yields a function that sets the stage. If stderr is a terminal, shows the stage and the elapsed time there."""
  if not sys.stderr.isatty():
    yield lambda stage: None
    return
  stage, start, done = ['configuring'], time.monotonic(), threading.Event()

  def show() -> None:
    while not done.wait(0.5):
      line = printable(f'{name}: {stage[0]}, {time.monotonic() - start:.0f} s ', one_line=True)
      print(f'\r{line}', end='', file=unfiltered_stream(sys.stderr), flush=True)

  thread = threading.Thread(target=show, daemon=True)
  thread.start()
  try:
    yield lambda text: stage.__setitem__(0, text)
  finally:
    done.set()
    thread.join()
    print('\r\033[K', end='', file=unfiltered_stream(sys.stderr), flush=True)


def _flags() -> CommandFlags:
  values = experiment_flags()
  del values.devices
  chips = 'Chips to plan for: v5p:8x16x16 (a torus), v5e:16x16:2 (slices), h100:512x8 (hosts x GPUs), cpu:64.'
  values.add_text('topology', chips, 'h100:8x8')
  values.add_switch('compile', "Use the chips' compiler; --nocompile uses only formulas.", default=True)
  values.add_switch('calibrate', 'Measure what programs reach on the devices of this machine, for all later plans.')
  page = 'Also write an HTML page: memory, the step over time, the roofline and collectives.'
  values.add_text('html', page, 'plan.html')
  values.add_switch('cache', 'Keep compiled programs in ~/.cache/praxis_lite/plans.', default=True)
  add_change_flags(values)
  values.add_switch('why', 'Print the cause of each collective, and all surprises.')
  values.add_text('snapshot', 'Write weights, memory and collectives to a file, for --check.', 'plans/8b.txt')
  check = 'Exit with 1 if the step is worse than in a snapshot, which also gives the default experiment and chips.'
  values.add_text('check', check, 'plans/8b.txt')
  return values


COMMAND = Command(
  'plan',
  'predict memory and time of a train step on chips you do not have',
  "compile an experiment's train step with the compiler of other chips, without having any of them, and print whether "
  'it fits in their memory, how long it takes, what each layer communicates, and what limits it. Exits with 1 if it '
  'does not fit.',
  "praxis-lite plan lm_sizes.Llama8B --topology=h100:8x8 --set 'task.ici_mesh_shape=(1,16,4)'",
  _flags(),
  _run,
  bare='exp',
  usage='EXPERIMENT_OR_RUN [--flags]',
)
