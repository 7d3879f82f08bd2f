"""The loggers of services: Weights & Biases, MLflow, Aim, Comet, and Prometheus.

Their packages are imported when a run starts.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.files import read_plain, replace_file, user_path
from praxis_lite.runs.loggers.base import LoggedRun, Logger

_AIM_FILE = 'aim_run.txt'  # This file in the run's directory contains Aim's name of the run.


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


class AimLogger(Logger):
  """Sends metrics to Aim.

  Attributes, besides those of `Logger`:
    repo: the repository, which is a directory or the address of a server; None uses the nearest one, or the one that
      AIM_REPO names.
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


class PrometheusLogger(Logger):
  """Writes a file with the last metrics in Prometheus's text format, for the textfile collector of its node exporter.

    praxis_lite_step{run="1",id="1-18c2"} 120
    praxis_lite_metric{run="1",id="1-18c2",name="train/loss"} 2.31

  The file is replaced as a whole. At the end of a process, praxis_lite_ended becomes 1, or 2 after an error.

  Attributes:
    folder: the folder that the collector reads; the file in it is named after the run. None writes `metrics.prom` into
      the run's directory.
  """

  folder: str | None = None

  def __post_init__(self) -> None:
    if self.folder is not None and not user_path(self.folder).is_dir():
      raise ConfigError(
        f'PrometheusLogger.folder: {self.folder} is not a directory; make it, or name the one that the collector reads'
      )

  def start(self, run: LoggedRun) -> None:
    own = run.directory / 'metrics.prom'
    self._file = own if self.folder is None else user_path(self.folder) / f'praxis_lite_{run.id}.prom'
    # The id tells apart runs in directories of the same name.
    self._labels = f'run="{_label(run.directory.name)}",id="{_label(run.id)}"'
    self._step, self._metrics = 0, dict[str, float]()

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    self._step = step
    self._metrics.update(metrics)
    self._write(ended=0)

  def finish(self, *, failed: bool) -> None:
    self._write(ended=2 if failed else 1)

  def _write(self, *, ended: int) -> None:
    run = self._labels
    families: dict[tuple[str, str], Mapping[str, float]] = {
      ('step', 'Steps taken.'): {run: self._step},
      ('written_seconds', 'When this was written, in seconds since 1970.'): {run: time.time()},
      ('ended', '0: trains, 1: the process has ended, 2: an error has ended it.'): {run: ended},
      ('metric', 'The last value of each metric.'): {
        f'{run},name="{_label(name)}"': value for name, value in self._metrics.items()
      },
    }
    lines = []
    for (name, about), samples in families.items():
      lines += [f'# HELP praxis_lite_{name} {about}', f'# TYPE praxis_lite_{name} gauge']
      lines += [f'praxis_lite_{name}{{{labels}}} {_sample(value)}' for labels, value in samples.items()]
    replace_file(self._file, '\n'.join(lines) + '\n')


def _label(text: str) -> str:
  """Returns a text escaped for the value of a label."""
  return text.replace('\\', '\\\\').replace('"', '\\"').replace('\n', '\\n')


def _sample(value: float) -> str:
  if math.isnan(value):
    return 'NaN'
  return ('+Inf' if value > 0 else '-Inf') if math.isinf(value) else repr(float(value))
