"""One turn of an implementation: a process that trains with some settings, and prints its measurements.

Each turn is a separate process, so that it has the whole memory of the device, and its own peak. It is started with a
JSON object, and prints one for each setting:

    python tools/gpu/torch_side.py '{"case": [...], "trials": [{"batch": 8, "options": {}}], "groups": 5, ...}'

Steps are timed in groups: the host waits for the device only at the end of a group, as in a training loop.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any, NamedTuple, Protocol

from tools.gpu.case import ModelCase

Options = dict[str, Any]


class TurnRequest(NamedTuple):
  """The argument of a turn.

  Attributes:
    case: the fields of a `ModelCase`.
    trials: settings, each {'batch': rows, 'options': options of the implementation}.
    groups, steps: the number of timed groups, and of steps in a group.
    losses: the number of first steps whose losses are returned.
    searching: whether trials only search for the best setting. If so, they end when memory is exhausted, or after the
      first trial that is not at least 1 % faster than the one before.
    started_at: `time.time()` when the process was started.
  """

  case: list[Any]
  trials: list[dict[str, Any]]
  groups: int
  steps: int
  losses: int = 3
  searching: bool = False
  started_at: float = 0.0


class Measured(NamedTuple):
  """The measurements of one setting.

  Attributes:
    batch, options: the setting.
    error: why it could not be measured; '' if it could.
    losses: the losses of the first steps.
    first_step_s: seconds from the start of the process, or of a later trial, to the end of its first step.
    step_s: seconds of a step, for each group.
    peak_bytes: the largest memory of the device that this process has used.
    versions: of packages and of the device.
  """

  batch: int
  options: Options
  error: str = ''
  losses: list[float] = []
  first_step_s: float = 0.0
  step_s: list[float] = []
  peak_bytes: int = 0
  versions: dict[str, str] = {}


class Side(Protocol):
  """A program that trains the model of a case."""

  def prepare(self, case: ModelCase, batch: int, options: Options) -> None:
    """Makes the first state, and compiles the step, or arranges that its first call compiles it."""

  def step(self, number: int) -> Any:
    """Takes a step with its tokens, without waiting for it, and returns its loss."""

  def value(self, loss: Any) -> float:
    """Returns a loss as a number, after waiting for it and all earlier work."""

  def release(self) -> None:
    """Frees all memory of the device."""

  def peak_bytes(self) -> int:
    """See `Measured`."""

  def versions(self) -> dict[str, str]:
    """See `Measured`."""


def main(side: Side) -> None:
  """Takes the turn that the first argument asks for."""
  request = TurnRequest(**json.loads(sys.argv[1]))
  case, best, began = ModelCase(*request.case), 0.0, request.started_at
  for trial in request.trials:
    found = measure_setting(side, case, request, began, **trial)
    print(json.dumps(found._asdict()), flush=True)
    speed = 0.0 if found.error else found.batch / statistics.median(found.step_s)
    if found.error or (request.searching and speed < 1.01 * best):
      break
    best, began = speed, time.time()


def measure_setting(
  side: Side, case: ModelCase, request: TurnRequest, began: float, batch: int, options: Options
) -> Measured:
  """Measures one setting."""
  try:
    side.prepare(case, batch, options)
    losses = [side.value(side.step(0))]
    first = time.time() - began
    losses += [side.value(side.step(i)) for i in range(1, request.losses)]
    number, seconds = request.losses, []
    for group in range(request.groups + 1):  # The first group is a warm-up.
      start = time.perf_counter()
      for _ in range(request.steps):
        loss = side.step(number)
        number += 1
      side.value(loss)
      if group:
        seconds.append((time.perf_counter() - start) / request.steps)
    return Measured(batch, options, '', losses, first, seconds, side.peak_bytes(), side.versions())
  except (RuntimeError, MemoryError, NotImplementedError) as error:
    return Measured(batch, options, f'{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}')
  finally:
    side.release()
