"""Logger: what gets the metrics of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from praxis_lite.common.config import Configurable


class LoggedRun(NamedTuple):
  """A run as its loggers see it.

  Attributes:
    directory: the directory of the run.
    id: the same for all launches of the run, and different from that of other runs.
    config: the fields of its config, as text by path, without passwords and the like.
  """

  directory: Path
  id: str
  config: Mapping[str, str]


class Logger(Configurable):
  """Sends the metrics of a run somewhere. Only one process of a run calls it, in the thread that trains.

  An exception in a method is reported, and then the logger is left out. `package` is the package that the logger
  imports; a run whose config needs one that is not installed does not start. `extra` is the extra of praxis_lite that
  installs it.

  Attributes:
    checkpoints: whether it also gets the checkpoints, as artifacts of the run. Training waits for `save`.
  """

  package = ''
  extra = ''

  checkpoints: bool = False

  def start(self, run: LoggedRun) -> None:
    """Called before the first `log` of this process."""

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    """Takes metrics by name, such as 'train/loss' or 'eval/valid/accuracy'."""
    raise NotImplementedError

  def save(self, step: int, folder: Path) -> None:
    """Takes the checkpoint of a step, a complete folder, if `checkpoints`."""
    raise NotImplementedError

  def finish(self, *, failed: bool) -> None:
    """Called at the end of the process; `failed` if an error ends it."""
