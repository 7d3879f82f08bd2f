"""praxis_lite: a framework for JAX, to declare layers and how their arrays are split, and to train them on any mesh.

The names that most experiments need can be imported from here. Each is loaded when it is first used, so that the
command line starts at once.
"""

from __future__ import annotations

from praxis_lite.common.interrupts import end_on_interrupt, is_command

if is_command():  # Before the imports below, which take a while.
  end_on_interrupt()

from typing import TYPE_CHECKING

from praxis_lite.common.importing import lazy_names
from praxis_lite.common.jax_internals.flags import add_needed_flags
from praxis_lite.common.jax_internals.threads import provide_threads

if TYPE_CHECKING:
  from praxis_lite.common.config import REQUIRED as REQUIRED, Config as Config, child as child, template as template
  from praxis_lite.layers.base import (
    ActivationSplit as ActivationSplit,
    Layer as Layer,
    SplitMapping as SplitMapping,
    WeightSplit as WeightSplit,
  )
  from praxis_lite.models import BaseModel as BaseModel
  from praxis_lite.runs import open_run as open_run, simulate_cpu_devices as simulate_cpu_devices
  from praxis_lite.sharding.weights import WeightHParams as WeightHParams, WeightInit as WeightInit
  from praxis_lite.training import partition_spmd_model as partition_spmd_model, registry as registry, unpad as unpad
  from praxis_lite.training.experiment import BaseExperiment as BaseExperiment
  from praxis_lite.training.learning import Learner as Learner
  from praxis_lite.training.task import SingleTask as SingleTask

__getattr__, __dir__, __all__ = lazy_names(
  __name__,
  {
    'praxis_lite.common.config': 'REQUIRED Config child template',
    'praxis_lite.training.experiment': 'BaseExperiment',
    'praxis_lite.layers.base': 'ActivationSplit Layer SplitMapping WeightSplit',
    'praxis_lite.training.learning': 'Learner',
    'praxis_lite.models': 'BaseModel',
    'praxis_lite.runs': 'open_run simulate_cpu_devices',
    'praxis_lite.training.registry': 'registry',
    'praxis_lite.instruments.testing': 'testing',
    'praxis_lite.training.task': 'SingleTask',
    'praxis_lite.training': 'partition_spmd_model unpad',
    'praxis_lite.sharding.weights': 'WeightHParams WeightInit',
  },
)

# Here, because XLA reads its flags and the number of its threads only once, when JAX starts.
add_needed_flags()
provide_threads()
