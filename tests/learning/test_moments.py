"""Moments in fewer bits: what one rounding does, what a run comes to, and that codes are split as their variables."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawn_state import drawn_state

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves_by_path
from praxis_lite.inputs import SyntheticLMInput
from praxis_lite.models import set_sharding, transformer_lm
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training.learning import Learner
from praxis_lite.training.learning.moments import compress_moments
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.state import state_layout
from praxis_lite.training.task import SingleTask

AXES = ('replica', 'data', 'mdl')


def remember(name):
  """A transformation whose only slot, of that name, becomes the gradient."""

  def init(params):
    return {name: params}

  def update(updates, state, params=None, **extra):
    return state[name], {name: updates}

  return optax.GradientTransformationExtraArgs(init, update)


def stored_and_read(moments, name, values, times):
  """What is read of a slot that `values` were written to, each time with other random bits; [times, *values.shape]."""
  tx = compress_moments(remember(name), moments)
  zeros = {'w': jnp.zeros_like(values)}

  def once(count):
    _, state = tx.update({'w': values}, tx.init(zeros)._replace(num_updates=count), zeros)
    return tx.update(zeros, state, zeros)[0]['w']

  return np.asarray(jax.jit(jax.vmap(once))(jnp.arange(times)), np.float64)


def outliers(*shape):
  """Rows of very different sizes, and one entry that is much larger than all others."""
  rng = np.random.default_rng(0)
  x = rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 0, (shape[0], *[1] * (len(shape) - 1)))
  x[0, 3] = 1e3
  return x.astype(np.float32)


@pytest.mark.parametrize(('moments', 'name'), [('bfloat16', 'mu'), ('bfloat16', 'nu'), ('int8', 'mu'), ('int8', 'nu')])
def test_rounding_is_to_a_neighbour_and_right_on_average(moments, name):
  """Within the distance of two codes, and by the mean of 4,000 roundings within a twentieth of it."""
  x = outliers(16, 24)
  x = x**2 if name == 'nu' else x
  x[2] = 0
  read = stored_and_read(moments, name, x, 4000)
  if moments == 'bfloat16':
    distance = np.abs(x) * 2.0**-7
  else:
    power, most = (4, 255) if name == 'nu' else (2, 127)
    size = np.abs(x).astype(np.float64)
    scale = np.minimum(size.max(1, keepdims=True), size.max(0, keepdims=True))
    below = np.floor(most * (size / np.where(scale, scale, 1)) ** (1 / power) - 1e-4)
    distance = scale * (((below + 2) / most) ** power - (np.maximum(below, 0) / most) ** power)
  assert (np.abs(read - x) <= distance).all()
  assert (np.abs(read.mean(0) - x) <= 0.05 * distance + 1e-30).all()
  assert (read[:, 2] == 0).all()


def test_second_moments_do_not_become_zero():
  """Where they did, the step would be the first moment over epsilon."""
  x = np.float32(10.0) ** -np.arange(24, dtype=np.float32).reshape(2, 12)
  read = stored_and_read('int8', 'nu', x, 50)
  assert (read > 0).all()
  assert (stored_and_read('int8', 'mu', x, 50) == 0).any()


@pytest.mark.parametrize('moments', ['bfloat16', 'int8'])
def test_a_slow_average_follows_its_mean(moments):
  """From 0 to 0.86 in steps of at most a thousandth, which rounding to the nearest would drop: within 2 percent."""
  tx = compress_moments(optax.ema(0.999, debias=False), moments)
  ones = np.ones((64, 64), np.float32)

  def step(state, _):
    out, state = tx.update(ones, state, ones)
    return state, out.mean()

  _, means = jax.jit(lambda: jax.lax.scan(step, tx.init(ones), length=2000))()
  np.testing.assert_allclose(means[-1], 1 - 0.999**2000, rtol=0.02)


@pytest.mark.slow
def test_an_optimizer_with_other_slots_beside_its_moments_keeps_their_dtypes():
  optimizer = Config(optax.adafactor, momentum=0.9, min_dim_size_to_factor=4)
  weights = {'w': WeightHParams((8, 6)), 'b': WeightHParams((6,)), 's': WeightHParams((8, 6), repeat_prefix=(3,))}
  params = jax.tree.map(lambda w: np.ones(w.full_shape, np.float32), weights)
  for moments in ('bfloat16', 'int8'):
    learner = Config(Learner, optimizer=optimizer, learning_rate=0.1, moments=moments)
    bound = learner.instantiate().bind(weights)
    state = jax.jit(bound.init)(params)
    out = jax.jit(lambda s, bound=bound: bound.update(params, jnp.float32(1), params, s, None, jnp.int32(0)))(state)
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), state, out.opt_states)
    assert all(jax.tree.leaves(same))
    assert all(np.isfinite(x).all() and (x != 1).all() for x in jax.tree.leaves(jax.device_get(out.mdl_vars)))
    dtypes = {x.dtype.name for x in jax.tree.leaves(state)}
    assert dtypes & ({'int8', 'uint8'} if moments == 'int8' else {'bfloat16'})


# ---------------------------------------------------------------- a language model

SIZES = {'vocab_size': 37, 'model_dims': 20, 'num_layers': 1, 'num_heads': 3, 'dims_per_head': 6, 'hidden_dims': 45}


def task(mesh=(1, 1, 1), moments='float32', **fields):
  model = set_sharding(transformer_lm(**SIZES), mdl_axis=None if fields.get('partitioning') else 'mdl')
  config = Config(SingleTask, model=model, mesh_axis_names=AXES, ici_mesh_shape=mesh, **fields)
  batch = ('replica', 'data')
  config.train.inputs_split_mapping = {'map_1d': (batch,), 'map_2d': (batch, None)}
  optimizer = Config(optax.adamw, b2=0.99)
  config.train.learner = Config(Learner, optimizer=optimizer, learning_rate=5e-3, moments=moments)
  return config


def data():
  return Config(SyntheticLMInput, seq_len=12, vocab_size=37, batch_size=10, is_training=True).instantiate()


def trained(config, steps):
  source = data()
  partitioned = PartitionedTask(config.instantiate(), source.batch_struct())
  state, losses = drawn_state(partitioned), []
  for _ in range(steps):
    out = partitioned.train_step(state, jax.random.key(1), source.get_next())
    state = out.state
    losses.append(float(out.weighted_loss))
  return partitioned, state, np.array(losses)


@pytest.fixture(scope='module')
def runs():
  return {moments: trained(task(moments=moments), 150) for moments in ('float32', 'bfloat16', 'int8')}


@pytest.mark.slow
@pytest.mark.parametrize(('moments', 'limit'), [('bfloat16', 0.01), ('int8', 0.02)])
def test_a_run_comes_to_the_loss_of_float32(moments, limit, runs):
  """The stated error: the loss, as the mean of 20 steps, differs by less than this share of it."""
  *_, expected = runs['float32']
  *_, losses = runs[moments]
  assert expected[-20:].mean() < 0.8 * expected[:20].mean()
  smooth = [np.convolve(x, np.ones(20) / 20, 'valid') for x in (losses, expected)]
  np.testing.assert_allclose(*smooth, rtol=limit)


@pytest.mark.slow
def test_a_mesh_trains_as_one_device_and_its_checkpoint_goes_back_to_one(runs, tmp_path, moments='int8'):
  """Uneven dimensions over 2 x 2 x 2; few codes differ, where a sum in another order is rounded otherwise."""
  partitioned, state, losses = trained(task((2, 2, 2), moments), 4)
  np.testing.assert_allclose(losses, runs[moments][2][:4], rtol=1e-3)
  alone, checkpointer = runs[moments][0], Checkpointer(tmp_path)
  checkpointer.save(4, state, partitioned.unpadded_state_shapes, None)
  checkpointer.wait()
  restored = checkpointer.restore(alone.state_shapes, alone.unpadded_state_shapes)
  checkpointer.close()
  expected = partitioned.unpad(state)
  jax.tree.map(np.testing.assert_array_equal, alone.unpad(restored), expected)
  out = alone.train_step(restored, jax.random.key(1), data().get_next())
  assert np.isfinite(out.weighted_loss)


def test_codes_and_their_maxima_are_split_as_their_variables_and_take_a_quarter_of_the_memory():
  config = task((2, 2, 2), 'int8')
  config.model.set(model_dims=512, hidden_dims=1023, num_heads=8, dims_per_head=64, vocab_size=5000)
  layout = state_layout(config.instantiate(), abstract_mesh(dict.fromkeys(AXES, 2)))
  specs, shapes = (leaves_by_path(tree.opt_states) for tree in (layout.specs, layout.padded_shapes))
  paths = [tuple(f'repeated_1.inner.0.mu.lm.transformer.layers.ff.up.w.{i}'.split('.')) for i in range(3)]
  assert [tuple(specs[path]) for path in paths] == [(None, 'data', 'mdl'), (None, 'data'), (None, 'mdl')]
  assert [shapes[path].shape for path in paths] == [(1, 512, 1024), (1, 512), (1, 1024)]
  assert [shapes[path].dtype for path in paths] == [jnp.int8, jnp.float32, jnp.float32]
  on_each = {
    name: sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    for name, tree in (('slots', layout.padded_shapes.opt_states), ('variables', layout.padded_shapes.mdl_vars))
  }
  assert on_each['slots'] / (2 * on_each['variables']) == pytest.approx(0.25, abs=0.02)


@pytest.mark.slow
def test_explicit_collectives_take_bfloat16_and_refuse_int8():
  fields = {'mesh': (1, 4, 1), 'partitioning': 'shard_map'}
  assert PartitionedTask(task(moments='bfloat16', **fields).instantiate(), data().batch_struct()).execution
  with pytest.raises(ConfigError, match=r"learner.moments='int8' needs whole tensors.*; set it to 'bfloat16'"):
    _ = PartitionedTask(task(moments='int8', **fields).instantiate(), data().batch_struct()).execution


def test_an_optimizer_that_needs_no_variables_is_updated_without_them():
  optimizer = compress_moments(optax.with_extra_args_support(optax.scale_by_adam()), 'bfloat16')
  variables = {'w': jnp.ones((2, 2))}
  state = optimizer.init(variables)
  for with_them, without in zip(optimizer.update(variables, state, variables), optimizer.update(variables, state)):
    jax.tree.map(np.testing.assert_array_equal, with_them, without)


def test_unknown_moments_are_refused():
  with pytest.raises(ConfigError, match=r"learner.moments: expected 'float32', 'bfloat16' or 'int8', got 'int4'"):
    Config(Learner, moments='int4').instantiate()
