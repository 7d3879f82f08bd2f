"""`praxis-lite check`: reports problems of an experiment's shardings before anything is compiled."""

from __future__ import annotations

from absl import flags

from praxis_lite.cli.command import Command, configured_shapes
from praxis_lite.cli.command_flags import CommandFlags, add_devices, experiment_flags

_MIB = 2**20


def _run(values: flags.FlagValues) -> int:
  from praxis_lite.instruments.explain import WarningLimits, check, format_problems, has_errors

  limits = WarningLimits(
    replicated_bytes=int(values.replicated_mib * _MIB),
    wasted_fraction=values.wasted_percent / 100,
    wasted_bytes=int(values.wasted_mib * _MIB),
  )
  problems = check(configured_shapes(values), limits=limits)
  print(format_problems(problems))
  return 1 if has_errors(problems) else 0


def _flags() -> CommandFlags:
  values = experiment_flags()
  add_devices(values, 'Number of devices, for a mesh with a size of -1.')
  replicated = 'Report weights of at least this many MiB that are on every device.'
  values.add_number('replicated_mib', replicated, '1', 64, least=0)
  values.add_number(
    'wasted_percent', 'Report arrays and batches with more than this percentage of padding.', '5', 10, least=0
  )
  values.add_number('wasted_mib', 'Only report padding of at least this many MiB.', '0', 1, least=0)
  return values


COMMAND = Command(
  'check',
  'report problems in the shardings, from shapes only',
  "look for mistakes in an experiment's shardings, from shapes only: unknown and unused mesh axes, large replicated "
  'weights, padding, products whose operands are split differently, rules and patterns without effect. Exits with 1 '
  'if there are errors.',
  "praxis-lite check lm_sizes.Llama8B --set 'task.ici_mesh_shape=(2,16,4)'",
  _flags(),
  _run,
  bare='exp',
)
