"""`praxis-lite train`: trains an experiment, or resumes an earlier run of the same directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from absl import flags

from praxis_lite.cli.command import (
  Command,
  compilation_cache_flag,
  configured_run,
  experiment_flags,
  job_log_dir_flag,
  seed_flag,
)

if TYPE_CHECKING:
  from praxis_lite.task import SingleTask


def _run(values: flags.FlagValues) -> int:
  config, job_log_dir = configured_run(values)

  from praxis_lite.runtime.distributed import initialize_distributed, set_up_compilation_cache
  from praxis_lite.runtime.executor import run_train

  initialize_distributed(values.coordinator_address, values.num_processes, values.process_id)
  set_up_compilation_cache(enabled=values.compilation_cache)
  run_train(config, job_log_dir, seed=values.seed, restore_input=values.restore_input, advise=_warnings)
  return 0


def _warnings(task: SingleTask, batch_struct: Mapping[str, object]) -> Iterator[str]:
  """Yields the problems that `check` reports, on a mesh of several devices."""
  from math import prod

  if prod(task.mesh_sizes().values()) > 1:
    from praxis_lite.explain import check

    yield from map(str, check(task, batch_struct))


def _flags() -> flags.FlagValues:
  values = experiment_flags()
  job_log_dir_flag(values)
  seed_flag(values, 'Seed of the initial values and of all random draws in training. Example: --seed=1')
  flags.DEFINE_boolean(
    'restore_input',
    True,
    'Resume the training data where the checkpoint left it; --norestore_input starts at its beginning, for a changed '
    'dataset. '
    'Example: --norestore_input',
    flag_values=values,
  )
  compilation_cache_flag(values)
  flags.DEFINE_string(
    'coordinator_address',
    None,
    'With several hosts: host:port of process 0, or auto on a cluster that JAX recognizes. '
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
  'train an experiment. If job_log_dir has checkpoints, training resumes from the newest, on any mesh.',
  'praxis-lite train --exp=lm.StdlibLmTiny --job_log_dir=runs/1 --set task.train.num_train_steps=20 --devices=8',
  _flags(),
  _run,
)
