"""Mamba-2 against its formula in NumPy, one token after another; in packed rows, in decoding, in stacks, on meshes."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cached_decoding import decoded, expected, inputs
from drawn_state import drawn_variables
from mixer_meshes import on_mesh_and_alone

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import CausalConv, Mamba2, MixerBlock, RepeatedTransformer, StackedTransformer, TransformerBlock

D, N, H, G, S, W = 12, 4, 3, 2, 5, 3


def mamba(**fields):
  sizes = {'input_dims': D, 'num_heads': N, 'dims_per_head': H, 'num_groups': G, 'state_dims': S, 'kernel_size': W}
  return Config(Mamba2, **{**sizes, 'chunk_size': 4, 'use_bias': True, **fields})


def built(config, seed=0, scale=4):
  layer = config.instantiate()
  variables = drawn_variables(layer.abstract_init(), seed)
  return layer, jax.tree.map(lambda x: scale * x if x.ndim > 1 else x, variables)


def by_hand(variables, x, epsilon=1e-5, limits=(0.0, math.inf)):
  """The layer for one row [T, D], in float64, one token after another."""
  v = jax.tree.map(lambda x: np.asarray(x, np.float64), variables)
  x = np.asarray(x, np.float64)

  def project(name):
    return np.tensordot(x, v[name]['w'], 1) + v[name]['b']

  def silu(y):
    return y / (1 + np.exp(-y))

  def convolve(name):
    seen, filters = project(name), v[f'{name}_conv']
    y = np.zeros_like(seen)
    for t in range(len(x)):
      for w in range(W):
        if t - w >= 0:
          y[t] += filters['w'][W - 1 - w] * seen[t - w]
    return silu(y + filters['b'])

  gate, value, key, query = project('gate'), convolve('value'), convolve('key'), convolve('query')
  steps = np.clip(np.log1p(np.exp(project('step') + v['step_bias'])), *limits)
  out, state = np.zeros_like(value), np.zeros((N, H, S))
  for t in range(len(x)):
    for n in range(N):
      group = n // (N // G)
      state[n] *= np.exp(-steps[t, n] * np.exp(v['log_decay'][n]))
      state[n] += steps[t, n] * np.outer(value[t, n], key[t, group])
      out[t, n] = state[n] @ query[t, group] + v['skip'][n] * value[t, n]
  out *= silu(gate)
  grouped = out.reshape(len(x), G, -1)
  grouped /= np.sqrt((grouped**2).mean(-1, keepdims=True) + epsilon)
  out = grouped.reshape(out.shape) * v['norm']['scale']
  return np.tensordot(out, v['out']['w'], 2) + v['out']['b']


@pytest.mark.parametrize('limits', [(0.0, math.inf), (0.4, 0.6)])
def test_layer_is_its_formula(limits):
  layer, variables = built(mamba(step_limits=limits))
  x = inputs()[:, :9]
  y, _ = jax.jit(layer.apply)(variables, x)
  for row, out in zip(x, y):
    np.testing.assert_allclose(out, by_hand(variables, row, limits=limits), rtol=1e-4, atol=1e-5)


def test_a_segment_is_a_row_of_its_own():
  layer, variables = built(mamba())
  x, ids = inputs()[:, :10], np.array([[1, 1, 1, 2, 2, 2, 2, 2, 0, 0], [1, 2, 2, 3, 3, 3, 3, 3, 3, 3]])
  y, _ = jax.jit(layer.apply)(variables, x, segment_ids=ids)
  for row in range(2):
    for segment in range(1, 4):
      at = np.flatnonzero(ids[row] == segment)
      if at.size:
        np.testing.assert_allclose(y[row, at], by_hand(variables, x[row, at]), rtol=1e-4, atol=1e-5)


def test_first_values_are_in_their_ranges():
  variables = mamba(num_heads=64).instantiate().init(jax.random.key(0))
  decay, step = np.exp(variables['log_decay']), np.log1p(np.exp(variables['step_bias']))
  assert decay.min() >= 1 and decay.max() <= 16 and decay.std() > 1
  assert step.min() >= 0.0009 and step.max() <= 0.11 and np.log(step).std() > 0.5


def block(**fields):
  return Config(MixerBlock, input_dims=D, hidden_dims=16, mixer_tpl=mamba(), **fields)


def attention_block():
  config = Config(TransformerBlock, input_dims=D, hidden_dims=16, num_heads=2)
  config.attention_tpl.causal = True
  return config


STACKS = {
  'layer': mamba,
  'block without feed-forward': lambda: block(ff_tpl=None),
  'every other attends': lambda: Config(
    RepeatedTransformer, layers_tpl=(block(norm_policy='primer_hybrid'), attention_block()), num_layers=5
  ),
  'scan in decoding': lambda: Config(RepeatedTransformer, layers_tpl=block(ff_tpl=None), num_layers=5),
}


@pytest.mark.parametrize('name', STACKS)
def test_decoding_equals_one_pass(name):
  """Prompts of two lengths, padded with large numbers, and then tokens one by one."""
  layer, variables = built(STACKS[name]().set(name='stack'), scale=2)
  x = inputs()
  out, _ = decoded(layer, variables, x)
  np.testing.assert_allclose(out, expected(layer, variables, x), rtol=1e-4, atol=1e-4)


def test_a_prompt_may_be_read_in_parts():
  layer, variables = built(mamba())
  x, pos = inputs()[:, :11], np.array([np.arange(11), [*range(8), -1, -1, -1]])
  _, side = layer.apply(variables, 2, 11, method='init_decode_state')
  state, parts = side.decode_state, []
  extend = jax.jit(functools.partial(layer.apply, method='extend_step'))
  for low, high in ((0, 5), (5, 6), (6, 11)):
    y, side = extend(variables, x[:, low:high], pos[:, low:high], decode_state=state)
    state, parts = side.decode_state, [*parts, y]
  once, _ = jax.jit(layer.apply)(variables, x)
  together = np.concatenate(parts, axis=1)
  np.testing.assert_allclose(np.where(pos[..., None] < 0, once, together), once, rtol=1e-4, atol=1e-5)
  _, side = jax.eval_shape(extend, variables, x[:, :6], pos[:, :6], decode_state=side.decode_state)
  assert jax.tree.map(jnp.shape, side.decode_state) == jax.tree.map(jnp.shape, state)


@pytest.mark.slow
def test_a_pattern_in_a_scan_is_the_layers_one_by_one():
  pattern, segment_ids = (block(ff_tpl=None), attention_block()), np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
  stacked = Config(StackedTransformer, layers_tpl=pattern, num_layers=5).instantiate()
  repeated = Config(RepeatedTransformer, layers_tpl=pattern, num_layers=5, remat='full').instantiate()
  variables = drawn_variables(stacked.abstract_init())

  def as_repeated(v):
    of_kind = [[v[f'layers_{i}'] for i in range(kind, 4, 2)] for kind in (0, 1)]
    return {f'layers_{k}': jax.tree.map(lambda *x: jnp.stack(x), *of_kind[k]) for k in (0, 1)} | {
      'rest_0': v['layers_4']
    }

  def run(layer, variables):
    def loss(v):
      return jnp.sum(layer.apply(v, inputs()[:, :6], segment_ids=segment_ids)[0] ** 2)

    return jax.jit(jax.value_and_grad(loss))(variables)

  value, grads = run(stacked, variables)
  actual = run(repeated, as_repeated(variables))
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4), actual, (value, as_repeated(grads)))


def objective(y):
  return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape))


@pytest.mark.slow_cases
@pytest.mark.parametrize('shape, groups', [((1, 3, 1), 1), ((2, 1, 3), 2)])
def test_heads_over_an_axis_equal_one_device(shape, groups):
  """Axes of 3 and unused ones, two rows, 4 heads over 3 devices."""
  mesh, ids = dict(zip(('replica', 'data', 'mdl'), shape)), np.array([[1] * 5 + [2] * 4, [1] * 8 + [0]])
  split = {'batch': ('replica', 'data'), 'data': 'data', 'mdl': 'mdl'}
  actual, expected = on_mesh_and_alone(built, mamba(num_groups=groups), mesh, inputs()[:, :9], ids, objective, **split)
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4), actual, expected)


@pytest.mark.slow_cases
@pytest.mark.parametrize('length, packed', [(9, True), (10, False)])
def test_a_length_over_an_axis_of_three_equals_one_device(length, packed):
  """States pass between three devices, whose parts of 10 tokens are not even, beside two for heads."""
  mesh, config = {'data': 1, 'context': 3, 'mdl': 2}, mamba(num_groups=1, chunk_size=2)
  ids = np.array([[1] * 5 + [2] * (length - 5), [1] * (length - 1) + [0]]) if packed else None
  split = {'batch': 'data', 'length': 'context', 'data': 'data', 'mdl': 'mdl'}
  actual, expected = on_mesh_and_alone(built, config, mesh, inputs()[:, :length], ids, objective, **split)
  assert [e.axes for e in config.instantiate().exchanges()] == [('context',)]
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=1e-4 * (1e-3 + np.abs(e).max())), actual, expected)


def test_mistakes_are_named():
  with pytest.raises(ConfigError, match=r'mixer.num_groups: 3 does not divide num_heads, 4'):
    mamba(num_groups=3).set(name='mixer').instantiate()
  with pytest.raises(ConfigError, match=r'mixer.step_range: expected two numbers, the least and the largest step'):
    mamba(step_range=(0.0, 1.0)).set(name='mixer').instantiate()
  with pytest.raises(ConfigError, match=r'conv.kernel_size: expected at least 2, got 1'):
    Config(CausalConv, shape=(3,), kernel_size=1, name='conv').instantiate()
  layer, variables = built(mamba().set(name='mixer'))
  with pytest.raises(ConfigError, match=r"mixer: a recurrence sees no later token.*set it to 'causal'"):
    layer.apply(variables, inputs(), prefix_lengths=np.ones(2, np.int32))
  with pytest.raises(ConfigError, match=r'mixer: extend_step needs the decode state that init_decode_state allocates'):
    layer.apply(variables, inputs()[:, :1], np.zeros((2, 1), np.int32), method='extend_step')
