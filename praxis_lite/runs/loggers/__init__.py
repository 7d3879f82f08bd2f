"""Loggers send the metrics of a run to Weights & Biases, MLflow, Aim, Comet, Prometheus, or a service of your own.

    config.task.train.loggers = ('wandb', Config(MlflowLogger, experiment='curves', checkpoints=True), Config(MyLogger))

They get the numbers that are written to `metrics.jsonl`, when they are written, and with `checkpoints` each checkpoint
once it is complete. A run that is resumed goes on as the same run of the service. A logger that fails, at its start or
later, is reported once and then left out, and one that fails to take a checkpoint gets no more of these; training goes
on. Event files for TensorBoard are always written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from praxis_lite.common.importing import lazy_names

if TYPE_CHECKING:
  from praxis_lite.runs.loggers.aim_logger import AimLogger as AimLogger
  from praxis_lite.runs.loggers.base import LoggedRun as LoggedRun, Logger as Logger
  from praxis_lite.runs.loggers.comet_logger import CometLogger as CometLogger
  from praxis_lite.runs.loggers.mlflow_logger import MlflowLogger as MlflowLogger
  from praxis_lite.runs.loggers.prometheus_logger import PrometheusLogger as PrometheusLogger
  from praxis_lite.runs.loggers.wandb_logger import WandbLogger as WandbLogger

__getattr__, __dir__, __all__ = lazy_names(
  __name__,
  {
    'praxis_lite.runs.loggers.aim_logger': 'AimLogger',
    'praxis_lite.runs.loggers.base': 'LoggedRun Logger',
    'praxis_lite.runs.loggers.comet_logger': 'CometLogger',
    'praxis_lite.runs.loggers.mlflow_logger': 'MlflowLogger',
    'praxis_lite.runs.loggers.prometheus_logger': 'PrometheusLogger',
    'praxis_lite.runs.loggers.wandb_logger': 'WandbLogger',
  },
)
