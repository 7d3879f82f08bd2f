"""`praxis-lite plan --measured`: compares a run with its plan."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from praxis_lite.common.errors import UserError

if TYPE_CHECKING:
  from praxis_lite.instruments.plan.experience import Measurement
  from praxis_lite.runs.records.launch import Launch


def check_measured_flags(values: flags.FlagValues) -> None:
  """Raises UserError if --measured has no run to compare. Without --topology, takes the chips of the run.

  If there is neither a run, nor an experiment, nor chips, the command prints the corrections from earlier runs.
  """
  if not values.measured:
    return
  if not values.job_log_dir and not any(values[name].value for name in ('exp', 'hf', 'topology', 'set')):
    return
  if not values.job_log_dir:
    raise UserError('--measured needs --job_log_dir, the directory of a run that has trained')
  for name in ('exp', 'hf', 'set', 'search', 'inference'):
    if values[name].value:
      raise UserError(f'--measured compares a run as it was recorded; leave out --{name}')
  read_measurement(values.job_log_dir)
  values['topology'].value = values.topology or _topology_of(_last_launch(values.job_log_dir))


def read_measurement(job_log_dir: str) -> Measurement:
  """Returns what the last launch of a run measured; raises UserError if it took too few steps."""
  from praxis_lite.instruments.plan.experience import Measurement
  from praxis_lite.runs.records.certificate import measure_steps

  return Measurement(os.path.abspath(job_log_dir), *measure_steps(job_log_dir))


def _last_launch(job_log_dir: str) -> Launch:
  from praxis_lite.runs.records.record import read_record

  return read_record(Path(job_log_dir)).launches[-1]


def _topology_of(launch: Launch) -> str:
  """Returns the chips of a launch, as --topology names them."""
  count, _, kind = launch.devices.partition(' ')
  used = math.prod((launch.mesh or {}).values()) if launch.mesh else int(count)
  if kind == 'cpu':
    return f'cpu:{used}'
  found = topology_of_devices(kind, used)
  if found is None:
    raise UserError(f'--measured: no figures of {kind!r} are known; name similar chips, as in --topology=h100:{used}')
  return found


def topology_of_devices(kind: str, count: int) -> str | None:
  """Returns the name in --topology for JAX devices; None if no figures of this kind of device are known."""
  from praxis_lite.common.accelerators import accelerator_of
  from praxis_lite.instruments.plan.targets import find_target
  from praxis_lite.instruments.plan.topology import nearest_torus

  found = accelerator_of(kind)
  if found is None:
    return None
  chips = count // found.devices_per_chip
  if found.kind == 'tpu':
    return f'{found.name}:{"x".join(map(str, nearest_torus(find_target(found.name), chips)))}'
  return f'{found.name}:{chips}'
