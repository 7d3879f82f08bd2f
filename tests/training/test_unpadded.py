"""The way out of a step and back in: users see arrays in their true shapes, whatever the mesh."""

import jax
import numpy as np
import optax
import pytest

import praxis_lite
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, ShardingError
from praxis_lite.common.weighted import weighted_mean
from praxis_lite.layers.base import Layer
from praxis_lite.models.base import BaseModel
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training import PartitionedTask
from praxis_lite.training.learning import Learner
from praxis_lite.training.task import SingleTask

BATCH = {'x': np.random.default_rng(0).standard_normal((5, 10)).astype(np.float32), 'y': np.arange(5, dtype=np.float32)}


class Two(BaseModel):
  """10 and 7 divide neither by 8 nor by 3."""

  def setup(self):
    self.create_variable('w', WeightHParams((10, 7), tensor_split_dims_mapping=('data', None)))
    self.create_variable('v', WeightHParams((7,), tensor_split_dims_mapping=('data',)))

  def compute_predictions(self, batch):
    return jax.numpy.tanh(batch['x'] @ self.theta.w) @ self.theta.v

  def compute_loss(self, predictions, batch):
    errors = (predictions - batch['y']) ** 2
    return {'loss': weighted_mean(errors, batch['weights'])}, {'error': errors}


def partitioned(devices):
  task = Config(SingleTask, model=Config(Two), mesh_axis_names=('data',), ici_mesh_shape=(devices,))
  task.train.learner = Config(Learner, optimizer=Config(optax.adam), learning_rate=0.01, ema_decay=0.9)
  return PartitionedTask(task.instantiate(), BATCH)


@pytest.fixture(scope='module')
def one():
  """A state of one device before and after three steps, as a user sees it."""
  task = partitioned(1)
  before = task.unpad(task.init_state(jax.random.key(0)))
  return before, three_steps(task, before)


def three_steps(task, state):
  state = task.pad(state)
  for _ in range(3):
    state = task.train_step(state, jax.random.key(1), BATCH).state
  return task.unpad(state)


@pytest.mark.parametrize('devices', [8, 3])
def test_a_loop_of_ones_own_takes_and_returns_true_shapes_and_trains_as_on_one_device(one, devices):
  before, expected = one
  task = partitioned(devices)
  after = three_steps(task, before)
  for (path, x), y in zip(jax.tree.leaves_with_path(after), jax.tree.leaves(expected)):
    assert isinstance(x, np.ndarray) and x.shape == y.shape, path
    np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6, err_msg=str(path))
  inside = task.jax_task.model.apply(after.mdl_vars, BATCH, method='predict', do_eval=True)[0]
  weights, values = after.mdl_vars['w'].astype(np.float64), after.mdl_vars['v'].astype(np.float64)
  np.testing.assert_allclose(inside, np.tanh(BATCH['x'] @ weights) @ values, rtol=1e-4, atol=1e-5)


def test_the_way_in_and_out_changes_no_bit_and_out_is_a_copy(one):
  before, _ = one
  task = partitioned(8)
  state = task.pad(before)
  assert state.mdl_vars['w'].shape == (16, 7) and state.mdl_vars['w'].sharding == task.layout.shardings.mdl_vars['w']
  assert all(s is t for s, t in zip(jax.tree.leaves(task.pad(state)), jax.tree.leaves(state)))
  out, by_function = task.unpad(state), praxis_lite.unpad(task.jax_task, state)
  variables = praxis_lite.unpad(task.jax_task, state.mdl_vars)
  task.train_step(state, jax.random.key(1), BATCH)  # Donates the state.
  for kept in (out, by_function):
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(before)))
  assert np.array_equal(variables['v'], before.mdl_vars['v'])
  padding = np.asarray(task.pad({'w': before.mdl_vars['w']})['w'])[10:]
  assert padding.shape == (6, 7) and not padding.any()


def test_partition_spmd_model_leads_to_the_same_functions():
  task = partitioned(8).jax_task
  model = praxis_lite.partition_spmd_model(task, jax.random.key(0), BATCH)
  assert len(model) == 6
  variables = model.partitioned_task.unpad(model.partitioned_train_state).mdl_vars
  assert variables['w'].shape == (10, 7)


def test_arrays_that_do_not_fit_are_named():
  task = partitioned(8)
  with pytest.raises(ShardingError, match=r'^w has shape \(3, 7\); in the layout it has \(10, 7\), and \(16, 7\) with'):
    task.pad({'w': np.zeros((3, 7))})
  with pytest.raises(ShardingError, match=r"^vv: the layout has no such array. Did you mean 'v'\?"):
    task.unpad({'vv': np.zeros(7)})


def test_apply_refuses_padded_variables_and_says_what_to_pass():
  task = partitioned(3)
  state = task.init_state(jax.random.key(0))
  remedy = r'w has shape \(12, 7\) in the variables, and the layer declares \(10, 7\); .* pass unpad\(task, state\)'
  for call in (task.jax_task.model.apply, jax.jit(lambda v, b: task.jax_task.model.apply(v, b)[0])):
    with pytest.raises(ConfigError, match=remedy):
      call(state.mdl_vars, BATCH)


def test_apply_refuses_the_variables_of_another_layer():
  class Outer(Layer):
    def setup(self):
      self.create_child('inner', Config(Two))

  layer = Config(Outer).instantiate()
  variables = {'w': np.zeros((10, 6), np.float32), 'v': np.zeros(7, np.float32)}
  told = r'inner\.w has shape \(10, 6\) in the variables, and the layer declares \(10, 7\)$'
  with pytest.raises(ConfigError, match=told):
    layer.inner.apply(variables, BATCH, method='predict')
