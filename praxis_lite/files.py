"""Files of a run directory that appear complete or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
  """Writes a file that appears complete or not at all."""
  handle, name = tempfile.mkstemp(dir=path.parent, prefix=f'.{path.name}-')
  try:
    with open(handle, 'w', encoding='utf-8') as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    os.chmod(name, 0o666 & ~_umask())
    os.replace(name, path)
  except BaseException:
    os.unlink(name)
    raise


def _umask() -> int:
  mask = os.umask(0o022)
  os.umask(mask)
  return mask
