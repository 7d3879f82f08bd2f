"""Griffin's recurrent block against its formula in NumPy; scans of linear recurrences against a loop; decoding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cached_decoding import decoded, expected, inputs
from drawn_state import drawn_variables
from mixer_meshes import on_mesh_and_alone

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import MixerBlock, PartialRotaryPositions, RepeatedTransformer, RgLru, TransformerBlock
from praxis_lite.layers.state_space import scan_states

D, N, H, W = 12, 4, 3, 3


def rg_lru(**fields):
  return Config(RgLru, **{'input_dims': D, 'num_heads': N, 'width': N * H, 'kernel_size': W, **fields})


def built(config):
  layer = config.instantiate()
  return layer, jax.tree.map(lambda x: 4 * x if x.ndim > 2 else x, drawn_variables(layer.abstract_init()))


def by_hand(variables, x):
  """The layer for one row [T, D], in float64."""
  v = jax.tree.map(lambda x: np.asarray(x, np.float64), variables)
  x = np.asarray(x, np.float64)

  def sigmoid(y):
    return 1 / (1 + np.exp(-y))

  gate = np.tensordot(x, v['gate']['w'], 1) + v['gate']['b']
  gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
  seen = np.pad(np.tensordot(x, v['value']['w'], 1) + v['value']['b'], ((W - 1, 0), (0, 0), (0, 0)))
  out, state = [], np.zeros((N, H))
  for t in range(len(x)):
    u = sum(v['conv']['w'][w] * seen[t + w] for w in range(W)) + v['conv']['b']
    admit, forget = (
      sigmoid(np.einsum('nh,nhk->nk', u, v[f'{name}_w']) + v[f'{name}_b']) for name in ('admit', 'forget')
    )
    a = np.exp(-8 * np.log1p(np.exp(v['decay'])) * forget) if t else 0
    state = a * state + np.sqrt(1 - a**2) * admit * u
    out.append(np.einsum('nh,nhd->d', state * gate[t], v['out']['w']) + v['out']['b'])
  return np.array(out)


def test_layer_is_its_formula_in_each_segment():
  layer, variables = built(rg_lru())
  x, ids = inputs()[:, :9], np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1, 1, 0]])
  y, _ = jax.jit(layer.apply)(variables, x, segment_ids=ids)
  np.testing.assert_allclose(y[0, :4], by_hand(variables, x[0, :4]), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(y[0, 4:], by_hand(variables, x[0, 4:]), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(y[1, :8], by_hand(variables, x[1, :8]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('T', [1, 2, 7])
def test_scan_is_the_loop_with_all_gradients(T):
  rng = np.random.default_rng(0)
  decay, x, state = (rng.uniform(0, 1, (2, T, 3)), rng.standard_normal((2, T, 3)), rng.standard_normal((2, 3)))
  decay[:, T // 2] = 0

  def loop(decay, x, state):
    states = []
    for t in range(T):
      state = decay[:, t] * state + x[:, t]
      states.append(state)
    return jnp.stack(states, axis=1)

  def results(compute):
    def loss(*args):
      y = compute(*args)
      return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

    return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*map(jnp.asarray, (decay, x, state)))

  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=1e-5), results(scan_states), results(loop))
  np.testing.assert_allclose(scan_states(decay, x), loop(decay, x, 0 * state), atol=1e-6)


def griffin_stack():
  block = Config(MixerBlock, input_dims=D, hidden_dims=16, mixer_tpl=rg_lru())
  attention = Config(TransformerBlock, input_dims=D, hidden_dims=16, num_heads=2)
  attention.attention_tpl.set(causal=True, sliding_window=3, rotary_tpl=Config(PartialRotaryPositions, share=0.4))
  return Config(RepeatedTransformer, layers_tpl=(block, block.clone(), attention), num_layers=4)


@pytest.mark.slow_cases
@pytest.mark.parametrize('config', [rg_lru, griffin_stack])
def test_decoding_equals_one_pass(config):
  layer = config().set(name='stack').instantiate()
  variables = drawn_variables(layer.abstract_init())
  out, _ = decoded(layer, variables, inputs())
  np.testing.assert_allclose(out, expected(layer, variables, inputs()), rtol=1e-4, atol=1e-4)


def test_heads_over_an_axis_of_three_equal_one_device():
  ids = np.array([[1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0]])
  mesh = {'replica': 2, 'data': 1, 'mdl': 3}
  actual, expected = on_mesh_and_alone(
    built, rg_lru(), mesh, inputs()[:, :7], ids, batch=('replica', 'data'), data='data', mdl='mdl'
  )
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4), actual, expected)


def test_a_length_over_an_axis_of_three_equals_one_device():
  ids = np.array([[1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0]])
  mesh = {'spare': 2, 'context': 3}
  actual, expected = on_mesh_and_alone(built, rg_lru(), mesh, inputs()[:, :7], ids, length='context')
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=1e-4 * (1e-3 + np.abs(e).max())), actual, expected)


def test_a_closed_gate_has_finite_gradients():
  """At a = 1, the slope of sqrt(1 - a^2) is bounded."""
  layer, variables = built(rg_lru())
  variables['decay'] = np.full((N, H), -200, np.float32)
  grads = jax.grad(lambda v: jnp.sum(layer.apply(v, inputs())[0] ** 2))(variables)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


def test_first_decays_are_in_their_range():
  decay = rg_lru(width=400).instantiate().init(jax.random.key(0))['decay']
  a = np.exp(-np.log1p(np.exp(decay)))
  assert a.min() >= 0.899 and a.max() <= 0.9995 and a.std() > 0.01


def test_mistakes_are_named():
  with pytest.raises(ConfigError, match=r'mixer.num_heads: 5 does not divide the width, 12'):
    rg_lru(num_heads=5).set(name='mixer').instantiate()
  with pytest.raises(ConfigError, match=r'rotary.share: 0.5 of 6 dims is 3; expected an even number from 2 to 6'):
    Config(PartialRotaryPositions, dims=6, name='rotary').instantiate()
