"""praxis_lite: layer parameters for JAX, and training on any mesh.

The names most experiments need can be imported from here; each is loaded when it is first used, so that the command
line starts at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from praxis_lite.importing import lazy_names
from praxis_lite.jax_internals.flags import add_needed_flags

if TYPE_CHECKING:
  from praxis_lite import registry as registry
  from praxis_lite.config import (
    REQUIRED as REQUIRED,
    Config as Config,
    template as template,
  )
  from praxis_lite.experiment import BaseExperiment as BaseExperiment
  from praxis_lite.layer import (
    ActivationSplit as ActivationSplit,
    Layer as Layer,
    SplitMapping as SplitMapping,
    WeightSplit as WeightSplit,
  )
  from praxis_lite.learning import Learner as Learner
  from praxis_lite.models import BaseModel as BaseModel
  from praxis_lite.runtime import (
    open_run as open_run,
    simulate_cpu_devices as simulate_cpu_devices,
  )
  from praxis_lite.task import SingleTask as SingleTask
  from praxis_lite.training import (
    partition_spmd_model as partition_spmd_model,
    unpadded as unpadded,
  )
  from praxis_lite.weights import (
    WeightHParams as WeightHParams,
    WeightInit as WeightInit,
  )

__getattr__ = lazy_names(
  __name__,
  {
    'praxis_lite.config': 'REQUIRED Config template',
    'praxis_lite.experiment': 'BaseExperiment',
    'praxis_lite.layer': 'ActivationSplit Layer SplitMapping WeightSplit',
    'praxis_lite.learning': 'Learner',
    'praxis_lite.models': 'BaseModel',
    'praxis_lite.runtime': 'open_run simulate_cpu_devices',
    'praxis_lite.task': 'SingleTask',
    'praxis_lite.training': 'partition_spmd_model unpadded',
    'praxis_lite.weights': 'WeightHParams WeightInit',
  },
)

add_needed_flags()  # Here, because XLA reads its flags once, when JAX starts.
