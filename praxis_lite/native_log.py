"""What libraries below Python, such as XLA, log on stderr; it can be used around their import."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator

# Seconds for the last of what was logged.
_PATIENCE = 2.0
_NOT_AN_ERROR = re.compile(rb'[IW]\d{4} |WARNING: All log messages before absl::InitializeLog')


@contextlib.contextmanager
def collected_log() -> Iterator[list[str]]:
  """Collects the lines of information and the warnings instead of showing them. All else goes to stderr as it comes."""
  found: list[str] = []
  sys.stderr.flush()
  stderr = os.dup(2)
  end, start = os.pipe()

  def read() -> None:
    while chunk := os.read(end, 1 << 16):  # Each message is written at once.
      for line in chunk.splitlines(keepends=True):
        if _NOT_AN_ERROR.match(line):
          found.append(line.decode(errors='replace').strip())
        else:
          with contextlib.suppress(OSError):  # All is over, but for a process that still logs.
            os.write(stderr, line)

  reader = threading.Thread(target=read, daemon=True)
  os.dup2(start, 2)
  os.close(start)
  reader.start()
  try:
    yield found
  finally:
    sys.stderr.flush()
    os.dup2(stderr, 2)  # The last writer of the pipe is closed, so the reader ends.
    reader.join(_PATIENCE)  # A process that was started meanwhile, and lives on, has the pipe too.
    if not reader.is_alive():
      os.close(end)
    os.close(stderr)
