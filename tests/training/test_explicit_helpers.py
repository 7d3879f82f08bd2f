"""The helpers of explicit collectives do what they say, each by itself, inside shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from explicit_models import class_batch, partitioned, train
from jax.sharding import AxisType, PartitionSpec as P

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, ShardingError
from praxis_lite.common.weighted import mean_over_devices
from praxis_lite.instruments.testing import collectives
from praxis_lite.layers import Mlp
from praxis_lite.layers.base import Layer
from praxis_lite.layers.base.call import Summary
from praxis_lite.layers.tensor_parallel import TensorParallelLinear
from praxis_lite.models import ClassificationModel
from praxis_lite.partitioning import accumulate_gradients, sync_gradients
from praxis_lite.sharding import (
  fold_rng_over_axis,
  gather_array_with_mean_grads,
  gather_params,
  shard_module_params,
  shard_params,
)
from praxis_lite.sharding.explicit import ShardedParam
from praxis_lite.sharding.weights import WeightHParamsCollection
from praxis_lite.training.microbatches import LossOutput, value_and_grad
from praxis_lite.training.task import SingleTask

RNG = np.random.default_rng(0)


def mapped(fn, in_specs, out_specs, shape=(8,), names=('data',)):
  mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=jax.devices()[: np.prod(shape)])
  return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def test_folded_keys_differ_along_the_axis_only():
  def draw(key):
    return jax.random.uniform(fold_rng_over_axis(key, 'data'), (1, 1))

  draws = mapped(draw, P(), P('data', 'mdl'), (4, 2), ('data', 'mdl'))(jax.random.key(0))
  assert len(set(np.asarray(draws[:, 0]).tolist())) == 4
  np.testing.assert_array_equal(draws[:, 0], draws[:, 1])


@pytest.mark.parametrize('dtype', [None, jnp.bfloat16])
def test_a_gathered_array_has_the_mean_of_all_devices_gradients(dtype):
  w, x = RNG.normal(size=(16, 3)).astype(np.float32), RNG.normal(size=(8, 16, 3)).astype(np.float32)

  def gradient(w, x):
    return jax.grad(lambda w: jnp.sum(gather_array_with_mean_grads(w, 'data', 0, 15, dtype) * x[0, :15]))(w)

  found = mapped(gradient, (P('data'), P('data')), P('data'))(w, x)
  expected = x.mean(0)
  expected[15:] = 0  # Padding.
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(
    found, expected, rtol=1e-5 if dtype is None else 0.05, atol=1e-6 if dtype is None else 0.01
  )


def test_params_are_split_along_the_largest_dimension_that_divides_and_come_back_whole():
  params = {
    'even': RNG.normal(size=(8, 16, 12)),
    'tie': RNG.normal(size=(16, 16)),
    'uneven': RNG.normal(size=(5, 13)),
    'small': RNG.normal(size=(8,)),
  }
  axes = {}

  def round_trip(params):
    sharded = shard_params(params, 'data', min_size=8)
    for name, p in sharded.items():
      axes[name] = (p.axes, p.value.shape) if isinstance(p, ShardedParam) else None
    return gather_params(sharded)

  whole = mapped(round_trip, P(), P())(params)
  data = ('data',)
  assert axes == {
    'even': (((), data, ()), (8, 2, 12)),
    'tie': (((), data), (16, 2)),
    'uneven': (((), data), (5, 2)),
    'small': None,
  }
  for name, value in params.items():
    np.testing.assert_array_equal(whole[name], value.astype(np.float32))


def test_params_can_be_split_over_two_axes_but_not_over_one_twice():
  w = RNG.normal(size=(6, 7)).astype(np.float32)

  def round_trip(w):
    return gather_params(shard_params(shard_params(w, 'data', 0), 'mdl', 0))

  np.testing.assert_array_equal(mapped(round_trip, P(), P(), (2, 4), ('data', 'mdl'))(w), w)
  with pytest.raises(ShardingError, match=r"shape \(6, 7\) is split over \('data',\) already"):
    mapped(lambda w: gather_params(shard_params(shard_params(w, 'data', 0), 'data', 0)), P(), P())(w)


def test_params_are_gathered_over_the_named_axis_only():
  w = RNG.normal(size=(6, 7)).astype(np.float32)
  left = []

  def round_trip(w):
    half = gather_params(shard_params(shard_params(w, 'data', 0), 'mdl', 0), 'mdl')
    left.append((half.axes, half.value.shape))
    return gather_params(half, ('data',))

  np.testing.assert_array_equal(mapped(round_trip, P(), P(), (2, 4), ('data', 'mdl'))(w), w)
  assert left == [((('data',), ()), (3, 7))]


@pytest.mark.parametrize('size', [8, 5])
def test_a_dimension_over_two_axes_is_gathered_over_the_last_first(size):
  w = RNG.normal(size=(size, 3)).astype(np.float32)

  def round_trip(w):
    sharded = shard_params(w, ('data', 'mdl'), 0)
    half = gather_params(sharded, 'mdl')
    assert (half.axes, half.value.shape) == ((('data',), ()), (4, 3))
    return gather_params(half)

  np.testing.assert_array_equal(mapped(round_trip, P(), P(), (2, 4), ('data', 'mdl'))(w), w)
  with pytest.raises(ShardingError, match=r"over \('data', 'mdl'\).*not over \('data',\) alone"):
    mapped(lambda w: gather_params(shard_params(w, ('data', 'mdl'), 0), 'data'), P(), P(), (2, 4), ('data', 'mdl'))(w)


def test_a_wrapped_layer_trains_as_the_layer_does():
  layer = Config(Mlp, input_dims=6, hidden_dims=(10, 4)).instantiate()
  module = shard_module_params(shard_module_params(layer, 'data', min_size=8), 'mdl', min_size=8)
  key, x = jax.random.key(0), RNG.normal(size=(8, 6)).astype(np.float32)
  parts = []

  def loss(params, x):
    return jnp.mean(jnp.square(module.apply(params, x)[0]))

  def step(x):
    params = module.init(key)
    parts.append(params['linear_0']['w'].value.shape)
    value, gradients = jax.value_and_grad(loss)(params, x)
    axes = ('data', 'mdl')
    return jax.lax.pmean(value, axes), gather_params(sync_gradients(gradients, axes))

  value, gradients = mapped(step, P(('data', 'mdl')), P(), (4, 2), ('data', 'mdl'))(x)
  expected, wanted = jax.value_and_grad(lambda v: jnp.mean(jnp.square(layer.apply(v, x)[0])))(layer.init(key))
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradients, wanted)
  assert parts == [(3, 3)]


def test_what_helpers_send_is_named_in_the_program():
  def step(w):
    return gather_params(shard_params(w, 'data', 0)), sync_gradients(w, 'data')

  mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))
  fn = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
  text = jax.jit(fn).lower(np.ones((16, 16), np.float32)).as_text(debug_info=True)
  for name in ('shard_params', 'gather_params', 'sync_gradients'):
    assert name in text


def test_accumulated_and_synced_gradients_are_those_of_the_whole_weighted_batch():
  w, b = RNG.normal(size=(5, 4)).astype(np.float32), RNG.normal(size=(4,)).astype(np.float32)
  params = {'w': w, 'b': b}
  x = RNG.normal(size=(32, 5)).astype(np.float32)
  weights = RNG.uniform(size=32).astype(np.float32)
  weights[4:8], weights[17] = 0, 0  # One device has padding alone.
  batch = {'x': x, 'weights': weights}

  def loss_of(params, batch):
    per_row = jnp.sum(jnp.tanh(batch['x'] @ params['w'] + params['b']) ** 2, -1)
    total = jnp.sum(batch['weights'])
    return jnp.sum(per_row * batch['weights']) / jnp.where(total > 0, total, 1), total

  def loss_fn(params, key, batch):
    loss, total = loss_of(gather_params(params), batch)
    return loss, {'loss': (loss, total)}

  def step(params, batch):
    sharded = shard_params(params, 'data', min_size=4)
    loss, metrics, gradients = accumulate_gradients(loss_fn, sharded, jax.random.key(0), batch, 2, 'data')
    gradients = sync_gradients(gradients, 'data')
    return loss, metrics, gather_params(gradients)

  loss, metrics, gradients = mapped(step, (P(), P('data')), P())(params, batch)
  expected, total = loss_of(params, batch)
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  np.testing.assert_allclose(metrics['loss'], (expected, total), rtol=1e-6)
  for name, g in jax.grad(lambda p: loss_of(p, batch)[0])(params).items():
    np.testing.assert_allclose(gradients[name], g, rtol=1e-5, atol=1e-6)


def test_metrics_are_means_by_weight_and_what_weighs_nothing_may_be_nan():
  values, weights = np.arange(8, dtype=np.float32), np.arange(8, dtype=np.float32) % 3
  values[0] = np.nan

  def sync(v, w):
    return mean_over_devices({'m': (v[0], w[0])}, ('data',))

  mean, weight = mapped(sync, (P('data'), P('data')), P())(values, weights)['m']
  assert weight == weights.sum()
  np.testing.assert_allclose(mean, np.sum(values[1:] * weights[1:]) / weights.sum(), rtol=1e-6)


# ---------------------------------------------------------------- tensor parallel layers


class TwoLayers(Layer):
  """A column and a row parallel layer."""

  hidden_dims: int = 12
  axis: str = 'mdl'

  def setup(self):
    linear = Config(TensorParallelLinear, use_bias=True)
    up = linear.clone(input_dims=16, output_dims=self.hidden_dims, parallel='column')
    up.weight_split_dims_mapping.wt = (None, self.axis)
    down = linear.clone(input_dims=self.hidden_dims, output_dims=10, parallel='row')
    down.weight_split_dims_mapping.wt = (self.axis, None)
    self.create_child('up', up)
    self.create_child('down', down)

  @property
  def output_dims(self):
    return 10

  def __call__(self, x, weights=None):
    return self.down(jnp.tanh(self.up(x.reshape(x.shape[0], -1))))


def tensor_parallel_task(partitioning, strategy=None, hidden_dims=12):
  network = Config(TwoLayers, hidden_dims=hidden_dims)
  model = Config(ClassificationModel, num_classes=10, network_tpl=network)
  task = Config(SingleTask, model=model, partitioning=partitioning, strategy=strategy)
  task.set(mesh_axis_names=('data', 'mdl'), ici_mesh_shape=(2, 4))
  task.train.inputs_split_mapping = {'map_1d': ('data',), 'map_4d': ('data', None, None, None)}
  task.train.learner.set(optimizer=Config(optax.adamw), learning_rate=1e-2, clip_gradient_norm_to_value=0.1)
  return task


@pytest.mark.slow
@pytest.mark.parametrize('strategy', [None, [('.*', 'fsdp(axis=("data", "mdl"), min_size_to_shard_mb=0)')]])
def test_tensor_parallel_layers_train_as_under_compiler_placement(strategy):
  batches = [class_batch(13, seed) for seed in range(3)]
  first, losses, state = train(tensor_parallel_task('auto', strategy), batches)
  explicit, explicit_losses, explicit_state = train(tensor_parallel_task('shard_map', strategy), batches)
  np.testing.assert_allclose(explicit_losses, losses, rtol=1e-5)
  for name, metric in first.mean_metrics.items():
    np.testing.assert_allclose(explicit.mean_metrics[name], metric, rtol=1e-5, err_msg=name)
  for a, b in zip(jax.tree.leaves(state.mdl_vars), jax.tree.leaves(explicit_state.mdl_vars), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
  assert explicit_state.mdl_vars['network']['up']['w'].addressable_shards[0].data.shape == (16, 3)


@pytest.mark.parametrize('names', [{}, {'axis': 'wide', 'logical_axis_rules': (('wide', 'mdl'),)}])
def test_a_pair_of_tensor_parallel_layers_takes_one_all_reduce_forward(names):
  mesh = jax.make_mesh((4,), ('mdl',), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
  layer = Config(TwoLayers, mesh_axis_names=('mdl',), **names).instantiate()
  variables = layer.init(jax.random.key(0))
  specs = {'up': {'w': P(None, 'mdl'), 'b': P('mdl')}, 'down': {'w': P('mdl', None), 'b': P()}}
  fn = jax.shard_map(
    lambda v, x: layer.apply(v, x)[0], mesh=mesh, in_specs=(specs, P()), out_specs=P(), check_vma=False
  )
  x = RNG.normal(size=(2, 16)).astype(np.float32)
  found = {kind: c.count for kind, c in collectives(jax.jit(fn).lower(variables, x).compile()).items() if c.count}
  assert found == {'all-reduce': 1}
  np.testing.assert_allclose(fn(variables, x), layer.apply(variables, x)[0], rtol=1e-5, atol=1e-6)


def test_tensor_parallel_layers_say_what_does_not_fit():
  with pytest.raises(ConfigError, match=r'network.down.w.*\(13, 10\) does not divide'):
    partitioned(tensor_parallel_task('shard_map', hidden_dims=13), class_batch(8)).train_step  # noqa: B018
  wrong = Config(TensorParallelLinear, input_dims=4, output_dims=4, parallel='row', mesh_axis_names=('x', 'y'))
  wrong.weight_split_dims_mapping.wt = ('wide', None)
  with pytest.raises(ShardingError, match='is split over one mesh axis'):
    wrong.clone(logical_axis_rules=(('wide', ('x', 'y')),)).instantiate()
  whole = wrong.clone(logical_axis_rules=(('wide', None),)).instantiate().abstract_init()['w']
  assert WeightHParamsCollection.KEEP_SPLIT not in whole.collections
  wrong.mesh_axis_names = None
  wrong.weight_split_dims_mapping.wt = (None, 'mdl')
  with pytest.raises(ShardingError, match=r"does not fit a row parallel layer.*\('mdl', None\)"):
    wrong.instantiate()
  with pytest.raises(ConfigError, match=r"parallel: expected 'column' or 'row'.*Did you mean 'column'"):
    wrong.clone(parallel='colum').instantiate()


def test_arguments_have_the_names_of_other_projects_too():
  w, x = RNG.normal(size=(16, 3)).astype(np.float32), RNG.normal(size=(8, 16, 3)).astype(np.float32)

  def gradients(w, x):
    gathers = (
      lambda w: gather_array_with_mean_grads(w, 'data', 0),
      lambda w: gather_array_with_mean_grads(w, 0, 'data'),
      lambda w: gather_array_with_mean_grads(w, axis=0, axis_name='data'),
      lambda w: gather_array_with_mean_grads(w, -2, axis_name=('data',)),
      lambda w: gather_array_with_mean_grads(w, axis_name='data'),
    )
    return [jax.grad(lambda w, gather=gather: jnp.sum(gather(w) * x[0]))(w) for gather in gathers]

  for found in mapped(gradients, (P('data'), P('data')), P('data'))(w, x):
    np.testing.assert_allclose(found, x.mean(0), rtol=1e-5, atol=1e-6)

  def helpers(w, key):
    split = shard_params(params=w, axis_name='data', min_weight_size=8)
    assert isinstance(split, ShardedParam) and not isinstance(shard_params(w, axis_name='data'), ShardedParam)
    mlp = Config(Mlp, input_dims=3, hidden_dims=(4,)).instantiate()
    module = shard_module_params(mlp, axis_name='data', min_weight_size=1)
    assert module.axis == 'data' and module.min_size == 1
    key = jax.random.key_data(fold_rng_over_axis(rng=key, axis_name='data'))
    return gather_params(split, axis_name='data'), sync_gradients(grads=w, axis_names='data'), key[None]

  whole, synced, keys = mapped(helpers, (P(), P()), (P(), P(), P('data')))(w, jax.random.key(0))
  np.testing.assert_array_equal(whole, w)
  np.testing.assert_allclose(synced, w, rtol=1e-6)
  assert len({tuple(key) for key in np.asarray(keys).tolist()}) == 8


@pytest.mark.parametrize(
  'call, message',
  [
    (lambda w: gather_array_with_mean_grads(w, 0, 1), 'expected one mesh axis and one dimension'),
    (lambda w: gather_array_with_mean_grads(w, 'data', axis_name='data'), 'expected one mesh axis and one dimension'),
    (gather_array_with_mean_grads, 'expected one mesh axis and one dimension'),
    (lambda w: shard_params(w, 'data', axis_name='data'), 'shard_params: axis_name and axis are two names for one'),
    (lambda w: sync_gradients(w, axes='data', axis_names='data'), 'sync_gradients: axis_names and axes are two names'),
  ],
)
def test_arguments_given_twice_or_not_at_all_are_refused(call, message):
  with pytest.raises(ShardingError, match=message):
    call(jnp.ones((8, 3)))


@pytest.mark.parametrize(
  'weights, kept', [([1, 2, 3], 2), ([1, 2, 0], 1), ([1, 0, 3], 2), ([1, 0, 0], 0), ([0, 0, 0], 2)]
)
def test_summaries_are_those_of_the_last_microbatch_that_weighs_anything(weights, kept):
  """Rows that fill up a batch may be all of a microbatch."""

  def loss_fn(trained, others, key, batch):
    loss, weight = jnp.sum(trained * batch['x']), jnp.sum(batch['weights'])
    return loss, LossOutput(weight, {}, {}, {'x': Summary(batch['x'][0])}, {})

  batch = {'x': jnp.arange(3.0), 'weights': jnp.array(weights, jnp.float32)}
  _, out, _ = value_and_grad(loss_fn, jnp.ones(()), {}, jax.random.key(0), batch, 3)
  assert float(out.summaries['x'].value) == kept
