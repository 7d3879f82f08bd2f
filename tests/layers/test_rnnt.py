"""The loss of transducers against the sum over all paths, with its gradients; chunks of the joint; far-off values."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import TransducerJoint, rnnt_loss

# All lengths of rows: full, fewer frames, fewer labels, no labels, one frame, and both.
FRAMES = np.array([4, 2, 4, 3, 1, 1], np.int32)
LABELS = np.array([3, 3, 1, 0, 3, 0], np.int32)
B, T, U = 6, 4, 4


def logs(seed):
  return -np.abs(np.random.default_rng(seed).standard_normal((B, T, U))).astype(np.float32)


def by_paths(blank, label, frames, labels):
  """The negative logarithm of the sum over all orders of blanks and labels whose last one is a blank."""
  total = -jnp.inf
  for places in itertools.combinations(range(frames - 1 + labels), labels):
    t = u = 0
    log_prob = 0.0
    for i in range(frames - 1 + labels):
      if i in places:
        log_prob, u = log_prob + label[t, u], u + 1
      else:
        log_prob, t = log_prob + blank[t, u], t + 1
    total = jnp.logaddexp(total, log_prob + blank[t, u])
  return -total


def test_loss_and_gradients_are_those_of_all_paths():
  args = logs(0), logs(1)
  factors = jnp.arange(1.0, B + 1)

  def expected(blank, label):
    return jnp.stack([by_paths(blank[i], label[i], FRAMES[i], LABELS[i]) for i in range(B)])

  np.testing.assert_allclose(jax.jit(rnnt_loss)(*args, FRAMES, LABELS), expected(*args), rtol=1e-5)
  found = jax.jit(jax.grad(lambda *a: (factors * rnnt_loss(*a, FRAMES, LABELS)).sum(), argnums=(0, 1)))(*args)
  known = jax.grad(lambda *a: (factors * expected(*a)).sum(), argnums=(0, 1))(*args)
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found, known)


def test_places_outside_of_a_row_change_nothing_and_rows_without_frames_are_impossible():
  blank, label = logs(0), logs(1)
  outside = (np.arange(T)[:, None] >= FRAMES[:, None, None]) | (np.arange(U) > LABELS[:, None, None])
  other = rnnt_loss(np.where(outside, 50, blank), np.where(outside, 50, label), FRAMES, LABELS)
  np.testing.assert_allclose(other, rnnt_loss(blank, label, FRAMES, LABELS), rtol=1e-6)
  value, gradients = jax.value_and_grad(lambda x: rnnt_loss(x, label, 0 * FRAMES, LABELS).sum())(blank)
  assert value > 1e29 and not np.asarray(gradients).any()


def test_a_long_row_of_improbable_labels_has_a_finite_loss_and_gradients():
  blank, label = np.full((1, 300, 40), -100.0, np.float32), np.full((1, 300, 40), -1e-3, np.float32)
  value, gradients = jax.value_and_grad(lambda x: rnnt_loss(x, label, jnp.array([300]), jnp.array([39]))[0])(blank)
  assert 2e4 < value < 4e4 and np.isfinite(gradients).all()
  np.testing.assert_allclose(-np.asarray(gradients).sum(), 300, rtol=5e-3)  # A path has a blank for each frame.


@pytest.mark.parametrize('chunk_size', [1, 3, 8])
def test_chunks_of_frames_change_nothing(chunk_size):
  sizes = {'encoder_dims': 5, 'label_dims': 4, 'joint_dims': 6, 'num_classes': 7}
  whole = Config(TransducerJoint, chunk_size=None, **sizes).instantiate()
  chunked = Config(TransducerJoint, chunk_size=chunk_size, **sizes).instantiate()
  variables = drawn_variables(whole.abstract_init())
  rng = np.random.default_rng(0)
  x, g = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 7, 5), (2, 3, 4)))
  labels = rng.integers(0, 6, (2, 2))

  def run(layer):
    def loss(variables, x, g):
      found, _ = layer.apply(variables, x, g, labels, 6)
      return jnp.sum(found.blank * jnp.cos(jnp.arange(42.0).reshape(2, 7, 3)) + 2 * found.label), found

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(variables, x, g)

  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), run(chunked), run(whole))
  hidden = np.tanh(
    (x @ variables['encoder_proj']['w'] + variables['encoder_proj']['b'])[:, :, None]
    + (g @ variables['label_proj']['w'])[:, None]
  )
  logits = hidden @ variables['w'] + variables['b']
  expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  found = run(whole)[0][1]
  np.testing.assert_allclose(found.blank, expected[..., 6], atol=1e-5)
  for i in range(2):
    for u in range(2):
      np.testing.assert_allclose(found.label[i, :, u], expected[i, :, u, labels[i, u]], atol=1e-5)


def test_mistakes_are_named():
  sizes = {'encoder_dims': 5, 'label_dims': 4, 'joint_dims': 6, 'num_classes': 7}
  with pytest.raises(ConfigError, match='chunk_size: expected at least 1'):
    Config(TransducerJoint, chunk_size=0, **sizes).instantiate()
  with pytest.raises(ConfigError, match='activation: unknown activation'):
    Config(TransducerJoint, activation='tan', **sizes).instantiate()
