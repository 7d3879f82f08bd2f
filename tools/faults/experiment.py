"""The experiment of the campaign: a small model on two devices, whose steps take some time but little work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.trees import NestedDict
from praxis_lite.inputs import ArrayInput, ArrayRecordInput
from praxis_lite.inputs.rows import Feature, Rows
from praxis_lite.models import BaseModel
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training import registry
from praxis_lite.training.experiment import BaseExperiment
from praxis_lite.training.learning import Learner
from praxis_lite.training.task import SingleTask

NUM_STEPS = 24
SAVE_INTERVAL = 4
NUM_EXAMPLES = 50


def examples(count: int = NUM_EXAMPLES) -> dict[str, np.ndarray]:
  x = np.random.default_rng(count).standard_normal((count, 10)).astype(np.float32)
  return {'x': x, 'y': np.sin(x.sum(1)).astype(np.float32)}


class SlowInput(ArrayInput):
  """An input that takes some time to read a batch, so that a fault can happen meanwhile.

  Attributes:
    seconds: the time that each batch takes.
  """

  arrays: Config | Callable[[], Rows] | Rows = examples
  seconds: float = 0.0

  def read(self, epoch: int, position: int, count: int, start: int, stop: int) -> tuple[Rows | None, int]:
    time.sleep(self.seconds)
    return super().read(epoch, position, count, start, stop)


class NoisyModel(BaseModel):
  """y = tanh(x w) v with noise on x, so that a resumed run must restore random numbers. Its 7 dims are not even."""

  def setup(self) -> None:
    self.create_variable('w', WeightHParams((10, 7), tensor_split_dims_mapping=(None, 'data')))
    self.create_variable('v', WeightHParams((7,), tensor_split_dims_mapping=('data',)))

  def compute_predictions(self, batch: NestedDict) -> jax.Array:
    x = batch['x']
    if not self.do_eval:
      x = x + 0.1 * jax.random.normal(self.next_prng_key(), x.shape)
    self.add_summary('w_rms', jnp.sqrt(jnp.mean(self.theta.w**2)))
    return jnp.tanh(x @ self.theta.w) @ self.theta.v

  def compute_loss(self, predictions: jax.Array, batch: NestedDict) -> tuple[dict[str, Any], dict[str, Any]]:
    errors, weights = (predictions - batch['y']) ** 2, batch['weights']
    return {'loss': ((errors * weights).sum() / jnp.maximum(weights.sum(), 1), weights.sum())}, {}


@registry.register
class Faults(BaseExperiment):
  """A regression of numbers in memory."""

  def task(self) -> Config:
    task = Config(SingleTask, name='faults', model=Config(NoisyModel), mesh_axis_names=('data',), ici_mesh_shape=(2,))
    task.train.learner = Config(Learner, optimizer=Config(optax.adam), learning_rate=0.05)
    task.train.set(num_train_steps=NUM_STEPS, log_interval_steps=1, eval_interval_steps=6)
    task.train.set(save_interval_steps=SAVE_INTERVAL, max_to_keep=3)
    return task

  def datasets(self) -> list[Config]:
    return [
      Config(SlowInput, name='train', batch_size=6, is_training=True, shuffle=True, seconds=0.03),
      Config(SlowInput, name='valid', batch_size=6, arrays=Config(examples, count=33)),
    ]


@registry.register
class FaultsOnFour(Faults):
  """The same on four devices."""

  def task(self) -> Config:
    return super().task().set(ici_mesh_shape=(4,))


@registry.register
class FaultsStopping(Faults):
  """The same, but its evaluations decide when it ends."""

  def task(self) -> Config:
    task = super().task()
    task.train.set(eval_interval_steps=2)
    task.train.early_stopping.set(metric='loss', patience=2)
    return task


@registry.register
class FaultsInFiles(Faults):
  """The same with data in a file of records."""

  def datasets(self) -> list[Config]:
    features = {'x': Config(Feature, shape=(10,), dtype='float32'), 'y': Config(Feature, dtype='float32')}
    train = Config(ArrayRecordInput, name='train', path=REQUIRED, features=features, num_workers=0)
    return [train.set(batch_size=6, is_training=True, shuffle=True), super().datasets()[1]]
