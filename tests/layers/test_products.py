"""Products with weights in few bits, and with inputs in int8, against formulas in NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import Linear, Projection, QuantizedWeights, products
from praxis_lite.layers.int8 import int8_tensordot
from praxis_lite.layers.products import matmul
from praxis_lite.layers.weight_formats import WeightFormat, quantize
from praxis_lite.models import BaseModel, quantize_weights

RNG = np.random.default_rng(0)


def random(*shape):
  return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.slow_cases
@pytest.mark.parametrize('name', ['int8', 'int4', 'int2'])
@pytest.mark.parametrize('rows, inputs, outputs', [((2, 3), (9,), (5,)), ((0,), (3, 5), (2, 4)), ((1,), (2, 8), (1,))])
def test_integers_are_multiplied_before_they_are_scaled(name, rows, inputs, outputs):
  form = WeightFormat(name, len(inputs), len(outputs))
  x, w, g = random(*rows, *inputs), random(*inputs, *outputs), random(*rows, *outputs)
  parts = quantize(form, w)
  expected = form.dequantize(parts, inputs[-1])
  y, transpose = jax.vjp(lambda x: form.multiply(x, parts, inputs[-1]), x)
  np.testing.assert_allclose(y, np.tensordot(x, expected, len(inputs)), atol=1e-5)
  out = tuple(range(len(rows), g.ndim)), tuple(range(len(inputs), expected.ndim))
  np.testing.assert_allclose(transpose(g)[0], np.tensordot(g, expected, out), atol=1e-5)
  assert y.shape == g.shape and y.dtype == np.float32


@pytest.mark.parametrize('dtype, most', [('bfloat16', 0.01), ('float16', 0.002)])
def test_other_dtypes_do_not_round_the_weight_nor_overflow(dtype, most):
  form, x = WeightFormat('int8', scale_dtype='bfloat16'), 30 * jnp.abs(jnp.asarray(random(4, 512), dtype))
  parts = quantize(form, jnp.ones((512, 3)))
  y = form.multiply(x, parts, 512)
  assert y.dtype == dtype
  np.testing.assert_allclose(y.astype(np.float32), x.astype(np.float32) @ form.dequantize(parts, 512), rtol=most)


def by_hand(x, w):
  """The product of a matrix x with scales for its rows, and of w with scales for its columns."""
  of_x, of_w = (np.abs(x).max(1, keepdims=True) / 127, np.abs(w).max(0) / 127)
  of_x, of_w = np.where(of_x == 0, 1, of_x), np.where(of_w == 0, 1, of_w)
  return (np.round(x / of_x) @ np.round(w / of_w)) * of_x * of_w


def test_both_operands_are_int8_and_gradients_go_straight_through():
  x, w, g = random(6, 4, 5), random(4, 5, 3, 2), random(6, 3, 2)
  x[1], w[:, :, 2] = 0, 0
  y, transpose = jax.vjp(lambda x, w: int8_tensordot(x, w, 2), x, w)
  np.testing.assert_allclose(y.reshape(6, 6), by_hand(x.reshape(6, 20), w.reshape(20, 6)), atol=1e-5)
  dx, dw = transpose(g)
  np.testing.assert_allclose(dx, np.einsum('bij,klij->bkl', g, w), atol=0.1)
  np.testing.assert_allclose(dw, np.einsum('bkl,bij->klij', x, g), atol=0.1)
  y = int8_tensordot(jnp.asarray(x).at[0, 1, 2].set(jnp.nan), w, 2)
  assert np.isnan(y[0]).any() and np.isfinite(y[1:]).all()


def test_more_products_than_int32_can_sum_and_none():
  size = 140_000
  x, w = np.ones((1, 2, size // 2), np.float32), np.ones((2, size // 2, 1), np.float32)
  np.testing.assert_allclose(int8_tensordot(x, w, 2), [[size]], rtol=1e-5)
  form = WeightFormat('int8', 2, 1)
  parts = quantize(form, w)
  y = form.multiply(jnp.full(x.shape, 127, jnp.int8), parts, size // 2)
  np.testing.assert_allclose(y, [[127 * form.dequantize(parts, size // 2).sum()]], rtol=1e-5)
  y, transpose = jax.vjp(lambda x, w: int8_tensordot(x, w, 1), np.ones((2, 0), np.float32), np.ones((0, 3), np.float32))
  np.testing.assert_array_equal(y, np.zeros((2, 3)))
  assert [d.shape for d in transpose(y)] == [(2, 0), (0, 3)]


class _Model(BaseModel):
  layer: Config = REQUIRED

  def setup(self):
    self.create_child('only', self.layer)

  def __call__(self, x):
    return self.only(x)


LAYERS = [
  Config(Linear, input_dims=9, output_dims=5, use_bias=True),
  Config(Projection, in_shape=(3, 3), out_shape=(5,)),
]


@pytest.mark.slow_cases
@pytest.mark.parametrize('layer', LAYERS)
@pytest.mark.parametrize('fields', [{}, {'format': 'int4'}, {'group_size': 3}, {'symmetric': False}, {'format': 'nf4'}])
def test_inputs_in_int8_meet_stored_integers(layer, fields):
  """Weights with one scale for each output keep their integers; others are computed, and rounded again."""
  config = Config(_Model, layer=layer.clone(matmul='int8'))
  model = quantize_weights(config, Config(QuantizedWeights, **fields)).instantiate()
  variables = model.init(jax.random.key(0))
  stored, parts = model.only._stored['w'], variables['only']
  w = np.asarray(stored.read({name: parts[name] for name in stored.parts}, None)).reshape(9, 5)
  x, shape = random(2, 9), getattr(model.only, 'in_shape', (9,))
  found, grads = jax.value_and_grad(lambda x: model.apply(variables, x.reshape(2, *shape))[0].sum())(x)
  of_x = np.abs(x).max(1, keepdims=True) / 127
  keeps = stored.multiply is not None
  expected = np.round(x / of_x) * of_x @ w if keeps else by_hand(x, w)
  np.testing.assert_allclose(found, expected.sum(), atol=1e-4)
  np.testing.assert_allclose(grads, np.broadcast_to(w.sum(1), (2, 9)), atol=1e-5 if keeps else 0.05)


def test_inputs_in_int8_with_a_fixed_range():
  layer = Config(Projection, in_shape=(3, 3), out_shape=(5,), matmul='int8')
  rule = Config(QuantizedWeights, format='int4', input_scale=True, input_range=True)
  model = quantize_weights(Config(_Model, layer=layer), rule).instantiate()
  stored, s = model.only._stored['w'], 1 + random(3, 3, 1) ** 2
  variables = {n: v for n, v in model.init(jax.random.key(0))['only'].items() if 'input' not in n}
  variables |= {'w_quantized_input_scale': s, 'w_quantized_input_range': np.full((1, 1, 1), 1.5, np.float32)}
  assert {n: p.shape for n, p in stored.parts.items()} == {n: v.shape for n, v in variables.items()}
  w = np.asarray(stored.read(variables, None)).reshape(9, 5)
  x = 2 * random(4, 9)
  x[0, 0], x[1], x[2, 3] = 100, 0, np.nan
  found, transpose = jax.vjp(lambda x: model.only.apply(variables, x.reshape(4, 3, 3))[0], x)
  s = s.reshape(9)
  q = np.clip(np.round(x / s / (1.5 / 127)), -127, 127)
  np.testing.assert_allclose(found, q * (1.5 / 127) * s @ w, atol=1e-4)
  assert np.isnan(found[2]).all() and (found[1] == 0).all()
  np.testing.assert_allclose(transpose(jnp.ones((4, 5)))[0], np.broadcast_to(w.sum(1), (4, 9)), atol=1e-4)


@pytest.mark.parametrize(
  'rule, text',
  [
    ({'group_size': 3}, 'input_range: it is for integers with one scale for each output'),
    ({'format': 'nf4'}, 'input_range: it is for integers'),
    ({'trained': True}, 'input_range: weights that are trained have none'),
    ({}, "only.matmul: a fixed range of inputs is for .* with matmul='int8'"),
  ],
)
def test_fixed_ranges_that_are_not_valid(rule, text):
  with pytest.raises(ConfigError, match=text):
    quantize_weights(Config(_Model, layer=LAYERS[0]), Config(QuantizedWeights, input_range=True, **rule)).instantiate()


@pytest.mark.parametrize(
  'rows, inputs, outputs, filled',
  [
    ((1, 1), (1024, 2), (1024,), 5),
    ((2, 2), (8, 256), (32, 32), 5),
    ((5,), (1024, 2), (1024,), 0),
    ((0,), (1024, 2), (1024,), 0),
  ],
)
def test_few_rows_are_filled_up_on_a_single_gpu(rows, inputs, outputs, filled, monkeypatch):
  """XLA does not turn 5 rows of 2 million weights into sums. Without rows, with 5, and on CPUs, nothing changes."""
  x, w, g = random(*rows, *inputs), random(*inputs, *outputs), random(*rows, *outputs)
  few = functools.partial(matmul, axes=2, kind='fprop', path='')
  wanted = few(x, w), *jax.vjp(few, x, w)[1](g)
  assert 'pad[' not in str(jax.make_jaxpr(few)(x, w))
  monkeypatch.setattr(products, 'memory_of_single_gpu', lambda: 8e10)
  program = str(jax.make_jaxpr(functools.partial(few))(x, w))  # A new function: the old one has a program already.
  assert ('pad[' in program) == bool(filled) and (not filled or f'f32[{filled},{inputs[0]}' in program)
  for found, other in zip((few(x, w), *jax.vjp(few, x, w)[1](g)), wanted):
    np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-3)


def test_small_and_plain_weights_are_not_filled_up(monkeypatch):
  monkeypatch.setattr(products, 'memory_of_single_gpu', lambda: 8e10)
  for axes, w in ((2, random(64, 8, 16)), (1, random(4096, 1024))):
    few = functools.partial(matmul, axes=axes, kind='fprop', path='')
    assert 'pad[' not in str(jax.make_jaxpr(few)(random(1, *w.shape[:axes]), w))
