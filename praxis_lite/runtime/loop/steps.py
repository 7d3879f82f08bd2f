"""Taking training steps, and what `run_train` can be asked to look at in them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from praxis_lite.errors import ConfigError
from praxis_lite.hosts.watchdog import doing
from praxis_lite.records.run_config import is_due
from praxis_lite.runtime.determinism import step_twice
from praxis_lite.runtime.loop.job import Job
from praxis_lite.runtime.loop.options import TrainOptions
from praxis_lite.runtime.nonfinite import SKIPPED
from praxis_lite.runtime.replay import check_finite
from praxis_lite.training.numerics import compare_gradients
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.state import TrainState
from praxis_lite.training.steps import TrainStepOutput
from praxis_lite.trees import NestedDict


class TrainSteps:
  """Takes the steps of a run, in their order.

  With the option `verify_numerics`, the gradients of the first one are compared with another computation of them; with
  `check_determinism`, some are run twice; with `debug_nans`, one that is not finite is looked into.

  Args:
    job: what is trained.
    options: those of the run.
    line: prints a line.
  """

  def __init__(self, job: Job, options: TrainOptions, line: Callable[[str], object]):
    self._partitioned = job.partitioned
    self._key = job.keys.train
    self._verifies_next = options.verify_numerics
    self._twice_every = options.check_determinism
    self._debug_nans = options.debug_nans
    self._line = line

  def take(self, number: int, state: TrainState, batch: NestedDict) -> TrainStepOutput:
    """Takes step `number`, which donates `state`: that of after the step before.

    Raises:
      NumericsError, DeterminismError, NonFiniteError: what the options look for has been found.
    """
    partitioned, key = self._partitioned, self._key
    if self._verifies_next:
      self._verifies_next = False
      self._line(_verified(partitioned, state, key, batch))
    doing(f'step {number}')
    with jax.profiler.StepTraceAnnotation('train', step_num=number):
      if is_due(number, self._twice_every):
        out = step_twice(partitioned.train_step, state, key, batch, number)
      else:
        out = partitioned.train_step(state, key, batch)
    if self._debug_nans and float(np.asarray(out.mean_metrics[SKIPPED][0])):
      check_finite(partitioned, number - 1, out.state, key, batch)
    return out


def _verified(partitioned: PartitionedTask, state: TrainState, key: jax.Array, batch: NestedDict) -> str:
  """Compares the gradients of the next step with another computation of them; returns a line about it."""
  try:
    compared = compare_gradients(partitioned, state, key, batch)
  except ConfigError as error:
    return f'gradients not verified: {error}'
  return (
    f'gradients verified: {compared.num_norms} norms, of each variable and layer, are those computed '
    f'{compared.reference}; largest difference {compared.worst:.1e} of the norm'
  )
