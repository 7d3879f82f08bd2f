"""What all commands on an experiment do first: devices, look-up, overrides, checks."""

from __future__ import annotations

from absl import flags

from praxis_lite.errors import UserError
from praxis_lite.experiment import ExperimentConfig


def prepare_devices(count: int | None) -> None:
  """Simulates `count` CPU devices, or leaves the machine's own. Must come before JAX looks for devices."""
  if count is not None:
    from praxis_lite.runtime.distributed import simulate_cpu_devices

    simulate_cpu_devices(count)


def prepare_for_shapes() -> None:
  """For commands that compute nothing: an accelerator is left alone, and no devices are simulated."""
  from praxis_lite.runtime.distributed import leave_accelerators_alone

  leave_accelerators_alone()


def configured_experiment(values: flags.FlagValues) -> ExperimentConfig:
  """Returns the configs of --exp with every --set applied.

  Raises:
    UserError: no such experiment, path or value.
  """
  from praxis_lite import registry
  from praxis_lite.config.overrides import apply_overrides
  from praxis_lite.experiment import configure

  if not values.exp:
    raise UserError('--exp is missing: name an experiment, as in --exp=lm.StdlibLm; `praxis-lite list` prints them')
  config = configure(registry.get(values.exp))
  apply_overrides(config.roots(), values.set)
  return config


def required_job_log_dir(values: flags.FlagValues) -> str:
  """Returns --job_log_dir.

  Raises:
    UserError: it is not given.
  """
  if not values.job_log_dir:
    raise UserError('--job_log_dir is missing: name a directory, as in --job_log_dir=runs/1')
  return values.job_log_dir
