"""Writes metrics for Prometheus."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.files import replace_file, user_path
from praxis_lite.runs.loggers.base import LoggedRun, Logger


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
