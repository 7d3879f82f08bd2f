"""The identity of a checkpoint. Interrupted work that used a checkpoint is continued only with the same checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from praxis_lite.checkpoints.checkpointer import Checkpointer, OnDamage, Step
from praxis_lite.checkpoints.contents import read_checkpoint_record
from praxis_lite.checkpoints.seal import SEAL


class CheckpointIdentity(NamedTuple):
  """A checkpoint of a run: its step, and its seal.

  Without a seal, `seal` is a hash of the record and of the names and sizes of the files. The names of files are
  random, so it differs between checkpoints.
  """

  step: int
  seal: str


def checkpoint_identity(
  job_log_dir: str | os.PathLike[str], step: Step = None, on_damage: OnDamage = 'fail'
) -> CheckpointIdentity:
  """Returns the checkpoint that `step` names, see `Checkpointer.existing_step`; raises CheckpointError if missing."""
  with contextlib.closing(Checkpointer(job_log_dir, read_only=True, on_damage=on_damage)) as checkpointer:
    number = checkpointer.existing_step(step)
    folder = Path(checkpointer.folder(number))
  about = read_checkpoint_record(folder, 'about')
  return CheckpointIdentity(number, about.get(SEAL) or _hash_of_files(folder, about))


def _hash_of_files(folder: Path, about: dict[str, object]) -> str:
  files = sorted(
    (file.relative_to(folder).as_posix(), file.stat().st_size) for file in folder.rglob('*') if file.is_file()
  )
  return hashlib.sha256(json.dumps([about, files], sort_keys=True).encode()).hexdigest()
