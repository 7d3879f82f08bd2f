"""Which of two results is wrong: the same step on one device in float64 tells.

One device is no oracle: its float32 rounds, and XLA has faults of its own on one CPU device, such as in the gradient of
a convolution with groups of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from praxis_lite.config import Config
from praxis_lite.task import SingleTask
from praxis_lite.verification.shrink import with_dtypes
from praxis_lite.verification.steps import Case, Results, Runner, task_of, values_of_state


def results_in_float64(case: Case, one_device: Mesh, noise: Sequence[int]) -> tuple[Results, list[Results]]:
  """Returns the results of a case that computes in float64, on the same values, and those with noise of these seeds.

  Raises:
    Exception: what a layer raises that does not compute in float64.
  """
  with jax.enable_x64(True):
    config = in_float64(case.config)
    task = task_of(config, case.kind)
    state = values_of_state(task, jax.tree.map(_as_float64, case.state.mdl_vars))
    batch = jax.tree.map(_as_float64, case.batch)
    runner = Runner(case._replace(config=config, task=task, state=state, batch=batch), one_device)
    return runner.results(), [runner.results(seed) for seed in noise]


def in_float64(config: Config[SingleTask]) -> Config[SingleTask]:
  """Returns a copy that stores and computes in float64."""
  copy = with_dtypes(config, jnp.float64)
  copy.model.dtype = jnp.float64
  return copy


def _as_float64(x: np.ndarray) -> np.ndarray:
  return x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x
