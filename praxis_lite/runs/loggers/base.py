"""Logger: the base class of receivers of a run's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from praxis_lite.common.config import Configurable


class LoggedRun(NamedTuple):
  """A run as its loggers see it.

  Attributes:
    directory: the directory of the run.
    id: an identifier that is the same for all launches of the run, and differs between runs.
    config: the fields of its config, as text by path, without secrets such as passwords.
  """

  directory: Path
  id: str
  config: Mapping[str, str]


class Logger(Configurable):
  """Sends the metrics of a run somewhere. Only one process of a run calls it, in the thread that trains.

  If a method raises an exception, it is reported, and the logger is no longer called. `package` is the package that the
  logger imports; a run does not start if it is not installed. `extra` is the extra of praxis_lite that installs it.

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
    """Takes the checkpoint of a step, a complete folder. Called only if the attribute `checkpoints` is True."""
    raise NotImplementedError

  def finish(self, *, failed: bool) -> None:
    """Called at the end of the process; `failed` says whether an error ended it."""
