"""The log of a training run: chooses the steps that the console and the curves on disk show, and reads their metrics.

The log reads the metrics of a step after a few more steps have been dispatched, so that the devices always have work.
Reading the metrics also bounds how far the host runs ahead.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import jax

from praxis_lite.common.jax_internals import reading, unless_unknown
from praxis_lite.inputs.rows import Struct
from praxis_lite.layers.base.call import Summary
from praxis_lite.runs.console import Console
from praxis_lite.runs.nonfinite import Hints, SkippedSteps
from praxis_lite.runs.observer import InputState, Observer, Observers, PauseReason, Run
from praxis_lite.runs.programs import InputProgram, ProgramResult
from praxis_lite.runs.records.metrics import MAX_STEPS_IN_FLIGHT, SummaryWriter, mean_values
from praxis_lite.runs.records.run_config import is_logged
from praxis_lite.runs.throughput import StartupTimes, Throughput, peak_flops
from praxis_lite.training.flops import model_flops
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.steps import TrainStepOutput
from praxis_lite.training.taps import finish_summaries


class _Step(NamedTuple):
  number: int
  metrics: dict[str, tuple[jax.Array, jax.Array]]
  summaries: dict[str, Summary]
  rows: int | None


class TrainLog(Observer):
  """Logs every `log_interval_steps`-th step, the first and the last step, and steps that were not finite.

  The first and the last step of each launch are logged, too, so that a run that ends early has its last loss.

  If several steps in a row are skipped, the console shows the first one, and then only their number.

  Args:
    rows_after: returns the number of rows in the next batch, given the state of the input before it; None if all
      batches have the same number of rows.
    observers: notified of a step's metrics once these are computed; their figures are logged with the metrics.
  """

  def __init__(
    self,
    partitioned: PartitionedTask,
    batch_struct: Struct,
    console: Console,
    writer: SummaryWriter,
    startup: StartupTimes,
    *,
    first_step: int,
    observers: Observers | None = None,
    rows_after: Callable[[InputState], int] | None = None,
  ):
    settings = partitioned.jax_task.train
    self._is_due = functools.partial(is_logged, interval=settings.log_interval_steps, total=settings.num_train_steps)
    self._console = console
    self._writer = writer
    self._startup = startup
    self._first_step = first_step
    # The last step, and whether it was skipped; None if the last step is in the log.
    self._unlogged: tuple[_Step, bool] | None = None
    self._rows_after = rows_after
    self._observers = observers or Observers(Observer())
    learner, limit = partitioned.jax_task.learner, settings.max_skipped_steps
    raises, clip = learner.on_nonfinite == 'raise', learner.clip_gradient_norm_to_value
    self.skipped = SkippedSteps(
      first_step, limit, raises, clip, console.line, self._report_nonfinite, learner.rate_field
    )
    self._in_flight: deque[_Step] = deque()
    self._throughput = Throughput(
      batch_struct, flops_per_step=_model_flops(partitioned), devices=partitioned.mesh.devices.flat
    )

  def on_step(self, run: Run, out: TrainStepOutput, read_from: InputState) -> None:
    self.add(run.step, out, None if self._rows_after is None else self._rows_after(read_from))

  def on_evaluation(self, run: Run, program: InputProgram, result: ProgramResult) -> None:
    self._console.line(program.result_line(run.step, result))
    self._writer.write(run.step, program.split, result.metrics, result.summaries)

  def on_pause(self, run: Run, reason: PauseReason) -> None:
    self.drain()
    if run.is_over and self._unlogged is not None:
      self._log(*self._unlogged)

  def on_resume(self, run: Run) -> None:
    self._throughput.restart(run.step)  # The time of an evaluation or a save does not count as training.

  def failure(self, run: Run) -> Callable[[Hints], Exception] | None:
    skipped = self.skipped
    return skipped.error if skipped.too_many or (run.is_over and skipped.most_steps) else None

  def add(self, step: int, out: TrainStepOutput, rows: int | None = None) -> None:
    """Adds the outputs of step `step`, which has just been dispatched with a batch of `rows` rows.

    Raises NonFiniteError if an earlier step was not finite and the learner is set to raise.
    """
    self._in_flight.append(_Step(step, out.mean_metrics, out.summaries if self._is_logged(step) else {}, rows))
    if step == self._first_step + 1:
      jax.block_until_ready(out.weighted_loss)
      self._startup.mark('run')
      self._console.line(self._startup.report())
      self.drain()
      self._throughput.restart(step)
    self._read_all_but(MAX_STEPS_IN_FLIGHT)

  def drain(self) -> None:
    """Waits for all dispatched steps, and logs them; raises NonFiniteError, like `add`."""
    self._read_all_but(0)

  def _report_nonfinite(self, step: int, what: str) -> None:
    for observer in self._observers:
      observer.on_nonfinite(step, what)

  def _is_logged(self, step: int) -> bool:
    return self._is_due(step) or step == self._first_step + 1

  def _read_all_but(self, count: int) -> None:
    while len(self._in_flight) > count:
      step = self._in_flight.popleft()
      if step.rows is not None:
        self._throughput.add_rows(step.rows)
      was_skipped = self.skipped.add(step.number, step.metrics)
      for observer in () if was_skipped else self._observers:
        observer.on_metrics(step.number, step.metrics)
      self._unlogged = step, was_skipped
      if self._is_logged(step.number):
        self._log(step, was_skipped)

  def _log(self, step: _Step, was_skipped: bool) -> None:
    self._unlogged = None
    rates = self._throughput.rates(step.number)
    metrics = {**mean_values(step.metrics), **(rates.to_metrics() if rates else {}), **self._observers.figures()}
    if was_skipped:
      self._console.progress(step.number)
    else:
      self._console.train_step(step.number, metrics, rates)
    self._writer.write(step.number, 'train', metrics, finish_summaries(jax.device_get(step.summaries)))


def _model_flops(partitioned: PartitionedTask) -> float | None:
  """Returns the number of floating-point operations in a training step; None if a device's peak rate is unknown."""
  # Counting needs a trace, so it is done only if the peak rate of all devices is known.
  if not all(map(peak_flops, partitioned.mesh.devices.flat)):
    return None

  def count() -> float:
    with reading('a traced step'):
      return model_flops(partitioned)

  return unless_unknown('no share of the peak FLOP/s', count, None)
