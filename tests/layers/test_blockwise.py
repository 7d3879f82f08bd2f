"""Blockwise attention is dense attention, in values and gradients, and does not do what a mask makes useless."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from attention_cases import CASES, arguments, attend


@pytest.mark.parametrize('name', CASES)
def test_blockwise_is_dense(name):
  floats, others, gradient = arguments(CASES[name])

  @jax.jit
  def both(floats, gradient):
    found = []
    for fields in ({'implementation': 'dense'}, {'implementation': 'blockwise', 'block_size': 8}):
      out, pull = jax.vjp(lambda f, fields=fields: attend(f, others, **fields), floats)
      found.append((out, pull(gradient)[0]))
    return found

  dense, blockwise = both(floats, gradient)
  assert dense[0].std() > 0.01
  jax.tree.map(lambda d, b: np.testing.assert_allclose(b, d, atol=1e-5, rtol=1e-5), dense, blockwise)
