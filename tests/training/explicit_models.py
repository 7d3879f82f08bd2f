"""Small models and batches for the tests of explicit collectives."""

import jax
import numpy as np
import optax
from drawn_state import drawn_state

from praxis_lite.common.config import Config
from praxis_lite.models import transformer_lm
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask

VOCAB, LENGTH, LAYERS = 37, 8, 3
FSDP = [('.*', 'fsdp(axis="data", min_size_to_shard_mb=0.0003)')]


def lm_batch(rows, seed=0, length=LENGTH):
  rng = np.random.default_rng(seed)
  ids = (rng.integers(0, VOCAB, (rows, 1)) + np.arange(length + 1) * rng.integers(1, 4, (rows, 1))) % VOCAB
  weights = (rng.uniform(size=(rows, length)) < np.linspace(0.2, 1, rows)[:, None]).astype(np.float32)
  ids = ids.astype(np.int32)
  return {'ids': ids[:, :-1], 'labels': ids[:, 1:], 'weights': weights}


def lm_task(partitioning, devices=8, strategy=None, model_dims=20, hidden_dims=44, layers=LAYERS):
  model = transformer_lm(
    vocab_size=VOCAB, model_dims=model_dims, num_layers=layers, num_heads=2, hidden_dims=hidden_dims
  )
  task = Config(SingleTask, model=model.set(packed=False), partitioning=partitioning, strategy=strategy)
  task.set(mesh_axis_names=('data',), ici_mesh_shape=(devices,))
  task.train.inputs_split_mapping = {'map_1d': ('data',), 'map_2d': ('data', None)}
  task.train.learner.set(optimizer=Config(optax.adamw), learning_rate=3e-3, clip_gradient_norm_to_value=0.5)
  return task


def class_batch(rows, seed=0):
  rng = np.random.default_rng(seed)
  return {
    'image': rng.normal(size=(rows, 4, 4, 1)).astype(np.float32),
    'label': rng.integers(0, 10, rows).astype(np.int32),
    'weights': rng.uniform(0.1, 1, rows).astype(np.float32),
  }


def partitioned(task, batch):
  return PartitionedTask(task.instantiate(), jax.eval_shape(lambda: batch))


def train(task, batches):
  """Returns (output of the first step, on the host; losses; last state)."""
  p = partitioned(task, batches[0])
  state, first, losses = drawn_state(p), None, []
  for batch in batches:
    out = p.train_step(state, jax.random.key(1), batch)
    first = jax.device_get(out) if first is None else first
    state = out.state
    losses.append(float(out.weighted_loss))
  return first, losses, state
