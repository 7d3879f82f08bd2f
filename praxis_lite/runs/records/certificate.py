"""The certificate of a run: what a plan predicted for its steps, compared with what the run measured.

    job_log_dir/plan.json    the prediction; `train` writes it

The measurements are read from the metrics of the last launch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from praxis_lite.common.errors import UserError
from praxis_lite.common.figures import format_bytes, format_seconds
from praxis_lite.common.files import parse_json, read_plain, replace_file
from praxis_lite.runs.records.curves import MetricsTable, read_metrics
from praxis_lite.runs.records.record import read_record

PLAN_FILE = 'plan.json'
_FIRST_LINES = 2  # How many lines at the start of a log are left out, because their times include one-time work.
_FORMAT = 1
_SHORT_SECONDS = 0.01  # Shorter steps may take longer than planned, because the host may be slower than the device.
_LITTLE_MEMORY = 2**28  # In bytes. Peaks below this are not compared: GPU libraries alone take a few hundred MiB.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
  """The predictions of a plan for a step.

  Attributes:
    topology, chip: the chips, in the notation of `--topology`, and the name of one chip.
    mode: 'compiled', or 'analytic' if the plan used formulas.
    step_seconds: seconds of a step; None if unknown.
    least_seconds, most_seconds: the range of `step_seconds`, from the errors of earlier plans; None if unknown.
    waiting_seconds: seconds of a step in which devices wait for communication.
    fast_bytes, network_bytes: the bytes that each device sends in a step, over fast links and over the network between
      hosts.
    failure_seconds: mean seconds between failures of any chip; None if no failures are assumed, or the time of a step
      is unknown.
    best_save_seconds: the best seconds of work between saves (Young, 1974; Daly, 2006).
  """

  topology: str
  chip: str
  mesh: Mapping[str, int]
  mode: str
  step_seconds: float | None
  least_seconds: float | None = None
  most_seconds: float | None = None
  peak_bytes: float
  waiting_seconds: float
  fast_bytes: float
  network_bytes: float
  failure_seconds: float | None = None
  save_stall_seconds: float | None = None
  best_save_seconds: float | None = None


class MeasuredSteps(NamedTuple):
  """The measurements of the last launch of a run.

  Attributes:
    seconds: the typical time of a step, without waits for inputs.
    device_peak: the peak memory of a device in bytes; None if the platform does not report it.
    input_wait: the share of the time in which the run waited for inputs.
  """

  seconds: float
  num_steps: int
  device_peak: float | None
  input_wait: float


class Certificate(NamedTuple):
  """A prediction and its measurement. `measured` is None if the run has logged too few steps."""

  predicted: Prediction
  measured: MeasuredSteps | None

  @property
  def times(self) -> float | None:
    """The ratio of the measured to the predicted time of a step; None on CPUs, or if one of the times is unknown."""
    seconds = self.predicted.step_seconds
    is_order_of_magnitude = self.predicted.chip == 'cpu'
    if self.measured is None or not seconds or is_order_of_magnitude:
      return None
    return self.measured.seconds / seconds

  @property
  def memory(self) -> float | None:
    """The ratio of the measured to the predicted peak memory; None if one of them is unknown."""
    peak = None if self.measured is None else self.measured.device_peak
    return peak / self.predicted.peak_bytes if peak and self.predicted.peak_bytes else None


def write_prediction(path: Path, predicted: Prediction) -> None:
  """Writes a prediction to a file; raises UserError if it cannot be written."""
  try:
    replace_file(path, json.dumps({'format': _FORMAT, **dataclasses.asdict(predicted)}, indent=1) + '\n')
  except OSError as error:
    raise UserError(f'{path} cannot be written: {error.strerror or error}') from None


def read_prediction(path: Path) -> Prediction:
  """Returns the prediction in a file, whose content is untrusted; raises UserError if it contains none."""
  try:
    content = parse_json(read_plain(path))
    if not isinstance(content, dict) or content.pop('format', None) != _FORMAT:
      raise ValueError('it has another format')
    texts: dict[str, Any] = {name: content[name] for name in ('topology', 'chip', 'mode')}
    mesh = content['mesh']
    if not all(isinstance(text, str) for text in texts.values()) or not isinstance(mesh, dict):
      raise ValueError('it has values of another type')
    numbers: dict[str, Any] = {name: _number(content.get(name)) for name in _TIMES}
    numbers |= {name: _number(content[name]) or 0.0 for name in _SIZES}
    return Prediction(**texts, mesh={str(axis): int(size) for axis, size in mesh.items()}, **numbers)
  except (ValueError, TypeError, KeyError) as error:
    raise UserError(f'{path} is no prediction of `praxis-lite plan --figures`: {error}') from None
  except OSError as error:
    raise UserError(f'{path} cannot be read: {error.strerror or error}') from None


_TIMES = (
  'step_seconds',
  'least_seconds',
  'most_seconds',
  'failure_seconds',
  'save_stall_seconds',
  'best_save_seconds',
)
_SIZES = ('peak_bytes', 'waiting_seconds', 'fast_bytes', 'network_bytes')


def _number(value: object) -> float | None:
  if value is None:
    return None
  if type(value) not in (int, float) or not 0 <= float(value) < math.inf:  # type: ignore[arg-type]
    raise ValueError(f'expected a number of at least 0, got {value!r}')
  return float(value)  # type: ignore[arg-type]


def measure_steps(job_log_dir: str | os.PathLike[str], metrics: MetricsTable | None = None) -> MeasuredSteps:
  """Returns what the last launch of a run measured; raises UserError if it logged too few steps, or has no record."""
  metrics = read_metrics(job_log_dir) if metrics is None else metrics
  first = read_record(job_log_dir).launches[-1].step
  too_few = UserError(f'{job_log_dir}: its last launch logged too few steps to measure their time; train longer')
  if 'train/speed/steps_per_second' not in metrics:
    raise too_few
  speeds = metrics.curve('train/speed/steps_per_second')
  of_launch = speeds.steps > first
  if np.sum(of_launch) <= _FIRST_LINES:
    raise too_few
  waits = dict(zip(*metrics.curve('train/speed/input_wait'))) if 'train/speed/input_wait' in metrics else {}
  waited = np.array([waits.get(step, 0.0) for step in speeds.steps])
  seconds = ((1 - waited) / speeds.values)[of_launch][_FIRST_LINES:]
  steps = int(speeds.steps[-1] - speeds.steps[of_launch][_FIRST_LINES - 1])
  peak = metrics.last().get('train/speed/device_peak_bytes')
  return MeasuredSteps(float(np.median(seconds)), steps, peak, float(np.mean(waited[of_launch])))


def read_certificate(job_log_dir: str | os.PathLike[str], metrics: MetricsTable | None = None) -> Certificate | None:
  """Returns the certificate of a run; None if it has no prediction that can be read."""
  file = Path(job_log_dir) / PLAN_FILE
  if not file.is_file():
    return None
  try:
    predicted = read_prediction(file)
  except UserError:
    return None
  try:
    return Certificate(predicted, measure_steps(job_log_dir, metrics))
  except UserError:
    return Certificate(predicted, None)


def format_certificate(certificate: Certificate) -> str:
  """Returns the predicted and measured figures as one line; '' if no predicted figure was measured."""
  predicted, measured = certificate
  parts = []
  if certificate.times is not None and predicted.step_seconds is not None and measured is not None:
    text = f'step {format_seconds(measured.seconds)}, {certificate.times:.2f} x the planned'
    parts.append(f'{text} {format_seconds(predicted.step_seconds)}{_within(predicted, measured)}')
    if predicted.step_seconds < _SHORT_SECONDS and measured.seconds > (predicted.most_seconds or 0.0):
      parts.append('the plan is of the device, and the host limits steps as short as these')
  peak = 0.0 if measured is None else measured.device_peak or 0.0
  if certificate.memory is not None and measured is not None and max(predicted.peak_bytes, peak) >= _LITTLE_MEMORY:
    memory = format_bytes(peak)
    parts.append(f'memory {memory}, {certificate.memory:.2f} x the planned {format_bytes(predicted.peak_bytes)}')
  if not parts:
    return ''
  if communication := format_communication(predicted):
    parts.append(f'as planned, {communication}')
  how = 'formulas' if predicted.mode == 'analytic' else 'the compiled step'
  return f'planned by {how} for {predicted.topology}: {"; ".join(parts)}'


def format_communication(predicted: Prediction) -> str:
  """Returns the planned share of waits for communication, and the bytes that each device sends; '' if it sends none."""
  if not (sent := predicted.fast_bytes + predicted.network_bytes):
    return ''
  share = predicted.waiting_seconds / predicted.step_seconds if predicted.step_seconds else None
  waits = '' if share is None else f'{share:.0%} of a step waits, and '
  network = f', {format_bytes(predicted.network_bytes)} of it over the network' if predicted.network_bytes else ''
  return f'{waits}each device sends {format_bytes(sent)}{network}'


def _within(predicted: Prediction, measured: MeasuredSteps) -> str:
  if predicted.least_seconds is None or predicted.most_seconds is None:
    return ''
  is_within = predicted.least_seconds <= measured.seconds <= predicted.most_seconds
  limits = f'{format_seconds(predicted.least_seconds)} to {format_seconds(predicted.most_seconds)}'
  return f' ({"within" if is_within else "outside"} its range, {limits})'
