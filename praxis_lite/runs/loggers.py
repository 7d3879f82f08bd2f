"""Loggers send the metrics of a run to Weights & Biases, MLflow, Aim, Comet, Prometheus, or a service of your own.

    config.task.train.loggers = ('wandb', Config(MlflowLogger, experiment='curves', checkpoints=True), Config(MyLogger))

They get the numbers that are written to `metrics.jsonl`, when they are written, and with `checkpoints` each checkpoint
once it is complete. A run that is resumed goes on as the same run of the service. A logger that fails, at its start or
later, is reported once and then left out, and one that fails to take a checkpoint gets no more of these; training goes
on. Event files for TensorBoard are always written.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from praxis_lite.common.config import Config, Configurable, build_at
from praxis_lite.common.config.text import fields_of, to_text
from praxis_lite.common.errors import ConfigError, check_choice, first_line
from praxis_lite.common.files import read_plain, replace_file, user_path
from praxis_lite.common.foreign_text import LEFT_OUT, is_secret, remove_secrets
from praxis_lite.runs.hooks import Hook
from praxis_lite.runs.observer import Run
from praxis_lite.runs.records.record import first_launch


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


class WandbLogger(Logger):
  """Weights & Biases.

  Attributes: the same as for `Logger`, and
    project: None uses the name of the directory that contains the run.
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

    name = re.sub(r'[^A-Za-z0-9_.-]', '-', f'checkpoint-{self._run.id}')  # Others are refused.
    artifact = wandb.Artifact(name, type='model', metadata={'step': step})
    artifact.add_dir(str(folder))
    self._run.log_artifact(artifact, aliases=[f'step-{step}', 'latest'])

  def finish(self, *, failed: bool) -> None:
    self._run.finish(exit_code=int(failed))


class MlflowLogger(Logger):
  """MLflow, at the server of MLFLOW_TRACKING_URI.

  Attributes: the same as for `Logger`, and
    experiment: None uses the name of the directory that contains the run.
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


class PrometheusLogger(Logger):
  """A file with the last metrics in the text format of Prometheus, for the textfile collector of its node exporter.

    praxis_lite_step{run="1",id="1-18c2"} 120
    praxis_lite_metric{run="1",id="1-18c2",name="train/loss"} 2.31

  The file is replaced as a whole. At the end of a process, praxis_lite_ended becomes 1, or 2 after an error.

  Attributes:
    folder: the folder that the collector reads, in which the file has the name of the run; None writes `metrics.prom`
      into the run's directory.
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
    # Runs in directories of the same name differ in their ids.
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
  """Returns a text as the value of a label."""
  return text.replace('\\', '\\\\').replace('"', '\\"').replace('\n', '\\n')


def _sample(value: float) -> str:
  if math.isnan(value):
    return 'NaN'
  return ('+Inf' if value > 0 else '-Inf') if math.isinf(value) else repr(float(value))


class AimLogger(Logger):
  """Aim.

  Attributes: the same as for `Logger`, and
    repo: the repository, a directory or the address of a server; None uses the nearest one, or that of AIM_REPO.
    experiment: None uses the name of the directory that contains the run.
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
    known = run.directory / _AIM_FILE  # Aim chooses the name of a run itself.
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
  """Comet, with the key of COMET_API_KEY.

  Attributes: the same as for `Logger`, and
    project: None uses the name of the directory that contains the run.
    workspace: None uses the default of the account.
    offline_directory: a directory in which to keep what `comet upload` sends later; None sends it at once.
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
    # The key of a run has 32 to 50 letters and digits, and is the same for all launches.
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


_AIM_FILE = 'aim_run.txt'  # Its line is the name that Aim has given to the run.

# What `task.train.loggers` and --track may name. TensorBoard needs no logger.
LOGGERS: dict[str, type[Logger] | None] = {
  **{'tensorboard': None, 'wandb': WandbLogger, 'mlflow': MlflowLogger},
  **{'aim': AimLogger, 'comet': CometLogger, 'prometheus': PrometheusLogger},
}


def build_loggers(entries: Sequence[str | Config]) -> list[Logger]:
  """Returns the loggers of `task.train.loggers`, which are names in `LOGGERS` or configs.

  Raises:
    ConfigError: an entry is neither, a value of one is not valid, the package of a logger is not installed, or a logger
      that takes no checkpoints is to get them.
  """
  loggers = []
  for i, entry in enumerate(entries):
    path = f'task.train.loggers[{i}]'
    if isinstance(entry, Config):
      logger: object = build_at(path, entry)
    elif isinstance(entry, str):
      try:
        check_choice(path, entry, list(LOGGERS))
      except ConfigError as error:
        own = 'Loggers of your own are set in Python, as in config.task.train.loggers = (Config(MyLogger),)'
        raise ConfigError(f'{error} {own}') from None
      logger = make() if (make := LOGGERS[entry]) else None
    else:
      cls = entry if isinstance(entry, type) else type(entry)
      form = f'Config({cls.__name__ if issubclass(cls, Logger) else "MyLogger"})'
      raise ConfigError(f'{path}: expected a name, or the config of a Logger, as in {form}; got {entry!r}')
    if logger is None:
      continue
    if not isinstance(logger, Logger):
      raise ConfigError(f'{path}: expected the config of a Logger, got that of {type(logger).__name__}')
    if logger.package and importlib.util.find_spec(logger.package) is None:
      install = f"'praxis_lite[{logger.extra}]'" if logger.extra else logger.package
      raise ConfigError(f'{path}: {logger.package} is not installed; pip install {install}')
    if logger.checkpoints and type(logger).save is Logger.save:
      raise ConfigError(f'{path}.checkpoints = True: {type(logger).__name__} takes no checkpoints; leave it out')
    loggers.append(logger)
  return loggers


class LoggersOfRun:
  """The loggers of a run; a context manager that finishes them. Those that fail are reported and left out.

  Args:
    loggers: see `build_loggers`.
    directory: the directory of the run, which records its launches before anything is logged.
    config: the configs of the run, by name.
    report: prints a line.
  """

  def __init__(
    self, loggers: Sequence[Logger], directory: Path, config: Mapping[str, Any], report: Callable[[str], object]
  ):
    self._loggers = list(loggers)
    self._started: list[Logger] = []
    self._without_saves: list[Logger] = []
    self._directory, self._config, self._report = directory, config, report

  def log(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
    """Passes on the metrics of a split after a step."""
    metrics = {f'{split}/{name}': value for name, value in scalars.items()}
    for logger in list(self._loggers):
      self._call(logger, functools.partial(logger.log, step, metrics))

  def save(self, step: int, folder: Path) -> None:
    """Passes on the checkpoint of a step to the loggers that get checkpoints."""
    for logger in [logger for logger in self._loggers if logger.checkpoints and logger not in self._without_saves]:
      self._call(logger, functools.partial(self._save, logger, step, folder))

  def _save(self, logger: Logger, step: int, folder: Path) -> None:
    """Passes on a checkpoint; a logger that fails gets no further ones, but goes on to get metrics."""
    try:
      logger.save(step, folder)
    except Exception as error:
      self._without_saves.append(logger)
      what = f'{type(error).__name__}: {first_line(error)}'
      self._report(f'{type(logger).__name__} gets no more checkpoints: {what}; training and metrics go on')

  def _call(self, logger: Logger, call: Callable[[], None]) -> None:
    """Starts a logger, unless it has started, and calls it."""
    if logger not in self._started:
      self._started.append(logger)
      self._try(logger, functools.partial(self._start, logger))
    if logger in self._loggers:
      self._try(logger, call)

  def __enter__(self) -> LoggersOfRun:
    return self

  def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
    for logger in [logger for logger in self._loggers if logger in self._started]:
      self._try(logger, functools.partial(logger.finish, failed=kind is not None))

  def _try(self, logger: Logger, call: Callable[[], None]) -> None:
    try:
      call()
    except Exception as error:
      self._loggers.remove(logger)
      what = f'{type(error).__name__}: {first_line(error)}'
      self._report(f'{type(logger).__name__} gets no more metrics: {what}; training goes on without it')

  def _start(self, logger: Logger) -> None:
    started = None
    with contextlib.suppress(OSError):
      started = first_launch(read_plain(self._directory / 'run.json'))
    fields = fields_of(to_text(self._config))
    shown = {path: LEFT_OUT if is_secret(path) else remove_secrets(value) for path, value in fields.items()}
    number = '' if started is None else f'-{int(started * 1000):x}'
    logger.start(LoggedRun(self._directory, f'{self._directory.name}{number}', shown))


class CheckpointsToLoggers(Hook):
  """Passes on the checkpoints of a run to its loggers."""

  def __init__(self, loggers: LoggersOfRun):
    self._loggers = loggers

  def on_checkpoint(self, run: Run, step: int, path: Path) -> None:
    self._loggers.save(step, path)
