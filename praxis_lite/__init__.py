"""praxis_lite: layer parameters for JAX, and training on any mesh.

The names most experiments need can be imported from here; each is loaded when it is first used, so that the command
line starts at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from praxis_lite import registry
  from praxis_lite.config import REQUIRED, Config, template
  from praxis_lite.experiment import BaseExperiment
  from praxis_lite.layer import ActivationSplit, Layer, SplitMapping, WeightSplit
  from praxis_lite.learning import Learner
  from praxis_lite.models import BaseModel
  from praxis_lite.runtime import simulate_cpu_devices
  from praxis_lite.task import SingleTask
  from praxis_lite.training import partition_spmd_model
  from praxis_lite.weights import WeightHParams, WeightInit

__all__ = [
  'REQUIRED',
  'ActivationSplit',
  'BaseExperiment',
  'BaseModel',
  'Config',
  'Layer',
  'Learner',
  'SingleTask',
  'SplitMapping',
  'WeightHParams',
  'WeightInit',
  'WeightSplit',
  'partition_spmd_model',
  'registry',
  'simulate_cpu_devices',
  'template',
]

_MODULES = {
  'REQUIRED': 'config',
  'ActivationSplit': 'layer',
  'BaseExperiment': 'experiment',
  'BaseModel': 'models',
  'Config': 'config',
  'Layer': 'layer',
  'Learner': 'learning',
  'SingleTask': 'task',
  'WeightHParams': 'weights',
  'SplitMapping': 'layer',
  'WeightInit': 'weights',
  'WeightSplit': 'layer',
  'partition_spmd_model': 'training',
  'simulate_cpu_devices': 'runtime',
  'template': 'config',
}


def __getattr__(name: str) -> Any:
  if name not in _MODULES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(f'{__name__}.{_MODULES[name]}'), name)
