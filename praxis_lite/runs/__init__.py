"""Runs an experiment: start-up, the training loop, records, summaries, evaluation and decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from praxis_lite.common.importing import lazy_names

if TYPE_CHECKING:
  from praxis_lite.common.devices import simulate_cpu_devices as simulate_cpu_devices
  from praxis_lite.runs.batcher import Batcher as Batcher, Request as Request
  from praxis_lite.runs.cluster.distributed import initialize_distributed as initialize_distributed
  from praxis_lite.runs.compilation_cache import set_up_compilation_cache as set_up_compilation_cache
  from praxis_lite.runs.draft_statistics import DraftStatistics as DraftStatistics
  from praxis_lite.runs.executor import TrainResult as TrainResult, run_train as run_train
  from praxis_lite.runs.hooks import Hook as Hook
  from praxis_lite.runs.inference import run_decode as run_decode, run_eval as run_eval
  from praxis_lite.runs.loggers.base import Logger as Logger
  from praxis_lite.runs.loggers.services import (
    AimLogger as AimLogger,
    CometLogger as CometLogger,
    MlflowLogger as MlflowLogger,
    PrometheusLogger as PrometheusLogger,
    WandbLogger as WandbLogger,
  )
  from praxis_lite.runs.loop.options import TrainOptions as TrainOptions
  from praxis_lite.runs.nonfinite import NonFiniteError as NonFiniteError
  from praxis_lite.runs.observer import Run as Run
  from praxis_lite.runs.run import SavedRun as SavedRun, open_run as open_run
  from praxis_lite.runs.scoring import Score as Score
  from praxis_lite.runs.trained import TrainedModel as TrainedModel

__getattr__, __dir__, __all__ = lazy_names(
  __name__,
  {
    'praxis_lite.runs.compilation_cache': 'set_up_compilation_cache',
    'praxis_lite.common.devices': 'simulate_cpu_devices',
    'praxis_lite.runs.cluster.distributed': 'initialize_distributed',
    'praxis_lite.runs.batcher': 'Batcher Request',
    'praxis_lite.runs.draft_statistics': 'DraftStatistics',
    'praxis_lite.runs.executor': 'TrainResult run_train',
    'praxis_lite.runs.hooks': 'Hook',
    'praxis_lite.runs.inference': 'run_decode run_eval',
    'praxis_lite.runs.loggers.base': 'Logger',
    'praxis_lite.runs.loggers.services': 'AimLogger CometLogger MlflowLogger PrometheusLogger WandbLogger',
    'praxis_lite.runs.loop.options': 'TrainOptions',
    'praxis_lite.runs.nonfinite': 'NonFiniteError',
    'praxis_lite.runs.observer': 'Run',
    'praxis_lite.runs.run': 'SavedRun open_run',
    'praxis_lite.runs.scoring': 'Score',
    'praxis_lite.runs.trained': 'TrainedModel',
  },
)
