"""Sends metrics to MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from praxis_lite.runs.loggers.base import LoggedRun, Logger


class MlflowLogger(Logger):
  """Sends metrics to the MLflow server at MLFLOW_TRACKING_URI.

  Attributes, besides those of `Logger`:
    experiment: the name of the experiment; None uses the name of the directory that contains the run.
  """

  package = extra = 'mlflow'

  experiment: str | None = None

  def start(self, run: LoggedRun) -> None:
    import mlflow

    self._mlflow = mlflow
    mlflow.set_experiment(self.experiment or run.directory.parent.name)
    found = mlflow.search_runs(filter_string=f"tags.praxis_lite = '{run.id}'", output_format='list', max_results=1)
    if found:
      mlflow.start_run(run_id=found[0].info.run_id)
    else:
      mlflow.start_run(run_name=run.directory.name, tags={'praxis_lite': run.id})
    mlflow.log_text(''.join(f'{path} = {value}\n' for path, value in run.config.items()), 'config.txt')

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    self._mlflow.log_metrics(dict(metrics), step=step)

  def save(self, step: int, folder: Path) -> None:
    self._mlflow.log_artifacts(str(folder), artifact_path=f'checkpoints/{step}')

  def finish(self, *, failed: bool) -> None:
    self._mlflow.end_run('FAILED' if failed else 'FINISHED')
