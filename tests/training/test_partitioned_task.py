"""A partitioned model trains, evaluates and decodes as on one device, whatever the mesh, divisible or not."""

import dataclasses
import functools
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite.bridges.t5x.partitioners import PjitPartitioner
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError, ShardingError
from praxis_lite.models.base import BaseModel
from praxis_lite.sharding.weights import WeightHParams, WeightInit
from praxis_lite.training import state
from praxis_lite.training.partitioned_task import (
  PartitionedTask,
  get_partitioned_spmd_model_decode_fn,
  partition_spmd_model,
)
from praxis_lite.training.state import initialize_partitioned_model_states, initialize_train_state, state_layout
from praxis_lite.training.steps import eval_step_single_learner, train_step_single_learner
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

AXES = ('replica', 'data', 'mdl')
BATCH, LENGTH = 6, 4


class Bigram(BaseModel):
  """Logits of the next token from a table and a projection; counts its steps in a variable that is not trained."""

  vocab: int = 5
  dims: int = 6

  def setup(self):
    split = ('mdl', 'data')
    self.create_variable('emb', WeightHParams((self.vocab, self.dims), tensor_split_dims_mapping=split))
    self.create_variable('out', WeightHParams((self.dims, self.vocab), tensor_split_dims_mapping=split[::-1]))
    self.create_variable(
      'bias', WeightHParams((self.vocab,), WeightInit.Constant(0.0), tensor_split_dims_mapping=('mdl',))
    )
    self.create_variable('seen', WeightHParams((), WeightInit.Constant(0.0)), trainable=False)

  def compute_predictions(self, batch):
    return jnp.tanh(self.theta.emb[batch['ids']]) @ self.theta.out + self.theta.bias

  def compute_loss(self, logits, batch):
    xent = optax.softmax_cross_entropy_with_integer_labels(logits, batch['labels'])
    weight = jnp.sum(batch['weights'])
    self.update_var('seen', self.theta.seen + weight)
    self.add_summary('logits', jnp.mean(logits))
    return {'loss': (jnp.sum(xent * batch['weights']) / weight, weight)}, {'xent': xent}

  def decode(self, batch):
    best = jnp.argmax(self.compute_predictions(batch), -1)
    return {'tokens': (jnp.float32(0), jnp.sum(batch['weights']))}, {'ids': best}


def batch(rows=BATCH, seed=0):
  rng = np.random.default_rng(seed)
  ids = (rng.integers(0, 5, (rows, 1)) + np.arange(LENGTH + 1)).astype(np.int32) % 5
  weights = rng.uniform(0.1, 1, (rows, LENGTH)).astype(np.float32)
  return {'ids': ids[:, :-1], 'labels': ids[:, 1:], 'weights': weights}


def struct(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def task(shape=None, optimizer=None, **learner):
  config = Config(SingleTask, model=Config(Bigram), mesh_axis_names=AXES, ici_mesh_shape=shape)
  config.train.inputs_split_mapping = {'map_1d': (('replica', 'data'),), 'map_2d': (('replica', 'data'), None)}
  config.train.learner.set(optimizer=optimizer or Config(optax.adam), learning_rate=0.05, **learner)
  return config


def train(config, steps=6, mdl_vars=None):
  model = partition_spmd_model(config, jax.random.key(0), struct(batch()))
  state, losses = model.partitioned_train_state, []
  for i in range(steps):
    out = model.train_step(state, jax.random.key(1), batch(seed=i))
    state = out.state
    losses.append(float(out.weighted_loss))
  return model, state, losses


OPTIMIZERS = {
  'adam': Config(optax.adam),
  'adafactor': Config(optax.adafactor, min_dim_size_to_factor=2),
  'momentum': Config(optax.sgd, momentum=0.9),
  'lamb': Config(optax.lamb),
}


@functools.cache
def trained_on_one_device(optimizer):
  return train(task(optimizer=OPTIMIZERS[optimizer]))


MESHES = [(1, 2, 4), (1, 1, 4), (1, 3, 1), (1, 5, 1), (7, 1, 1), (2, 2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
  ('shape', 'optimizer'),
  [*((shape, 'adam') for shape in MESHES), *(((1, 2, 4), name) for name in OPTIMIZERS if name != 'adam')],
)
def test_uneven_mesh_has_the_loss_curve_of_one_device(shape, optimizer):
  _, alone, expected = trained_on_one_device(optimizer)
  _, state, losses = train(task(shape, OPTIMIZERS[optimizer]))
  np.testing.assert_allclose(losses, expected, rtol=1e-4)
  assert expected[-1] < expected[0]
  for name, value in alone.mdl_vars.items():
    stored = np.asarray(state.mdl_vars[name])
    np.testing.assert_allclose(stored[tuple(slice(d) for d in value.shape)], value, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_unpartitioned_step_is_the_oracle():
  config = task(clip_gradient_norm_to_value=0.5, ema_decay=0.9).instantiate()
  state = jax.jit(initialize_train_state, static_argnums=0)(config, jax.random.key(0))
  expected = []
  for i in range(6):
    out = jax.jit(train_step_single_learner, static_argnums=0)(config, state, jax.random.key(1), batch(seed=i))
    state = out.state
    expected.append(float(out.weighted_loss))
  _, partitioned, losses = train(task((2, 2, 2), clip_gradient_norm_to_value=0.5, ema_decay=0.9))
  np.testing.assert_allclose(losses, expected, rtol=1e-4)
  np.testing.assert_allclose(np.asarray(partitioned.ema_vars['emb'])[:5, :6], state.ema_vars['emb'], rtol=1e-3)
  assert float(partitioned.mdl_vars['seen']) == pytest.approx(float(state.mdl_vars['seen']), rel=1e-5)
  evaluate = jax.jit(eval_step_single_learner, static_argnums=0)
  assert np.isfinite(evaluate(config, state.mdl_vars, jax.random.key(0), state.step, batch()).weighted_loss)


def test_state_is_padded_and_split_and_its_slots_too():
  model, state, _ = train(task((1, 2, 4)), steps=1)
  assert state.mdl_vars['emb'].shape == (8, 6)  # 5 over 4, 6 over 2
  assert state.mdl_vars['emb'].addressable_shards[0].data.shape == (2, 3)
  for slot in jax.tree.leaves(state.opt_states):
    assert slot.shape in {(8, 6), (6, 8), (8,), ()}
  assert not np.asarray(state.mdl_vars['emb'])[5:].any()
  assert model.total_num_params == 5 * 6 * 2 + 5 + 1
  fields = (
    'partitioned_train_state',
    'train_state_partition_specs',
    'inputs_partition_spec',
    'train_step',
    'eval_step',
  )
  assert model._fields == (*fields, 'total_num_params')


def test_what_is_in_the_padding_never_matters():
  model, state, _ = train(task((1, 2, 4)), steps=2)

  def poison(x, true):
    full = np.array(x)
    mask = np.ones(full.shape, bool)
    mask[tuple(slice(d) for d in true.shape)] = False
    full[mask] = np.nan if full.dtype.kind == 'f' else -1
    return jax.device_put(full, x.sharding)

  truth = initialize_partitioned_model_states(task((1, 2, 4)).instantiate(), jax.random.key(0)).unpadded_shapes
  poisoned = jax.tree.map(poison, state, truth)
  clean = model.train_step(jax.tree.map(jnp.copy, state), jax.random.key(1), batch())
  dirty = model.train_step(poisoned, jax.random.key(1), batch())
  assert float(clean.weighted_loss) == float(dirty.weighted_loss)
  jax.tree.map(np.testing.assert_array_equal, clean.state, dirty.state)


@pytest.mark.slow_cases
@pytest.mark.parametrize('rows', [1, 3, 6, 11])
def test_metrics_of_a_batch_that_does_not_fill_the_mesh_are_exact(rows):
  one = partition_spmd_model(task(), jax.random.key(0), struct(batch(rows)))
  eight = partition_spmd_model(task((2, 2, 2)), jax.random.key(0), struct(batch(rows)))
  step = jnp.int32(0)
  expected = one.eval_step(one.partitioned_train_state.mdl_vars, jax.random.key(1), step, batch(rows))
  actual = eight.eval_step(eight.partitioned_train_state.mdl_vars, jax.random.key(1), step, batch(rows))
  np.testing.assert_allclose(actual.mean_metrics['loss'], expected.mean_metrics['loss'], rtol=1e-6)
  assert actual.per_example_out['xent'].shape == (rows, LENGTH)
  np.testing.assert_allclose(actual.per_example_out['xent'], expected.per_example_out['xent'], rtol=1e-5)


def test_accumulating_over_microbatches_equals_the_whole_batch():
  _, whole, expected = train(task((1, 2, 2)))
  _, parts, losses = train(task((1, 2, 2), num_microbatches=3))
  np.testing.assert_allclose(losses, expected, rtol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), parts, whole)


def test_excluded_variables_have_no_slots_and_do_not_change():
  _, state, _ = train(task((1, 2, 4), bprop_variable_exclusion=('emb',)), steps=2)
  slots = jax.tree_util.tree_flatten_with_path(state.opt_states)[0]
  assert slots and not any('emb' in jax.tree_util.keystr(path) for path, _ in slots)
  fresh = partition_spmd_model(task((1, 2, 4)), jax.random.key(0), struct(batch())).partitioned_train_state
  np.testing.assert_array_equal(state.mdl_vars['emb'], fresh.mdl_vars['emb'])
  assert (np.asarray(state.mdl_vars['out']) != np.asarray(fresh.mdl_vars['out'])).any()


def test_a_step_that_is_not_finite_changes_nothing_but_the_counter():
  model, state, _ = train(task((1, 2, 4)), steps=2)
  before = jax.tree.map(np.asarray, state)
  bad = batch()
  bad['weights'] = np.full_like(bad['weights'], np.nan)
  out = model.train_step(state, jax.random.key(1), bad)
  assert float(out.mean_metrics['skipped'][0]) == 1
  assert int(out.state.step) == int(before.step) + 1
  after = dataclasses.replace(out.state, step=before.step)
  jax.tree.map(np.testing.assert_array_equal, after, before)


def test_decoding_is_partitioned_too():
  model, state, _ = train(task((1, 2, 4)), steps=3)
  decode, specs = get_partitioned_spmd_model_decode_fn(
    task((1, 2, 4)).instantiate(), jax.random.key(0), state, model.train_state_partition_specs, struct(batch())
  )
  assert specs['ids'] == jax.sharding.PartitionSpec(AXES, None)
  decoded = decode(state.mdl_vars, jax.random.key(0), state.step, batch()).decoded
  one, alone, _ = train(task(), steps=3)
  expected, _ = get_partitioned_spmd_model_decode_fn(
    task().instantiate(), jax.random.key(0), alone, one.train_state_partition_specs, struct(batch())
  )
  np.testing.assert_array_equal(
    decoded['ids'], expected(alone.mdl_vars, jax.random.key(0), alone.step, batch()).decoded['ids']
  )


def test_inference_needs_no_optimizer_and_compiles_in_another_thread():
  jax_task = task((1, 2, 4)).instantiate()
  whole, layout = (state_layout(jax_task, jax_task.create_mesh(), optimizer=o) for o in (True, False))
  assert jax.tree.leaves(whole.specs.opt_states) and layout.specs.opt_states is None
  assert layout.mdl_vars == whole.mdl_vars
  on_mesh = PartitionedTask(jax_task, struct(batch()), layout=layout)
  step, threads = on_mesh.predict_step, []
  step.flags = types.SimpleNamespace(compile=lambda lowered: (threads.append(threading.current_thread()), lowered)[1])
  step.begin_to_compile()
  step.begin_to_compile()
  assert isinstance(step.compiled, jax.stages.Lowered)
  assert len(threads) == 1 and threads[0] is not threading.main_thread()


def test_decoding_takes_a_state_as_a_partitioner_has_laid_it_out():
  axes = ('data', 'model')
  partitioner = PjitPartitioner(
    num_partitions=4,
    logical_axis_rules=(('data', 'data'), ('mdl', 'model')),
    params_axis_names_overrides=(('emb', ('data', None)), ('bias', (None,))),
  )
  config = task().set(mesh_axis_names=axes, logical_axis_rules=partitioner.logical_axis_rules)
  config.train.inputs_split_mapping = {'map_1d': ('data',), 'map_2d': ('data', None)}
  model = partition_spmd_model(config, jax.random.key(0), struct(batch()), partitioner=partitioner)
  state = model.partitioned_train_state
  assert state.mdl_vars['emb'].sharding.spec == jax.sharding.PartitionSpec('data', None)

  decode, _ = get_partitioned_spmd_model_decode_fn(
    config.instantiate(), jax.random.key(0), state, model.train_state_partition_specs, struct(batch())
  )
  decoded = decode(state.mdl_vars, jax.random.key(0), state.step, batch()).decoded['ids']
  variables = {
    name: np.asarray(state.mdl_vars[name])[tuple(slice(d) for d in weight.shape)]
    for name, weight in config.model.instantiate().abstract_init().items()
  }
  (_, expected), _ = config.model.instantiate().apply(variables, batch(), do_eval=True, method='decode')
  np.testing.assert_array_equal(decoded, expected['ids'])


def test_a_partitioner_may_leave_the_parameters_in_host_memory():
  rules = (('data', 'data'), ('mdl', 'model'))
  losses, kinds = [], []
  for params_on_devices in (True, False):
    partitioner = PjitPartitioner(num_partitions=4, logical_axis_rules=rules, params_on_devices=params_on_devices)
    config = task().set(mesh_axis_names=('data', 'model'), logical_axis_rules=rules)
    config.train.inputs_split_mapping = {'map_1d': ('data',), 'map_2d': ('data', None)}
    model = partition_spmd_model(config, jax.random.key(0), struct(batch()), partitioner=partitioner)
    state = model.partitioned_train_state
    emb, slot = state.mdl_vars['emb'], jax.tree.leaves(state.opt_states)[-1]
    kinds.append((type(emb) is np.ndarray, emb.shape, isinstance(slot, jax.Array)))
    moved = partitioner.move_params_to_devices(state, model.train_state_partition_specs)
    assert moved.mdl_vars['emb'].sharding.spec == jax.sharding.PartitionSpec('model', 'data')
    losses.append(float(model.train_step(moved, jax.random.key(1), batch()).weighted_loss))
  assert kinds == [(False, (8, 6), True), (True, (5, 6), True)]
  assert losses[0] == losses[1]


def test_steps_take_arrays_of_jax_and_keys_of_either_kind():
  model = partition_spmd_model(task((1, 2, 4)), jax.random.PRNGKey(0), struct(batch()))
  state, key = model.partitioned_train_state, jax.random.key(1)
  step = functools.partial(model.eval_step, state.mdl_vars)
  expected = step(key, state.step, batch()).weighted_loss
  assert step(jax.random.PRNGKey(1), state.step, batch()).weighted_loss == expected
  assert step(key, state.step, jax.tree.map(jnp.asarray, batch())).weighted_loss == expected
  assert step(key, 0, model.eval_step.put_inputs(batch())).weighted_loss == expected
  with pytest.raises(DataError, match=r"'weights' is int64; the step was built for float32"):
    step(key, 0, {**batch(), 'weights': np.ones((BATCH, LENGTH), np.int64)})


def test_mistakes_are_told_before_anything_is_compiled():
  with pytest.raises(ShardingError, match=r'needs 16 devices, and there are 8'):
    partition_spmd_model(task((2, 2, 4)), jax.random.key(0), struct(batch()))
  config = task((1, 2, 4))
  config.train.inputs_split_mapping = {'map_1d': None}
  with pytest.raises(ShardingError, match='map_2d'):
    partition_spmd_model(config, jax.random.key(0), struct(batch())).train_step.compile()
  model = partition_spmd_model(task((1, 2, 4)), jax.random.key(0), struct(batch()))
  with pytest.raises(DataError, match='labels'):
    wrong = {k: v for k, v in batch().items() if k != 'labels'}
    model.train_step(model.partitioned_train_state, jax.random.key(0), wrong)


def test_only_train_batches_are_padded_to_microbatches():
  jax_task = task((1, 3, 1), num_microbatches=4).instantiate()
  partitioned = PartitionedTask(jax_task, struct(batch()))
  rows = {
    name: getattr(partitioned, name).arguments[-1]['ids'].shape[0]
    for name in ('train_step', 'eval_step', 'decode_step')
  }
  assert rows == {'train_step': 12, 'eval_step': 6, 'decode_step': 6}


def test_a_mesh_and_a_partitioner_together_are_refused():
  partitioner = PjitPartitioner(num_partitions=1)
  both = {'mesh': partitioner.mesh, 'partitioner': partitioner}
  with pytest.raises(ConfigError, match='mesh, partitioner and layout each decide the mesh'):
    partition_spmd_model(task(), jax.random.key(0), struct(batch()), **both)
  with pytest.raises(ConfigError, match='mesh, partitioner and layout each decide the mesh'):
    PartitionedTask(task().instantiate(), struct(batch()), **both)


@pytest.mark.parametrize('shape', [(1, 1, 1), (2, 2, 2)])
def test_few_initial_values_are_drawn_by_a_program_that_compiles_quickly_and_are_the_same(shape, monkeypatch):
  options = []
  original = state.GuardedJit

  def recorded(*args, **kwargs):
    options.append(kwargs['compiler_options'])
    return original(*args, **kwargs)

  monkeypatch.setattr(state, 'GuardedJit', recorded)
  drawn = []
  for few in (1 << 23, 0):
    monkeypatch.setattr(state, 'FEW_TO_DRAW', few)
    drawn.append(PartitionedTask(task(shape).instantiate(), struct(batch())).init_state(jax.random.key(3)))
  assert options[0]['xla_backend_optimization_level'] == 0 and options[1] is None
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), *drawn)
