"""`praxis-lite check`: reports problems of an experiment's shardings before anything is compiled."""

from __future__ import annotations

import functools

from absl import flags

from praxis_lite.cli.command import Command, configured_experiment, experiment_flags

_MIB = 2**20


def _run(values: flags.FlagValues) -> int:
  from praxis_lite.common.devices import leave_accelerators_alone
  from praxis_lite.instruments.explain import Limits, check, format_problems, has_errors

  leave_accelerators_alone()
  limits = Limits(
    replicated_bytes=int(values.replicated_mib * _MIB),
    wasted_fraction=values.wasted_percent / 100,
    wasted_bytes=int(values.wasted_mib * _MIB),
  )
  problems = check(configured_experiment(values), limits=limits)
  print(format_problems(problems))
  return 1 if has_errors(problems) else 0


def _flags() -> flags.FlagValues:
  values = experiment_flags()
  number = functools.partial(flags.DEFINE_float, lower_bound=0, flag_values=values)
  number('replicated_mib', 64, 'Report replicated weights of this many MiB or more. Example: --replicated_mib=1')
  number('wasted_percent', 10, 'Report arrays and batches with more padding than this. Example: --wasted_percent=5')
  number('wasted_mib', 1, 'Report no padding of fewer MiB than this. Example: --wasted_mib=0')
  return values


COMMAND = Command(
  'check',
  'report problems in the shardings, from shapes alone',
  "look for mistakes in an experiment's shardings, from shapes alone: unknown and unused mesh axes, large replicated "
  'weights, padding, products whose operands do not fit, rules and patterns without effect. Exits with 1 on errors.',
  "praxis-lite check --exp=lm_sizes.Llama8B --set 'task.ici_mesh_shape=(2,16,4)'",
  _flags(),
  _run,
)
