"""`praxis-lite show`: prints an experiment's config and parameter table, from shapes alone, without a device."""

from __future__ import annotations

import functools

from absl import flags

from praxis_lite.cli.command import Command, configured_experiment, experiment_flags
from praxis_lite.errors import UserError


def _run(values: flags.FlagValues) -> int:
  from praxis_lite.config.json import to_json
  from praxis_lite.config.text import to_text
  from praxis_lite.runtime.distributed import leave_accelerators_alone

  if values.html == '':
    raise UserError('--html is empty: name a file, as in --html=sharding.html')
  leave_accelerators_alone()
  config = configured_experiment(values)
  if values.json:
    print(to_json(config.roots()))
    return 0
  if values.sharding or values.html:
    from praxis_lite.explain import check, explain_task, format_report

    report = explain_task(config)
    if values.sharding:
      print(format_report(report))
    if values.html:
      from praxis_lite.explain.page import write_page

      print(f'wrote {write_page(values.html, report, values.exp, check(config))}')
    return 0
  parts = []
  if values.config:
    parts.append(to_text(config.roots()).rstrip())
  if values.parameters:
    from praxis_lite.explain import format_parameter_table, parameter_table

    task = config.task.instantiate()
    sizes = task.mesh_sizes()
    parts.append(format_parameter_table(parameter_table(task, sizes), sizes))
  print('\n\n'.join(parts))  # At the end, so that an error in the config is all that is printed.
  return 0


def _flags() -> flags.FlagValues:
  values = experiment_flags()
  switch = functools.partial(flags.DEFINE_boolean, flag_values=values)
  switch('config', True, 'Print the config. Example: --noconfig')
  switch('parameters', True, 'Print the parameter table. Example: --noparameters')
  switch('json', False, 'Print the config as JSON instead. Example: --json')
  split = 'Print instead how each parameter, optimizer slot, activation and input is split, and why.'
  switch('sharding', False, f'{split} Example: --sharding')
  page = 'Write the output of --sharding as an HTML page with diagrams. Example: --html=sharding.html'
  flags.DEFINE_string('html', None, page, flag_values=values)
  return values


COMMAND = Command(
  'show',
  'print the config and parameters, from shapes alone',
  "print an experiment's config, and for each parameter its path, shape, split over the mesh, shape on each device, "
  'padding and bytes, with totals. Works for models of any size: no arrays are allocated.',
  "praxis-lite show --exp=lm_sizes.Llama8B --set 'task.ici_mesh_shape=(1,8,8)'",
  _flags(),
  _run,
)
