"""Optimizers of matrices on one device: the updates are those of optax, or of a form in NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_trees import declarations, values

from praxis_lite.common.config import Config
from praxis_lite.training.learning import Learner, muon


def after_steps(optimizer: Config, weights: Any, steps: int = 3) -> Any:
  bound = Config(Learner, optimizer=optimizer, learning_rate=0.05).instantiate().bind(weights)
  params = values(weights)
  state = bound.init(params)
  for step in range(steps):
    gradients = values(weights, step + 1, spread=4.0)
    params, state, *_ = bound.update(gradients, jnp.float32(1), params, state, None, jnp.int32(step))
  return params


@pytest.mark.parametrize('fields', [{}, {'nesterov': False, 'consistent_rms': 0.2, 'weight_decay': 0.1, 'beta': 0.9}])
def test_muon_is_that_of_optax(fields: dict[str, Any]) -> None:
  weights = declarations()
  expected = after_steps(Config(optax.contrib.muon, **fields), weights)
  found = after_steps(Config(muon, **fields), weights)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
