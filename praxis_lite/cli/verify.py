"""`praxis-lite verify`: compares a small version of an experiment on its mesh with one device."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from praxis_lite.cli.command import Command, configured_experiment
from praxis_lite.cli.command_flags import CommandFlags, add_devices, experiment_flags
from praxis_lite.common.errors import UserError
from praxis_lite.common.jax_internals.flags import add_flags, split_flags

if TYPE_CHECKING:
  from praxis_lite.common.config import Config
  from praxis_lite.training.task import SingleTask

# Programs run only a few times, so XLA partitions them as usual but does not optimize them.
_QUICK_TO_COMPILE = {'xla_backend_optimization_level': '0', 'xla_cpu_use_fusion_emitters': 'false'}
# The prefix of progress lines.
_PROGRESS = 'verify: '
# A run of at least this many steps is verified before training, for at most this many seconds.
_LONG_RUN_STEPS, _MOST_SECONDS = 1000, 20.0


def is_worth_verifying(config: Config[SingleTask], *, is_alone: bool) -> bool:
  """Whether a run is long and uses several devices.

  A mesh size of -1 counts as several, unless the process `is_alone`.
  """
  steps = config.train.num_train_steps
  is_long = isinstance(steps, int) and steps >= _LONG_RUN_STEPS  # A value that is not an integer is reported later.
  if not is_alone and -1 in (config.ici_mesh_shape or ()):
    return is_long
  return is_long and math.prod(config.instantiate().mesh_sizes().values()) > 1


def _assumed_sizes(config: Config[SingleTask], most: int) -> dict[str, int]:
  """Returns the mesh sizes of an experiment; a size of -1 becomes at least 2, so that there are about 8 devices."""
  others = -math.prod(config.ici_mesh_shape or ()) * math.prod(config.dcn_mesh_shape or ())
  return config.instantiate().mesh_sizes(max(min(8, most) // others, 2) * others if others > 0 else None)


def verify_first(experiment: Sequence[str], *, enabled: bool = True) -> None:
  """Verifies the gradients of an experiment in a separate process that does not use the accelerators.

  Args:
    experiment: the flags that name the experiment; see `experiment_arguments`.
    enabled: whether to print a line, with the result or with the reason why there is none. An error is raised anyway.

  Raises:
    UserError: a gradient is wrong; the message names the variable.
  """
  command = [sys.executable, '-m', 'praxis_lite', 'verify', '--quick', '--search_seconds=0', *experiment]
  devices = '--xla_force_host_platform_device_count='
  kept = [flag for flag in split_flags(os.environ.get('XLA_FLAGS', '')) if not flag.startswith(devices)]
  environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ' '.join(kept)}
  try:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_MOST_SECONDS, check=False)
    lines = (done.stdout if done.returncode < 2 else done.stderr).strip().splitlines()
    result = lines[-1] if lines else f'it ended with exit code {done.returncode}'
  except subprocess.TimeoutExpired as error:
    done, result = None, _describe_unfinished(error.stderr, experiment)
  except (OSError, subprocess.SubprocessError) as error:
    done, result = None, str(error)
  if done is not None and done.returncode == 1 and 'wrong: ' in done.stdout:
    wrong = next(line for line in lines if line.startswith('wrong: ')).removeprefix('wrong: ')
    raise UserError(
      f'on this mesh the model does not compute what it computes on one device: {wrong}. `praxis-lite verify '
      f'{experiment[0]}` looks for mappings that are right; --noverify trains anyway'
    )
  if enabled:
    is_right = done is not None and done.returncode == 0
    print(f'verified: {result}' if is_right else f'not verified: {result}', flush=True)


def _describe_unfinished(progress: bytes | str | None, experiment: Sequence[str]) -> str:
  """Returns the message for a verification that timed out: its progress, and the command that runs it in full."""
  text = progress.decode(errors='replace') if isinstance(progress, bytes) else progress or ''
  lines = [line.removeprefix(_PROGRESS) for line in text.splitlines() if line.startswith(_PROGRESS)]
  done = [line for line in lines if line.startswith('compared ')]
  far = '; '.join(done) if done else 'still compiling, nothing was compared' if lines else 'nothing was compared'
  command = shlex.join(['praxis-lite', 'verify', *experiment])
  return f'the check did not finish within {_MOST_SECONDS:.0f} s ({far}); to complete it: {command}'


def _run(values: flags.FlagValues) -> int:
  os.environ['XLA_FLAGS'] = add_flags(os.environ.get('XLA_FLAGS', ''), _QUICK_TO_COMPILE)

  import jax

  from praxis_lite.common.devices import simulate_cpu_devices
  from praxis_lite.common.jax_internals.devices import backends_have_started
  from praxis_lite.instruments.verification import format_verification, verify
  from praxis_lite.instruments.verification.small_mesh import MOST_DEVICES, small_mesh

  most = values.devices or MOST_DEVICES
  if not backends_have_started():  # The import of an experiment's file may have started devices.
    simulate_cpu_devices(max(most, 8))
  config = configured_experiment(values)
  sizes = _assumed_sizes(config.task, most)
  if -1 in (config.task.ici_mesh_shape or ()):
    config.task.ici_mesh_shape = tuple(n // d for n, d in zip(sizes.values(), config.task.dcn_mesh_shape or (1,) * 9))
  needed = math.prod(small_mesh(sizes, most).values())
  if not backends_have_started() or jax.device_count() < needed:
    simulate_cpu_devices(max(needed, 8))  # Processes that already have devices, such as notebooks, often have 8.
  options = {'full': values.full, 'quick': values.quick, 'search_seconds': values.search_seconds}
  found = verify(config, most_devices=most, progress=_report, **options)
  print(format_verification(found))
  return 0 if found.is_right else 1


def _report(line: str) -> None:
  print(f'{_PROGRESS}{line}', file=sys.stderr, flush=True)


def _flags() -> CommandFlags:
  values = experiment_flags()
  add_devices(values)
  values.add_switch('full', 'Keep the sizes of the model, which takes memory and time.')
  values.add_switch('quick', 'Only compare the gradients of one small batch.')
  search = 'If something is wrong, look this many seconds for mappings that are right.'
  values.add_number('search_seconds', search, '300', 60.0, least=0)
  return values


COMMAND = Command(
  'verify',
  'compare an experiment on its mesh with one device',
  'compare what a small version of an experiment computes on its mesh, of simulated CPU devices, with what it computes '
  'on one device: loss, gradients, a step of the optimizer, evaluation and decoding. Names each variable that differs. '
  'Exits with 1 if any differs.',
  "praxis-lite verify lm_sizes.Llama8B --set 'task.ici_mesh_shape=(2,16,4)'",
  _flags(),
  _run,
  bare='exp',
)
