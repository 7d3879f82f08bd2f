"""Catches the signals that end a run, and stops all of its processes after the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

import jax
from jax.experimental import multihost_utils

from praxis_lite.common.interrupts import WaitingHandler


class StopSignals:
  """A context manager that catches the signals that end a run; outside the main thread, it catches nothing.

  SIGTERM (sent by a scheduler that needs the machine) and SIGINT (Ctrl-C) only set a flag, which the training loop
  reads between steps. It then finishes the step, saves and exits. A second signal ends the process immediately.

  With several processes, all must stop after the same step, or some would wait forever in a collective. JAX's
  preemption service ensures this: it catches SIGTERM in any process, and chooses a step that no process has passed yet.

  An evaluation is interrupted in the same way, after a batch on which all agree.

  Attributes:
    received: the name of the signal that this process received; None without one.
    since: when the signal came, by `time.monotonic`.
  """

  def __init__(self) -> None:
    self.received: str | None = None
    self.since: float | None = None
    self._calls = 0
    self._agreed = False
    self._previous: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
    self._several_processes = jax.process_count() > 1

  def requested_now(self) -> bool:
    """Returns whether to stop now; with several processes, all must call this equally often, at the same points."""
    if self._several_processes:
      self._calls += 1
      if multihost_utils.reached_preemption_sync_point(self._calls):
        self._agreed = True
        self.received = self.received or signal.SIGTERM.name
    return self.requested

  @property
  def requested(self) -> bool:
    """Whether to stop; with several processes, what all agreed on when `requested_now` was last called."""
    return self._agreed if self._several_processes else self.received is not None

  def request_of_all(self) -> None:
    """Makes all processes stop after the same step, like a SIGTERM to this process."""
    os.kill(os.getpid(), signal.SIGTERM)

  def __enter__(self) -> StopSignals:
    if threading.current_thread() is threading.main_thread():
      # Our handler would replace the preemption service's own handler of SIGTERM.
      caught = (signal.SIGINT,) if self._several_processes else (signal.SIGTERM, signal.SIGINT)
      self._previous = {s: signal.signal(s, self._handle) for s in caught}
      WaitingHandler.handler = self._handle
    return self

  def __exit__(self, *exc_info: object) -> None:
    for s, handler in self._previous.items():
      signal.signal(s, handler)

  def _handle(self, number: int, frame: FrameType | None) -> None:
    WaitingHandler.note()
    if self.received is not None:
      if os.isatty(1):
        os.write(1, b'\x1b[?25h')  # Shows the cursor, which the progress bar has hidden.
      signal.signal(number, signal.SIG_DFL)
      os.kill(os.getpid(), number)
      return
    self.received, self.since = signal.Signals(number).name, time.monotonic()
    text = f'{self.received}: finishing the step and saving; a second signal ends the run immediately\n'
    if os.isatty(2):
      text = f'\n{text}\n'  # The progress bar redraws the last two lines.
    # Not `print`, because the handler may interrupt another `print`, and buffered files are not re-entrant.
    os.write(2, text.encode())
    if self._several_processes:
      os.kill(os.getpid(), signal.SIGTERM)
