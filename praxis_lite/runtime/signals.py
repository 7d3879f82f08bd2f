"""Stopping a run from outside: finish the step, save, exit.

SIGTERM (a scheduler that wants the machine back) and SIGINT (Ctrl-C) only set a flag, which the training loop reads
between steps. A second signal ends the process at once.

With several processes all must stop after the same step, or the others would wait for ever in a collective. JAX's
preemption service sees to that: it catches SIGTERM in any of them and names a step that none has passed yet.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SHOW_CURSOR = b'\x1b[?25h'


class StopSignals:
  """While entered, catches the signals that end a run.

      with StopSignals() as stop:
        while not stop.requested_at(step):
          ...

  Outside the main thread, where Python allows no handlers, it catches nothing.

  Attributes:
    received: name of the signal that came, or None.
  """

  def __init__(self) -> None:
    self.received: str | None = None
    self._agreed = False
    self._previous: dict[signal.Signals, Any] = {}
    self._several_processes = jax.process_count() > 1

  def requested_at(self, step: int) -> bool:
    """Whether to stop after `step`; with several processes, each must ask at every step."""
    if self._several_processes and multihost_utils.reached_preemption_sync_point(step):
      self._agreed = True
      self.received = self.received or signal.SIGTERM.name
    return self.requested

  @property
  def requested(self) -> bool:
    """Whether to stop: with several processes, what all of them agreed on when `requested_at` was last called."""
    return self._agreed if self._several_processes else self.received is not None

  def interrupts(self) -> bool:
    """Whether to give up what can be given up, such as an evaluation; with several processes, never."""
    return self.received is not None and not self._several_processes

  def __enter__(self) -> StopSignals:
    if threading.current_thread() is threading.main_thread():
      # The preemption service has its own handler of SIGTERM, which ours would replace.
      caught = (signal.SIGINT,) if self._several_processes else _SIGNALS
      self._previous = {s: signal.signal(s, self._handle) for s in caught}
    return self

  def __exit__(
    self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
  ) -> None:
    for s, handler in self._previous.items():
      signal.signal(s, handler)

  def _handle(self, number: int, frame: FrameType | None) -> None:
    if self.received is not None:
      if os.isatty(1):
        os.write(1, _SHOW_CURSOR)  # The progress bar hides it, and nobody will close the bar now.
      signal.signal(number, signal.SIG_DFL)
      os.kill(os.getpid(), number)
      return
    self.received = signal.Signals(number).name
    text = f'{self.received}: finishing the step and saving; once more ends the run at once\n'
    if os.isatty(2):
      text = f'\n{text}\n'  # The progress bar, two lines high, is redrawn over the last line and the one before.
    # os.write: a handler that prints may interrupt another print, and buffered files are not re-entrant.
    os.write(2, text.encode())
    if self._several_processes:
      os.kill(os.getpid(), signal.SIGTERM)
