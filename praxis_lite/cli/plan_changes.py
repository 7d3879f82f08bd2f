"""The sections of `praxis-lite plan` beyond one plan: search, comparison, what-if, remedies, and training cost."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from absl import flags

from praxis_lite.cli.command import configured_experiment, experiment_arguments
from praxis_lite.cli.command_flags import CommandFlags
from praxis_lite.common.errors import UserError

if TYPE_CHECKING:
  from praxis_lite.instruments.plan import Plan
  from praxis_lite.instruments.plan.topology import Topology
  from praxis_lite.training.experiment import ExperimentConfig


class PlanJob(NamedTuple):
  """One invocation of `praxis-lite plan`.

  Attributes:
    values: the parsed flags.
    config: config of the experiment, with a fitted mesh.
    topology: the chips.
    fitted: the overrides that fitted the mesh.
    cache: the directory of compiled programs.
    report: called with the name of each stage as it begins.
  """

  values: flags.FlagValues
  config: ExperimentConfig
  topology: Topology
  fitted: Sequence[str]
  cache: Path
  report: Callable[[str], None]

  def elsewhere(self, overrides: Sequence[str] = ()) -> Callable[[], None] | None:
    """Returns a function that compiles the experiment, with these further overrides, in a child process.

    Returns None for simulated devices, for which this process compiles.
    """
    from praxis_lite.instruments.plan.child import compile_in_child

    arguments = experiment_arguments(self.values, [*self.values.set, *self.fitted, *overrides])
    command = [sys.executable, '-m', 'praxis_lite', 'plan', *arguments, f'--topology={self.topology.name}']
    return None if self.topology.target.kind == 'cpu' else lambda: compile_in_child(command, self.cache)


def add_change_flags(values: CommandFlags) -> None:
  search = 'Search for the best mesh, rematerialization and microbatches, and compile the most promising settings.'
  values.add_switch('search', search)
  values.add_integer('verify', 'With --search: how many settings to compile.', 10, 6, least=0)
  values.add_integer('search_seconds', 'With --search: about how long it may take.', 1800, 480, least=1)
  sizes = 'With --search: batch sizes to try too. They change what is learned.'
  values.add_list('batch_sizes', sizes, '128,256')
  compare = 'Also plan it with these overrides, side by side; topology= and exp= name other chips or experiments.'
  values.add_texts('compare', compare, "'task.ici_mesh_shape=(1,64,1)'")
  what_if = 'Print what other moments would save, and the largest batch and length that fit.'
  values.add_switch('what_if', what_if)
  tokens = 'Tokens to train on, for the cost of training; by default 20 for each parameter.'
  values.add_number('tokens', tokens, '1e12', least=1)
  values.add_number('price_per_chip_hour', 'Price of a chip for an hour, for the cost of training.', '2.5', least=0)


def search_table(job: PlanJob) -> tuple[str, bool]:
  """Returns the table of a search, and whether anything fits."""
  from praxis_lite.instruments.plan.searching import format_search, search

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
  return format_search(found), found[0].fits


def more_about(job: PlanJob, found: Plan) -> list[str]:
  """Returns the sections after the plan itself: training cost, comparison, and changes."""
  from praxis_lite.instruments.plan.compare import format_comparison
  from praxis_lite.instruments.plan.price import format_price

  values = job.values
  sections = [format_price(found, values.tokens, values.price_per_chip_hour)]
  if values.compare:
    sections.append(format_comparison(found, _other_plan(job)))
  return [*filter(None, sections), *_changes(job, found)]


def _changes(job: PlanJob, found: Plan) -> list[str]:
  from praxis_lite.instruments.plan.knobs import configure_task
  from praxis_lite.instruments.plan.what_if import WhatIf, format_changes

  what_if = WhatIf(configure_task(job.config), found, cache=job.cache, elsewhere=job.elsewhere, report=job.report)
  before, sections = found.memory.peak, []
  if not found.fits:
    ways = what_if.ways_out()
    nothing = 'no setting near this one fits; use more chips, or --search'
    sections.append(format_changes(ways, before, 'to make it fit') if ways else nothing)
    if ways and found.is_refused:
      sections.append('the compiler needs more than formulas predict here; plan a change before you rely on it')
  if job.values.what_if:
    largest = [what_if.largest_batch(), what_if.largest_length()] if found.fits else []
    changes = [*what_if.state_changes(), *(change for change in largest if change)]
    sections.append(format_changes(changes, before, 'what if'))
    if less := what_if.less_waiting():
      sections.append(format_changes([less], before, 'to wait less for communication'))
  return sections


def _other_plan(job: PlanJob) -> Plan:
  """Returns the plan that --compare names."""
  from praxis_lite.common.config.overrides import apply_overrides
  from praxis_lite.instruments.plan import apply_calibration, calibration_file, parse_topology, plan
  from praxis_lite.instruments.plan.fitting import made_to_fit

  named = {part.partition('=')[0]: part.partition('=')[2] for part in job.values.compare if _names(part)}
  overrides = [part for part in job.values.compare if not _names(part)]
  values = copy.deepcopy(job.values)
  values['set'].value = overrides if 'exp' in named else [*values.set, *overrides]
  values['exp'].value = named.get('exp', values.exp)
  topology = job.topology
  if 'topology' in named:
    topology = apply_calibration(parse_topology(named['topology']), calibration_file())
  config = configured_experiment(values)
  fitted = [] if any('mesh_shape' in part for part in values.set) else made_to_fit(config.task, topology)[0]
  apply_overrides(config.roots(), fitted)
  other = job._replace(values=values, config=config, topology=topology, fitted=fitted)
  return plan(
    config, None, topology, compile=values.compile, cache=job.cache, elsewhere=other.elsewhere(), report=job.report
  )


def _names(part: str) -> bool:
  return part.startswith(('exp=', 'topology='))


def topologies_of(values: flags.FlagValues) -> list[str]:
  """Returns the names of all topologies in the flags."""
  return [values.topology, *(part.partition('=')[2] for part in values.compare if part.startswith('topology='))]
