"""A tiny regression task whose dimensions do not divide, its data, and its runs: quick to compile, noisy to train."""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite.common.config import Config
from praxis_lite.inputs import ArrayInput
from praxis_lite.models.base import BaseModel
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.learning import Learner
from praxis_lite.training.task import SingleTask

INPUTS, HIDDEN = 10, 7


class TinyModel(BaseModel):
  """y = tanh(x w) v, with noise on x in training: what is drawn must come back when a run resumes."""

  noise: float = 0.1

  def setup(self):
    self.create_variable('w', WeightHParams((INPUTS, HIDDEN), tensor_split_dims_mapping=('data', None)))
    self.create_variable('v', WeightHParams((HIDDEN,), tensor_split_dims_mapping=('data',)))

  def compute_predictions(self, batch):
    x = batch['x']
    if not self.do_eval:
      x = x + self.noise * jax.random.normal(self.next_prng_key(), x.shape)
    self.add_summary('w_rms', jnp.sqrt(jnp.mean(self.theta.w**2)))
    return jnp.tanh(x @ self.theta.w) @ self.theta.v

  def compute_loss(self, predictions, batch):
    errors, weights = (predictions - batch['y']) ** 2, batch['weights']
    total = weights.sum()
    return {'loss': ((errors * weights).sum() / jnp.maximum(total, 1), total)}, {'errors': errors}

  def decode(self, batch):
    predictions = jnp.tanh(batch['x'] @ self.theta.w) @ self.theta.v
    return {'num_decoded': (batch['weights'].sum(), jnp.float32(1))}, {'y': predictions}


class GatedInput(ArrayInput):
  """Waits before a batch that its gate does not let through yet, so that a test can act on a run that stands still.

  Attributes:
    gate: a file with the number of batches that may be read, which `open_gate` writes; '' lets all of them through.
  """

  gate: str = ''

  def read(self, epoch, position, count, start, stop):
    number = epoch * self.batches_per_epoch() + position // self.batch_size
    while self.gate and number >= int(pathlib.Path(self.gate).read_text()):
      time.sleep(0.01)
    return super().read(epoch, position, count, start, stop)


def open_gate(gate: pathlib.Path, batches: int = 1000) -> str:
  """Lets this many batches through, counted from the beginning of training; returns the gate's name."""
  written = gate.with_suffix('.new')
  written.write_text(str(batches))
  os.replace(written, gate)  # A reader finds the old number or the new one.
  return str(gate)


def examples(count: int, seed: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((count, INPUTS)).astype(np.float32)
  return {'x': x, 'y': np.sin(x.sum(1)).astype(np.float32)}


def tiny_run(
  devices: int = 1,
  *,
  noise: float = 0.1,
  gate: str = '',
  eval_gate: str = '',
  learner: dict[str, Any] | None = None,
  **train: Any,
):
  """The configs of a run of 20 steps; batches of 6 do not divide by any number of devices that is tested."""
  task = Config(
    SingleTask, name='tiny', model=Config(TinyModel, noise=noise), mesh_axis_names=('data',), ici_mesh_shape=(devices,)
  )
  task.train.learner = Config(Learner, **{'optimizer': Config(optax.adam), 'learning_rate': 0.05, **(learner or {})})
  task.train.set(**{'num_train_steps': 20, 'log_interval_steps': 1, 'save_interval_steps': 3, **train})
  data = Config(GatedInput, name='train', arrays=examples(50, 0), batch_size=6, is_training=True, gate=gate)
  valid = Config(GatedInput, name='valid', arrays=examples(33, 1), batch_size=6, gate=eval_gate)
  prompts = Config(ArrayInput, name='prompts', arrays=examples(7, 2), batch_size=4)
  return ExperimentConfig(task, [data, valid], [prompts])


def shared_rows_run(shape: tuple[int, int]):
  """The configs of a run of 4 steps whose inputs x are split over rows and over a context axis."""
  config = tiny_run(noise=0.0, num_train_steps=4, decode_interval_steps=4)
  config.task.set(mesh_axis_names=('context', 'data'), ici_mesh_shape=shape)
  config.task.train.inputs_split_mapping = {'map_1d': ('data',), 'map_2d': ('data', 'context')}
  return config


def expected_loss(variables: Any, count: int, seed: int) -> float:
  """The loss on `examples(count, seed)`, in NumPy."""
  w, v = (np.asarray(variables[name], np.float64) for name in ('w', 'v'))
  data = examples(count, seed)
  return float(np.mean((np.tanh(data['x'] @ w[:INPUTS]) @ v[:HIDDEN] - data['y']) ** 2))
