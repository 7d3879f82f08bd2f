"""Sends metrics to Comet."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from praxis_lite.runs.loggers.base import LoggedRun, Logger


class CometLogger(Logger):
  """Sends metrics to Comet, with the API key in COMET_API_KEY.

  Attributes, besides those of `Logger`:
    project: the name of the project; None uses the name of the directory that contains the run.
    workspace: None uses the default of the account.
    offline_directory: a directory that collects data for a later `comet upload`; None sends the data at once.
  """

  package, extra = 'comet_ml', 'comet'

  project: str | None = None
  workspace: str | None = None
  offline_directory: str | None = None

  def start(self, run: LoggedRun) -> None:
    import comet_ml

    offline = self.offline_directory
    settings = {
      'log_code': False,
      'auto_param_logging': False,
      'auto_metric_logging': False,
      'auto_output_logging': False,
    }
    # Comet's key of a run must have 32 to 50 letters and digits. This one is the same for all launches.
    key = hashlib.sha1(run.id.encode()).hexdigest()
    self._run = comet_ml.start(
      project_name=self.project or run.directory.parent.name,
      workspace=self.workspace,
      experiment_key=key,
      mode='get_or_create',
      online=offline is None,
      experiment_config=comet_ml.ExperimentConfig(name=run.directory.name, offline_directory=offline, **settings),
    )
    self._run.log_parameters(dict(run.config), nested_support=False)

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    self._run.log_metrics(dict(metrics), step=step)

  def save(self, step: int, folder: Path) -> None:
    self._run.log_model(f'checkpoint-{step}', str(folder), metadata={'step': step})

  def finish(self, *, failed: bool) -> None:
    self._run.log_other('failed', failed)
    self._run.end()
