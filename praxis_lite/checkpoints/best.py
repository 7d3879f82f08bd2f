"""Which checkpoint of a run is the best by a metric: `best.json`, {"step", "metric", "mode", "value"}."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import jax

from praxis_lite.files import KnownFolder, parse_json, read_plain

BEST = 'best.json'


class BestCheckpoint(NamedTuple):
  """The best checkpoint of a run: its step, and the value of a metric, such as 'eval/valid/loss', after that step."""

  step: int
  metric: str
  mode: str  # 'min' or 'max'
  value: float

  @classmethod
  def parse(cls, data: bytes, steps: Collection[int]) -> BestCheckpoint | None:
    """Returns what a file says; None if it is not what was written, or names none of the checkpoints `steps`."""
    try:
      best = cls(**parse_json(data))
    except (ValueError, TypeError):
      return None
    return best if best.is_whole() and best.step in steps else None

  def is_whole(self) -> bool:
    """Whether all has the right type; a file may be of anyone."""
    is_named = type(self.step) is int and isinstance(self.metric, str) and self.mode in ('min', 'max')
    return is_named and type(self.value) in (int, float) and abs(self.value) <= sys.float_info.max


class BestRecord:
  """The best checkpoint, and the file that says so, which lags behind until that checkpoint is complete.

  Args:
    path: of the file.
    steps: of the checkpoints that there are; a file that names none of them is ignored.

  Attributes:
    value: the best checkpoint; None for none.
  """

  def __init__(self, path: Path, steps: Collection[int]):
    self._path = path
    self._folder = KnownFolder(path.parent) if path.parent.is_dir() else None  # A reader's may be anywhere.
    self.value = self._written = self._read(steps)

  def _read(self, steps: Collection[int]) -> BestCheckpoint | None:
    try:
      data = read_plain(self._path)
    except OSError:
      return None
    return BestCheckpoint.parse(data, steps)

  def write(self) -> None:
    """Has the file name the best checkpoint, which is complete by now."""
    if self.value != self._written and jax.process_index() == 0:
      if self.value is None:
        self._path.unlink(missing_ok=True)
      else:
        folder = self._folder = self._folder or KnownFolder(self._path.parent)
        folder.replace_file(self._path.name, json.dumps(self.value._asdict()) + '\n')
    self._written = self.value

  def take_back(self) -> None:
    """Returns to the one that the file names, because the other one was not saved."""
    self.value = self._written

  def kept_steps(self) -> set[int]:
    """Returns the steps that are never deleted: of the best one, and of that which the file names until then."""
    return {best.step for best in (self.value, self._written) if best is not None}
