"""Captures the log that native libraries, such as XLA, write to stderr. It can be used around their import too."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator

# Seconds to wait for the last lines of the log.
_PATIENCE = 2.0
_NOT_AN_ERROR = re.compile(rb'[IW]\d{4} |WARNING: All log messages before absl::InitializeLog')


@contextlib.contextmanager
def collected_log() -> Iterator[list[str]]:
  """Collects information and warning lines instead of showing them. Other output goes to stderr immediately."""
  found: list[str] = []
  sys.stderr.flush()
  stderr = os.dup(2)
  end, start = os.pipe()

  def read() -> None:
    while chunk := os.read(end, 1 << 16):  # A library writes each message in one call.
      for line in chunk.splitlines(keepends=True):
        if _NOT_AN_ERROR.match(line):
          found.append(line.decode(errors='replace').strip())
        else:
          with contextlib.suppress(OSError):  # Another process may still log after `stderr` is closed.
            os.write(stderr, line)

  reader = threading.Thread(target=read, daemon=True)
  os.dup2(start, 2)
  os.close(start)
  reader.start()
  try:
    yield found
  finally:
    sys.stderr.flush()
    os.dup2(stderr, 2)  # This closes the last writer of the pipe, so the reader ends.
    reader.join(_PATIENCE)  # Limited, because a process started meanwhile may keep the pipe open.
    if not reader.is_alive():
      os.close(end)
    os.close(stderr)
