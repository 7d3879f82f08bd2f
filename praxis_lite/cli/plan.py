"""`praxis-lite plan`: predicts memory, time and communication of a train step on chips that this machine lacks."""

from __future__ import annotations

from absl import flags

from praxis_lite.cli.command import Command
from praxis_lite.cli.plan_flags import import_jax, plan_flags


def _run(values: flags.FlagValues) -> int:
  import_jax()
  from praxis_lite.cli.plan_run import run_plan

  return run_plan(values)


COMMAND = Command(
  'plan',
  'predict memory and time of a step on chips you do not have',
  "compile an experiment's train step with the compiler of other chips, without having any of them, and print whether "
  'it fits in their memory, how long it takes, what each layer communicates, and what limits it. Exits with 1 if it '
  'does not fit.',
  "praxis-lite plan lm_sizes.Llama8B --topology=h100:8x8 --set 'task.ici_mesh_shape=(1,16,4)'",
  plan_flags(),
  _run,
  bare='exp',
)
