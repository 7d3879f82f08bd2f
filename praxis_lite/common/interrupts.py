"""Ctrl-C ends a command immediately, with one line in place of a traceback.

Python raises KeyboardInterrupt only between two of its own instructions, so a compilation delays it by minutes, and an
import may swallow it. The operating system writes to a pipe at once, and a thread that reads it ends the process.
During training, another handler of SIGINT saves first. It has to wait while the main thread compiles. In this case,
the thread that reads the pipe prints a line about it, and ends the process after a second Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys

EXIT_CODE = 128 + signal.SIGINT  # What a shell reports for a process that this signal has killed.


def is_command() -> bool:
  """Whether this process was started as `praxis-lite` or `python -m praxis_lite`."""
  program = os.path.basename(sys.argv[0]).removesuffix('.exe') if sys.argv else ''
  return program == 'praxis-lite' or (program == '-m' and 'praxis_lite' in sys.orig_argv)


def _end_early(number: int, frame: object) -> None:
  """The handler of SIGINT until `end_on_interrupt` sets up the lasting one, which needs more imports."""
  os.write(2, f'{chr(10) * os.isatty(2)}praxis-lite: interrupted\n'.encode())
  os._exit(EXIT_CODE)


if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
  signal.signal(signal.SIGINT, _end_early)

import contextlib  # noqa: E402, after the handler is set
import threading  # noqa: E402

_PATIENCE_S = 1.0  # Seconds until a line says that a handler waits.


def end_on_interrupt() -> None:
  """Makes SIGINT end this process with a line; does nothing if the process ignores or handles it in another way."""
  if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _end_early):
    ending = _Ending()
    signal.signal(signal.SIGINT, ending.end)
    if sys.platform != 'win32':  # On Windows, the pipe would have to be a socket.
      ending.watch()


class WaitingHandler:
  """Counts how often a handler of SIGINT has run, so that the other thread knows whether it has to wait."""

  count = 0
  handler: object = None

  @classmethod
  def note(cls) -> None:
    """Called by the handler when it runs."""
    cls.count += 1


class _Ending:
  """The handler of SIGINT, and the thread that sees the signal while the main thread is busy."""

  def __init__(self) -> None:
    self._stderr = 2
    with contextlib.suppress(OSError):  # stderr may be closed.
      self._stderr = os.dup(2)  # A copy, because some code points the original elsewhere for a while.
    self._is_ending = threading.Lock()

  def end(self, number: int, frame: object) -> None:
    if self._is_ending.acquire(blocking=False):  # The signal reaches both the main thread and the other one.
      # Not print: a handler may interrupt another print, and buffered files are not re-entrant.
      with contextlib.suppress(OSError):
        os.write(self._stderr, f'{chr(10) * os.isatty(self._stderr)}praxis-lite: interrupted\n'.encode())
      os._exit(EXIT_CODE)

  def watch(self) -> None:
    read_from, write_to = os.pipe()
    os.set_blocking(write_to, False)
    signal.set_wakeup_fd(write_to, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=self._leave_line_to_parent)
    threading.Thread(target=self._read, args=(read_from,), daemon=True).start()

  def _read(self, read_from: int) -> None:
    count_before = None
    while number := os.read(read_from, 1):
      handler = signal.getsignal(signal.SIGINT)
      if number[0] != signal.SIGINT or handler not in (self.end, WaitingHandler.handler):
        continue
      if handler == self.end or count_before == WaitingHandler.count:  # The first Ctrl-C is not handled yet.
        self.end(signal.SIGINT, None)
      count_before = WaitingHandler.count
      threading.Timer(_PATIENCE_S, self._tell_if_waiting, (count_before,)).start()

  def _tell_if_waiting(self, count_before: int) -> None:
    if WaitingHandler.count == count_before:
      line = b'SIGINT: waiting for a compilation or a step; a second Ctrl-C ends the run immediately\n'
      with contextlib.suppress(OSError):
        os.write(self._stderr, line)

  def _leave_line_to_parent(self) -> None:
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGINT) == self.end:
      signal.signal(signal.SIGINT, signal.SIG_DFL)
