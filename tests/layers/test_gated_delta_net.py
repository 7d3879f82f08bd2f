"""The gated delta rule in chunks against the rule one token after another; its layer against NumPy, and in decoding."""

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
from praxis_lite.layers import GatedDeltaNet
from praxis_lite.layers.delta_rule import DeltaTokens, scan_delta_rule
from praxis_lite.layers.state_parts import scan_delta_rule_in_parts
from praxis_lite.layers.state_space import segment_starts

D, N, H, G, S, W = 12, 4, 3, 2, 5, 3
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 3, 3, 0, 0], [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]])


def drawn(B, T, groups=G, starts=None, dtype=np.float32):
  rng = np.random.default_rng(0)
  value, key, query = (rng.standard_normal(shape) for shape in ((B, T, N, H), (B, T, groups, S), (B, T, groups, S)))
  key /= np.linalg.norm(key, axis=-1, keepdims=True)
  decay, rate = -rng.uniform(0, 2, (B, T, N)).astype(np.float32), rng.uniform(0, 1, (B, T, N)).astype(np.float32)
  return DeltaTokens(jnp.asarray(value, dtype), decay, rate, *(jnp.asarray(x, dtype) for x in (key, query)), starts)


def one_by_one(tokens, state):
  def step(state, token):
    value, decay, rate, key, query, starts = token
    key, query = (jnp.repeat(x, N // x.shape[1], axis=1) for x in (key, query))
    state = jnp.where(starts[:, None, None, None], 0, state) * jnp.exp(decay)[..., None, None]
    new = rate[..., None] * (value - jnp.einsum('bnsh,bns->bnh', state, key))
    state = state + key[..., :, None] * new[..., None, :]
    return state, jnp.einsum('bnsh,bns->bnh', state, query)

  starts = jnp.zeros(tokens.decay.shape[:2], bool) if tokens.starts is None else tokens.starts
  state, out = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens._replace(starts=starts)))
  return jnp.moveaxis(out, 0, 1), state


def results(compute, tokens, state):
  def loss(arrays, state):
    out, last = compute(tokens._replace(**arrays), state)
    weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
    return jnp.sum(out * weights) + jnp.sum(last * jnp.sin(jnp.arange(last.size)).reshape(last.shape)), (out, last)

  arrays = {name: x for name, x in tokens._asdict().items() if name != 'starts'}
  return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(arrays, state)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'B, T, chunk, at_once, groups, packed',
  [
    (2, 11, 4, 16, 2, True),
    (2, 11, 3, 1, 1, False),
    (1, 1, 4, 16, 2, False),
    (2, 11, 64, 16, 4, True),
    (2, 11, 2, 2, 2, True),
  ],
)
def test_chunks_equal_the_rule(B, T, chunk, at_once, groups, packed):
  """Lengths that chunks divide and do not, one row of one token, a chunk longer than the row, chunks in groups."""
  tokens = drawn(B, T, groups, segment_starts(jnp.asarray(SEGMENTS)) if packed else None)
  state = jnp.asarray(np.random.default_rng(1).standard_normal((B, N, S, H)), jnp.float32)
  actual = results(lambda t, s: scan_delta_rule(t, s, chunk, at_once), tokens, state)
  expected = results(one_by_one, tokens, state)
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=5e-5, atol=5e-5), actual, expected)


@pytest.mark.parametrize('parts, packed', [(3, True), (16, False)])
def test_parts_that_pass_states_on_equal_the_rule(parts, packed):
  """Also more parts than tokens."""
  tokens = drawn(2, 11, starts=segment_starts(jnp.asarray(SEGMENTS)) if packed else None)

  def in_parts(tokens, _):
    return scan_delta_rule_in_parts(tokens, 2, parts, lambda x, _: x), jnp.zeros(1)

  def whole(tokens, _):
    return one_by_one(tokens, jnp.zeros((2, N, S, H)))[0], jnp.zeros(1)

  actual, expected = (results(compute, tokens, jnp.zeros(1)) for compute in (in_parts, whole))
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=5e-5, atol=5e-5), actual, expected)


def test_equal_keys_replace_what_is_there():
  """With the same key, a rate of 1 and no decay, an output is the last value: the hardest system to solve."""
  tokens = drawn(1, 64)
  key = jnp.broadcast_to(tokens.key[:, :1], tokens.key.shape)
  tokens = tokens._replace(decay=0 * tokens.decay, rate=0 * tokens.rate + 1, key=key, query=key)
  out, _ = scan_delta_rule(tokens, None, 64)
  np.testing.assert_allclose(out, tokens.value, atol=1e-4)


def test_bfloat16_is_close_and_keeps_its_state_in_float32():
  tokens = drawn(2, 11, dtype=jnp.bfloat16)
  out, state = scan_delta_rule(tokens, None, 4)
  assert (out.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
  exact, _ = one_by_one(jax.tree.map(lambda x: x.astype(jnp.float32), tokens), jnp.zeros((2, N, S, H)))
  np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=0.03 * np.abs(exact).max())


def delta_net(**fields):
  sizes = {'input_dims': D, 'num_heads': N, 'dims_per_head': H, 'num_groups': G, 'key_dims': S, 'kernel_size': W}
  return Config(GatedDeltaNet, **{**sizes, 'chunk_size': 4, **fields})


def built(config):
  layer = config.instantiate()
  return layer, jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, drawn_variables(layer.abstract_init()))


def by_hand(v, x):
  """The layer for one row [T, D], in float64."""
  v, x = jax.tree.map(lambda x: np.asarray(x, np.float64), v), np.asarray(x, np.float64)

  def silu(y):
    return y / (1 + np.exp(-y))

  def project(name):
    return np.tensordot(x, v[name]['w'], 1)

  def convolve(name):
    seen = np.pad(project(name), ((W - 1, 0), (0, 0), (0, 0)))
    return silu(sum(v[f'{name}_conv']['w'][w] * seen[w : w + len(x)] for w in range(W)))

  gate, value, key, query = project('gate'), convolve('value'), convolve('key'), convolve('query')
  key, query = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (key, query))
  decay = np.exp(-np.exp(v['log_decay']) * np.log1p(np.exp(project('step') + v['step_bias'])))
  rate = 1 / (1 + np.exp(-project('rate')))
  state, out = np.zeros((N, S, H)), np.zeros_like(value)
  for t in range(len(x)):
    for n in range(N):
      k, q = key[t, n // (N // G)], query[t, n // (N // G)] / np.sqrt(S)
      state[n] *= decay[t, n]
      state[n] += rate[t, n] * np.outer(k, value[t, n] - state[n].T @ k)
      out[t, n] = state[n].T @ q
  out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-6) * v['norm']['scale'] * silu(gate)
  return np.tensordot(out, v['out']['w'], 2)


def test_layer_is_its_formula_in_each_segment():
  layer, variables = built(delta_net())
  x, ids = inputs()[:, :9], np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1, 1, 0]])
  y, _ = jax.jit(layer.apply)(variables, x, segment_ids=ids)
  np.testing.assert_allclose(y[0, :4], by_hand(variables, x[0, :4]), rtol=2e-4, atol=2e-4)
  np.testing.assert_allclose(y[0, 4:], by_hand(variables, x[0, 4:]), rtol=2e-4, atol=2e-4)
  np.testing.assert_allclose(y[1, :8], by_hand(variables, x[1, :8]), rtol=2e-4, atol=2e-4)


def test_decoding_equals_one_pass():
  layer, variables = built(delta_net())
  out, _ = decoded(layer, variables, inputs())
  np.testing.assert_allclose(out, expected(layer, variables, inputs()), rtol=2e-4, atol=2e-4)


def test_heads_over_an_axis_of_three_equal_one_device():
  actual, expected = on_mesh_and_alone(
    built,
    delta_net(),
    {'replica': 2, 'data': 1, 'mdl': 3},
    inputs()[:, :7],
    batch=('replica', 'data'),
    data='data',
    mdl='mdl',
  )
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=2e-4 * (1e-3 + np.abs(e).max())), actual, expected)


@pytest.mark.parametrize('length, packed', [(9, True), pytest.param(10, False, marks=pytest.mark.slow)])
def test_a_length_over_an_axis_of_three_equals_one_device(length, packed):
  """States pass between three devices, whose parts of 10 tokens are not even, beside two for heads."""
  mesh, config = {'data': 1, 'context': 3, 'mdl': 2}, delta_net(chunk_size=2)
  ids = np.array([[1] * 5 + [2] * (length - 5), [1] * (length - 1) + [0]]) if packed else None
  split = {'batch': 'data', 'length': 'context', 'data': 'data', 'mdl': 'mdl'}
  actual, expected = on_mesh_and_alone(built, config, mesh, inputs()[:, :length], ids, **split)
  assert [e.axes for e in config.instantiate().exchanges()] == [('context',)]
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=2e-4 * (1e-3 + np.abs(e).max())), actual, expected)


def test_mistakes_are_named():
  with pytest.raises(ConfigError, match=r'mixer.num_groups: 3 does not divide num_heads, 4'):
    delta_net(num_groups=3).set(name='mixer').instantiate()
