"""Training through shard_map is training: it matches compiler placement, and communicates what it says it does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.config import Config
from praxis_lite.errors import ConfigError
from praxis_lite.layers import Dropout, Linear, Mlp
from praxis_lite.models import ClassificationModel, transformer_lm
from praxis_lite.partitioning.collectives import collectives
from praxis_lite.partitioning.spmd import PartitionedTask
from praxis_lite.task import SingleTask

VOCAB, LENGTH, LAYERS = 37, 8, 3
FSDP = [('.*', 'fsdp(axis="data", min_size_to_shard_mb=0.0003)')]


def lm_batch(rows, seed=0):
  rng = np.random.default_rng(seed)
  ids = (rng.integers(0, VOCAB, (rows, 1)) + np.arange(LENGTH + 1) * rng.integers(1, 4, (rows, 1))) % VOCAB
  weights = (rng.uniform(size=(rows, LENGTH)) < np.linspace(0.2, 1, rows)[:, None]).astype(np.float32)
  ids = ids.astype(np.int32)
  return {'ids': ids[:, :-1], 'labels': ids[:, 1:], 'weights': weights}


def lm_task(partitioning, devices=8, strategy=None, optimizer=None, **learner):
  model = transformer_lm(vocab_size=VOCAB, model_dims=20, num_layers=LAYERS, num_heads=2, hidden_dims=44)
  task = Config(SingleTask, model=model.set(packed=False), partitioning=partitioning, strategy=strategy)
  task.set(mesh_axis_names=('data',), ici_mesh_shape=(devices,))
  task.train.inputs_split_mapping = {'map_1d': ('data',), 'map_2d': ('data', None)}
  learner = {'clip_gradient_norm_to_value': 0.5, **learner}
  task.train.learner.set(optimizer=optimizer or Config(optax.adamw), learning_rate=3e-3, **learner)
  return task


def partitioned(task, batch):
  return PartitionedTask(task.instantiate(), jax.eval_shape(lambda: batch))


def run(task, batches):
  p = partitioned(task, batches[0])
  state, outs = p.init_state(jax.random.key(0)), []
  for batch in batches:
    out = p.train_step(state, jax.random.key(1), batch)
    state = out.state
    outs.append(out._replace(state=None))
  return p, state, outs


def assert_same_step(left, right, rtol=1e-5, atol=1e-6):
  for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
    np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=rtol, atol=atol)


@pytest.mark.parametrize('devices', [8, 5])
@pytest.mark.parametrize('strategy', [None, FSDP], ids=['data_parallel', 'fully_sharded'])
def test_one_step_and_fifty_match_compiler_placement(devices, strategy):
  # 13 rows leave some devices with rows of padding alone; weights differ between rows.
  batches = [lm_batch(13, seed) for seed in range(50)]
  _, first, (auto,) = run(lm_task('auto', devices, strategy), batches[:1])
  p, state, (explicit,) = run(lm_task('shard_map', devices, strategy), batches[:1])
  assert_same_step((first.mdl_vars, auto), (state.mdl_vars, explicit))
  _, _, curve = run(lm_task('auto', devices, strategy), batches)
  _, _, explicit_curve = run(lm_task('shard_map', devices, strategy), batches)
  losses = [float(out.weighted_loss) for out in curve]
  np.testing.assert_allclose([float(out.weighted_loss) for out in explicit_curve], losses, rtol=1e-4)
  assert losses[-1] < 0.8 * losses[0]
  if strategy:
    padding = np.asarray(state.mdl_vars['lm']['softmax']['w'])[20:]
    assert padding.size == (20 if devices == 8 else 0) // 5 * 37 or not padding.any()
