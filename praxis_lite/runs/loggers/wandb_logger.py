"""Sends metrics to Weights & Biases."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from praxis_lite.runs.loggers.base import LoggedRun, Logger


class WandbLogger(Logger):
  """Sends metrics to Weights & Biases.

  Attributes, besides those of `Logger`:
    project: the name of the project; None uses the name of the directory that contains the run.
    entity: user or team; None uses the default of the account.
  """

  package = extra = 'wandb'

  project: str | None = None
  entity: str | None = None

  def start(self, run: LoggedRun) -> None:
    import wandb

    project, name = self.project or run.directory.parent.name, run.directory.name
    self._run = wandb.init(
      project=project, entity=self.entity, name=name, id=run.id, resume='allow', config=dict(run.config)
    )

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    self._run.log(dict(metrics), step=step)

  def save(self, step: int, folder: Path) -> None:
    import wandb

    name = re.sub(r'[^A-Za-z0-9_.-]', '-', f'checkpoint-{self._run.id}')  # W&B refuses other characters.
    artifact = wandb.Artifact(name, type='model', metadata={'step': step})
    artifact.add_dir(str(folder))
    self._run.log_artifact(artifact, aliases=[f'step-{step}', 'latest'])

  def finish(self, *, failed: bool) -> None:
    self._run.finish(exit_code=int(failed))
