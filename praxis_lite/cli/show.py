"""`praxis-lite show`: prints a summary of an experiment or run, its config and its parameters. Needs only shapes."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from absl import flags

from praxis_lite.cli.command import Command, configured_experiment, configured_shapes, say_how_config_differs
from praxis_lite.cli.command_flags import CommandFlags, add_devices, experiment_flags
from praxis_lite.cli.plan_flags import import_jax, prepare
from praxis_lite.common.errors import UserError

if TYPE_CHECKING:
  from praxis_lite.instruments.explain import ShardingReport
  from praxis_lite.training.experiment import ExperimentConfig


def _run(values: flags.FlagValues) -> int:
  if values.compiled:
    import_jax()
  from praxis_lite.common.config.json import to_json
  from praxis_lite.common.config.text import diff_texts, to_text, to_text_of_changes

  for flag, example in (('html', 'a file, as in --html=sharding.html'), ('diff', 'an experiment or a run')):
    if values[flag].value == '':
      raise UserError(f'--{flag} is empty: name {example}')
  if values.compiled:
    if values.devices is not None:
      raise UserError('--devices: --compiled names the chips and their number; leave out --devices')
    from praxis_lite.instruments.plan import parse_topology

    prepare(parse_topology(values.compiled))
  config = configured_experiment(values) if values.compiled else configured_shapes(values)
  say_how_config_differs(values, config)
  roots = config.roots()
  if values.diff:
    lines = diff_texts(to_text(roots), _text_of(values.diff), folded=not values.all)
    print('\n'.join(lines) if lines else 'their configs are equal')
    return 0
  if values.json:
    print(to_json(roots))
    return 0
  if values.sharding or values.html or values.compiled:
    from praxis_lite.instruments.explain import check, explain_task, format_report

    report = _explain_compiled(config, values.compiled) if values.compiled else explain_task(config)
    if values.sharding or values.compiled:
      print(format_report(report))
      print('\nThe last column names fields of layers; --set takes them below task.model')
    if values.html:
      from praxis_lite.instruments.explain.page import write_page

      print(f'wrote {write_page(values.html, report, values.exp or values.job_log_dir, check(config))}')
    return 0

  from praxis_lite.instruments.explain import format_parameter_table, parameter_table, summarize
  from praxis_lite.instruments.explain.growth import format_growth

  parts = [summarize(config), *_made_by(values)] if values.summary else []
  if values.config:
    parts.append(to_text(roots) if values.all else to_text_of_changes(roots))
  if values.parameters:
    task = config.task.instantiate()
    sizes = task.mesh_sizes()
    parts.append(format_parameter_table(parameter_table(task, sizes), sizes))
    parts += filter(None, [format_growth(task)])
  print('\n\n'.join(parts))  # Print only now, so that a config error is the only output.
  return 0


def _explain_compiled(config: ExperimentConfig, name: str) -> ShardingReport:
  """Explains how the compiler of the chips `name` split the arrays of a step. Uses a cached program if there is one."""
  from praxis_lite.cli.plan_flags import cache_of_plans
  from praxis_lite.instruments.explain import explain_task
  from praxis_lite.instruments.plan import plan

  found = plan(config, None, name, cache=cache_of_plans())
  if found.mode != 'compiled':
    raise UserError(f'--compiled: {found.failure}')
  report = explain_task(config)
  return dataclasses.replace(report, activations=list(found.activations))


def _made_by(values: flags.FlagValues) -> list[str]:
  """Returns a list with one text: the commands that made and resumed a run. For an experiment, the list is empty."""
  from praxis_lite.common.errors import first_lines
  from praxis_lite.runs.records.record import read_record

  commands = [] if values.exp else read_record(values.job_log_dir).commands
  lines = [f'{"resumed by" if i else "made by"}  {command}' for i, command in enumerate(commands)]
  return ['\n'.join(first_lines(lines))] if lines else []


def _text_of(name: str) -> str:
  """Returns the config of an experiment, or the recorded config of a run, as text; raises UserError without either."""
  from praxis_lite.common.config.text import to_text
  from praxis_lite.runs.records.record import has_record, read_record
  from praxis_lite.runs.records.runs import runs_near
  from praxis_lite.training import registry
  from praxis_lite.training.experiment import configure

  if not has_record(name) and '.py' not in name and ('/' in name or os.path.isdir(name)):
    raise UserError(f'--diff: there is no experiment {name!r}, and no run{runs_near(name)}')
  return read_record(name).text if has_record(name) else to_text(configure(registry.get(name)).roots())


def _flags() -> CommandFlags:
  values = experiment_flags()
  add_devices(values, 'Number of devices, for a mesh with a size of -1.')
  values.add_switch('summary', 'Print the summary.', default=True)
  values.add_switch('config', 'Print the fields of the config that differ from the defaults.', default=True)
  fields = 'Print all fields of the config; with --diff, also those inside of configs that only one side has.'
  values.add_switch('all', fields)
  values.add_switch('parameters', 'Print the parameter table.', default=True)
  other = "Only print how the config differs from another experiment's or run's: its value -> the other value."
  values.add_text('diff', other, 'runs/1')
  values.add_switch('json', 'Only print the config, as JSON.')
  split = 'Only print how each parameter, optimizer slot, activation and input is split, and why.'
  values.add_switch('sharding', split)
  compiled = 'Like --sharding, with the splits of activations that the compiler of these chips chose.'
  values.add_text('compiled', compiled, 'h100:8x8')
  values.add_text('html', 'Write the output of --sharding as an HTML page with diagrams.', 'sharding.html')
  return values


COMMAND = Command(
  'show',
  'print the config and parameters, from shapes only',
  'print a summary of an experiment or run; the fields of its config that differ from the defaults of their classes; '
  'and for each parameter its path, shape, split over the mesh, shape on each device, padding and bytes, with totals. '
  'No arrays are allocated, so it works for models of any size.',
  "praxis-lite show lm_sizes.Llama8B --set 'task.ici_mesh_shape=(1,8,8)'",
  _flags(),
  _run,
  bare='exp',
)
