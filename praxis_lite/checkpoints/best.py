"""The file `best.json` of a run, {"step", "metric", "mode", "value"}: it says which checkpoint is best by a metric."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import jax

from praxis_lite.common.files import KnownFolder, parse_json, read_plain

BEST = 'best.json'


class BestCheckpoint(NamedTuple):
  """The best checkpoint of a run: its step, and the value of a metric, such as 'eval/valid/loss', after that step."""

  step: int
  metric: str
  mode: str  # 'min' or 'max'
  value: float

  @classmethod
  def parse(cls, data: bytes, steps: Collection[int]) -> BestCheckpoint | None:
    """Returns the parsed file, or None if it is not valid or names a checkpoint that is not in `steps`."""
    try:
      best = cls(**parse_json(data))
    except (ValueError, TypeError):
      return None
    return best if best.is_whole() and best.step in steps else None

  def is_whole(self) -> bool:
    """Whether all fields have the right type and the value is finite: anyone may have edited the file."""
    is_named = type(self.step) is int and isinstance(self.metric, str) and self.mode in ('min', 'max')
    return is_named and type(self.value) in (int, float) and abs(self.value) <= sys.float_info.max


class BestRecord:
  """Keeps the best checkpoint in `value`, and in a file, which is updated only when that checkpoint is complete.

  `steps` are the steps of the existing checkpoints. A file that names another step is ignored.
  """

  def __init__(self, path: Path, steps: Collection[int]):
    self._path = path
    self._folder = KnownFolder(path.parent) if path.parent.is_dir() else None  # None if the path is wrong.
    self.value = self._written = self._read(steps)

  def _read(self, steps: Collection[int]) -> BestCheckpoint | None:
    with contextlib.suppress(OSError):
      return BestCheckpoint.parse(read_plain(self._path), steps)
    return None

  def write(self) -> None:
    """Writes the best checkpoint to the file. That checkpoint must be complete by now."""
    if self.value != self._written and jax.process_index() == 0:
      if self.value is None:
        self._path.unlink(missing_ok=True)
      else:
        folder = self._folder = self._folder or KnownFolder(self._path.parent)
        folder.replace_file(self._path.name, json.dumps(self.value._asdict()) + '\n')
    self._written = self.value

  def take_back(self) -> None:
    """Goes back to the checkpoint that the file names, because the new best one was not saved."""
    self.value = self._written

  def kept_steps(self) -> set[int]:
    """Returns the steps to keep: that of the best checkpoint, and the one in the file, which may not be updated yet."""
    return {best.step for best in (self.value, self._written) if best is not None}
