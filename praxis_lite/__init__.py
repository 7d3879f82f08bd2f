"""praxis_lite: layer parameters for JAX, and training on any mesh.

The names most experiments need can be imported from here; each is loaded when it is first used, so that the command
line starts at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from praxis_lite.jax_internals.flags import add_needed_flags

if TYPE_CHECKING:
  from praxis_lite import registry
  from praxis_lite.config import REQUIRED, Config, template
  from praxis_lite.experiment import BaseExperiment
  from praxis_lite.layer import ActivationSplit, Layer, SplitMapping, WeightSplit
  from praxis_lite.learning import Learner
  from praxis_lite.models import BaseModel
  from praxis_lite.runtime import open_run, simulate_cpu_devices
  from praxis_lite.task import SingleTask
  from praxis_lite.training import partition_spmd_model, unpadded
  from praxis_lite.weights import WeightHParams, WeightInit

_EXPORTS = {
  'config': ('REQUIRED', 'Config', 'template'),
  'experiment': ('BaseExperiment',),
  'layer': ('ActivationSplit', 'Layer', 'SplitMapping', 'WeightSplit'),
  'learning': ('Learner',),
  'models': ('BaseModel',),
  'runtime': ('open_run', 'simulate_cpu_devices'),
  'task': ('SingleTask',),
  'training': ('partition_spmd_model', 'unpadded'),
  'weights': ('WeightHParams', 'WeightInit'),
}


add_needed_flags()  # Here, as XLA reads its flags once, when JAX starts.


def __getattr__(name: str) -> Any:
  for module, names in _EXPORTS.items():
    if name in names:
      return getattr(importlib.import_module(f'{__name__}.{module}'), name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
