"""The registered digits experiments: four ways to communicate, one training."""

import jax
import numpy as np
import pytest
from drawn_state import drawn_state

from praxis_lite.experiments.digits import digits
from praxis_lite.instruments.testing import collectives
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure
from praxis_lite.training.partitioned_task import PartitionedTask

NAMES = ('DigitsDataParallel', 'DigitsDataParallelExplicit', 'DigitsFullySharded', 'DigitsFullyShardedExplicit')
STEPS, ROWS = 4, 64


def task_of(name):
  registry.load_all()
  return configure(registry.get(f'digits.{name}')).task


def batches():
  data = digits('train')
  return [{k: v[i * ROWS : (i + 1) * ROWS] for k, v in data.items()} for i in range(STEPS)]


def curve(task):
  data = batches()
  p = PartitionedTask(task.instantiate(), jax.eval_shape(lambda: data[0]))
  state, losses = drawn_state(p), []
  for batch in data:
    out = p.train_step(state, jax.random.key(1), batch)
    state = out.state
    losses.append(float(out.weighted_loss))
  return p, losses


@pytest.fixture(scope='module')
def expected():
  task = task_of('DigitsDataParallel')
  task.ici_mesh_shape = (1,)
  return curve(exact(task))[1]


def exact(task):
  """In float32 and without dropout, so that all ways are the same function."""
  task.model.fprop_dtype = None
  task.model.network_tpl.dropout_tpl.rate = 0.0
  return task


@pytest.mark.slow_cases
@pytest.mark.parametrize('name', NAMES)
def test_all_ways_train_as_one_device_does(name, expected):
  np.testing.assert_allclose(curve(exact(task_of(name)))[1], expected, rtol=1e-4)


@pytest.mark.slow_cases
@pytest.mark.parametrize('name', NAMES)
def test_registered_experiments_train_and_communicate_as_they_say(name):
  task = task_of(name)
  task.train.learner.schedule.warmup_steps = 1
  p, losses = curve(task)
  assert np.isfinite(losses).all()
  assert losses[-1] < losses[0]
  w = p.state_shapes.mdl_vars['network']['linear_0']['w']
  assert w.sharding.shard_shape(w.shape) == ((64, 64) if 'FullySharded' in name else (64, 512))
  if name == 'DigitsDataParallelExplicit':
    found = collectives(p.train_step.compiled)
    # One float32 gradient a step for all four microbatches; no parameter is gathered: examples' losses and predictions
    # are.
    assert 0 <= found['all-reduce'].bytes - 4 * p.total_num_params < 128
    assert found['all-gather'].bytes == 2 * 4 * ROWS
  if name == 'DigitsFullyShardedExplicit':
    found = collectives(p.train_step.compiled)
    assert found['reduce-scatter'].count == 4 * 3
    # Weights are sent in bfloat16 where the backend computes in it; their gradients are averaged in float32.
    assert found['reduce-scatter'].bytes == 4 * 4 * (64 * 512 + 512 + 512 * 10) // 8
