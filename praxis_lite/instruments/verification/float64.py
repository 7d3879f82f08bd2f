"""Runs a step on one device in float64, to decide which of two float32 results is wrong.

Results of one device in float32 are not a reliable reference: they are rounded, and XLA also has faults on one CPU
device, for example in the gradient of a convolution with batch groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from praxis_lite.common.config import Config
from praxis_lite.instruments.verification.shrink import replace_dtypes
from praxis_lite.instruments.verification.steps import Case, Runner, StepResults, task_of, values_of_state
from praxis_lite.training.task import SingleTask


def results_in_float64(case: Case, one_device: Mesh, noise: Sequence[int]) -> tuple[StepResults, list[StepResults]]:
  """Returns the results of a case in float64, without noise, and a list of results with noise, one for each seed.

  Variables and batch have the same values as in the case.

  Raises:
    Exception: any error of a layer that does not support float64.
  """
  with jax.enable_x64(True):
    config = to_float64(case.config)
    task = task_of(config, case.kind)
    # Averages, such as those of batch norms, are float32, whatever dtype the layer computes in.
    declared = jax.tree.map(lambda weight: weight.dtype, task.model.abstract_init())
    state = values_of_state(task, jax.tree.map(np.ndarray.astype, case.state.mdl_vars, declared))
    batch = jax.tree.map(_array_to_float64, case.batch)
    runner = Runner(case._replace(config=config, task=task, state=state, batch=batch), one_device)
    return runner.results(), [runner.results(seed) for seed in noise]


def to_float64(config: Config[SingleTask]) -> Config[SingleTask]:
  """Returns a copy of the config whose task stores and computes in float64."""
  copy = replace_dtypes(config, jnp.float64)
  copy.model.dtype = jnp.float64
  return copy


def _array_to_float64(x: np.ndarray) -> np.ndarray:
  return x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x
