"""An experiment for `launch` whose metrics say which examples each step has read, exactly."""

from __future__ import annotations

import os

import jax.numpy as jnp
import numpy as np
from tiny_runs import TinyModel, examples, tiny_run

from praxis_lite.common.config import Config
from praxis_lite.training.experiment import BaseExperiment

COUNT, PLACES = 50, 8  # Eight digits of three bits are whole numbers that float32 has exactly.
NAMES = [f'ids_{first}' for first in range(0, COUNT, PLACES)]


class CountedModel(TinyModel):
  def compute_loss(self, predictions, batch):
    metrics, out = super().compute_loss(predictions, batch)
    times = jnp.zeros(COUNT).at[batch['id']].add(batch['weights'])
    for i, name in enumerate(NAMES):
      part = times[i * PLACES : (i + 1) * PLACES]
      metrics[name] = ((part * 8.0 ** jnp.arange(part.size)).sum(), jnp.float32(1))
    return metrics, out


def times_in(metrics):
  """How often a step has read each example, from its metrics."""
  digits = [int(metrics[name]) // 8**place % 8 for name in NAMES for place in range(PLACES)]
  return np.array(digits[:COUNT])


class CountedHosts(BaseExperiment):
  def _run(self):
    run = tiny_run(int(os.environ['TOTAL_DEVICES']), noise=0.0, num_train_steps=27, save_interval_steps=2)
    run.task.model = Config(CountedModel, noise=0.0)
    arrays = {**examples(COUNT, 0), 'id': np.arange(COUNT, dtype=np.int32)}
    run.datasets[0].set(arrays=arrays, gate=os.environ.get('GATE', ''), shuffle=True)
    del run.datasets[1:]
    return run

  def task(self):
    return self._run().task

  def datasets(self):
    return self._run().datasets
