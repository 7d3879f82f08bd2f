"""Weights of which n of m neighbouring inputs are kept: by loops in NumPy, their gradients, on meshes, in few bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import QuantizedWeights
from praxis_lite.layers.weight_formats import WeightFormat


def pruned_by_hand(w, n, m):
  """The weight [..., I, O] with zeros, by a loop over groups of inputs."""
  found = np.zeros_like(w)
  for *stack, out in np.ndindex(*w.shape[:-2], w.shape[-1]):
    for start in range(0, w.shape[-2], m):
      inputs = range(start, min(start + m, w.shape[-2]))
      for i in sorted(inputs, key=lambda i: (-abs(w[*stack, i, out]), i))[:n]:
        found[*stack, i, out] = w[*stack, i, out]
  return found


@pytest.mark.parametrize('shape', [(8, 3), (2, 9, 2), (1, 1), (3, 2, 6, 1)])
@pytest.mark.parametrize('kept', [(2, 4), (1, 3), (3, 4)])
def test_the_largest_of_each_group_are_kept(shape, kept):
  w = np.random.default_rng(0).integers(-3, 4, shape).astype(np.float32)  # With equal ones and zeros.
  np.testing.assert_array_equal(WeightFormat('float', kept=kept).prune(jnp.asarray(w)), pruned_by_hand(w, *kept))


def test_weights_of_projections_are_pruned_along_the_dims_of_a_head():
  w = np.random.default_rng(0).standard_normal((3, 6, 5)).astype(np.float32)
  out = WeightFormat('float', num_inputs=2, kept=(2, 4)).prune(jnp.asarray(w))
  np.testing.assert_array_equal(out, pruned_by_hand(w, 2, 4))
  heads = WeightFormat('float', num_outputs=2, kept=(2, 4)).prune(jnp.asarray(w.swapaxes(0, 1)))
  np.testing.assert_array_equal(heads, pruned_by_hand(w.swapaxes(0, 1).reshape(6, 15), 2, 4).reshape(6, 3, 5))


@pytest.mark.parametrize('name', ['int8', 'int4', 'nf4'])
@pytest.mark.parametrize('symmetric', [True, False])
def test_zeros_are_zeros_in_few_bits_too(name, symmetric):
  if name == 'nf4' and not symmetric:
    return
  w = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
  form = WeightFormat(name, group_size=8, symmetric=symmetric, kept=(2, 4))
  found = form.dequantize(form.quantize(jnp.asarray(w)), 9)
  assert not np.any(np.asarray(found)[pruned_by_hand(w, 2, 4) == 0])


@pytest.mark.parametrize('name', ['float', 'int4'])
def test_the_gradient_goes_to_all_weights_or_to_kept_ones(name):
  w = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
  for stays in (False, True):
    form = WeightFormat(name, kept=(2, 4), mask_stays=stays)
    gradient = jax.grad(lambda w, form=form: jnp.sum(form.round_weight(w) * 3))(jnp.asarray(w))
    is_kept = pruned_by_hand(w, 2, 4) != 0
    np.testing.assert_allclose(gradient, 3 * (is_kept if stays else np.ones_like(w)))
    assert not np.any(np.asarray(form.round_weight(jnp.asarray(w)))[~is_kept])


def test_rules_that_are_not_valid():
  for fields, message in (
    ({'format': 'float'}, "'float' is for weights with `kept`"),
    ({'format': 'float', 'kept': (2, 4)}, "'float' is for weights with `kept`"),
    ({'kept': (4, 2)}, r'kept: expected \(n, m\) with 0 < n < m'),
    ({'kept': (2, 4), 'mask_stays': True}, 'mask_stays: it is for weights with'),
  ):
    with pytest.raises(ConfigError, match=message):
      Config(QuantizedWeights, **fields).instantiate()
