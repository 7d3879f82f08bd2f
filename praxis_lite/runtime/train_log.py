"""What a training run reports of its steps, without ever waiting for the step just dispatched.

A step's metrics are looked at when a few more steps have been dispatched, so the devices always have work queued.
Looking at them also bounds how far the host runs ahead.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import jax

from praxis_lite.call import Summary
from praxis_lite.errors import UserError
from praxis_lite.runtime.console import Console
from praxis_lite.runtime.flops import count_flops
from praxis_lite.runtime.metrics import mean_values
from praxis_lite.runtime.programs import MAX_STEPS_IN_FLIGHT
from praxis_lite.runtime.startup import StartupTimes
from praxis_lite.runtime.summaries import SummaryWriter
from praxis_lite.runtime.throughput import Throughput, peak_flops
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.steps import TrainStepOutput

# What the learner calls the share of updates that it has skipped because something was not finite: 0 or 1 of one step.
SKIPPED = 'skipped'


class NonFiniteError(UserError):
  """The loss or the gradients of a step are not finite, and the learner is set to raise."""


class _Step(NamedTuple):
  number: int
  metrics: dict[str, tuple[jax.Array, jax.Array]]
  summaries: dict[str, Summary]


class TrainLog:
  """Logs every `log_interval_steps`-th step, the first and the last one, and any step that was not finite.

  Args:
    partitioned: the task that is trained.
    batch_struct: shapes of one global batch.
    console, writer: where to.
    startup: reported with the first step of this process.
    first_step: steps taken before.
  """

  def __init__(
    self,
    partitioned: PartitionedTask,
    batch_struct: Any,
    console: Console,
    writer: SummaryWriter,
    startup: StartupTimes,
    *,
    first_step: int,
  ):
    settings = partitioned.jax_task.train
    self._interval: int = settings.log_interval_steps
    self._last_step: int = settings.num_train_steps
    self._raises: bool = partitioned.jax_task.learner.on_nonfinite == 'raise'
    self._console = console
    self._writer = writer
    self._startup = startup
    self._first_step = first_step
    self._in_flight: deque[_Step] = deque()
    self._throughput = Throughput(
      batch_struct, flops_per_step=_model_flops(partitioned), devices=partitioned.mesh.devices.flat
    )

  def add(self, step: int, out: TrainStepOutput) -> None:
    """Takes the outputs of `step`, the number of steps now taken, just dispatched.

    Raises:
      NonFiniteError: a step before it was not finite and the learner is set to raise.
    """
    self._in_flight.append(_Step(step, out.mean_metrics, out.summaries if self._is_logged(step) else {}))
    if step == self._first_step + 1:
      jax.block_until_ready(out.weighted_loss)
      self._startup.mark('first step')
      self._console.line(self._startup.report())
      self.drain()
      self.restart_clock(step)
    while len(self._in_flight) > MAX_STEPS_IN_FLIGHT:
      self._look_at(self._in_flight.popleft())

  def drain(self) -> None:
    """Waits for all steps dispatched, and logs them.

    Raises:
      NonFiniteError: as `add`.
    """
    while self._in_flight:
      self._look_at(self._in_flight.popleft())

  def restart_clock(self, step: int) -> None:
    """Leaves what has passed since the last step, an evaluation say, out of the speeds; call after `drain`."""
    self._throughput.restart(step)

  def _is_logged(self, step: int) -> bool:
    return step % self._interval == 0 or step in (self._first_step + 1, self._last_step)

  def _look_at(self, done: _Step) -> None:
    if SKIPPED in done.metrics and float(done.metrics[SKIPPED][0]) > 0:
      self._report_nonfinite(done.number)
    elif SKIPPED not in done.metrics:
      jax.block_until_ready(done.metrics)
    if not self._is_logged(done.number):
      return
    metrics = mean_values(done.metrics)
    rates = self._throughput.rates(done.number)
    self._console.train_step(done.number, metrics, rates)
    speeds = rates.as_metrics() if rates else {}
    self._writer.write(done.number, 'train', {**metrics, **speeds}, jax.device_get(done.summaries))

  def _report_nonfinite(self, step: int) -> None:
    if self._raises:
      raise NonFiniteError(
        f'step {step}: the loss or a gradient is not finite, and task.train.learner is set to raise; lower the '
        'learning rate, clip gradients, or let it skip such steps. The checkpoints before this step are untouched'
      )
    self._console.line(f'step {step}: the loss or a gradient is not finite; the update was skipped')


def _model_flops(partitioned: PartitionedTask) -> float | None:
  """Operations of a training step: the forward pass, and twice that backward. None where no peak is known."""
  # Counting means tracing, so it is done only where the count will be compared to a peak.
  if not all(peak_flops(device) for device in partitioned.mesh.devices.flat):
    return None
  step = partitioned.eval_step
  return 3 * count_flops(step.jitted.trace(*step.arguments).jaxpr)
