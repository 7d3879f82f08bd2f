"""`praxis-lite train`: trains an experiment, or goes on where an earlier run of the same directory stopped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from absl import flags

from praxis_lite.cli.command import MAX_SEED, Command, compilation_cache_flag, experiment_flags, job_log_dir_flag


def _run(values: flags.FlagValues) -> int:
  from praxis_lite.cli.experiments import configured_experiment, prepare_devices, required_job_log_dir

  job_log_dir = required_job_log_dir(values)
  prepare_devices(values.devices)
  config = configured_experiment(values)

  from praxis_lite.runtime.distributed import initialize_distributed, set_up_compilation_cache
  from praxis_lite.runtime.executor import run_train

  initialize_distributed(values.coordinator_address, values.num_processes, values.process_id)
  set_up_compilation_cache(enabled=values.compilation_cache)
  run_train(config, job_log_dir, seed=values.seed, restore_input=values.restore_input, advise=_warnings)
  return 0


def _warnings(task: Any, batch_struct: Any) -> Iterator[str]:
  """What `check` warns of, on a mesh of several devices."""
  from math import prod

  if prod(task.mesh_sizes().values()) > 1:
    from praxis_lite.explain import check

    yield from map(str, check(task, batch_struct))


def _flags() -> flags.FlagValues:
  values = experiment_flags()
  job_log_dir_flag(values)
  flags.DEFINE_integer(
    'seed',
    0,
    'Seed of the first values and of all that is drawn in training. Example: --seed=1',
    lower_bound=0,
    upper_bound=MAX_SEED,
    flag_values=values,
  )
  flags.DEFINE_boolean(
    'restore_input',
    True,
    'Go on in the training data where the checkpoint left it; --norestore_input starts it anew, for a changed dataset. '
    'Example: --norestore_input',
    flag_values=values,
  )
  compilation_cache_flag(values)
  flags.DEFINE_string(
    'coordinator_address',
    None,
    'With several hosts: host:port of process 0, or auto on a cluster that JAX knows. '
    'Example: --coordinator_address=10.0.0.1:1234',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'num_processes', None, 'With several hosts: how many processes. Example: --num_processes=4', flag_values=values
  )
  flags.DEFINE_integer(
    'process_id', None, 'With several hosts: which of them this is. Example: --process_id=0', flag_values=values
  )
  return values


COMMAND = Command(
  'train',
  'train an experiment. The same command goes on where an earlier run of the same job_log_dir stopped, on any mesh.',
  'praxis-lite train --exp=lm.StdlibLmTiny --job_log_dir=runs/1 --set task.train.num_train_steps=20 --devices=8',
  _flags(),
  _run,
)
