"""The loggers of a run: builds them from its config, calls them, and drops those that fail."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from praxis_lite.common.config import Config, build_at
from praxis_lite.common.config.text import fields_of
from praxis_lite.common.errors import ConfigError, check_choice, error_summary
from praxis_lite.common.files import read_plain
from praxis_lite.common.foreign_text import LEFT_OUT, is_secret, remove_secrets
from praxis_lite.runs.hooks import Hook
from praxis_lite.runs.loggers.base import LoggedRun, Logger
from praxis_lite.runs.loggers.services import AimLogger, CometLogger, MlflowLogger, PrometheusLogger, WandbLogger
from praxis_lite.runs.observer import Run
from praxis_lite.runs.records.record import first_launch, read_text

# The names for `task.train.loggers` and --track. TensorBoard needs no logger.
LOGGERS: dict[str, type[Logger] | None] = {
  'tensorboard': None,
  'wandb': WandbLogger,
  'mlflow': MlflowLogger,
  'aim': AimLogger,
  'comet': CometLogger,
  'prometheus': PrometheusLogger,
}


def build_loggers(entries: Sequence[str | Config]) -> list[Logger]:
  """Returns the loggers of `task.train.loggers`, which are names in `LOGGERS` or configs.

  Raises:
    ConfigError: an entry is neither such a name nor a config, a field of a logger is not valid, the package of a logger
      is not installed, or `checkpoints` is set for a logger that cannot take them.
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
      if (service := LOGGERS[entry]) is None:
        continue
      logger = service()
    else:
      own_class = entry if isinstance(entry, type) else type(entry)
      form = f'Config({own_class.__name__ if issubclass(own_class, Logger) else "MyLogger"})'
      raise ConfigError(f'{path}: expected a name, or the config of a Logger, as in {form}; got {entry!r}')
    if not isinstance(logger, Logger):
      raise ConfigError(f'{path}: expected the config of a Logger, got that of {type(logger).__name__}')
    if logger.package and importlib.util.find_spec(logger.package) is None:
      install = f"'praxis_lite[{logger.extra}]'" if logger.extra else logger.package
      raise ConfigError(f'{path}: {logger.package} is not installed; pip install {install}')
    if logger.checkpoints and type(logger).save is Logger.save:
      raise ConfigError(f'{path}.checkpoints = True: {type(logger).__name__} takes no checkpoints; leave it out')
    loggers.append(logger)
  return loggers


class LoggersOfRun(Hook):
  """The loggers of a run; a context manager that finishes them. A logger that fails is reported, and no longer called.

  Args:
    directory: the directory of the run, in which its config and launches are recorded before anything is logged.
  """

  def __init__(self, loggers: Sequence[Logger], directory: Path, report: Callable[[str], object]):
    self._loggers = list(loggers)
    self._started: list[Logger] = []
    self._without_saves: list[Logger] = []
    self._directory, self._report = directory, report

  def log(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
    """Passes the metrics of a split after a step to the loggers."""
    metrics = {f'{split}/{name}': value for name, value in scalars.items()}
    for logger in list(self._loggers):
      self._call(logger, functools.partial(logger.log, step, metrics))

  def on_checkpoint(self, run: Run, step: int, path: Path) -> None:
    self.save(step, path)

  def save(self, step: int, folder: Path) -> None:
    """Passes the checkpoint of a step to the loggers that get checkpoints."""
    for logger in [logger for logger in self._loggers if logger.checkpoints and logger not in self._without_saves]:
      self._call(logger, functools.partial(self._save, logger, step, folder))

  def _save(self, logger: Logger, step: int, folder: Path) -> None:
    """Passes a checkpoint to a logger; a logger that fails gets no more checkpoints, but still gets metrics."""
    try:
      logger.save(step, folder)
    except Exception as error:
      self._without_saves.append(logger)
      what = error_summary(error)
      self._report(f'{type(logger).__name__} gets no more checkpoints: {what}; training and metrics go on')

  def _call(self, logger: Logger, call: Callable[[], None]) -> None:
    """Starts a logger unless it has started, then calls it."""
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
      what = error_summary(error)
      self._report(f'{type(logger).__name__} gets no more metrics: {what}; training goes on without it')

  def _start(self, logger: Logger) -> None:
    started = None
    with contextlib.suppress(OSError):
      started = first_launch(read_plain(self._directory / 'run.json'))
    fields = fields_of(read_text(self._directory))
    shown = {path: LEFT_OUT if is_secret(path) else remove_secrets(value) for path, value in fields.items()}
    number = '' if started is None else f'-{int(started * 1000):x}'
    logger.start(LoggedRun(self._directory, f'{self._directory.name}{number}', shown))
