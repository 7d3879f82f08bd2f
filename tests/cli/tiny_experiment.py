"""An experiment in a file of its own that compiles and trains in no time: y = tanh(x w) v, of random numbers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import Config
from praxis_lite.inputs import ArrayInput
from praxis_lite.models import BaseModel
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training import registry
from praxis_lite.training.experiment import BaseExperiment
from praxis_lite.training.task import SingleTask


def examples() -> dict[str, np.ndarray]:
  x = np.random.default_rng(0).standard_normal((12, 5)).astype(np.float32)
  return {'x': x, 'y': np.sin(x.sum(1)).astype(np.float32)}


class Examples(ArrayInput):
  arrays: object = examples


class TinyModel(BaseModel):
  hidden: int = 7

  def setup(self) -> None:
    if self.hidden == 13:
      raise RuntimeError('an unlucky number')
    self.create_variable('w', WeightHParams((5, self.hidden)))
    self.create_variable('v', WeightHParams((self.hidden,)))

  def compute_predictions(self, batch):
    return jnp.tanh(batch['x'] @ self.theta.w) @ self.theta.v

  def compute_loss(self, predictions, batch):
    errors, weights = (predictions - batch['y']) ** 2, batch['weights']
    return {'loss': ((errors * weights).sum() / jnp.maximum(weights.sum(), 1), weights.sum())}, {}


@registry.register
class Tiny(BaseExperiment):
  """Random numbers."""

  mesh_axis_names = ('data',)

  def task(self):
    task = Config(SingleTask, name='tiny', model=Config(TinyModel))
    task.train.set(num_train_steps=2, log_interval_steps=1)
    return task

  def datasets(self):
    return [
      Config(Examples, name='train', batch_size=4, is_training=True),
      Config(Examples, name='valid', batch_size=4),
    ]
