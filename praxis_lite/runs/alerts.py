"""Alerts: runs a command of the user when something happens to a training run.

    praxis-lite train --exp=lm.X --job_log_dir=runs/1 --alert_command='notify-send "$PRAXIS_LITE_MESSAGE"'

The shell of the system runs it, in process 0, with four more environment variables:

    PRAXIS_LITE_EVENT     'nonfinite', 'went_back', 'failed' or 'ended'
    PRAXIS_LITE_MESSAGE   one line
    PRAXIS_LITE_RUN       the run's directory
    PRAXIS_LITE_STEP      the number of steps taken

The command is not part of the config, so a config from someone else cannot run commands. Training does not wait for it:
one thread runs the commands one after the other, each for at most 30 seconds.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from praxis_lite.common.errors import error_summary, first_line
from praxis_lite.common.foreign_text import printable
from praxis_lite.common.processes import is_primary_process
from praxis_lite.runs.observer import Observer, Run
from praxis_lite.runs.trouble import Trouble

LIMIT_S = 30.0
_MOST_WAITING = 20
_MOST_KILLING_S = 5.0


class Alerts(Observer):
  """Runs a command after a step that is not finite, when the run goes back or fails, and when it ends.

  It lives as long as the call that trains, and observes each attempt of this call.

  Args:
    line: prints a line; once an attempt has started, the console of this attempt prints lines instead.
    limit_s: seconds after which a command is killed. The end of the run waits for about two commands.
  """

  def __init__(self, command: str, directory: Path, line: Callable[[str], object], limit_s: float = LIMIT_S):
    self._command, self._directory, self._line, self._limit = command, directory, line, limit_s
    self._events: queue.Queue[tuple[str, str, int] | None] = queue.Queue(_MOST_WAITING)
    self._thread = threading.Thread(target=self._work, name='alerts', daemon=True)
    self._step, self._has_failed = 0, False

  @contextlib.contextmanager
  def while_called(self) -> Iterator[None]:
    """Sends an alert if an error ends the block; at the end, waits for the commands, for a bounded time."""
    if not is_primary_process():
      yield
      return
    self._thread.start()
    try:
      yield
    except BaseException as error:
      self._alert('failed', error_summary(error))
      raise
    finally:
      with contextlib.suppress(queue.Full):
        self._events.put_nowait(None)
      self._thread.join(2 * self._limit + 1)

  def note_going_back(self, trouble: Trouble) -> None:
    """Alerts that the run has gone back to an earlier checkpoint."""
    self._alert('went_back', trouble.what)
    self._step = trouble.back_to or 0

  def on_start(self, run: Run) -> None:
    self._line, self._step = run.line, run.step

  def on_resume(self, run: Run) -> None:
    self._step = run.step

  def on_nonfinite(self, step: int, what: str) -> None:
    self._step = step
    self._alert('nonfinite', what)

  def on_end(self, run: Run) -> None:
    self._step = run.step
    if run.error is None:  # If there is an error, `while_called` reports it, after all processes have saved.
      self._alert('ended', f'the run ended after step {run.step} of {run.total_steps}: {run.ended_by}')

  def _alert(self, event: str, message: str) -> None:
    if is_primary_process():
      with contextlib.suppress(queue.Full):  # The commands are too slow: drop this alert.
        self._events.put_nowait((event, message, self._step))

  def _work(self) -> None:
    while (item := self._events.get()) is not None:
      event, message, step = item
      names = {'EVENT': event, 'MESSAGE': message, 'RUN': str(self._directory), 'STEP': str(step)}
      env = os.environ | {f'PRAXIS_LITE_{name}': value.replace('\0', '') for name, value in names.items()}
      problem = _run_command(self._command, env, self._limit)
      if problem and not self._has_failed:
        self._has_failed = True
        self._line(f'--alert_command: {problem}; training goes on, and further failures are not reported')


@contextlib.contextmanager
def alerts_of_run(command: str | None, directory: Path) -> Iterator[Sequence[Alerts]]:
  """A context manager around a call that trains in a directory; yields a tuple with the call's alerts.

  Without a command, the tuple is empty. If an error ends the call, the alerts report it.
  """
  if command is None:
    yield ()
    return
  alerts = Alerts(command, directory, lambda text: print(printable(text), flush=True))
  with alerts.while_called():
    yield (alerts,)


def _run_command(command: str, env: dict[str, str], limit_s: float) -> str:
  """Runs a command; returns what went wrong, or '' if nothing did."""
  quiet = subprocess.DEVNULL
  try:
    # In a separate session, Ctrl-C does not end it, and all processes that it starts can be killed together.
    process = subprocess.Popen(
      command, shell=True, env=env, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )
  except (OSError, ValueError) as error:
    return first_line(error)
  try:
    code = process.wait(limit_s)
  except subprocess.TimeoutExpired:
    with contextlib.suppress(OSError):
      os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # A process that is blocked in a system call cannot be killed.
      process.wait(min(limit_s, _MOST_KILLING_S))
    return f'the command took more than {limit_s:g} s, and was killed'
  return f'the command ended with exit code {code}' if code else ''
