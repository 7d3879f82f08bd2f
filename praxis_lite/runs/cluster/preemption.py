"""Preemption: detects that the platform will take the machine away, and limits the time to save.

Most platforms send SIGTERM. Others write a file, or change the answer at some address; this process then sends SIGTERM
to itself. All processes agree on a step, after which the training loop stops and saves. If this takes longer than the
grace period, the process ends with the exit code of `LostHostError`, before the platform kills it. The previous
checkpoint stays complete.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import jax

from praxis_lite.common.errors import LostHostError
from praxis_lite.runs.cluster.clusters import LAUNCHER
from praxis_lite.runs.cluster.watchdog import dump_stacks, the_watchdog
from praxis_lite.runs.stop_signals import StopSignals

_INTERVAL = 0.5
_URL_INTERVAL = 5.0
_URL_TIMEOUT = 2.0


@contextlib.contextmanager
def preemptible(
  stop: StopSignals, directory: Path, *, grace_s: float | None = None, notice: str | None = None
) -> Iterator[None]:
  """Looks for notices in a thread while a block runs; ends the process if the block takes too long after a notice.

  Args:
    stop: catches the signals.
    directory: the run's directory, into which the stacks of all threads are written if the block takes too long.
    grace_s: seconds from a notice to the end of the block; None disables the limit. The notice may have reached another
      process of the run.
    notice: a file that appears when the machine will be taken away; or an address (http://...) whose answer is FALSE,
      NONE, empty or an error until then.
  """
  is_over = threading.Event()

  def look() -> None:
    launcher, has_signaled = os.environ.get(LAUNCHER), False
    while not is_over.wait(_URL_INTERVAL if notice and _is_url(notice) and not has_signaled else _INTERVAL):
      if not has_signaled and (_has_notice(notice) or (launcher and str(os.getppid()) != launcher)):
        has_signaled = True  # Only once, because a second SIGTERM ends the process at once.
        os.kill(os.getpid(), signal.SIGTERM)
      since = _notice_time(stop)
      if grace_s is not None and since is not None and time.monotonic() - since > grace_s:
        _end_late_process(directory, grace_s)

  thread = threading.Thread(target=look, name='preemption', daemon=True)
  thread.start()
  try:
    yield
  finally:
    is_over.set()


def _notice_time(stop: StopSignals) -> float | None:
  watchdog = the_watchdog()
  times = stop.since, None if watchdog is None else watchdog.preempted_since
  return min((t for t in times if t is not None), default=None)


def _has_notice(notice: str | None) -> bool:
  if notice is None:
    return False
  if not _is_url(notice):
    return os.path.exists(notice)
  # Google's metadata server answers only requests with this header; others ignore it.
  request = urllib.request.Request(notice, headers={'Metadata-Flavor': 'Google'})
  try:
    with urllib.request.urlopen(request, timeout=_URL_TIMEOUT) as answer:
      return answer.read(1000).decode(errors='replace').strip().upper() not in ('', 'FALSE', 'NONE')
  except (OSError, ValueError, http.client.HTTPException):  # Amazon's server answers 404 until there is a notice.
    return False


def _is_url(notice: str) -> bool:
  return notice.startswith(('http://', 'https://'))


def _end_late_process(directory: Path, grace_s: float) -> None:
  where = dump_stacks(directory, jax.process_index())
  code = LostHostError.exit_code
  text = f'not saved within grace_s = {grace_s:g} s of the notice; {where}exit code {code}: the last save is complete'
  os.write(2, f'{text}\n'.encode())
  os._exit(code)
