"""Repeat against a Python loop over the same weights."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables
from jax.ad_checkpoint import checkpoint_name

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.errors import ConfigError, ShardingError
from praxis_lite.layers.base import Layer
from praxis_lite.layers.remat import REMAT_POLICIES
from praxis_lite.layers.repeat import Repeat
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.sharding.weights import WeightHParams, WeightInit

D, LAYERS = 3, 4


class Residual(Layer):
  """A small layer with one of everything: weights, a counter, noise, a summary, an auxiliary loss, a cache."""

  dims: int = REQUIRED
  noise: float = 0.0
  aux: bool = False

  def setup(self) -> None:
    self.create_variable('w', WeightHParams((self.dims, self.dims), tensor_split_dims_mapping=('data', None)))
    counter = WeightHParams((), init=WeightInit.Constant(0.0))
    self.create_variable('calls', counter, trainable=False)

  def __call__(self, x, shift=0.0):
    h = jnp.tanh(checkpoint_name(x @ self.theta.w, 'hidden'))
    if self.noise:
      h += self.noise * jax.random.normal(self.next_prng_key(), h.shape)
    if self.aux:
      self.add_summary('mean', jnp.mean(h))
      self.add_aux_loss('square', jnp.mean(h**2), weight=jnp.sum(jnp.abs(h)))
      self.update_var('calls', self.theta.calls + 1.0)
    return x + h + shift

  def init_decode_state(self, batch_size):
    self.update_decode_state('sum', jnp.zeros((batch_size, self.dims)))

  def extend_step(self, x):
    self.update_decode_state('sum', self.get_decode_state('sum') + x)
    return x + jnp.tanh(self.get_decode_state('sum') @ self.theta.w)


class Root(Layer):
  repeat_tpl: Config = REQUIRED

  def setup(self) -> None:
    self.create_child('repeat', self.repeat_tpl)

  def __call__(self, x, **kwargs):
    return self.repeat(x, **kwargs)


def repeat(sub=None, **fields):
  sub = {'dims': D, 'mesh_axis_names': ('data', 'stage'), **(sub or {})}
  return Config(Repeat, **{'layers_tpl': Config(Residual, **sub), 'num_layers': LAYERS, **fields})


def single(**sub):
  return Config(Residual, dims=D, **sub).instantiate()


def layer_variables(variables, i):
  return jax.tree.map(lambda v: v[i], variables['layers'])


def x_BD():
  return np.random.default_rng(5).standard_normal((2, D)).astype(np.float32)


def test_repeat_is_a_loop_over_stacked_weights():
  layer = repeat().instantiate()
  variables = drawn_variables(layer.abstract_init())
  assert variables['layers']['w'].shape == (LAYERS, D, D)
  y, _ = layer.apply(variables, x_BD(), shift=0.5)
  expected = np.asarray(x_BD())
  for w in np.asarray(variables['layers']['w']):
    expected = expected + np.tanh(expected @ w) + 0.5
  np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_declarations_carry_the_repeat_prefix():
  config = repeat(mesh_axis_names=('data', 'stage'))
  config.weight_split_dims_mapping.stack = ('stage',)
  weight = config.instantiate().abstract_init()['layers']['w']
  assert weight.full_shape == (LAYERS, D, D)
  assert weight.full_split_dims_mapping == ('stage', 'data', None)
  assert repeat().instantiate().abstract_init()['layers']['w'].full_split_dims_mapping == (None, 'data', None)


def test_repetitions_start_from_different_weights():
  w = repeat().instantiate().init(jax.random.key(0))['layers']['w']
  assert all(not np.allclose(w[0], w[i]) for i in range(1, LAYERS))


@pytest.mark.parametrize('unroll', [1, 2, LAYERS])
def test_side_outputs_are_stacked_and_auxiliary_losses_add_up(unroll):
  layer = Config(Root, repeat_tpl=repeat({'aux': True}, unroll=unroll)).instantiate()
  variables = drawn_variables(layer.abstract_init())
  _, side = layer.apply(variables, x_BD())
  means, squares, x = [], [], x_BD()
  for i in range(LAYERS):
    x, one = single(aux=True).apply(layer_variables(variables['repeat'], i), x)
    ((_, summary),) = one.summaries.items()
    means.append(summary.value)
    ((_, (value, weight)),) = one.aux_losses.items()
    squares.append(value * weight)
  np.testing.assert_allclose(side.summaries['repeat.layers/mean'].value, means, rtol=1e-5)
  value, weight = side.aux_losses['repeat.layers/square']
  np.testing.assert_allclose(value * weight, sum(squares), rtol=1e-5)
  np.testing.assert_array_equal(side.updates['repeat']['layers']['calls'], np.ones(LAYERS))


def test_auxiliary_losses_of_zero_weight_are_finite():
  layer = repeat({'aux': True}).instantiate()
  _, side = layer.apply(layer.init(jax.random.key(0)), jnp.zeros((2, D)))
  value, weight = side.aux_losses['layers/square']
  assert value == 0 and weight == 0


def test_repetitions_draw_different_numbers():
  layer = repeat({'noise': 1.0}).instantiate()
  variables = jax.tree.map(jnp.zeros_like, layer.init(jax.random.key(0)))
  y, _ = layer.apply(variables, jnp.zeros((500, D)), key=jax.random.key(1))
  np.testing.assert_allclose(np.var(y), LAYERS, rtol=0.15)  # equal draws would give the square of it
  with pytest.raises(ConfigError, match='draws random numbers'):
    layer.apply(variables, x_BD())


@pytest.mark.parametrize('unroll', [LAYERS, LAYERS - 1, 1])
def test_caches_extend_one_by_one_or_stacked(unroll):
  layer = repeat(unroll=unroll).instantiate()
  variables = drawn_variables(layer.abstract_init())
  _, side = layer.apply(variables, 2, method='init_decode_state')
  shapes = jax.tree.map(jnp.shape, side.decode_state['layers'], is_leaf=lambda x: hasattr(x, 'shape'))
  by_number = {str(i): {'sum': (2, D)} for i in range(LAYERS)}
  assert shapes == (by_number if unroll == LAYERS else {'sum': (LAYERS, 2, D)})
  caches, steps = [np.zeros((2, D))] * LAYERS, np.random.default_rng(9).standard_normal((3, 2, D)).astype(np.float32)
  for x in steps:
    y, side = layer.apply(variables, x, decode_state=side.decode_state, method='extend_step')
    expected = np.asarray(x)
    for i, w in enumerate(np.asarray(variables['layers']['w'])):
      caches[i] = caches[i] + expected
      expected = expected + np.tanh(caches[i] @ w)
    np.testing.assert_allclose(y, expected, rtol=1e-5)


@pytest.mark.parametrize(
  'num_layers, dims, is_loop',
  [(4, D, False), (5, D, True), (16, 1448, True), (16, 1449, False), (17, 1449, True)],  # 4 * 1449**2 bytes are 8 MB.
)
def test_decoding_is_a_loop_if_layers_are_many_or_small(num_layers, dims, is_loop):
  layer = repeat({'dims': dims}, num_layers=num_layers).instantiate()
  _, side = jax.eval_shape(lambda: layer.apply({'layers': {}}, 2, method='init_decode_state'))
  assert side.decode_state['layers'].keys() == ({'sum'} if is_loop else set(map(str, range(num_layers))))


@pytest.mark.parametrize(
  'chip, num_layers, is_loop',
  [
    ('NVIDIA H100 80GB HBM3', 17, False),
    ('NVIDIA H100 80GB HBM3', 49, True),
    ('NVIDIA GeForce RTX 4090', 17, True),  # A quarter of its memory is 5.9 GiB; these layers have 6.4 GiB.
    ('NVIDIA of tomorrow', 17, True),
  ],
)
def test_a_single_gpu_decodes_more_large_layers_without_a_loop_if_they_fit_twice(chip, num_layers, is_loop):
  layer = repeat({'dims': 10_000}, num_layers=num_layers).instantiate()
  for mesh in ({'data': 1}, {'data': 2}):
    with jax.sharding.use_abstract_mesh(abstract_mesh(mesh, 'gpu', chip)):
      _, side = jax.eval_shape(lambda: layer.apply({'layers': {}}, 2, method='init_decode_state'))
    assert (side.decode_state['layers'].keys() == {'sum'}) == (is_loop or mesh['data'] > 1)


def _loss_and_grads(layer, variables):
  def loss(v):
    y, side = layer.apply(v, x_BD(), key=jax.random.key(2))
    return jnp.sum(y**2) + sum(value * weight for value, weight in side.aux_losses.values())

  return jax.jit(jax.value_and_grad(loss))(variables)


# ---------------------------------------------------------------- patterns of different layers


class Shift(Residual):
  """A layer of another kind."""

  def setup(self) -> None:
    super().setup()
    self.create_variable('shift', WeightHParams((self.dims,)))

  def __call__(self, x, shift=0.0):
    return super().__call__(x + checkpoint_name(jnp.sin(self.theta.shift), 'shift'), shift)


def pattern(num_layers, sub=None, **fields):
  sub = {'dims': D, 'mesh_axis_names': ('data', 'stage'), **(sub or {})}
  return repeat(layers_tpl=(Config(Residual, **sub), Config(Shift, **sub)), num_layers=num_layers, **fields)


def in_turn(variables, num_layers, **sub):
  """Yields each layer of the pattern, with its variables, and whether it is the last of its kind to be stacked."""
  kinds = [Config(cls, dims=D, **sub).instantiate() for cls in (Residual, Shift)]
  for i in range(num_layers):
    of_round = i < num_layers // 2 * 2
    stacked = variables[f'layers_{i % 2}' if of_round else f'rest_{i % 2}']
    yield kinds[i % 2], jax.tree.map(lambda v, i=i: v[i // 2], stacked) if of_round else stacked


@pytest.mark.parametrize('num_layers', [1, 2, 5])
def test_a_pattern_is_a_loop_over_its_layers_and_what_is_left_over(num_layers):
  layer = pattern(num_layers, {'aux': True}).instantiate()
  variables = drawn_variables(layer.abstract_init())
  names = ['rest_0'] if num_layers == 1 else ['layers_0', 'layers_1'] + ['rest_0'] * (num_layers % 2)
  assert list(variables) == names
  y, side = layer.apply(variables, x_BD(), shift=0.5)
  expected, squares = x_BD(), 0.0
  for one, weights in in_turn(variables, num_layers, aux=True):
    expected, of_one = one.apply(weights, expected, shift=0.5)
    ((value, weight),) = of_one.aux_losses.values()
    squares += value * weight
  np.testing.assert_allclose(y, expected, rtol=1e-5)
  np.testing.assert_allclose(sum(v * w for v, w in side.aux_losses.values()), squares, rtol=1e-5)
  calls = {name: update['calls'] for name, update in side.updates.items()}
  assert {name: x.shape for name, x in calls.items()} == {n: (num_layers // 2,) if 'l' in n else () for n in names}
  assert all(np.all(x == 1) for x in calls.values())


def test_layers_of_a_pattern_draw_different_numbers_and_extend_their_own_caches():
  layer = pattern(5, {'noise': 1.0}).instantiate()
  variables = drawn_variables(layer.abstract_init())
  zeros = jax.tree.map(jnp.zeros_like, variables)
  y, _ = layer.apply(zeros, jnp.zeros((500, D)), key=jax.random.key(1))
  np.testing.assert_allclose(np.var(y), 5, rtol=0.15)  # equal draws would give up to the square of it
  _, side = layer.apply(variables, 2, method='init_decode_state')
  caches, steps = [np.zeros((2, D))] * 5, np.random.default_rng(9).standard_normal((3, 2, D)).astype(np.float32)
  for x in steps:
    y, side = layer.apply(variables, x, decode_state=side.decode_state, method='extend_step')
    expected = np.asarray(x)
    for i, (_, weights) in enumerate(in_turn(variables, 5)):
      caches[i] = caches[i] + expected
      expected = expected + np.tanh(caches[i] @ np.asarray(weights['w']))
    np.testing.assert_allclose(y, expected, rtol=1e-5)


@pytest.mark.slow
def test_first_layers_come_before_the_repeated_ones():
  """As others of the same kind in sequence: values, gradients, draws, side outputs and caches."""
  sub, other = Config(Residual, dims=D, aux=True, noise=0.1), Config(Shift, dims=D, aux=True, noise=0.1)
  layer = Config(Repeat, layers_tpl=sub, num_layers=4, first_tpl=(other, sub), remat='full').instantiate()
  variables = drawn_variables(layer.abstract_init())
  assert list(variables) == ['first_0', 'first_1', 'layers']
  assert [type(one) for one in layer.layers_by_turn()] == [Shift, Residual, Residual, Residual]
  # A pattern of as many layers that all are repeated once computes the same.
  whole = Config(Repeat, layers_tpl=(other, sub, sub, sub), num_layers=4).instantiate()

  def in_pattern(variables):
    firsts = [jax.tree.map(lambda v: v[None], variables[f'first_{i}']) for i in (0, 1)]
    rest = [jax.tree.map(lambda v, i=i: v[i : i + 1], variables['layers']) for i in (0, 1)]
    return {f'layers_{i}': v for i, v in enumerate([*firsts, *rest])}

  value, grads = _loss_and_grads(layer, variables)
  got = _loss_and_grads(whole, in_pattern(variables))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, (value, in_pattern(grads)))

  def extended(one, weights):
    state = one.apply(weights, 2, method='init_decode_state')[1].decode_state
    return one.apply(weights, x_BD(), decode_state=state, method='extend_step')[0]

  results = jax.jit(lambda: (extended(layer, variables), extended(whole, in_pattern(variables))))()
  np.testing.assert_allclose(*results, rtol=1e-5)
  with pytest.raises(ConfigError, match=r'num_layers: expected at least 3, since first_tpl has 2, got 2'):
    Config(Repeat, layers_tpl=sub, num_layers=2, first_tpl=(other, sub)).instantiate()


@pytest.mark.slow
def test_remat_of_each_layer_of_a_pattern_changes_neither_values_nor_gradients():
  sub = {'aux': True, 'noise': 0.1}
  fields = {
    'remat': ('save_names', 'dots_saveable'),
    'remat_save_names': ('shift',),
    'remat_offload_names': ('hidden',),
  }
  variables = drawn_variables(pattern(5, sub).instantiate().abstract_init())
  expected, got = (_loss_and_grads(pattern(5, sub, **f).instantiate(), variables) for f in ({}, fields))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


def test_what_is_offloaded_is_sent_to_the_memory_of_the_host_and_back():
  """One transfer in the body of each scan; only the first kind of layer offloads."""
  layer = pattern(4, remat=('save_names', 'none'), remat_offload_names=('hidden',)).instantiate()
  variables = drawn_variables(layer.abstract_init())
  program = str(jax.make_jaxpr(jax.grad(lambda v: jnp.sum(layer.apply(v, x_BD())[0])))(variables))
  assert 'f32<host>[2,2,3]' in program, 'two rounds of the first kind'
  assert len(re.findall(r':f32<host>\[2,3\] = device_put', program)) == 1
  assert len(re.findall(r':f32\[2,3\] = device_put', program)) == 1


@pytest.fixture(scope='module')
def without_remat():
  plain = repeat({'aux': True, 'noise': 0.1}).instantiate()
  variables = drawn_variables(plain.abstract_init())
  return variables, _loss_and_grads(plain, variables)


@pytest.mark.slow
@pytest.mark.parametrize('policy', REMAT_POLICIES)
def test_no_remat_policy_changes_values_or_gradients(policy, without_remat):
  sub = {'aux': True, 'noise': 0.1}
  variables, expected = without_remat
  names = ('hidden',) if policy == 'save_names' else ()
  layer = repeat(sub, remat=policy, remat_save_names=names).instantiate()
  got = _loss_and_grads(layer, variables)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected)


def _saved_stacks(**fields):
  """Shapes of what the forward scan keeps for the backward one, weights and inputs of the scan aside."""
  layer = repeat(**fields).instantiate()
  variables = drawn_variables(layer.abstract_init())
  vjp = jax.eval_shape(lambda v: jax.vjp(lambda v: jnp.sum(layer.apply(v, x_BD())[0]), v)[1], variables)
  return sorted(x.shape for x in jax.tree.leaves(vjp) if x.shape == (LAYERS, 2, D))


def test_remat_policies_keep_what_they_say():
  inputs_only = len(_saved_stacks(remat='full'))
  assert len(_saved_stacks(remat='save_names', remat_save_names=('hidden',))) == inputs_only + 1
  assert len(_saved_stacks(remat='dots_saveable')) == inputs_only + 1


@pytest.mark.parametrize(
  'fields, error, message',
  [
    ({'num_layers': 0}, ConfigError, 'num_layers: expected at least 1'),
    ({'remat': 'dots_savable'}, ConfigError, "Did you mean 'dots_saveable'"),
    ({'remat': 'save_names'}, ConfigError, 'needs the names'),
    ({'remat_save_names': ('hidden',)}, ConfigError, "policy 'auto' does not take names"),
    ({'remat': 'none', 'remat_offload_names': ('hidden',)}, ConfigError, "offload_names is set, but policy 'none'"),
    ({'remat': ('full', 'none')}, ConfigError, r'remat: 2 policies for a pattern of 1 layer\(s\); give one, or'),
    (
      {'remat': 'full', 'remat_save_names': ('hidden',), 'remat_offload_names': ('hidden',)},
      ConfigError,
      "remat_offload_names: 'hidden' is in remat_save_names too",
    ),
    ({'unroll': 0}, ConfigError, "unroll: expected a number of repetitions, or 'auto', got 0"),
    ({'layers_tpl': ()}, ConfigError, 'layers_tpl: an empty pattern'),
  ],
)
def test_bad_hyperparameters_are_named(fields, error, message):
  with pytest.raises(error, match=message):
    repeat().set(**fields).instantiate()


def test_stack_axis_must_be_a_mesh_axis():
  config = repeat(mesh_axis_names=('data', 'stage'))
  config.weight_split_dims_mapping.stack = ('stages',)
  with pytest.raises(ShardingError, match=r"stack.*Did you mean 'stage'"):
    config.instantiate()
