"""PlanJob: one invocation of `praxis-lite plan`, and the sections of its output besides the plan itself."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from praxis_lite.bridges.hf.sizes import read_sizes_of, training_experiment, write_experiment
from praxis_lite.cli.command import configured_experiment, experiment_arguments
from praxis_lite.cli.plan_flags import OF_DECODING
from praxis_lite.cli.train_plan import predict
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.common.figures import duration
from praxis_lite.instruments.plan import Plan, Topology, apply_calibration, calibration_file, parse_topology, plan
from praxis_lite.instruments.plan.child import compile_in_child
from praxis_lite.instruments.plan.compare import format_comparison
from praxis_lite.instruments.plan.compilers import missing_compiler
from praxis_lite.instruments.plan.copies import format_copies
from praxis_lite.instruments.plan.experience import apply_experience, experience_file
from praxis_lite.instruments.plan.fitting import made_to_fit
from praxis_lite.instruments.plan.goodput import Interruptions, advise_interval
from praxis_lite.instruments.plan.knobs import configure_task
from praxis_lite.instruments.plan.price import Price, format_price, price_of
from praxis_lite.instruments.plan.what_if import WhatIf, format_changes, format_more_chips, plan_on_more_chips
from praxis_lite.runs.records.certificate import Prediction
from praxis_lite.training.experiment import ExperimentConfig


class PlanJob(NamedTuple):
  """One invocation of `praxis-lite plan`."""

  values: flags.FlagValues
  config: ExperimentConfig  # The configs of the experiment, with a mesh that fits the topology.
  topology: Topology
  fitted: Sequence[str]  # The overrides that fit the mesh to the topology; empty if it fits already.
  cache: Path  # The directory of compiled programs.
  report: Callable[[str], None]  # Called with the name of each stage as it begins.

  def elsewhere(self, overrides: Sequence[str] = ()) -> Callable[[], None] | None:
    """Returns a function that compiles the experiment, with these further overrides, in a child process.

    Returns None for simulated devices, for which this process compiles.
    """
    arguments = experiment_arguments(self.values, [*self.values.set, *self.fitted, *overrides])
    arguments = [f'--hf={self.values.hf}', *arguments[1:]] if self.values.hf else arguments
    arguments = [*arguments, *_decoding_arguments(self.values)]
    command = [sys.executable, '-m', 'praxis_lite', 'plan', *arguments, f'--topology={self.topology.name}']
    return None if self.topology.target.kind == 'cpu' else lambda: compile_in_child(command, self.cache)


def _decoding_arguments(values: flags.FlagValues) -> list[str]:
  """Returns the flags that describe the requests, for another process; [] if decoding is not planned."""
  given = [f'--{name}={values[name].value}' for name in OF_DECODING if values[name].value]
  return ['--inference', *given] if values.inference else []


def planned_experiment(values: flags.FlagValues, topology: Topology) -> ExperimentConfig:
  """Returns the configs of the experiment to plan, from --exp, the run in --job_log_dir, or the config.json of --hf."""
  if not values.hf:
    return configured_experiment(values)

  config = training_experiment(read_sizes_of(values.hf))
  apply_overrides(config.roots(), [_one_row_each(topology), *values.set])
  return config


def _one_row_each(topology: Topology) -> str:
  return f'datasets[*].batch_size={topology.num_devices}'


def write_planned_experiment(job: PlanJob, overrides: Sequence[str] = ()) -> list[str]:
  """Writes the file of --write_experiment, with the plan's settings and these further overrides.

  Returns a list of one line about the file; [] without the flag.
  """
  if not job.values.write_experiment:
    return []

  file, settings = job.values.write_experiment, [_one_row_each(job.topology), *job.values.set, *job.fitted, *overrides]
  write_experiment(file, read_sizes_of(job.values.hf), settings, job.topology.name)
  return [f'wrote {file}']


def read_topology(name: str, values: flags.FlagValues) -> Topology:
  """Returns the topology with this name and the network of the flags, corrected by measurements on its kind of chip."""
  found = apply_calibration(parse_topology(name), calibration_file())
  found = found.change_network(values.host_gigabits, values.oversubscription)
  if values.measured:  # --measured compares with a plan without earlier corrections.
    return found
  mode = 'compiled' if values.compile and not missing_compiler(found) else 'analytic'
  return apply_experience(found, experience_file(), mode)


def topologies_of(values: flags.FlagValues) -> list[str]:
  """Returns the names of all topologies in the flags."""
  return [values.topology, *(part.partition('=')[2] for part in values.compare if part.startswith('topology='))]


def more_about(job: PlanJob, found: Plan) -> list[str]:
  """Returns the sections after the plan itself: training cost, comparison, and changes."""
  values = job.values
  sections = training_cost(job, found)
  if values.compare:
    sections.append(format_comparison(found, _other_plan(job)))
  return [*sections, *_changes(job, found)]


def training_cost(job: PlanJob, found: Plan) -> list[str]:
  """Returns lines about the cost of the whole training, of its saves and of its emergency copies."""
  values, copies = job.values, job.config.task.train.emergency_copies
  price = price_of(found, values.tokens, values.price_per_chip_hour, read_interruptions(values))
  lines = [format_price(found, values.tokens, price), _advise_interval(job, found, price), format_copies(found, copies)]
  return [*filter(None, lines)]


def figures_of(job: PlanJob, found: Plan) -> Prediction:
  """Returns the predictions of a plan for `--figures`, including the failures and saves that the flags describe."""
  price, figures = price_of(found, None, None, read_interruptions(job.values)), predict(found)
  if price is None or math.isinf(price.goodput.seconds_to_failure):
    return figures
  return dataclasses.replace(
    figures,
    failure_seconds=price.goodput.seconds_to_failure,
    save_stall_seconds=price.goodput.save_seconds,
    best_save_seconds=price.goodput.save_interval,
  )


def _advise_interval(job: PlanJob, found: Plan, price: Price | None) -> str:
  """Returns a line if the run is long, and its interval between saves is far from the best one; otherwise ''."""
  if price is None or price.seconds < price.goodput.seconds_to_failure:  # No failure is expected.
    return ''
  steps, restart = job.config.task.train.save_interval_steps, read_interruptions(job.values).restart_seconds
  advice = advise_interval(price.goodput, steps * found.step_seconds, restart)
  best = max(1, round(price.goodput.save_interval / found.step_seconds)) if advice else 0
  return advice and (
    f'task.train.save_interval_steps = {steps:,}, every {duration(steps * found.step_seconds)}, is {advice}: about '
    f'{best:,} steps'
  )


def read_interruptions(values: flags.FlagValues) -> Interruptions:
  """Returns the interruptions of a run that the flags describe: failures, restarts, saves and waiting for input."""
  given = {field.name: getattr(values, field.name) for field in dataclasses.fields(Interruptions)}
  return Interruptions(**{name: value for name, value in given.items() if value is not None})


def _changes(job: PlanJob, found: Plan) -> list[str]:
  what_if = WhatIf(configure_task(job.config), found, cache=job.cache, elsewhere=job.elsewhere, report=job.report)
  before, sections = found.memory.peak, []
  if not found.fits:
    ways = what_if.ways_out()
    sections.append(format_changes(ways, before, 'to make it fit') if ways else _more_chips(job))
    if ways and found.is_refused:
      sections.append('the compiler needs more than formulas predict here; plan a change before you rely on it')
  if job.values.what_if:
    largest = [what_if.largest_batch(), what_if.largest_length()] if found.fits else []
    changes = [*what_if.state_changes(), *(change for change in largest if change)]
    sections.append(format_changes(changes, before, 'what if'))
    if less := what_if.less_waiting():
      sections.append(format_changes([less], before, 'to wait less for communication'))
  return sections


def _more_chips(job: PlanJob) -> str:
  """Returns a text that says that no setting near this one fits, and how many chips would be enough."""
  job.report('looking for the number of chips that suffices')
  more = plan_on_more_chips(configure_task(job.config), job.topology)
  nothing = 'no setting near this one fits; use more chips, or --search'
  return nothing if more is None else f'no setting near this one fits on these chips; {format_more_chips(more)}'


def _other_plan(job: PlanJob) -> Plan:
  """Returns the plan that --compare names."""
  named = {part.partition('=')[0]: part.partition('=')[2] for part in job.values.compare if _names(part)}
  overrides = [part for part in job.values.compare if not _names(part)]
  values = copy.deepcopy(job.values)
  values['set'].value = overrides if 'exp' in named else [*values.set, *overrides]
  values['exp'].value = named.get('exp', values.exp)
  topology = job.topology
  if 'topology' in named:
    topology = read_topology(named['topology'], values)
  config = configured_experiment(values)
  is_given = any('mesh_shape' in part for part in values.set) and -1 not in (config.task.ici_mesh_shape or ())
  fitted = [] if is_given else made_to_fit(config.task, topology)[0]
  apply_overrides(config.roots(), fitted)
  other = job._replace(values=values, config=config, topology=topology, fitted=fitted)
  return plan(
    config, None, topology, compile=values.compile, cache=job.cache, elsewhere=other.elsewhere(), report=job.report
  )


def _names(part: str) -> bool:
  return part.startswith(('exp=', 'topology='))
