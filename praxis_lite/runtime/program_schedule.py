"""When evaluation and decoding run, and where their results go. Each runs at most once a step, also over restarts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from praxis_lite.runtime.console import Console, metrics_line
from praxis_lite.runtime.metrics import HostMetrics
from praxis_lite.runtime.programs import DecodeProgram, EvalProgram
from praxis_lite.runtime.signals import StopSignals
from praxis_lite.runtime.summaries import SummaryWriter
from praxis_lite.runtime.variables import eval_variables
from praxis_lite.training.state import TrainState

Program = EvalProgram | DecodeProgram


class Programs:
  """The eval and decode programs of a training run.

  Args:
    evaluation, decoding: the programs, run in this order.
    console, writer: where results go.
    stop: a signal cuts them short.
    first_step: steps taken before this process; what the writer already has of that step is not run again.

  Attributes:
    metrics: the latest results by split.
  """

  def __init__(
    self,
    evaluation: Sequence[EvalProgram],
    decoding: Sequence[DecodeProgram],
    console: Console,
    writer: SummaryWriter,
    stop: StopSignals,
    *,
    first_step: int,
  ):
    self.metrics: dict[str, HostMetrics] = {}
    self._evaluation = evaluation
    self._decoding = decoding
    self._console = console
    self._writer = writer
    self._stop = stop
    self._done_at: dict[str, int] = {}
    programs: list[Program] = [*evaluation, *decoding]
    for program in programs:
      if _agreed(writer.was_written(program.split)):
        self._done_at[program.split] = first_step

  def evaluate(self, step: int, state: TrainState) -> None:
    """Evaluates all inputs, unless that has been done at this step."""
    self._run(self._evaluation, step, state)

  def decode(self, step: int, state: TrainState) -> None:
    """Decodes all inputs, unless that has been done at this step."""
    self._run(self._decoding, step, state)

  def _run(self, programs: Sequence[Program], step: int, state: TrainState) -> None:
    for program in programs:
      if self._done_at.get(program.split) == step:
        continue
      variables = eval_variables(state, use_ema=program.use_ema)
      result = program.run(variables, state.step, self._stop.interrupts)
      if result is None:
        return
      self._done_at[program.split] = step
      self.metrics[program.split] = result.metrics
      self._console.line(result_line(step, program, result))
      self._writer.write(step, program.split, result.metrics, result.summaries)


def result_line(step: int, program: Program, result: Any) -> str:
  """Returns what the console shows of a result."""
  batches = '1 batch' if result.num_batches == 1 else f'{result.num_batches} batches'
  note = f'{batches}, {result.seconds:.1f} s'
  if isinstance(program, DecodeProgram):
    note = f'{note}, {program.output_path(step)}'
  return metrics_line(step, program.split, result.metrics, note)


def _agreed(value: bool) -> bool:
  """What process 0, which has read the files, says: all must run the same programs."""
  if jax.process_count() == 1:
    return value
  return bool(multihost_utils.broadcast_one_to_all(np.asarray(value)))
