"""Modules of Flax, Equinox and Haiku as layers: the numbers of their libraries, on any mesh, trained and resumed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from padded_layers import place_variables, step_on_mesh

pytest.importorskip('equinox', reason='needs Equinox: pip install praxis_lite[equinox]')
pytest.importorskip('flax', reason='needs Flax: pip install praxis_lite[flax]')
pytest.importorskip('haiku', reason='needs Haiku: pip install praxis_lite[haiku]')

import equinox as eqx
import flax.linen as nn
import haiku as hk
import optax
from flax import nnx
from foreign_modules import LIBRARIES, SPLITS, LinenNet, X, haiku_net, layer_of
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from praxis_lite.bridges.foreign import EquinoxLayer, HaikuLayer, LinenLayer, NnxLayer
from praxis_lite.common.config import Config
from praxis_lite.common.config.json import from_json, to_json
from praxis_lite.common.config.trusted import UntrustedError, import_trusted
from praxis_lite.common.errors import ConfigError, ShardingError, UserError
from praxis_lite.common.trees import leaves, nest, path_name
from praxis_lite.inputs import ArrayInput
from praxis_lite.instruments.explain import explain
from praxis_lite.instruments.verification import verify
from praxis_lite.layers import Linear, Repeat
from praxis_lite.layers.base.call import fold_in_path
from praxis_lite.models.base import BaseModel
from praxis_lite.runs import run_eval, run_train
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.learning import Learner
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')
each_library = pytest.mark.parametrize('library', LIBRARIES)
AXES = ('data', 'mdl', 'unused')


def assert_trees_close(actual, expected, tolerance=1e-5):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
    np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * (1e-2 + np.abs(e).max(initial=0)))


# ---------------------------------------------------------------- variables


@pytest.mark.slow_cases
@each_library
def test_init_makes_what_is_declared_in_the_dtype_of_the_layer(library):
  layer = layer_of(library).set(dtype='bfloat16', fprop_dtype='float32').instantiate()
  declared, values = layer.abstract_init(), layer.init(jax.random.key(0))
  shapes = {path: (w.full_shape, w.as_struct().dtype) for path, w in leaves(declared).items()}
  assert shapes == {path: (x.shape, x.dtype) for path, x in leaves(values).items()}
  for path, weight in leaves(declared).items():
    if weight.trainable:
      assert weight.dtype == 'bfloat16', path
    else:
      assert path[0] in ('batch_stats', 'state') and weight.as_struct().dtype in (jnp.float32, jnp.int32), path
  assert {w.trainable for w in leaves(declared).values()} == {True, False}


def theirs(library, key):
  """(initial values by path, result in training, result in evaluation) of the library itself."""
  if library == 'linen':
    net = LinenNet()
    v = net.init({'params': key}, jnp.zeros((1, 7)), train=True)
    y, _ = net.apply(v, X, train=True, mutable=['batch_stats'])
    return leaves(dict(v)), y, net.apply(v, X, train=False)
  if library == 'nnx':
    net = layer_of('nnx').module_tpl.instantiate(rngs=nnx.Rngs(key))
    kernel, var = net.out.kernel.get_value(), net.blocks[1].var.get_value()
    values = {('params', 'out', 'kernel'): kernel, ('state', 'blocks_1', 'var'): var}
    net.eval()
    evaluated = net(X)
    net.train()
    return values, net(X), evaluated
  if library == 'equinox':
    net, state = eqx.nn.make_with_state(layer_of('equinox').module_tpl.instantiate)(key=key)
    call = jax.vmap(net, in_axes=(0, None), out_axes=(0, None), axis_name='batch')
    evaluating = jax.vmap(eqx.nn.inference_mode(net), in_axes=(0, None), out_axes=(0, None), axis_name='batch')
    return {('params', 'layers_1', 'weight'): net.layers[1].weight}, call(X, state)[0], evaluating(X, state)[0]
  net = hk.transform_with_state(haiku_net)
  params, state = net.init(key, jnp.zeros((1, 7)), is_training=True)
  found = {('params', 'out', 'w'): params['out']['w'], ('params', 'batch_norm', 'scale'): params['batch_norm']['scale']}
  y = [net.apply(params, state, None, X, is_training=train)[0] for train in (True, False)]
  return found, *y


@each_library
def test_initial_values_and_results_are_those_of_the_library(library):
  layer = layer_of(library).instantiate()
  variables = layer.init(jax.random.key(3))
  values, trained, evaluated = theirs(library, fold_in_path(jax.random.key(3), ()))
  for path, value in values.items():
    np.testing.assert_array_equal(leaves(variables)[path], value, err_msg=path_name(path))
  np.testing.assert_allclose(layer.apply(variables, X)[0], trained, rtol=1e-5, atol=1e-6)
  y, side = layer.apply(variables, X, do_eval=True)
  np.testing.assert_allclose(y, evaluated, rtol=1e-5, atol=1e-6)
  assert not side.updates
  other = layer.init(jax.random.key(4))
  assert any((a != b).any() for a, b in zip(jax.tree.leaves(variables), jax.tree.leaves(other)))


@each_library
def test_its_statistics_move_in_training_and_are_used_in_evaluation(library):
  layer = layer_of(library).instantiate()
  variables = layer.init(jax.random.key(0))
  before, _ = layer.apply(variables, X, do_eval=True)
  _, side = layer.apply(variables, X)
  not_trained = {path for path, weight in leaves(layer.abstract_init()).items() if not weight.trainable}
  assert set(leaves(side.updates)) == not_trained
  assert {path: x.dtype for path, x in leaves(side.updates).items()} == {
    p: leaves(variables)[p].dtype for p in not_trained
  }
  moved = variables | side.updates
  assert np.abs(layer.apply(moved, X, do_eval=True)[0] - before).max() > 1e-3


@each_library
def test_dropout_is_drawn_with_the_key_of_the_call(library):
  layer = layer_of(library, rate=0.5).instantiate()
  variables = layer.init(jax.random.key(0))
  one, again, other = (layer.apply(variables, X, key=jax.random.key(k))[0] for k in (1, 1, 2))
  np.testing.assert_array_equal(one, again)
  assert (one != other).any()
  np.testing.assert_array_equal(*(layer.apply(variables, X, key=jax.random.key(k), do_eval=True)[0] for k in (1, 2)))


@each_library
def test_repeated_layers_are_drawn_each_on_its_own(library):
  square = {
    'linen': Config(LinenLayer, module_tpl=Config(nn.Dense, features=4), example_shapes=((1, 4),)),
    'nnx': Config(NnxLayer, module_tpl=Config(nnx.Linear, in_features=4, out_features=4)),
    'equinox': Config(EquinoxLayer, module_tpl=Config(eqx.nn.Linear, in_features=4, out_features=4)),
    'haiku': Config(HaikuLayer, module_tpl=Config(hk.Linear, output_size=4), example_shapes=((1, 4),)),
  }[library]
  repeat = Config(Repeat, num_layers=3, layers_tpl=square.clone()).instantiate()
  variables = repeat.init(jax.random.key(0))
  matrix = next(x for x in jax.tree.leaves(variables) if x.ndim == 3)
  assert matrix.shape == (3, 4, 4) and len(np.unique(np.asarray(matrix))) == 48
  one, y = square.instantiate(), X[:, :4]
  for i in range(3):
    y, _ = one.apply(jax.tree.map(lambda x, i=i: x[i], next(iter(variables.values()))), y)
  np.testing.assert_allclose(repeat.apply(variables, X[:, :4])[0], y, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- meshes


def step(layer, variables, x):
  """Returns (result, updates, gradients of variables and of x)."""

  def loss(variables, x):
    y, side = layer.apply(variables, x, key=jax.random.key(1))
    return jnp.mean(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))), (y, side.updates)

  floats = {path: v for path, v in leaves(variables).items() if jnp.issubdtype(v.dtype, jnp.floating)}
  of_floats = lambda f, x: loss(nest(leaves(variables) | f), x)  # noqa: E731
  (_, aux), grads = jax.value_and_grad(of_floats, argnums=(0, 1), has_aux=True)(floats, x)
  return aux, {path_name(path): g for path, g in grads[0].items()}, grads[1]


@pytest.mark.slow
@each_library
def test_on_a_mesh_every_gradient_and_update_is_that_of_one_device(library):
  """With dropout too: the draw does not depend on the mesh. 7, 10 and 5 do not divide by 3, nor 9 rows by 2."""
  plain = layer_of(library, rate=0.3)
  one = plain.instantiate()
  variables = jax.tree.map(lambda x: x + 0.1 if x.dtype == jnp.float32 else x, one.init(jax.random.key(0)))
  expected = jax.jit(lambda v, x: step(one, v, x))(variables, X)
  config = plain.set(
    mesh_axis_names=AXES, variable_splits=SPLITS[library], inputs_split_mapping={'map_2d': ('data', None)}
  )
  config.activation_split_dims_mapping.out = ('data', 'mdl')
  layer = config.instantiate()
  mesh = jax.make_mesh((2, 3, 1), AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:6])

  padded = place_variables(layer, variables, mesh)
  split = [path_name(p) for p, x in leaves(padded).items() if x.addressable_shards[0].data.size < x.size]
  assert len(split) >= 3, split
  x = jax.device_put(X, NamedSharding(mesh, PartitionSpec()))
  assert_trees_close(step_on_mesh(step, layer, variables, mesh)(padded, x), expected)


@pytest.mark.parametrize('library', ['linen', 'nnx'])
def test_the_metadata_of_a_module_says_how_it_is_split_unless_a_pattern_does(library):
  names = {'linen': ('Dense_0', 'Dense_1'), 'nnx': ('blocks_0', 'out')}[library]
  config = layer_of(library, split=True).set(mesh_axis_names=AXES, logical_axis_rules=(('hidden', 'mdl'),))
  first, second = (config.instantiate().abstract_init()['params'][name]['kernel'] for name in names)
  assert first.full_split_dims_mapping == ('data', 'mdl') and second.full_split_dims_mapping == ('hidden', None)
  assert first.full_split_dims_mapping.sources[0].startswith(f'the metadata of params.{names[0]}.kernel in ')
  config.variable_splits = ((f'params.{names[0]}.kernel', (None, 'data')), ('params.*kernel', ('unused', None)))
  first, second = (config.instantiate().abstract_init()['params'][name]['kernel'] for name in names)
  assert first.full_split_dims_mapping == (None, 'data') and second.full_split_dims_mapping == ('unused', None)
  config.set(variable_splits=(), use_own_splits=False)
  assert config.instantiate().abstract_init()['params'][names[0]]['kernel'].tensor_split_dims_mapping is None
  config.set(use_own_splits=True, logical_axis_rules=None)
  with pytest.raises(ShardingError, match=f"{names[1]}.kernel.*'hidden'"):
    config.instantiate()


# ---------------------------------------------------------------- runs


class Net(BaseModel):
  """Regression by a network of another library."""

  net_tpl: Config = None

  def setup(self):
    self.create_child('net', self.net_tpl)
    self.create_child('head', Config(Linear, input_dims=5, output_dims=1))

  def compute_predictions(self, batch):
    return self.head(self.net(batch['x']))[:, 0]

  def compute_loss(self, predictions, batch):
    error_B, weights_B = jnp.square(predictions - batch['y']), batch['weights']
    return {'loss': (jnp.average(error_B, weights=weights_B), jnp.sum(weights_B))}, {'error': error_B}


_SPLIT_NAMES = ('train', 'valid')


def experiment(net, steps=6, mesh=(1, 1, 1), **train):
  rng = np.random.default_rng(0)
  x = rng.standard_normal((24, 7)).astype(np.float32)
  arrays = {'x': x, 'y': np.tanh(x[:, 0] - x[:, 1])}
  data = [
    Config(ArrayInput, name=n, arrays=arrays, batch_size=12, is_training=n == 'train') for n in ('train', 'valid')
  ]
  task = Config(SingleTask, name='foreign', model=Config(Net, net_tpl=net), mesh_axis_names=AXES, ici_mesh_shape=mesh)
  task.train.learner = Config(Learner, optimizer=Config(optax.adam), learning_rate=0.02)
  task.train.inputs_split_mapping = {'map_1d': ('data',), 'map_2d': ('data', None)}
  task.train.set(num_train_steps=steps, log_interval_steps=1, save_interval_steps=100, **train)
  return ExperimentConfig(task, data, [])


def losses(folder, split='train'):
  lines = map(json.loads, (folder / 'metrics.jsonl').read_text().splitlines())
  return [line['metrics']['loss'] for line in lines if line['split'] == split and 'loss' in line['metrics']]


@pytest.mark.slow
@each_library
def test_a_run_trains_evaluates_and_resumes_with_the_same_bits_on_a_mesh(library, tmp_path):
  net = layer_of(library, rate=0.1).set(variable_splits=SPLITS[library])
  whole = run_train(experiment(net, mesh=(2, 3, 1)), str(tmp_path / 'whole'))
  run_train(experiment(net, steps=3, mesh=(2, 3, 1)), str(tmp_path / 'two'))
  resumed = run_train(experiment(net, mesh=(2, 3, 1)), str(tmp_path / 'two'))
  assert whole.step == resumed.step == 6
  for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
  curve = losses(tmp_path / 'whole')
  assert curve == losses(tmp_path / 'two') and curve[-1] < curve[0]
  metrics = run_eval(experiment(net, mesh=(3, 1, 1)), str(tmp_path / 'whole'))
  expected = whole.metrics['eval/valid']['loss']
  np.testing.assert_allclose(next(iter(metrics.values()))['loss'], expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('net, matrix', [
  (Config(EquinoxLayer, module_tpl=Config(eqx.nn.MLP, in_size=7, out_size=5, width_size=10, depth=1)),
   'layers_0.weight'),
  (Config(HaikuLayer, module_tpl=Config(hk.nets.MLP, output_sizes=(10, 5)), example_shapes=((1, 7),)),
   'mlp.linear_0.w'),
], ids=['equinox', 'haiku'])  # fmt: skip
def test_verify_finds_the_layer_right_and_explain_names_the_pattern(net, matrix):
  net = net.clone(variable_splits=((f'params.{matrix}', ('data', 'mdl')),))
  config = experiment(net, mesh=(2, 2, 1))
  assert 'net.variable_splits[0]' in str(explain(config, f'net.params.{matrix}'))
  verification = verify(config, quick=True)
  assert verification.compared and not verification.differences, str(verification)


@pytest.mark.slow
def test_under_shard_map_a_module_without_statistics_trains_and_one_with_them_is_refused(tmp_path):
  dense = Config(LinenLayer, module_tpl=Config(nn.Dense, features=5), example_shapes=((1, 7),))
  dense.variable_splits = (('.*kernel', ('data', None)),)
  curves = []
  for name, mesh, partitioning in (('one', (1, 1, 1), 'auto'), ('mapped', (3, 1, 1), 'shard_map')):
    config = experiment(dense, steps=2, mesh=mesh)
    config.task.partitioning = partitioning
    run_train(config, str(tmp_path / name))
    curves.append(losses(tmp_path / name))
  np.testing.assert_allclose(*curves, rtol=1e-4)
  config = experiment(layer_of('linen'), steps=1, mesh=(3, 1, 1))
  config.task.partitioning = 'shard_map'
  with pytest.raises(UserError, match=r'net\.batch_stats\.BatchNorm_0\.mean: .*under shard_map each device'):
    run_train(config, str(tmp_path / 'refused'))


# ---------------------------------------------------------------- configs and errors


def test_a_record_may_name_their_layers_and_nothing_else_of_theirs():
  for value in (nn.Dense, nnx.Linear, eqx.nn.MLP, hk.nets.MLP, hk.initializers.Constant, nn.with_partitioning):
    assert from_json(to_json(value)) is value
  layer = Config(LinenLayer, module_tpl=Config(nn.Dense, features=3), example_shapes=((1, 7),))
  assert from_json(to_json(layer)) == layer
  for name in ('flax.nnx:use_eager_sharding', 'flax.serialization:from_bytes', 'equinox:tree_serialise_leaves',
               'haiku:transform', 'flax.linen.module:jax.numpy.load', 'flax.linen.module:Any'):  # fmt: skip
    with pytest.raises(UntrustedError):
      import_trusted(name)


class Breaks(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(3)(x) + {'a': 1}['b']


class Moded(nn.Module):
  @nn.compact
  def __call__(self, x, train):
    return nn.Dense(3)(x)


def dense(**fields):
  return Config(LinenLayer, **{'module_tpl': Config(nn.Dense, features=3), 'example_shapes': ((1, 7),), **fields})


WRONG = [
  (dense(variable_splits=(('.*kernl', ('data', None)),)),
   r"LinenLayer\.variable_splits\[0\]: '\.\*kernl' matches no variable; there are params\.bias, params\.kernel\."),
  (dense(variable_splits=(('kernel', ('data', None)),)), r"A pattern matches whole paths: write '\.\*kernel\.\*'"),
  (dense(variable_splits=(('(', ('data', None)),)), r"variable_splits\[0\]: '\(' is not a regular expression"),
  (dense(variable_splits=('.*kernel', ('data', None))), r"variable_splits\[0\]: expected a pair .* got '\.\*kernel'"),
  (dense(variable_splits=(('.*kernel', 'data'),)), r"variable_splits\[0\]: expected a pair"),
  (dense(variable_splits=(('.*kernel', ('data',)),), mesh_axis_names=AXES), r'params\.kernel.*1 entry'),
  (dense(variable_splits=(('.*kernel', ('dat', None)),), mesh_axis_names=AXES), r"Did you mean 'data'"),
  (dense(module_tpl=Config(Breaks)), r"LinenLayer\.module_tpl: the Flax module Breaks cannot be built: KeyError: 'b'"),
  (dense(module_tpl=Config(dict)), r'module_tpl: expected the config of a flax\.linen\.Module, which returned dict'),
  (dense(module_tpl=Config(nn.Dense)), r"Dense\.features: a value is required|LinenLayer\.module_tpl"),
  (dense(example_shapes=(7,)), r'example_shapes\[0\]: expected the shape of an argument, such as \(1, 6\), got 7'),
  (dense(example_dtypes=('int32', 'int32')), r'example_dtypes: 2 entries for 1 example_shapes'),
  (dense(train_argument='training'), r"LinenLayer\.module_tpl: the Flax module Dense cannot be built: .*training"),
  (dense(train_argument='train'), r"; LinenLayer\.train_argument = 'train' must be a keyword of the module, or empty"),
  (dense(eval_argument='frozen'), r"; LinenLayer\.eval_argument = 'frozen' must be a keyword of the module, or empty"),
  (dense(module_tpl=Config(Moded)), r"; set LinenLayer\.train_argument = 'train', so that the module knows"),
  (Config(NnxLayer, module_tpl=Config(nn.Dense, features=3)), r'expected the config of a flax\.nnx\.Module'),
  (dense(module_tpl=Config(eqx.nn.Linear, in_features=3, out_features=2)),
   r'of a flax\.linen\.Module, got Linear; use EquinoxLayer'),
  (dense(module_tpl=Config(Linear, input_dims=3, output_dims=2)), r'it is a layer already, so use its config'),
  (Config(EquinoxLayer, module_tpl=Config(nnx.Linear, in_features=3, out_features=2)),
   r'of an equinox\.Module, got Linear; use NnxLayer'),
  (Config(HaikuLayer, module_tpl=Config(nn.Dense, features=3), example_shapes=((1, 7),)), r'got Dense; use LinenLayer'),
  (Config(NnxLayer, module_tpl=Config(hk.Linear, output_size=2)), r'got Linear; use HaikuLayer'),
  (Config(EquinoxLayer, module_tpl=Config(dict)), r'expected the config of an equinox\.Module'),
  (Config(HaikuLayer, module_tpl=Config(haiku_net), example_shapes=((1, 7),)),
   r'HaikuLayer\.module_tpl: the Haiku module haiku_net cannot be built: TypeError: .*is_training.*'
   r"; set HaikuLayer\.train_argument = 'is_training'"),
]  # fmt: skip


@pytest.mark.parametrize('config, message', WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_told_in_a_line_before_anything_runs(config, message):
  with pytest.raises(UserError, match=message) as raised:
    config.instantiate()
  assert '\n' not in str(raised.value)


@each_library
def test_an_error_in_a_call_names_the_layer(library):
  layer = layer_of(library).instantiate()
  variables = layer.init(jax.random.key(0))
  with pytest.raises(
    ConfigError, match=rf'{type(layer).__name__}\.module_tpl: the \w+ module \w+ raised an error: '
  ) as e:
    layer.apply(variables, X[:, :3])
  assert e.value.__cause__ is not None and '\n' not in str(e.value)


@pytest.mark.parametrize('library, package', [('linen', 'flax.linen'), ('nnx', 'flax.nnx'), ('equinox', 'equinox'),
                                              ('haiku', 'haiku')])  # fmt: skip
def test_a_library_that_is_not_installed_is_told(library, package, monkeypatch):
  config = layer_of(library)
  monkeypatch.setitem(sys.modules, package, None)
  extra = package.partition('.')[0]
  with pytest.raises(ConfigError, match=re.escape(f'is not installed; pip install praxis_lite[{extra}]')):
    config.instantiate()


def test_a_module_without_variables_is_a_layer_too():
  layer = Config(EquinoxLayer, module_tpl=Config(eqx.nn.Dropout, p=0.5)).instantiate()
  assert layer.init(jax.random.key(0)) == {}
  y, _ = layer.apply({}, X, key=jax.random.key(1))
  assert (np.asarray(y) == 0).any() and (layer.apply({}, X, do_eval=True)[0] == X).all()


@pytest.mark.slow_cases
@each_library
@pytest.mark.parametrize('rows', [1, 4])
def test_any_number_of_rows(library, rows):
  layer = layer_of(library).instantiate()
  variables = layer.init(jax.random.key(0))
  whole, _ = layer.apply(variables, X, do_eval=True)
  np.testing.assert_allclose(layer.apply(variables, X[:rows], do_eval=True)[0], whole[:rows], rtol=1e-5, atol=1e-6)


@pytest.mark.slow_cases
@each_library
def test_it_computes_in_bfloat16_with_float32_weights(library):
  layer = layer_of(library).set(fprop_dtype='bfloat16').instantiate()
  variables = layer.init(jax.random.key(0))
  y, side = layer.apply(variables, jnp.asarray(X, jnp.bfloat16))
  expected, _ = layer_of(library).instantiate().apply(variables, X)
  np.testing.assert_allclose(np.asarray(y, np.float32), expected, atol=0.1)
  kept = {p: leaves(variables)[p].dtype for p in leaves(side.updates)}
  assert {p: x.dtype for p, x in leaves(side.updates).items()} == kept


@pytest.mark.slow
def test_building_a_layer_starts_no_device():
  """Otherwise `verify` and `--devices` could not choose the devices any more."""
  code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import foreign_modules
from praxis_lite.common.jax_internals.devices import backends_have_started
for library in foreign_modules.LIBRARIES:
  foreign_modules.layer_of(library).instantiate().abstract_init()
  print(library, backends_have_started())
"""
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert done.stdout.split()[1::2] == ['False'] * 4, done.stdout


def test_an_equinox_module_that_is_given_one_row_without_its_dimension_says_what_to_pass():
  eqx = pytest.importorskip('equinox')
  layer = Config(EquinoxLayer, module_tpl=Config(eqx.nn.Linear, in_features=4, out_features=2)).instantiate()
  variables = layer.init(jax.random.key(0))
  with pytest.raises(ConfigError, match=r'over_rows is set, .* such as x\[None\] for a single one, or set over_rows='):
    layer.apply(variables, jnp.ones(4))
  assert layer.apply(variables, jnp.ones((1, 4)))[0].shape == (1, 2)
