"""Adafactor with Adam's decay, against its formulas in NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_trees import SKIP, weight

from praxis_lite.common.config import Config
from praxis_lite.training.learning import Learner, adafactor

RATE, DECAY, CLIP = 0.1, 0.9, 0.5


def expected(w: np.ndarray, gradients: list[np.ndarray], *, beta1: float, weight_decay: float) -> np.ndarray:
  """Second moments as exponential sums, which Adam's correction divides by the sum of their weights."""
  average = np.zeros_like(w)
  for t in range(1, len(gradients) + 1):
    weights = [DECAY ** (t - s) for s in range(1, t + 1)]
    squares = sum(c * g**2 for c, g in zip(weights, gradients)) / sum(weights)
    if min(w.shape) >= 4 and w.ndim > 1:
      squares = squares.mean(1, keepdims=True) * squares.mean(0, keepdims=True) / squares.mean()
    update = gradients[t - 1] / np.sqrt(squares)
    update = update / max(1.0, np.sqrt(np.mean(update**2)) / CLIP) * RATE * max(np.sqrt(np.mean(w**2)), 1e-3)
    average = beta1 * average + (1 - beta1) * update
    w = w - (average if beta1 else update) - RATE * weight_decay * w
  return w


@pytest.mark.parametrize('shape', [(6, 4), (5, 3), (7,)])
@pytest.mark.parametrize('beta1', [0.0, 0.8])
def test_updates_follow_the_formulas(shape: tuple[int, ...], beta1: float) -> None:
  """(6, 4) is factored, (5, 3) is below the threshold."""
  rng = np.random.default_rng(0)
  w, *gradients = (rng.standard_normal(shape) for _ in range(4))
  fields = {'decay_adam': DECAY, 'clipping_threshold': CLIP, 'min_dim_size_to_factor': 4, 'beta1': beta1}
  optimizer = Config(adafactor, weight_decay=0.3, **fields)
  learner = Config(Learner, optimizer=optimizer, learning_rate=RATE).instantiate().bind({'w': weight(*shape)})
  params: Any = {'w': jnp.asarray(w, jnp.float32)}
  state = learner.init(params)
  update = jax.jit(learner.update)
  for step, gradient in enumerate(gradients):
    out = update({'w': jnp.asarray(gradient, jnp.float32)}, jnp.float32(0), params, state, None, jnp.int32(step))
    params, state = out.mdl_vars, out.opt_states
  want = expected(w, gradients, beta1=beta1, weight_decay=0.3)
  np.testing.assert_allclose(params['w'], want, rtol=1e-4, atol=1e-5)
  assert ((6,) in {x.shape for x in jax.tree.leaves(state)}) == (shape == (6, 4))


def test_weight_decay_spares_marked_variables() -> None:
  optimizer = Config(adafactor, weight_decay=0.5)
  weights = {'w': weight(2), 'b': weight(2, marks=(SKIP,))}
  learner = Config(Learner, optimizer=optimizer, learning_rate=1.0).instantiate().bind(weights)
  ones, zeros = {'w': jnp.ones(2), 'b': jnp.ones(2)}, {'w': jnp.zeros(2), 'b': jnp.zeros(2)}
  out = learner.update(zeros, jnp.float32(0), ones, learner.init(ones), None, jnp.int32(0)).mdl_vars
  np.testing.assert_allclose(out['w'], 0.5)
  np.testing.assert_allclose(out['b'], 1.0)
