"""What `praxis-lite plan` does: plans a step, plans decoding, or searches for settings, and prints what it found."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from praxis_lite.cli.command import check_devices
from praxis_lite.cli.plan_flags import OF_DECODING, cache_of_plans, check_flags, check_measured, prepare
from praxis_lite.cli.plan_job import (
  PlanJob,
  figures_of,
  more_about,
  planned_experiment,
  read_topology,
  topologies_of,
  training_cost,
  write_planned_experiment,
)
from praxis_lite.cli.train_plan import topology_of_devices
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.common.errors import UserError
from praxis_lite.common.foreign_text import printable, unfiltered_stream
from praxis_lite.instruments.plan import (
  Plan,
  Ranked,
  Topology,
  calibration,
  format_plan,
  format_search,
  plan,
  regressions,
  search,
  snapshot_of,
)
from praxis_lite.instruments.plan.child import VARIABLE, end_with_parent, go_first_when_memory_is_short, outcome_of
from praxis_lite.instruments.plan.experience import (
  Measurement,
  experience_file,
  format_experience,
  format_measured,
  remember,
)
from praxis_lite.instruments.plan.fitting import made_to_fit
from praxis_lite.instruments.plan.inference import InferencePlan, Requests, format_inference, plan_inference
from praxis_lite.instruments.plan.page import write_plan_page
from praxis_lite.instruments.plan.snapshot import keep, read
from praxis_lite.runs.records.certificate import measure_steps, write_prediction
from praxis_lite.runs.records.record import read_record
from praxis_lite.training.experiment import ExperimentConfig


def run_plan(values: flags.FlagValues) -> int:
  """Runs the command; returns its exit code."""
  if values.check:
    _take_names_of_snapshot(values)
  if values.calibrate:
    return _calibrate()
  check_measured(values)
  if values.measured and not values.job_log_dir:
    print(format_experience(experience_file()))
    return 0
  if values.measured:
    measure_steps(values.job_log_dir)  # Raises UserError if the run took too few steps.
    values['topology'].value = values.topology or _topology_of_run(values.job_log_dir)
  check_flags(values)
  if values.cheapest:
    return _cheapest(values)
  topology, *others = (read_topology(name, values) for name in topologies_of(values))
  prepare(topology, *others)
  config = planned_experiment(values, topology)
  check_devices(values, config)
  if VARIABLE in os.environ:  # This is a child process that only compiles.
    end_with_parent()
    go_first_when_memory_is_short()
    cache = Path(os.environ[VARIABLE])
    inferred = _plan_decoding(values, config, topology, cache=cache) if values.inference else None
    print(outcome_of(inferred or plan(config, None, topology, cache=cache)))
    return 0
  fitted = _made_to_fit(values, config, topology)
  with _live_line(topology.name) as report, _cache(values.cache) as cache:
    job = PlanJob(values, config, topology, fitted, cache, report)
    sections, found = (_plan_inference if values.inference else _search if values.search else _plan)(job)
  print('\n\n'.join(sections))
  is_as_good = True
  if isinstance(found, InferencePlan):
    _write_page(values, found)
  elif isinstance(found, Plan):
    _write_page(values, found, training_cost(job, found))
    if values.figures:
      write_prediction(Path(values.figures), figures_of(job, found))
      print(f'\nwrote {values.figures}')
    is_as_good = _compare_with_snapshot(values, found)
  return 0 if found.fits and is_as_good else 1


def _cheapest(values: flags.FlagValues) -> int:
  """Searches for the cheapest run; returns 1 if nothing reaches the goal."""
  from praxis_lite.cli.plan_cheapest import (
    cheapest_text,
    check_cheapest_flags,
    find_cheapest_run,
    read_offers,
    write_cheapest_page,
  )

  check_cheapest_flags(values)
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


def _search(job: PlanJob) -> tuple[list[str], Ranked]:
  """Returns the table of a search for settings, a line about the file of --write_experiment, and the best setting."""
  sizes = job.values.batch_sizes
  if wrong := [size for size in sizes if not size.strip().isdecimal() or not int(size)]:
    raise UserError(f'--batch_sizes: expected numbers of rows such as 128,256, got {wrong[0]!r}')
  found = search(
    *(job.config, None, job.topology),
    verify=job.values.verify if job.values.compile else 0,
    seconds=job.values.search_seconds,
    batch_sizes=[int(size) for size in sizes],
    cache=job.cache,
    elsewhere=job.elsewhere,
    report=job.report,
  )
  return [format_search(found), *write_planned_experiment(job, found[0].overrides)], found[0]


def _plan_inference(job: PlanJob) -> tuple[list[str], InferencePlan]:
  how = {'compile': job.values.compile, 'cache': job.cache, 'elsewhere': job.elsewhere(), 'report': job.report}
  found = _plan_decoding(job.values, job.config, job.topology, **how)
  return [format_inference(found, job.values.price_per_chip_hour)], found


def _plan_decoding(values: flags.FlagValues, config: ExperimentConfig, topology: Topology, **how: Any) -> InferencePlan:
  """Returns the plan of decoding the requests of the flags; `how` are keyword arguments of `plan_inference`."""
  requests = Requests(**{name: values[name].value or default for name, default in OF_DECODING.items()})
  return plan_inference(config.task, topology, requests, **how)


def _plan(job: PlanJob) -> tuple[list[str], Plan]:
  values, elsewhere = job.values, job.elsewhere()
  found = plan(
    job.config, None, job.topology, compile=values.compile, cache=job.cache, elsewhere=elsewhere, report=job.report
  )
  sections = [_format_measurement(job, found)] if values.measured else []
  sections += [format_plan(found, every_cause=values.why), *more_about(job, found), *write_planned_experiment(job)]
  return sections, found


def _write_page(values: flags.FlagValues, found: Plan | InferencePlan, remarks: Sequence[str] = ()) -> None:
  """Writes the page of --html, with `remarks` added to its notes, and prints its path; does nothing without --html."""
  if values.html:
    print(f'\nwrote {write_plan_page(values.html, found, values.exp or values.hf or values.job_log_dir, remarks)}')


def _format_measurement(job: PlanJob, found: Plan) -> str:
  """Records the measured step time of the run in --job_log_dir for later plans; returns a comparison as text."""
  run = job.values.job_log_dir
  measured = Measurement(os.path.abspath(run), *measure_steps(run))
  remember(experience_file(), found, measured)
  chip = found.topology.target.name
  return f'{format_measured(found, measured)}\nlater plans for {chip} are corrected by this: {experience_file()}'


def _topology_of_run(job_log_dir: str) -> str:
  """Returns the chips of the last launch of a run, as --topology names them."""
  launch = read_record(Path(job_log_dir)).launches[-1]
  count, _, kind = launch.devices.partition(' ')
  used = math.prod((launch.mesh or {}).values()) if launch.mesh else int(count)
  if kind == 'cpu':
    return f'cpu:{used}'
  found = topology_of_devices(kind, used)
  if found is None:
    raise UserError(f'--measured: no figures of {kind!r} are known; name similar chips, as in --topology=h100:{used}')
  return found


def _made_to_fit(values: flags.FlagValues, config: ExperimentConfig, topology: Topology) -> list[str]:
  """Fits the mesh to the topology, unless --set gives a mesh; prints the change, and returns it as overrides.

  For --search, this prints the change and returns [], because the search itself fits the mesh.
  """
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


def _take_names_of_snapshot(values: flags.FlagValues) -> None:
  """Takes the experiment, its overrides and the chips from the snapshot of --check, unless flags give them."""
  kept = read(Path(values.check))
  values['topology'].value = values.topology or kept.topology
  if not values.exp and not values.job_log_dir:
    values['exp'].value, values['set'].value = kept.experiment, [*kept.overrides, *values.set]


def _compare_with_snapshot(values: flags.FlagValues, found: Plan) -> bool:
  """Compares a plan with the snapshot of --check, and writes --snapshot. Returns False if the plan is worse."""
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


def _calibrate() -> int:
  """Measures the devices of this machine for later plans."""
  file = calibration.calibration_file()
  with _live_line('calibrating') as report:
    target = calibration.calibrate(file, report=report)
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
