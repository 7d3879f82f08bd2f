"""`praxis-lite verify`: compares an experiment on its mesh, in small, with one device."""

from __future__ import annotations

import math
import os

from absl import flags

from praxis_lite.cli.command import Command, configured_experiment, experiment_flags

# XLA partitions programs as ever, and spends no time on making them fast: they run a few times.
_QUICK_TO_COMPILE = {'xla_backend_optimization_level': '0', 'xla_cpu_use_fusion_emitters': 'false'}


def _run(values: flags.FlagValues) -> int:
  given = os.environ.get('XLA_FLAGS', '')
  added = [f'--{name}={value}' for name, value in _QUICK_TO_COMPILE.items() if name not in given]
  os.environ['XLA_FLAGS'] = ' '.join([given, *added]).strip()

  from praxis_lite.runtime.distributed import simulate_cpu_devices
  from praxis_lite.verification import format_verification, verify
  from praxis_lite.verification.shrink import small_mesh

  most = values.devices or 8
  config = configured_experiment(values)
  needed = math.prod(small_mesh(config.task.instantiate().mesh_sizes(), most).values())
  simulate_cpu_devices(max(needed, most))
  found = verify(config, most_devices=most, full=values.full, quick=values.quick, search_seconds=values.search_seconds)
  print(format_verification(found))
  return 0 if found.is_right else 1


def _flags() -> flags.FlagValues:
  values = experiment_flags()
  full = 'Keep the sizes of the model, which takes memory and time. Example: --full'
  flags.DEFINE_boolean('full', False, full, flag_values=values)
  quick = 'Compare the gradients of one small batch only. Example: --quick'
  flags.DEFINE_boolean('quick', False, quick, flag_values=values)
  search = 'If something is wrong, look so long for mappings that are right. Example: --search_seconds=300'
  flags.DEFINE_float('search_seconds', 60.0, search, lower_bound=0, flag_values=values)
  return values


COMMAND = Command(
  'verify',
  'compare an experiment on its mesh with one device, in small',
  'compare what an experiment computes on its mesh with what it computes on one device: loss, gradients, a step of the '
  'optimizer, evaluation and decoding, in small sizes on simulated CPU devices. Names each variable that differs. '
  'Exits with 1 if one does.',
  "praxis-lite verify --exp=lm_sizes.Llama8B --set 'task.ici_mesh_shape=(2,16,4)'",
  _flags(),
  _run,
)
