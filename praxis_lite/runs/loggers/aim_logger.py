"""Sends metrics to Aim."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from praxis_lite.common.files import read_plain, replace_file
from praxis_lite.runs.loggers.base import LoggedRun, Logger

_AIM_FILE = 'aim_run.txt'  # This file in the run's directory contains Aim's name of the run.


class AimLogger(Logger):
  """Sends metrics to Aim.

  Attributes, besides those of `Logger`:
    repo: the repository, which is a directory or the address of a server; None uses the nearest one, or that of
      AIM_REPO.
    experiment: the name of the experiment; None uses the name of the directory that contains the run.
    artifacts_uri: where checkpoints go, such as 's3://bucket/aim'; None uses a folder `aim-artifacts` in the run's
      directory.
  """

  package = extra = 'aim'

  repo: str | None = None
  experiment: str | None = None
  artifacts_uri: str | None = None

  def start(self, run: LoggedRun) -> None:
    import aim

    repo = aim.Repo.from_path(self.repo, init=True) if self.repo and '://' not in self.repo else self.repo
    known = run.directory / _AIM_FILE  # Aim chooses the names of runs.
    name = (read_plain(known).decode().strip() if known.exists() else '') or None
    settings: dict[str, Any] = {'repo': repo, 'experiment': self.experiment or run.directory.parent.name}
    settings |= {'system_tracking_interval': None, 'capture_terminal_logs': False}
    self._run = aim.Run(name, force_resume=name is not None, **settings)
    replace_file(known, f'{self._run.hash}\n')
    self._run.name = run.directory.name
    self._run['praxis_lite'] = run.id
    self._run['config'] = dict(run.config)
    if self.checkpoints:
      self._run.set_artifacts_uri(self.artifacts_uri or (run.directory / 'aim-artifacts').absolute().as_uri())

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
      self._run.track(value, name=name, step=step)

  def save(self, step: int, folder: Path) -> None:
    self._run.log_artifacts(str(folder), name=f'checkpoints/{step}', block=True)

  def finish(self, *, failed: bool) -> None:
    self._run['failed'] = failed
    self._run.close()
