"""Reads the training input for the loop: puts batches on the mesh, waits for them, and reports bad records it skips."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import jax

from praxis_lite.common.figures import number_of
from praxis_lite.common.trees import NestedDict
from praxis_lite.inputs import BaseInput, PrefetchIterator
from praxis_lite.models import BaseModel
from praxis_lite.runs.hooks import Hook
from praxis_lite.runs.nonfinite import Hints, hints_in
from praxis_lite.runs.observer import InputState, Observers, Run
from praxis_lite.runs.records.metrics import DeviceMetrics

_POLL_SECONDS = 0.005
_LOOK_SECONDS = 0.2
_LONG_WAIT_SECONDS = 30.0
_MOST_BAD_RECORDS = 10


class Feed:
  """Prefetches batches of the training input, beginning when it is constructed; a context manager.

  Args:
    data: the training input, already at the position to read from.
    put: puts a batch on the mesh; None leaves batches on the host.
    skip: the batches to skip, each given by the state of the input before it.
  """

  def __init__(
    self,
    data: BaseInput,
    put: Callable[[Any], NestedDict] | None,
    skip: Sequence[InputState],
    observers: Observers,
    line: Callable[[str], object],
    timeout_s: float,
  ):
    self._data = data
    self._batches = PrefetchIterator(data, put, left_out=skip, timeout_s=timeout_s)
    self._batch: NestedDict | None = None
    self._observers = observers
    self._line = line

  def wait(self, step: int, last: jax.Array, stops: Callable[[], bool]) -> bool:
    """Waits for a batch or the end of the input; returns False if `stops()` becomes true before that.

    Args:
      last: an array that the last step computes. Only time after it is computed counts as waiting for input.
    """
    while not self._batches.wait(0.0 if _is_computed(last) else _POLL_SECONDS):
      if _is_computed(last):
        break
    else:
      return True
    started, told = time.monotonic(), False
    with self._observers.measure('waiting'):
      while not self._batches.wait(_LOOK_SECONDS):
        if stops():
          return False
        if not told and time.monotonic() - started > _LONG_WAIT_SECONDS:
          told = True
          left = f'{self._batches.timeout_s - _LONG_WAIT_SECONDS:.0f} s more'
          self._line(f'step {step}: waiting for input for {_LONG_WAIT_SECONDS:.0f} s; the run waits {left}')
    if told:
      self._line(f'step {step}: input resumed after {time.monotonic() - started:.0f} s')
    return True

  def next(self) -> NestedDict | None:
    """Returns the next batch, or None at the end of the input; raises the error that ended reading, if one did."""
    self._batch = next(self._batches, None)
    return self._batch

  @property
  def position(self) -> InputState:
    """The state of the input after the last batch."""
    return self._batches.get_state()

  @property
  def position_before(self) -> InputState:
    """The state of the input before the last batch."""
    return self._batches.state_before

  def hints(self, model: BaseModel) -> Hints:
    """Returns hints about what in the last batch may have led to values that are not finite.

    With several processes, returns empty `Hints`.
    """
    if self._batch is None or jax.process_count() > 1:
      return Hints()
    return hints_in(jax.device_get(self._batch), self._data, model)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc_info: object) -> None:
    self._batches.close()
    if self._batches.hangs:
      self._line(f'{self._data.label}: its reader hangs and was abandoned')


def _is_computed(x: jax.Array) -> bool:
  return bool(cast(Any, x).is_ready())


class BadRecordLines(Hook):
  """Prints the bad records that the training input skips: the first ones one by one, then only their number."""

  def __init__(self, data: BaseInput):
    self._data = data
    self._told = 0

  def on_step(self, run: Run, metrics: DeviceMetrics) -> None:
    bad = self._data.bad_records
    if len(bad) > self._told:
      for record in bad[self._told : _MOST_BAD_RECORDS]:
        run.line(f'{self._data.label}: left out {record}')
      if len(bad) > _MOST_BAD_RECORDS:
        run.line(f'{self._data.label}: left out {number_of(len(bad), "bad record")}; the last is {bad[-1]}')
      self._told = len(bad)
