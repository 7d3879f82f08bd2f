"""The directory of a run, where everything it writes goes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from praxis_lite.errors import UserError


def prepare_job_log_dir(job_log_dir: str | os.PathLike[str]) -> Path:
  """Creates the directory if need be, and writes to it: better now than after an hour of compiling and training.

  Raises:
    UserError: it cannot be created, or nothing can be written there.
  """
  path = Path(job_log_dir).expanduser().absolute()
  try:
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
      pass
  except OSError as error:
    raise UserError(f'job_log_dir {path} is not writable: {error.strerror or error}') from None
  return path
