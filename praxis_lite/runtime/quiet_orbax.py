"""Orbax reports what fails once where it is asked, and many times where nobody reads: only the first counts.

A full disk makes it log the same error from each of its threads, a thousand lines of tracebacks; the event loop whose
other reads and writes come back after the first has failed adds more. All of it reaches the caller as one exception.
"""

from __future__ import annotations

import functools
import logging
import os
import sys


@functools.cache
def quiet_orbax() -> None:
  """Keeps Orbax's account of its own doings and failures off the console, from now on; its exceptions stay."""
  logging.getLogger('absl').addFilter(_not_by_orbax)
  logging.getLogger('asyncio').addFilter(_not_of_orbax)
  report = sys.unraisablehook

  def report_others(unraisable: sys.UnraisableHookArgs) -> None:
    late = isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == 'Event loop is closed'
    if not late:
      report(unraisable)

  sys.unraisablehook = report_others


def _not_by_orbax(record: logging.LogRecord) -> bool:
  return f'{os.sep}orbax{os.sep}' not in record.pathname


def _not_of_orbax(record: logging.LogRecord) -> bool:
  # asyncio names the coroutine whose exception nobody has asked for, and its file.
  return f'{os.sep}orbax{os.sep}' not in record.getMessage()
