"""What `praxis-lite train` does about plans: it records a prediction in the run, and ends with what was measured.

The code of runs does not import `instruments/`, so an observer in this file joins the two. On chips with known figures,
it makes the plan by formulas after the last step is saved, so the first step need not wait for the plan. Later plans
for the chip learn from the run. On a CPU there is nothing to predict.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from praxis_lite.common.accelerators import accelerator_of
from praxis_lite.common.errors import UserError, error_summary
from praxis_lite.common.figures import format_axes
from praxis_lite.common.processes import is_primary_process
from praxis_lite.runs.observer import Observer, Run
from praxis_lite.runs.records.certificate import (
  PLAN_FILE,
  Certificate,
  MeasuredSteps,
  Prediction,
  format_certificate,
  measure_steps,
  read_prediction,
  write_prediction,
)

if TYPE_CHECKING:
  from praxis_lite.instruments.plan import Plan

_NORMAL_ENDS = ('done', 'data', 'stopped')  # After a signal, there is no time to make a plan.


class PlanOfRun(Observer):
  """Records the prediction of a run; at the end of the run, prints the prediction next to what was measured.

  The prediction is in a file that `plan --figures` wrote; without a file, it is made by formulas. Raises UserError if
  the file holds no prediction.
  """

  def __init__(self, file: str | None = None):
    self._file = file
    self._given = None if file is None else read_prediction(Path(file))
    self._first_step = 0

  def on_start(self, run: Run) -> None:
    """Raises UserError if the given prediction is for another mesh or other chips."""
    self._first_step = run.step
    if self._given is None:
      return
    mesh = {axis: size for axis, size in self._given.mesh.items() if size > 1}
    if mesh != {axis: size for axis, size in run.mesh.items() if size > 1}:
      what = f'{format_axes(self._given.mesh)}, and this run has {format_axes(run.mesh)}'
      raise UserError(f'--plan={self._file} is for the mesh {what}; make a plan for this mesh')
    if self._given.chip != (chip := _chip_name()):
      raise UserError(f'--plan={self._file} is for {self._given.topology}, and this run is on {chip}; leave it out')
    if is_primary_process():
      write_prediction(run.directory / PLAN_FILE, self._given)

  def on_end(self, run: Run) -> None:
    if not is_primary_process() or run.step == self._first_step or run.ended_by not in _NORMAL_ENDS:
      return
    try:
      measured = measure_steps(run.directory)
      predicted = self._given or _predict(run, measured)
    except UserError:  # Too few steps were logged, or there is no plan of this step.
      return
    except Exception as error:  # An error in a plan must not fail a run that has trained and is saved.
      run.line(f'no plan of this step: {error_summary(error)}')
      return
    if predicted is not None and (text := format_certificate(Certificate(predicted, measured))):
      run.line(text)


def predict(plan: Plan) -> Prediction:
  """Returns the figures of a plan that a run is compared with."""
  limits, collectives = plan.seconds_range or (None, None), plan.cost.collectives
  return Prediction(
    topology=plan.topology.name,
    chip=plan.topology.target.name,
    mesh=dict(plan.mesh),
    mode=plan.mode,
    step_seconds=plan.step_seconds if plan.is_time_known else None,
    least_seconds=limits[0],
    most_seconds=limits[1],
    peak_bytes=float(plan.memory.peak),
    waiting_seconds=sum(c.count * c.exposed for c in collectives),
    fast_bytes=sum(c.count * c.fast_bytes for c in collectives),
    network_bytes=sum(c.count * c.network_bytes for c in collectives),
  )


def _predict(run: Run, measured: MeasuredSteps) -> Prediction | None:
  """Plans the step of a run by formulas, records the prediction, and lets later plans learn from the run.

  Returns None on chips without known figures.
  """
  name = topology_of_run(run)
  if name is None:
    return None

  from praxis_lite.instruments.plan import apply_calibration, calibration_file, parse_topology, plan
  from praxis_lite.instruments.plan.experience import Measurement, experience_file, is_typical, remember

  topology = apply_calibration(parse_topology(name), calibration_file())
  found = plan(run.task, run.batch_struct, topology, compile=False)
  predicted = predict(found)
  write_prediction(run.directory / PLAN_FILE, predicted)
  of_run = Measurement(str(run.directory), *measured)
  if is_typical(found, of_run):
    remember(experience_file(), found, of_run)
  return predicted


def topology_of_run(run: Run) -> str | None:
  """Returns the chips of a run as `--topology` names them; None on a CPU, and on chips without known figures."""
  return topology_of_devices(jax.devices()[0].device_kind, math.prod(run.mesh.values()))


def topology_of_devices(kind: str, count: int) -> str | None:
  """Returns the name in --topology for JAX devices; None if no figures of this kind of device are known."""
  if (found := accelerator_of(kind)) is None:
    return None
  from praxis_lite.instruments.plan.targets import find_target
  from praxis_lite.instruments.plan.topology import nearest_torus

  chips = count // found.devices_per_chip
  if found.kind == 'tpu':
    return f'{found.name}:{"x".join(map(str, nearest_torus(find_target(found.name), chips)))}'
  return f'{found.name}:{chips}'


def _chip_name() -> str:
  kind = jax.devices()[0].device_kind
  found = accelerator_of(kind)
  return kind if found is None else found.name
