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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from praxis_lite.cli.command import Command, check_devices
from praxis_lite.cli.command_flags import CommandFlags, add_devices, experiment_flags
from praxis_lite.cli.plan_changes import (
  PlanJob,
  add_change_flags,
  figures_of,
  more_about,
  planned_experiment,
  read_topology,
  search_table,
  topologies_of,
  training_cost,
  write_planned_experiment,
)
from praxis_lite.cli.plan_cheapest import (
  add_cheapest_flags,
  cheapest_text,
  check_cheapest_flags,
  find_cheapest_run,
  read_offers,
  write_cheapest_page,
)
from praxis_lite.cli.plan_inference import add_inference_flags, check_inference_flags, plan_decoding
from praxis_lite.cli.plan_measured import check_measured_flags, read_measurement
from praxis_lite.common.errors import UserError
from praxis_lite.common.files import cache_folder
from praxis_lite.common.foreign_text import printable, unfiltered_stream
from praxis_lite.common.native_log import collected_log

if TYPE_CHECKING:
  from praxis_lite.instruments.plan import Plan, Topology
  from praxis_lite.instruments.plan.inference import InferencePlan
  from praxis_lite.training.experiment import ExperimentConfig


def _run(values: flags.FlagValues) -> int:
  import_jax()
  if values.check:
    _named_by_snapshot(values)
  if values.calibrate:
    return _calibrate()
  check_measured_flags(values)
  if values.measured and not values.job_log_dir:
    from praxis_lite.instruments.plan.experience import experience_file, format_experience

    print(format_experience(experience_file()))
    return 0
  check_cheapest_flags(values)
  _check_flags(values)
  if values.cheapest:
    return _cheapest(values)

  from praxis_lite.instruments.plan import plan
  from praxis_lite.instruments.plan.child import VARIABLE, end_with_parent, go_first_when_memory_is_short, outcome_of

  topology, *others = (read_topology(name, values) for name in topologies_of(values))
  prepare(topology, *others)
  config = planned_experiment(values, topology)
  check_devices(values, config)
  if VARIABLE in os.environ:  # This is a child process that only compiles.
    end_with_parent()
    go_first_when_memory_is_short()
    cache = Path(os.environ[VARIABLE])
    inferred = plan_decoding(values, config, topology, cache=cache) if values.inference else None
    print(outcome_of(inferred or plan(config, None, topology, cache=cache)))
    return 0
  fitted = _made_to_fit(values, config, topology)
  with _live_line(topology.name) as report, _cache(values.cache) as cache:
    job = PlanJob(values, config, topology, fitted, cache, report)
    make = _plan_inference if values.inference else _search if values.search else _plan
    show = make(job)
  return 0 if show() else 1


def _cheapest(values: flags.FlagValues) -> int:
  """Searches for the cheapest run; returns 1 if nothing reaches the goal."""
  offers = read_offers(values)
  topology = offers[0].topology
  prepare(*(offer.topology for offer in offers))
  config = planned_experiment(values, topology)
  with _live_line('cheapest') as report, _cache(values.cache) as cache:
    job = PlanJob(values, config, topology, (), cache, report)
    found = find_cheapest_run(job, offers)
  print(cheapest_text(job, found))
  write_cheapest_page(job, found)
  return 0 if found.is_reached else 1


def _search(job: PlanJob) -> Callable[[], bool]:
  """Searches for settings. Returns a function that prints their table, and returns whether a setting fits.

  Call the returned function after `_live_line` has ended.
  """
  table, best = search_table(job)
  sections = [table, *write_planned_experiment(job, best.overrides)]

  def show() -> bool:
    print('\n\n'.join(sections))
    return best.fits

  return show


def _plan_inference(job: PlanJob) -> Callable[[], bool]:
  """Plans decoding. Returns a function that prints the plan, and returns whether the program fits."""
  from praxis_lite.instruments.plan.inference import format_inference

  values, elsewhere = job.values, job.elsewhere()
  how = {'compile': values.compile, 'cache': job.cache, 'elsewhere': elsewhere, 'report': job.report}
  found = plan_decoding(values, job.config, job.topology, **how)

  def show() -> bool:
    print(format_inference(found, values.price_per_chip_hour))
    _write_page(values, found)
    return found.fits

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
  sections = [_format_measurement(job, found)] if values.measured else []
  sections += [format_plan(found, every_cause=values.why), *more_about(job, found), *write_planned_experiment(job)]

  def show() -> bool:
    print('\n\n'.join(sections))
    _write_page(values, found, training_cost(job, found))
    if values.figures:
      from praxis_lite.runs.records.certificate import write_prediction

      write_prediction(Path(values.figures), figures_of(job, found))
      print(f'\nwrote {values.figures}')
    return _compare_with_snapshot(values, found) and found.fits

  return show


def _write_page(values: flags.FlagValues, found: Plan | InferencePlan, remarks: Sequence[str] = ()) -> None:
  """Writes the page of --html, with `remarks` added to its notes, and prints its path; does nothing without --html."""
  if values.html:
    from praxis_lite.instruments.plan.page import write_plan_page

    print(f'\nwrote {write_plan_page(values.html, found, values.exp or values.hf or values.job_log_dir, remarks)}')


def _format_measurement(job: PlanJob, found: Plan) -> str:
  """Records the measured step time of the run in --job_log_dir for later plans; returns a comparison as text."""
  from praxis_lite.instruments.plan.experience import experience_file, format_measured, remember

  measured = read_measurement(job.values.job_log_dir)
  remember(experience_file(), found, measured)
  chip = found.topology.target.name
  return f'{format_measured(found, measured)}\nlater plans for {chip} are corrected by this: {experience_file()}'


def _check_flags(values: flags.FlagValues) -> None:
  check_inference_flags(values)
  if values.html == '':
    raise UserError('--html is empty: name a file, as in --html=plan.html')
  if values.html and os.path.isdir(values.html):
    file = os.path.join(values.html, 'plan.html')
    raise UserError(f'--html={values.html} is a directory: name a file, as in --html={file}')
  if values.hf and values.exp:
    raise UserError('--hf and --exp both name a model; use one of them')
  if values.write_experiment and not values.hf:
    raise UserError('--write_experiment needs --hf, a config.json; other experiments have their file already')
  if values.write_experiment and os.path.exists(values.write_experiment):
    raise UserError(f'--write_experiment={values.write_experiment} exists; name another file')
  if values.html and values.search:
    raise UserError('--html shows one plan, and --search compares many; search first, then --set what it found')
  if values.cheapest:
    return
  if not values.topology and values.devices is not None:
    raise UserError(
      '--devices: plan uses no devices of this machine; --topology names the chips, as in '
      f'--topology=cpu:{values.devices}'
    )
  if not values.topology:
    raise UserError('--topology is missing: name the chips, as in --topology=v5p:4x4x4 or --topology=h100:8x8')


def _made_to_fit(values: flags.FlagValues, config: ExperimentConfig, topology: Topology) -> list[str]:
  """Fits the mesh to the topology, unless --set gives a mesh; prints the change, and returns it as overrides.

  For --search, this prints the change and returns [], because the search itself fits the mesh.
  """
  from praxis_lite.common.config.overrides import apply_overrides
  from praxis_lite.instruments.plan.fitting import made_to_fit

  if any('mesh_shape' in override for override in values.set) and -1 not in (config.task.ici_mesh_shape or ()):
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
  """Compares a plan with the snapshot of --check, and writes --snapshot. Returns False if the plan is worse."""
  from praxis_lite.instruments.plan.snapshot import keep, read, regressions, snapshot_of

  new = snapshot_of(found, values.exp or '', values.set)
  worse: list[str] = []
  if values.check:
    kept = read(Path(values.check))
    worse = regressions(kept, new)
    text = 'is as good as in the snapshot, or better' if not worse else '\n  '.join(['is worse:', *worse])
    if kept.mode != new.mode:
      text += (
        f'\n  the snapshot is {kept.mode} and this plan is {new.mode}, so only the splits of weights and the memory of '
        'the state were compared; temporaries and collectives were not'
      )
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
  return cache_folder() / 'plans'


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
  """Yields a function that sets the name of the stage. A terminal on stderr shows the stage and the elapsed time."""
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
  chips = 'Chips to plan for: v5p:8x16x16 (a torus), v5e:16x16:2 (slices), h100:512x8 (hosts x GPUs), cpu:64.'
  values.add_text('topology', chips, 'h100:8x8')
  add_devices(values, 'Only checked to be enough for the mesh; --topology gives the number of chips.')
  hugging_face = 'Plan to train a model of Hugging Face by its config.json, without its weights, in place of --exp.'
  values.add_text('hf', hugging_face, 'llama/config.json')
  written = 'With --hf: also write a file with the planned experiment, or with the best one that --search found.'
  values.add_text('write_experiment', written, 'my_llama.py')
  values.add_switch('compile', "Use the chips' compiler; --nocompile uses only formulas.", default=True)
  values.add_switch('calibrate', 'Measure how fast programs run on the devices of this machine, for all later plans.')
  page = 'Also write an HTML page: memory, the step over time, the roofline and collectives.'
  values.add_text('html', page, 'plan.html')
  values.add_switch('cache', 'Keep compiled programs in ~/.cache/praxis_lite/plans.', default=True)
  add_change_flags(values)
  add_cheapest_flags(values)
  add_inference_flags(values)
  measured = (
    'Compare the run in --job_log_dir with its plan, and correct later plans by it. Alone: print the corrections.'
  )
  values.add_switch('measured', measured)
  figures = 'Also write the predictions for a step to a file, for `train --plan`, which compares a run with them.'
  values.add_text('figures', figures, 'plan.json')
  values.add_switch('why', 'Print the cause of each collective, and all surprises.')
  values.add_text('snapshot', 'Write weights, memory and collectives to a file, for --check.', 'plans/8b.txt')
  check = 'Exit with 1 if the step is worse than in a snapshot, which also gives the default experiment and chips.'
  values.add_text('check', check, 'plans/8b.txt')
  return values


COMMAND = Command(
  'plan',
  'predict memory and time of a step on chips you do not have',
  "compile an experiment's train step with the compiler of other chips, without having any of them, and print whether "
  'it fits in their memory, how long it takes, what each layer communicates, and what limits it. Exits with 1 if it '
  'does not fit.',
  "praxis-lite plan lm_sizes.Llama8B --topology=h100:8x8 --set 'task.ici_mesh_shape=(1,16,4)'",
  _flags(),
  _run,
  bare='exp',
  usage='EXPERIMENT_OR_RUN [--flags]',
)
