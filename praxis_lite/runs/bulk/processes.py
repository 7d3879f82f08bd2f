"""Several processes of a command on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from praxis_lite.common.errors import UserError

_PARENT = 'PRAXIS_LITE_BULK_PARENT'


def run_processes(arguments: Sequence[str], indices: Sequence[int]) -> None:
  """Runs `praxis-lite` with these arguments and `--process_index=i`, for each i at once, and waits for all.

  Raises:
    UserError: one of them failed; the others have done their part by then.
  """
  environment = {**os.environ, _PARENT: str(os.getpid())}
  started = [
    subprocess.Popen([sys.executable, '-m', 'praxis_lite', *arguments, f'--process_index={i}'], env=environment)
    for i in indices
  ]
  try:
    codes = [process.wait() for process in started]
  finally:
    for process in started:
      if process.poll() is None:
        with contextlib.suppress(OSError):
          process.terminate()
  for index, code in zip(indices, codes):
    if code:
      how = f'was ended by {signal.Signals(-code).name}' if code < 0 else f'ended with code {code}'
      raise UserError(f'process {index} {how}; the same command goes on with what is left')


def end_without_parent() -> None:
  """Ends this process if the one that has started it with `run_processes` is gone."""
  parent = os.environ.get(_PARENT)
  if parent is not None and os.getppid() != int(parent):
    os._exit(1)
