"""Orbax, imported when it is first needed, and quiet."""

from __future__ import annotations

import functools
import logging
import os
import sys
from types import ModuleType


@functools.cache
def orbax_checkpoint() -> ModuleType:
  """Imports Orbax, which takes a second, and keeps what it logs off the console: its failures are exceptions as well.

  On a full disk it logs the same error from each of its threads, a thousand lines of tracebacks, and its event loop
  reports every read and write that returns after the first failure.
  """
  import orbax.checkpoint

  folder = f'{os.sep}orbax{os.sep}'
  logging.getLogger('absl').addFilter(lambda record: folder not in record.pathname)
  # asyncio names the coroutine whose exception was never retrieved, and its file.
  logging.getLogger('asyncio').addFilter(lambda record: folder not in record.getMessage())
  report = sys.unraisablehook

  def report_others(unraisable: sys.UnraisableHookArgs) -> None:
    if repr(unraisable.exc_value) != "RuntimeError('Event loop is closed')":
      report(unraisable)

  sys.unraisablehook = report_others
  return orbax.checkpoint
