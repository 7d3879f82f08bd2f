"""GPTQ, AWQ and SmoothQuant against loops in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import Linear, QuantizedWeights
from praxis_lite.layers.gptq import compensation, quantize_in_turn
from praxis_lite.layers.input_scales import awq_scales, smooth_scales
from praxis_lite.layers.weight_formats import WeightFormat, quantize

FORMS = [
  WeightFormat('int4', group_size=4),
  WeightFormat('int2'),
  WeightFormat('int4', group_size=7, symmetric=False),
  WeightFormat('nf4', group_size=64),
  WeightFormat('mxfp8', group_size=32),
  WeightFormat('nvfp4', group_size=16),
]


def rows_and_weight(inputs=21, outputs=5, unused=()):
  generator = np.random.default_rng(0)
  mixed = generator.standard_normal((inputs, inputs)) * np.exp(generator.standard_normal(inputs))
  x = (generator.standard_normal((400, inputs)) @ mixed).astype(np.float32)
  x[:, list(unused)] = 0
  return x, generator.standard_normal((inputs, outputs)).astype(np.float32)


def restored(form, parts, inputs):
  return np.asarray(form.dequantize(parts, inputs))


def gptq_by_hand(form, w, gram):
  """The loop of the paper, with the inverse of the products of the inputs that are left computed anew for each."""
  w, size = w.astype(np.float64).copy(), len(w)
  nearest = form.quantize(jnp.asarray(w, jnp.float32))
  scales = np.asarray(form.decode_scale(nearest['scale'], nearest.get('tensor')))
  group = form.group_size or size
  diagonal = np.diag(gram).copy()
  h = gram.astype(np.float64) + np.diag(np.where(diagonal > 0, 0.01 * diagonal[diagonal > 0].mean(), 1))
  left, found = list(np.argsort(-diagonal, kind='stable')), np.zeros_like(w)
  while left:
    i, inverse = left[0], np.linalg.inv(h[np.ix_(left, left)])
    scale = scales[i // group]
    zero = np.float32(nearest['zero'][i // group]) if form.has_zeros else None
    row = jnp.asarray(w[i], jnp.float32)
    found[i] = form.restore_values(form.round_values(row, scale, zero), scale, zero)
    w[left] -= np.outer(inverse[:, 0], (w[i] - found[i]) / inverse[0, 0])
    left = left[1:]
  return found


@pytest.mark.slow_cases
@pytest.mark.parametrize('form', FORMS, ids=lambda form: form.name)
def test_gptq_is_its_loop_and_better_than_rounding(form):
  x, w = rows_and_weight(unused=(2, 20))
  gram = x.T @ x
  found = restored(form, quantize_in_turn(form, w, compensation(gram)), len(w))
  np.testing.assert_allclose(found, gptq_by_hand(form, w, gram), atol=1e-5)
  nearest = restored(form, quantize(form, w), len(w))
  np.testing.assert_allclose(found[[2, 20]], nearest[[2, 20]], atol=1e-6)
  assert np.square(x @ (found - w)).sum() < 0.75 * np.square(x @ (nearest - w)).sum()


def test_gptq_in_several_blocks_with_several_dims_of_inputs_and_outputs():
  x, w = rows_and_weight(135, 6)
  form = WeightFormat('int4', num_inputs=2, num_outputs=2, group_size=9)
  errors = compensation(x.T @ x)
  parts = quantize_in_turn(form, w.reshape(5, 27, 2, 3), errors)
  flat = WeightFormat('int4', group_size=9)
  found = np.asarray(form.dequantize(parts, 27)).reshape(135, 6)
  np.testing.assert_allclose(found, gptq_by_hand(flat, w, x.T @ x), atol=1e-4)
  some = quantize_in_turn(form, w.reshape(5, 27, 2, 3)[..., 1:], errors)  # Outputs do not depend on each other.
  np.testing.assert_array_equal(some['values'], parts['values'][..., 1:])


def test_without_rows_everything_is_rounded_to_nearest():
  _, w = rows_and_weight()
  for form in FORMS:
    nearest = quantize(form, w)
    found = quantize_in_turn(form, w, compensation(np.zeros((21, 21))))
    for name, part in nearest.items():
      np.testing.assert_array_equal(found[name], part)
    assert (np.asarray(awq_scales((form,), [w], jnp.zeros(21), jnp.zeros((21, 21)))) == 1).all()
    assert (np.asarray(smooth_scales((form,), [w], jnp.zeros(21))) == 1).all()


@pytest.mark.parametrize('form', FORMS, ids=lambda form: form.name)
def test_awq_takes_the_power_with_the_smallest_error(form):
  x, w = rows_and_weight(unused=(3,))
  other = WeightFormat('int8')  # Another weight that reads the same inputs, such as the keys beside the queries.
  means = np.abs(x).sum(0)
  relative = np.maximum(means / means.max(), 1e-4)

  def error(s):
    read = (form, w), (other, w[:, :2] ** 3)
    return sum(np.square(x @ (restored(f, quantize(f, w * s), 21) / s - w)).sum() for f, w in read)

  errors = {}
  for power in np.linspace(0, 1, 21):
    s = relative**power
    s = (s / np.sqrt(s.max() * s.min())).astype(np.float32)[:, None]
    errors[error(s)] = s
  found = np.asarray(awq_scales((form, other), [w, w[:, :2] ** 3], means, x.T @ x))[:, None]
  np.testing.assert_allclose(error(found), min(errors), rtol=1e-3)
  np.testing.assert_allclose(found, errors[min(errors)], rtol=2e-2)


def test_smooth_scales_make_inputs_and_weights_equally_large():
  x, w = rows_and_weight(unused=(3,))
  w[5] = 0
  form, other = WeightFormat('int8'), 2 * np.flip(w)
  other[5] = 0
  s = np.asarray(smooth_scales((form, form), [w, other], np.abs(x).max(0)))
  assert s[3] == s[5] == 1
  used = np.delete(np.arange(21), [3, 5])
  both = np.concatenate([w, other], axis=1) * s[:, None]
  np.testing.assert_allclose(np.abs(x / s).max(0)[used], np.abs(both).max(1)[used], rtol=1e-5)


def test_heads_that_read_one_head_of_values_share_their_scales():
  x, w = rows_and_weight(24, 5)
  form = WeightFormat('int8', num_inputs=2)
  most = np.abs(x).max(0).reshape(2, 3, 4).max(1), np.abs(w).reshape(2, 3, 4, 5).max((1, 3))
  s = np.asarray(smooth_scales((form,), [w.reshape(6, 4, 5)], np.abs(x).max(0), repeats=3)).reshape(2, 3, 4)
  np.testing.assert_allclose(s, np.repeat(np.sqrt(most[0] / most[1])[:, None], 3, axis=1), rtol=1e-6)
  by_mean = np.asarray(awq_scales((form,), [w.reshape(6, 4, 5)], np.abs(x).mean(0), x.T @ x, repeats=3))
  assert (by_mean.reshape(2, 3, 4)[:, :1] == by_mean.reshape(2, 3, 4)).all()


@pytest.mark.parametrize('fields', [{'format': 'int8'}, {'format': 'int4', 'group_size': 4}])
@pytest.mark.parametrize('matmul', ['fprop', 'int8'])
def test_a_layer_divides_by_the_scales_of_its_inputs(fields, matmul):
  from praxis_lite.models import BaseModel, quantize_weights

  class Net(BaseModel):
    def setup(self):
      super().setup()
      self.create_child('layer', Config(Linear, input_dims=21, output_dims=5, matmul=matmul))

  x, w = rows_and_weight()
  model = quantize_weights(Config(Net, name='net'), Config(QuantizedWeights, input_scale=True, **fields)).instantiate()
  stored = model.layer._stored['w']
  s = np.asarray(smooth_scales((stored.format,), [w], np.abs(x).max(0)))[:, None]
  variables = stored.name_parts(quantize(stored.format, w * s), s)
  assert {name: part.shape for name, part in stored.parts.items()} == {n: v.shape for n, v in variables.items()}
  y = model.layer.apply(variables, x)[0]
  rounded = np.asarray(stored.read(variables, None))
  np.testing.assert_allclose(rounded, w, atol=np.abs(w).max() / 3)
  inputs = x
  if matmul == 'int8' and stored.multiply is not None:
    step = np.abs(x / s[:, 0]).max(1, keepdims=True) / 127
    inputs = np.round(x / s[:, 0] / step) * step * s[:, 0]
  tolerance = 1e-4 if stored.multiply is not None or matmul == 'fprop' else 5e-2
  np.testing.assert_allclose(y, inputs @ rounded, atol=tolerance * np.abs(y).max())


def test_rules_with_scales_of_inputs_that_are_not_valid():
  with pytest.raises(ConfigError, match='input_scale: weights that are trained have none'):
    Config(QuantizedWeights, input_scale=True, trained=True).instantiate()
