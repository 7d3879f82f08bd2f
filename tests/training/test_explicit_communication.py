"""What explicit steps send and hold is what theory says, and what a step written by hand does."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from explicit_models import FSDP, LAYERS, VOCAB, lm_batch, lm_task, partitioned
from jax.sharding import NamedSharding, PartitionSpec as P

from praxis_lite.common.config import Config
from praxis_lite.common.weighted import weighted_mean
from praxis_lite.instruments.testing import collectives
from praxis_lite.layers import Linear, Repeat
from praxis_lite.layers.base import Layer
from praxis_lite.models.base import BaseModel
from praxis_lite.training.task import SingleTask

ROWS, DIMS, DEPTH = 16, 256, 6


def counts(compiled):
  return {kind: (c.count, c.bytes) for kind, c in collectives(compiled).items() if c.count}


@pytest.mark.slow
def test_data_parallel_all_reduces_gradients_and_gathers_no_parameter():
  p = partitioned(lm_task('shard_map'), lm_batch(ROWS))
  found = counts(p.train_step.compiled)
  # The loss and the weight of each row, which a step returns, are all that is gathered.
  assert found.pop('all-gather') == (2, 2 * ROWS * 4)
  assert set(found) == {'all-reduce'}
  # Each gradient once, and a few scalars: the weight of the batch, the loss, the metrics.
  assert 0 <= found['all-reduce'][1] - 4 * p.total_num_params <= 64


@pytest.mark.slow
def test_fully_sharded_gathers_each_layer_twice_and_reduce_scatters_its_gradient():
  p = partitioned(lm_task('shard_map', strategy=FSDP, model_dims=16, hidden_dims=48), lm_batch(ROWS))
  found = counts(p.train_step.compiled)
  attention, ff, table = 4 * 16 * 16, 3 * 16 * 48, 16 * VOCAB
  # Four weights of attention and three of the feed-forward layer, forward and backward; the embedding, forward; the
  # softmax, whose product the forward pass ends and the backward pass begins with, once.
  gathers, gathered = found['all-gather']
  assert gathers - 2 == 2 * 7 * LAYERS + 2
  assert gathered - 2 * ROWS * 4 == 4 * (2 * LAYERS * (attention + ff) + 2 * table)
  assert found['reduce-scatter'] == (7 * LAYERS + 2, 4 * (LAYERS * (attention + ff) + 2 * table) // 8)
  # Norms are whole.
  norms = 4 * (2 * LAYERS + 1) * 16
  assert found['all-reduce'][1] - norms <= 64
  assert set(found) == {'all-gather', 'reduce-scatter', 'all-reduce'}


@pytest.mark.parametrize('partitioning', ['auto', 'shard_map'])
def test_fully_sharded_devices_hold_an_eighth_of_weights_and_slots(partitioning):
  p = partitioned(lm_task(partitioning, strategy=FSDP, model_dims=16, hidden_dims=48), lm_batch(ROWS))
  split = dict.fromkeys(('whole', 'split'), 0)
  for x in jax.tree.leaves((p.state_shapes.mdl_vars, p.state_shapes.opt_states)):
    own = math.prod(x.sharding.shard_shape(x.shape))
    assert own in (x.size, x.size // 8)
    split['split' if own < x.size else 'whole'] += x.size
  assert split['whole'] < 0.03 * split['split']


class Block(Layer):
  def setup(self):
    self.create_child('linear', Config(Linear, input_dims=DIMS, output_dims=DIMS))

  def __call__(self, x):
    return jnp.tanh(self.linear(x))


class Deep(BaseModel):
  remat: str = 'none'

  def setup(self):
    self.create_child('stack', Config(Repeat, layers_tpl=Config(Block), num_layers=DEPTH, remat=self.remat))

  def compute_predictions(self, batch):
    return self.stack(batch['x'])

  def compute_loss(self, predictions, batch):
    loss = jnp.mean(jnp.square(predictions - batch['y']), -1)
    return {'loss': weighted_mean(loss, batch['weights'])}, {}


def by_hand(mesh, explicit):
  """A fully sharded Adam step of the same model, in plain JAX."""
  optimizer = optax.adam(1e-3)
  spec, rows = P(None, None, 'data'), P('data')

  def loss_fn(ws, batch, gather):
    @jax.checkpoint
    def body(x, w):
      return jnp.tanh(x @ gather(w)), None

    x, _ = jax.lax.scan(body, batch['x'], ws)
    return jnp.sum(jnp.mean(jnp.square(x - batch['y']), -1) * batch['weights'])

  def update(ws, states, gradients):
    updates, states = optimizer.update(gradients, states, ws)
    return optax.apply_updates(ws, updates), states

  def local(ws, states, batch):
    total = jax.lax.psum(jnp.sum(batch['weights']), 'data')
    gather = lambda w: jax.lax.all_gather(w, 'data', axis=1, tiled=True)  # noqa: E731
    loss, gradients = jax.value_and_grad(lambda ws: loss_fn(ws, batch, gather) / total)(ws)
    return *update(ws, states, gradients), jax.lax.psum(loss, 'data')

  def placed(ws, states, batch):
    total = jnp.sum(batch['weights'])
    loss, gradients = jax.value_and_grad(lambda ws: loss_fn(ws, batch, lambda w: w) / total)(ws)
    return *update(ws, states, gradients), loss

  ws = jax.ShapeDtypeStruct((DEPTH, DIMS, DIMS), jnp.float32)
  specs = (spec, jax.tree.map(lambda x: spec if x.ndim else P(), jax.eval_shape(optimizer.init, ws)))
  out = (*specs, P())
  if explicit:
    fn = jax.shard_map(local, mesh=mesh, in_specs=(*specs, rows), out_specs=out, check_vma=False)
  else:
    fn = placed
  sharding = lambda tree: jax.tree.map(lambda s: NamedSharding(mesh, s), tree)  # noqa: E731
  shapes = (ws, jax.eval_shape(optimizer.init, ws), deep_batch())
  jitted = jax.jit(fn, in_shardings=sharding((*specs, rows)), out_shardings=sharding(out), donate_argnums=(0, 1))
  return jitted.lower(*shapes).compile()


def deep_batch():
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(2, ROWS, DIMS)).astype(np.float32)
  return {'x': x, 'y': y, 'weights': np.ones(ROWS, np.float32)}


def device_bytes(compiled):
  m = compiled.memory_analysis()
  return m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes


@pytest.mark.parametrize('partitioning', ['auto', 'shard_map'])
def test_a_fully_sharded_step_takes_the_memory_of_one_written_by_hand(partitioning):
  task = Config(SingleTask, model=Config(Deep, remat='full'), partitioning=partitioning)
  task.set(
    mesh_axis_names=('data',), ici_mesh_shape=(8,), strategy=[('.*', 'fsdp(axis="data", min_size_to_shard_mb=0)')]
  )
  task.train.inputs_split_mapping = {'map_1d': ('data',), 'map_2d': ('data', None)}
  task.train.learner.set(optimizer=Config(optax.adam))
  p = partitioned(task, deep_batch())
  ours, theirs = p.train_step.compiled, by_hand(p.mesh, partitioning == 'shard_map')
  memory, by_hand_memory = device_bytes(ours), device_bytes(theirs)
  assert 0.95 * by_hand_memory <= memory <= 1.05 * by_hand_memory
  gathers = 2 * DEPTH if partitioning == 'shard_map' else counts(theirs)['all-gather'][0]
  assert counts(ours)['all-gather'] == (gathers, 4 * gathers * DIMS * DIMS)
