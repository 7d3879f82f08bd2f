"""Recurrences in chunks against the recurrence one token after another: values, states and all gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.layers.state_parts import scan_in_parts
from praxis_lite.layers.state_space import StateTokens, scan_in_chunks, segment_starts

N, G, H, S = 4, 2, 3, 5


def drawn(B, T, dtype=np.float32, groups=G, starts=None):
  rng = np.random.default_rng(0)
  value, key, query = (rng.standard_normal(shape) for shape in ((B, T, N, H), (B, T, groups, S), (B, T, groups, S)))
  decay = -rng.uniform(0, 2, (B, T, N)).astype(np.float32)
  return StateTokens(
    *(jnp.asarray(x, dtype) for x in (value,)), decay, *(jnp.asarray(x, dtype) for x in (key, query)), starts
  )


def one_by_one(tokens, state):
  """The recurrence, as its formula says."""

  def step(state, token):
    value, decay, key, query, starts = token
    key, query = (jnp.repeat(x, N // x.shape[1], axis=1) for x in (key, query))
    state = jnp.where(starts[:, None, None, None], 0, state)
    state = jnp.exp(decay)[..., None, None] * state + value[..., :, None] * key[..., None, :]
    return state, jnp.einsum('bnhs,bns->bnh', state, query)

  starts = tokens.starts
  if starts is None:
    starts = jnp.zeros(tokens.decay.shape[:2], bool)
  tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens._replace(starts=starts))
  state, out = jax.lax.scan(step, state, tokens)
  return jnp.moveaxis(out, 0, 1), state


def results(compute, tokens, state):
  """Outputs, the last state, and the gradients of all arrays of a number that depends on both."""

  def loss(arrays, state):
    out, last = compute(tokens._replace(**arrays), state)
    weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
    return jnp.sum(out * weights) + jnp.sum(last * jnp.sin(jnp.arange(last.size)).reshape(last.shape)), (out, last)

  arrays = {name: x for name, x in tokens._asdict().items() if name != 'starts'}
  return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(arrays, state)


SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 3, 3, 0, 0], [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]])


@pytest.mark.parametrize(
  'B, T, chunk, groups, packed',
  [(2, 11, 4, 2, True), (2, 11, 3, 1, False), (1, 1, 4, 2, False), (3, 8, 4, 4, False), (2, 11, 64, 1, True)],
)
def test_chunks_equal_the_recurrence(B, T, chunk, groups, packed):
  """Lengths that chunks divide and do not, one row of one token, a chunk longer than the row."""
  tokens = drawn(B, T, groups=groups, starts=segment_starts(jnp.asarray(SEGMENTS)) if packed else None)
  state = jnp.asarray(np.random.default_rng(1).standard_normal((B, N, H, S)), jnp.float32)
  actual = results(lambda t, s: scan_in_chunks(t, s, chunk), tokens, state)
  expected = results(one_by_one, tokens, state)
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5), actual, expected)


def test_strong_decays_have_finite_gradients_and_zero_is_the_first_state():
  tokens = drawn(2, 9)
  tokens = tokens._replace(decay=tokens.decay * 1e4)
  zeros = jnp.zeros((2, N, H, S))
  actual = results(lambda t, s: scan_in_chunks(t, s, 4), tokens, zeros)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(actual))
  jax.tree.map(np.testing.assert_array_equal, scan_in_chunks(tokens, None, 4), scan_in_chunks(tokens, zeros, 4))


def test_bfloat16_is_close_and_keeps_its_state_in_float32():
  tokens = drawn(2, 11, jnp.bfloat16)
  out, state = scan_in_chunks(tokens, None, 4)
  assert (out.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
  exact, last = one_by_one(jax.tree.map(lambda x: x.astype(jnp.float32), tokens), jnp.zeros((2, N, H, S)))
  np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=0.02 * np.abs(exact).max())
  np.testing.assert_allclose(state, last, atol=0.02 * np.abs(last).max())


def test_segments_start_where_ids_change():
  assert segment_starts(None) is None
  np.testing.assert_array_equal(
    segment_starts(jnp.asarray([[1, 1, 2, 0, 0], [3, 3, 3, 3, 3]])), [[0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]
  )


@pytest.mark.slow_cases
@pytest.mark.parametrize('parts, packed', [(3, True), (4, False), (16, True)])
def test_parts_that_pass_states_on_equal_the_recurrence(parts, packed):
  """Also more parts than tokens."""
  tokens = drawn(2, 11, starts=segment_starts(jnp.asarray(SEGMENTS)) if packed else None)

  def in_parts(tokens, _):
    return scan_in_parts(tokens, 2, parts, lambda x, _: x), jnp.zeros(1)

  def whole(tokens, _):
    return one_by_one(tokens, jnp.zeros((2, N, H, S)))[0], jnp.zeros(1)

  actual, expected = (results(compute, tokens, jnp.zeros(1)) for compute in (in_parts, whole))
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5), actual, expected)
