"""The lineage number of a run's emergency copies: copies of another lineage are never read.

    job_log_dir/emergency_copies.json    {"lineage": 2715493}

A run that goes back to an earlier checkpoint removes this file, which begins a new lineage.
"""

from __future__ import annotations

import os
from pathlib import Path

LINEAGE = 'emergency_copies.json'


def forget_copies(job_log_dir: str | os.PathLike[str]) -> None:
  """Begins a new lineage, so that existing copies are ignored. Only one process of a run calls this."""
  Path(job_log_dir, LINEAGE).unlink(missing_ok=True)
