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

_FIRST_LINES = 2  # The first lines of a log include what happens once.


def check_measured_flags(values: flags.FlagValues) -> None:
  """Raises UserError if --measured has no run to compare. Without --topology, takes the chips of the run."""
  if not values.measured:
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
  import numpy as np

  from praxis_lite.instruments.plan.experience import Measurement
  from praxis_lite.runs.records.curves import read_metrics

  metrics = read_metrics(job_log_dir)
  speeds = metrics.curve('train/speed/steps_per_second') if 'train/speed/steps_per_second' in metrics else None
  of_launch = None if speeds is None else speeds.steps > _last_launch(job_log_dir).step
  if speeds is None or of_launch is None or np.sum(of_launch) <= _FIRST_LINES:
    raise UserError(f'{job_log_dir}: its last launch logged too few steps to measure their time; train longer')
  waits = dict(zip(*metrics.curve('train/speed/input_wait')))
  waited = np.array([waits.get(step, 0.0) for step in speeds.steps])
  seconds = ((1 - waited) / speeds.values)[of_launch][_FIRST_LINES:]
  last = metrics.last()
  steps = int(speeds.steps[-1] - speeds.steps[of_launch][_FIRST_LINES - 1])
  peak = last.get('train/speed/device_peak_bytes')
  return Measurement(
    os.path.abspath(job_log_dir), float(np.median(seconds)), steps, peak, float(np.mean(waited[of_launch]))
  )


def _last_launch(job_log_dir: str) -> Launch:
  from praxis_lite.runs.records.record import read_record

  return read_record(Path(job_log_dir)).launches[-1]


def _topology_of(launch: Launch) -> str:
  """Returns the chips of a launch, as --topology names them."""
  from praxis_lite.common.accelerators import accelerator_of
  from praxis_lite.instruments.plan.targets import find_target
  from praxis_lite.instruments.plan.topology import nearest_torus

  count, _, kind = launch.devices.partition(' ')
  used = math.prod((launch.mesh or {}).values()) if launch.mesh else int(count)
  if kind == 'cpu':
    return f'cpu:{used}'
  found = accelerator_of(kind)
  if found is None:
    raise UserError(f'--measured: no figures of {kind!r} are known; name similar chips, as in --topology=h100:{used}')
  chips = used // found.devices_per_chip
  if found.kind == 'tpu':
    return f'{found.name}:{"x".join(map(str, nearest_torus(find_target(found.name), chips)))}'
  return f'{found.name}:{chips}'
