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

from tools.gpu.case import Case

Options = dict[str, Any]


class Request(NamedTuple):
  """What a turn is asked for.

  Attributes:
    case: the fields of a `Case`.
    trials: settings, each {'batch': rows, 'options': of the side}.
    groups, steps: groups that are timed, and steps of a group.
    losses: number of first steps whose losses are returned.
    searching: trials that only find the best setting: it ends when memory does, or at the first slower trial.
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
  """What a setting gave.

  Attributes:
    batch, options: the setting.
    error: why it gave nothing; '' if it did not fail.
    losses: of the first steps.
    first_step_s: seconds from the start of the process, or of a later trial, to the end of its first step.
    step_s: seconds of a step, of each group.
    peak_bytes: the most memory of the device that was in use, in this process.
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

  def prepare(self, case: Case, batch: int, options: Options) -> None:
    """Makes the first state, and compiles the step or has it compiled at its first call."""

  def step(self, number: int) -> Any:
    """Takes a step with its tokens, without waiting for it, and returns its loss."""

  def value(self, loss: Any) -> float:
    """Waits for a loss and all that comes before it."""

  def release(self) -> None:
    """Lets go of all memory of the device."""

  def peak_bytes(self) -> int:
    """See `Measured`."""

  def versions(self) -> dict[str, str]:
    """See `Measured`."""


def main(side: Side) -> None:
  """Takes the turn that the first argument asks for."""
  request = Request(**json.loads(sys.argv[1]))
  case, best, began = Case(*request.case), 0.0, request.started_at
  for trial in request.trials:
    found = measured(side, case, request, began, **trial)
    print(json.dumps(found._asdict()), flush=True)
    speed = 0.0 if found.error else found.batch / statistics.median(found.step_s)
    if found.error or (request.searching and speed < 1.01 * best):
      break
    best, began = speed, time.time()


def measured(side: Side, case: Case, request: Request, began: float, batch: int, options: Options) -> Measured:
  """Measures one setting."""
  try:
    side.prepare(case, batch, options)
    losses = [side.value(side.step(0))]
    first = time.time() - began
    losses += [side.value(side.step(i)) for i in range(1, request.losses)]
    number, seconds = request.losses, []
    for group in range(request.groups + 1):  # The first one is warm-up.
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
