"""Weights in few bits against formulas in NumPy, for odd sizes, stacks, groups and zeros."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from drawn_state import drawn_variables

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import FeedForward, Linear, Lora, MoeFeedForward, Projection, QuantizedWeights
from praxis_lite.layers.weight_formats import BLOCKS, NF4, WeightFormat, quantize
from praxis_lite.models import (
  BaseModel,
  add_adapters,
  dequantize_variables,
  quantize_variables,
  quantize_weights,
  transformer_lm,
)
from praxis_lite.sharding.weights import WeightInit

INTEGERS = {'int8': 8, 'int4': 4, 'int2': 2}


def random(*shape):
  return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def by_hand(x, name, symmetric):
  """The numbers of one scale after rounding."""
  most = np.abs(x).max()
  if name == 'nf4':
    return np.float32(most or 1) * np.float32([min(NF4, key=lambda c: abs(v / (most or 1) - c)) for v in x])
  half = 2 ** (INTEGERS[name] - 1)
  if symmetric:
    scale = most / (half - 0.49) or 1
    return scale * np.clip(np.round(x / scale), -half, half - 1)
  scale = (max(x.max(), 0) - min(x.min(), 0)) / (2 * half - 1) or 1
  zero = np.round(-min(x.min(), 0) / scale)
  return scale * (np.clip(np.round(x / scale) + zero, 0, 2 * half - 1) - zero)


def groups_by_hand(w, name, group_size, symmetric):
  """The rounded weight, for one dimension of inputs before one of outputs."""
  expected = np.zeros_like(w)
  for stack in np.ndindex(w.shape[:-2]):
    for out in range(w.shape[-1]):
      for start in range(0, w.shape[-2], group_size or w.shape[-2]):
        at = (*stack, slice(start, start + (group_size or w.shape[-2])), out)
        expected[at] = by_hand(w[at], name, symmetric)
  return expected


dequantize = jax.jit(WeightFormat.dequantize, static_argnums=(0, 2))
CASES = [
  *(('int8', None, True), ('int8', 3, False), ('int4', 4, True), ('int4', None, False)),
  *(('int2', 5, True), ('nf4', 4, True), ('int4', 64, True)),
]


@pytest.mark.parametrize('shape', [(2, 9, 2), (1, 1)])
def test_every_format_is_its_formula(shape):
  w = random(*shape)
  w.reshape(-1)[2:4] = 0
  for name, group_size, symmetric in CASES:
    form = WeightFormat(name, group_size=group_size, symmetric=symmetric)
    parts = quantize(form, w)
    np.testing.assert_allclose(
      dequantize(form, parts, shape[-2]), groups_by_hand(w, name, group_size, symmetric), atol=2e-6, err_msg=name
    )
    assert parts['values'].shape == form.values_shape(shape) and parts['scale'].shape == form.scale_shape(shape)


def small_floats_by_hand(w, name):
  """A weight [I, O] after rounding, with the casts of ml_dtypes."""
  expected, tensor = np.zeros_like(w), np.float32(np.abs(w).max() / (6 * 448)) or np.float32(1)
  for out in range(w.shape[1]):
    for start in range(0, len(w), BLOCKS[name]):
      x = w[start : start + BLOCKS[name], out]
      most = np.abs(x).max()
      if name == 'mxfp8':
        scale = np.float32(2.0 ** (np.floor(np.log2(most)) - 8 if most else -126))
        scale = scale.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        q = np.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
      else:
        scale = np.float32(most / 6 / tensor).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        scale = tensor * np.maximum(scale, np.float32(2**-9))
        q = np.clip(x / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn)
      expected[start : start + BLOCKS[name], out] = scale * q.astype(np.float32)
  return expected


@pytest.mark.parametrize('name', BLOCKS)
def test_small_floats_are_their_formulas(name):
  w = random(70, 6) * np.float32([1, 1e-3, 1e3, 1, 1, 1])  # The second output has the smallest scales of nvfp4.
  w[16:48, 3], w[:, 4] = 0, 0
  form = WeightFormat(name, group_size=BLOCKS[name])
  expected = small_floats_by_hand(w, name)
  parts = quantize(form, w)
  np.testing.assert_array_equal(dequantize(form, parts, 70), expected)
  assert parts['scale'].dtype == np.uint8 and parts['values'].shape == form.values_shape(w.shape)
  for whole in (np.zeros_like(w), w * np.float32(1e-30)):
    np.testing.assert_array_equal(dequantize(form, quantize(form, whole), 70), small_floats_by_hand(whole, name))
  ties = np.float32([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5, 17, 19, 460, 2**-10])
  dtype = {'mxfp8': ml_dtypes.float8_e4m3fn, 'nvfp4': ml_dtypes.float4_e2m1fn}[name]
  largest = float(ml_dtypes.finfo(dtype).max)
  found = form.restore_values(form.round_values(ties, np.float32(1), None), np.float32(1), None)
  np.testing.assert_array_equal(found, np.clip(ties, -largest, largest).astype(dtype).astype(np.float32))
  heads = WeightFormat(name, num_inputs=2, group_size=BLOCKS[name])  # A stack, each of 2 heads of 35 dims.
  stacked = heads.quantize(np.stack([w, 3 * w]).reshape(2, 2, 35, 6))
  again = np.asarray(heads.dequantize(stacked, 35)).reshape(2, 2, 35, 6)
  for one, scaled in zip(again, (w, 3 * w)):
    largest = np.abs(scaled).max(keepdims=True)
    for head, x in zip(one, scaled.reshape(2, 35, 6)):
      np.testing.assert_array_equal(head, form.dequantize(form.quantize(x, largest=largest), 35))


@pytest.mark.parametrize('name, steps', [('int8', 0.51), ('int4', 0.51), ('int2', 0.51), ('nf4', 0.152)])
@pytest.mark.parametrize('scale_dtype', ['float32', 'bfloat16', 'float16'])
def test_rounding_is_off_by_half_a_step(name, steps, scale_dtype):
  w = random(33, 50)
  form = WeightFormat(name, group_size=8, scale_dtype=scale_dtype)
  parts = quantize(form, w)
  scales = np.repeat(parts['scale'].astype(np.float32), 8, axis=0)[:33]
  assert (np.abs(dequantize(form, parts, 33) - w) <= scales * (steps + 5e-5)).all()


@pytest.mark.parametrize('name', ['int8', 'int4', 'nf4', 'mxfp8', 'nvfp4'])
def test_zeros_stay_zero_and_other_dtypes_are_taken(name):
  form = WeightFormat(name, group_size=2, scale_dtype='bfloat16')
  parts = form.quantize(np.zeros((5, 2), np.float32))
  assert parts['scale'].dtype == form.stored_scale_dtype and not np.any(form.dequantize(parts, 5))
  w = jax.numpy.asarray(random(5, 2), 'bfloat16')
  again = form.dequantize(form.quantize(w), 5, 'bfloat16')
  assert again.dtype == 'bfloat16' and np.abs(again - w).max() < 0.5


def test_several_dimensions_of_inputs_share_a_scale_unless_there_are_groups():
  w = random(3, 4, 5)  # Out of 3 heads of 4 dims.
  whole = WeightFormat('int8', num_inputs=2)
  assert whole.scale_shape(w.shape) == (1, 1, 5) and whole.values_shape(w.shape) == w.shape
  flat = WeightFormat('int8').quantize(w.reshape(12, 5))
  np.testing.assert_array_equal(whole.quantize(w)['values'], flat['values'].reshape(w.shape))
  assert WeightFormat('int4', num_inputs=2, group_size=3).scale_shape(w.shape) == (3, 2, 5)
  heads = WeightFormat('int4', num_inputs=1, num_outputs=2, group_size=3)  # To 4 heads of 5 dims.
  assert heads.values_shape(w.shape) == (2, 4, 5) and heads.scale_shape(w.shape) == (1, 4, 5)
  assert np.abs(heads.dequantize(heads.quantize(w), 3) - w).max() < 0.3


def test_a_percentile_cuts_outliers():
  w = random(1000, 1) * 0.1
  w[3] = 50
  for symmetric in (True, False):
    errors = []
    for percentile in (99.5, 100):
      form = WeightFormat('int4', symmetric=symmetric, percentile=percentile)
      errors.append(np.abs(np.delete(dequantize(form, quantize(form, w), 1000) - w, 3)).mean())
    assert errors[0] < 0.02 < errors[1]


def test_the_gradient_of_rounding_goes_straight_through():
  form, w = WeightFormat('int2', group_size=2), random(5, 3)
  rounded = dequantize(form, quantize(form, w), 5)
  value, gradient = jax.jit(jax.value_and_grad(lambda w: jax.numpy.sum(form.round_weight(w) ** 2)))(w)
  np.testing.assert_allclose(value, np.sum(np.square(rounded)), rtol=1e-5)
  np.testing.assert_allclose(gradient, 2 * rounded, atol=1e-5)


def test_initial_values_are_rounded_ones():
  model = Config(Linear, input_dims=5, output_dims=3, params_init=WeightInit.Gaussian(2.0))
  edits = Config(OneLayer, layer=model, quantized=Config(QuantizedWeights, format='int4')).instantiate(name='model')
  found = edits.init(jax.random.key(0))['only']
  assert found['w'].shape == (3, 3) and len(np.unique(found['w'])) > 3 and found['w_quantized_scale'].min() > 0.1


class OneLayer(BaseModel):
  layer: Config = REQUIRED

  def setup(self):
    self.create_child('only', self.layer)


# ---------------------------------------------------------------- in layers


def lm(*rules, experts=None):
  sizes = {'vocab_size': 37, 'model_dims': 18, 'num_layers': 2, 'num_heads': 3, 'hidden_dims': 15}
  return quantize_weights(transformer_lm(**sizes, experts=experts), *rules)


def kinds(tree):
  return jax.tree.map(lambda x: (tuple(getattr(x, 'full_shape', x.shape)), np.dtype(x.dtype)), tree)


def logits(model, variables):
  return jax.jit(lambda v: model.lm.apply(v, IDS, method='logits')[0])(variables['lm'])


IDS = np.arange(10).reshape(2, 5)
EXPERTS = Config(MoeFeedForward, num_experts=3)


@pytest.mark.slow_cases
@pytest.mark.parametrize('experts, formats', [(None, ('int4', 'nf4')), (EXPERTS, ('nvfp4', 'mxfp8'))])
def test_a_model_computes_with_the_rounded_weights(experts, formats):
  own = {'int4': {'group_size': 4}, 'nf4': {'scale_dtype': 'bfloat16'}}
  first, other = (Config(QuantizedWeights, format=name, **own.get(name, {})) for name in formats)
  rules = first.set(layers=r'.*\.(query|up|ff)'), other
  plain, model = lm(experts=experts).instantiate(), lm(*rules, experts=experts).instantiate()
  variables = drawn_variables(plain.abstract_init())
  stored = quantize_variables(model, variables)
  assert kinds(stored) == kinds(model.abstract_init()) == kinds(jax.eval_shape(model.init, jax.random.key(0)))
  rounded = dequantize_variables(model, stored)
  assert kinds(rounded) == kinds(variables)
  assert model.active_num_params == plain.active_num_params
  found, expected = logits(model, stored), logits(plain, rounded)
  np.testing.assert_allclose(found, expected, atol=1e-5)
  trained = lm(*[rule.clone(trained=True) for rule in rules], experts=experts).instantiate()
  assert kinds(trained.abstract_init()) == kinds(variables)
  np.testing.assert_allclose(logits(trained, variables), expected, atol=1e-5)


def test_the_weight_of_a_projection_is_the_rounded_one():
  model = lm(Config(QuantizedWeights, layers=r'.*\.out', format='int8')).instantiate()
  (layer,) = (x for x in model.descendants() if isinstance(x, Projection) and x.name == 'out')
  form = layer._stored['w'].format
  w = random(3, 6, 18)
  stored = layer._stored['w'].store(jax.numpy.asarray(w))
  found, _ = layer.apply(stored, method='weight')
  np.testing.assert_allclose(found, form.dequantize(form.quantize(w), 6), atol=1e-6)


@pytest.mark.parametrize(
  'rule, text',
  [
    ({'format': 'int3'}, 'format.*int3'),
    ({'group_size': 0}, 'group_size.*at least 1'),
    ({'percentile': 30.0}, 'percentile: expected a number above 50'),
    ({'format': 'nf4', 'symmetric': False}, 'symmetric: only integers have zero points'),
    ({'format': 'nvfp4', 'symmetric': False}, "leave it True for 'nvfp4'"),
    ({'format': 'mxfp8', 'group_size': 16}, 'group_size: mxfp8 has groups of 32'),
    ({'format': 'nvfp4', 'scale_dtype': 'bfloat16'}, 'scale_dtype: nvfp4 says how its scales are stored'),
    ({'format': 'mxfp8', 'percentile': 99.0}, 'percentile: mxfp8 says'),
    ({'scale_dtype': 'int8'}, 'scale_dtype: expected a floating dtype'),
    ({'layers': '('}, 'not a regular expression'),
    ({'layers': r'.*\.querry'}, r'quantized\[0\].layers: .* matches no layer with weights'),
    ({'layers': r'lm\.softmax'}, r'matches lm.softmax, a FullSoftmax, whose weights cannot be quantized'),
  ],
)
def test_rules_that_are_not_valid(rule, text):
  with pytest.raises(ConfigError, match=text):
    lm(Config(QuantizedWeights, **rule)).instantiate()


def test_a_rule_may_match_the_adapters_of_its_layers():
  model = lm(Config(QuantizedWeights, layers=r'.*\.ff\..*'))
  ff = (
    add_adapters(model, Config(Lora, rank=2)).instantiate().abstract_init()['lm']['transformer']['layers']['ff']['up']
  )
  assert np.dtype(ff['w'].dtype) == np.int8 and ff['lora']['a'].trainable


def test_a_weight_that_is_not_finite_is_named():
  model, variables = lm(Config(QuantizedWeights)).instantiate(), drawn_variables(lm().instantiate().abstract_init())
  variables['lm']['transformer']['layers']['attention']['query']['w'][0, 0, 0, 0] = np.nan
  with pytest.raises(Exception, match=r'attention\.query\.w has NaN or infinities'):
    quantize_variables(model, variables)


class OnlyFeedForward(BaseModel):
  def setup(self):
    self.create_child('ff', Config(FeedForward, input_dims=8, hidden_dims=64))

  def __call__(self, x):
    return self.ff(x)


@pytest.mark.slow
def test_training_with_rounded_weights_recovers_what_rounding_afterwards_loses():
  rule = Config(QuantizedWeights, format='int2')
  plain, trained, frozen = (
    Config(OnlyFeedForward, quantized=rules).instantiate(name='model')
    for rules in ((), (rule.clone(trained=True),), (rule,))
  )
  variables, x = drawn_variables(plain.abstract_init()), random(64, 8)
  variables = jax.tree.map(lambda v: 5 * v, variables)
  wanted = plain.apply(variables, x)[0]
  optimizer = optax.adam(1e-2)

  def loss(v):
    return jnp.mean((trained.apply(v, x)[0] - wanted) ** 2)

  @jax.jit
  def train(v):
    def step(state, _):
      v, slots = state
      value, gradients = jax.value_and_grad(loss)(v)
      updates, slots = optimizer.update(gradients, slots)
      return (optax.apply_updates(v, updates), slots), value

    (v, _), losses = jax.lax.scan(step, (v, optimizer.init(v)), length=300)
    return v, losses

  tuned, losses = train(variables)
  after = float(jnp.mean((frozen.apply(quantize_variables(frozen, tuned), x)[0] - wanted) ** 2))
  np.testing.assert_allclose(after, loss(tuned), rtol=1e-4)
  assert after < 0.3 * losses[0], (after, losses[0])
