"""The Conformer and its parts: formulas in NumPy, padding and odd lengths, causal and local forms, and mistakes."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables
from jax.sharding import AxisType
from padded_layers import place_variables, step_on_mesh
from small_layers import conformer_encoder

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import (
  ConformerBlock,
  ConformerEncoder,
  ConvolutionModule,
  ConvSubsampling,
  DepthwiseConv1D,
  GroupNorm,
  LayerNorm,
  MultiHeadAttention,
  RelativeBias,
)

B, T, D, N, H, M = 3, 7, 6, 2, 4, 5
X = np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)
FEATURES = np.random.default_rng(1).standard_normal((B, 11, M)).astype(np.float32)
LENGTHS = np.array([11, 6, 1])
PADDINGS = np.arange(11) >= LENGTHS[:, None]


def make(cls, **fields):
  layer = Config(cls, **fields).instantiate()
  return layer, drawn_variables(layer.abstract_init())


def standardize(x, of=None):
  y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
  return y if of is None else y * of['scale'] + of['bias']


@pytest.mark.parametrize('width, causal', [(1, False), (3, False), (4, False), (4, True), (9, True)])
def test_a_depthwise_convolution_is_its_formula(width, causal):
  layer, variables = make(DepthwiseConv1D, dims=D, kernel_size=width, causal=causal, use_bias=True)
  before = width - 1 if causal else (width - 1) // 2
  expected = np.zeros_like(X) + variables['b']
  for t in range(T):
    for w in range(width):
      if 0 <= t + w - before < T:
        expected[:, t] += X[:, t + w - before] * variables['w'][w]
  np.testing.assert_allclose(layer.apply(variables, X)[0], expected, atol=1e-5)


@pytest.mark.parametrize('frames', [1, 2, 7, 8, 11])
def test_subsampling_is_its_formula(frames):
  layer, variables = make(ConvSubsampling, input_dims=M, output_dims=D, channels=(2, 3))
  x = FEATURES[:, :frames, :, None]
  for i in range(2):
    of, padded = variables[f'conv_{i}'], np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    size = [-(-s // 2) for s in x.shape[1:3]]
    x = np.zeros((B, *size, of['w'].shape[-1]))
    for t in range(size[0]):
      for m in range(size[1]):
        x[:, t, m] = np.einsum('bhwc,hwco->bo', padded[:, 2 * t : 2 * t + 3, 2 * m : 2 * m + 3], of['w']) + of['b']
    x = np.maximum(x, 0)
  expected = x.reshape(B, x.shape[1], -1) @ variables['proj']['w'] + variables['proj']['b']
  found, paddings = layer.apply(variables, FEATURES[:, :frames])[0]
  assert paddings is None and found.shape[1] == math.ceil(frames / 4)
  np.testing.assert_allclose(found, expected, atol=1e-5)


def sublayer(layer, variables, name, x):
  return np.asarray(getattr(layer, name).apply(variables[name], x)[0])


def test_a_block_is_its_formula():
  norms = {'norm_tpl': Config(LayerNorm)}
  config = Config(ConformerBlock, input_dims=D, hidden_dims=9, num_heads=N, dims_per_head=H)
  layer = config.set(conv_tpl=Config(ConvolutionModule, **norms)).instantiate()
  v = drawn_variables(layer.abstract_init())
  x = X + 0.5 * sublayer(layer, v, 'ff_in', standardize(X, v['ff_in_norm']))
  x = x + sublayer(layer, v, 'attention', standardize(x, v['attention_norm']))
  of = v['convolution']
  y = standardize(x, of['input_norm'])
  value, gate = (y @ of[name]['w'] + of[name]['b'] for name in ('value', 'gate'))
  y = sublayer(layer.convolution, of, 'depthwise', (value / (1 + np.exp(-gate))).astype(np.float32))
  y = standardize(y, of['norm'])
  x = x + (y / (1 + np.exp(-y))) @ of['down']['w'] + of['down']['b']
  x = x + 0.5 * sublayer(layer, v, 'ff_out', standardize(x, v['ff_out_norm']).astype(np.float32))
  np.testing.assert_allclose(layer.apply(v, X)[0], standardize(x, v['final_norm']), atol=1e-4)


FORMS = {
  'rotary': {},
  'relative': {'attention_tpl': Config(MultiHeadAttention, relative_bias_tpl=Config(RelativeBias))},
  'causal': {'causal': True},
  'group norm': {'conv_tpl': Config(ConvolutionModule, norm_tpl=Config(GroupNorm, num_groups=3))},
}


def encoder(form='rotary', **fields):
  config = Config(ConformerEncoder, input_dims=M, model_dims=D, num_layers=2, num_heads=1, hidden_dims=9, kernel_size=3)
  config.subsampling_tpl.channels = (2, 3)
  config.set(**fields)
  for field, value in FORMS[form].items():
    (config if field == 'causal' else config.stack_tpl.layers_tpl).set(**{field: value})
  return config


@functools.cache
def built(form):
  layer = encoder(form).instantiate()
  return layer, drawn_variables(layer.abstract_init())


@pytest.mark.parametrize('channels', [(), (2, 3)])
def test_hidden_frames_do_not_begin_as_zeros(channels):
  """Norms would multiply their gradients by 1e3 each."""
  layer = Config(ConvSubsampling, input_dims=M, output_dims=D, channels=channels).instantiate()
  hidden, _ = layer.apply(layer.init(jax.random.key(0)), jnp.zeros((1, 8, M)))[0]
  assert np.all(np.std(hidden, axis=-1) > 0.05)


@pytest.mark.slow_cases
@pytest.mark.parametrize('form', FORMS)
def test_padded_rows_have_the_states_of_their_frames_alone(form):
  """Also of one frame, and whatever the padding holds; evaluated, because a batch norm sees other rows in training."""
  layer, variables = built(form)
  noisy = np.where(PADDINGS[..., None], np.nan, FEATURES)
  (found, paddings), _ = layer.apply(variables, noisy, PADDINGS, do_eval=True)
  for row, length in enumerate(LENGTHS):
    count = math.ceil(length / 4)
    assert np.asarray(paddings)[row].tolist() == [False] * count + [True] * (3 - count)
    (alone, none), _ = layer.apply(variables, FEATURES[row : row + 1, :length], do_eval=True)
    assert none is None
    np.testing.assert_allclose(found[row, :count], alone[0], atol=2e-5)


def test_a_batch_norm_counts_no_padding():
  layer, variables = make(ConvolutionModule, input_dims=D, kernel_size=1)
  short, side = layer.apply(variables, X[:, :4])
  padded = np.concatenate([X[:, :4], np.full((B, 3, D), 50, np.float32)], axis=1)
  long, with_padding = layer.apply(variables, padded, np.arange(7)[None] >= np.array([[4]] * B))
  np.testing.assert_allclose(long[:, :4], short, atol=1e-5)
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), side.updates, with_padding.updates)


def test_causal_states_depend_on_no_later_frame():
  layer, variables = built('causal')
  (known, _), _ = layer.apply(variables, FEATURES, do_eval=True)
  changed = FEATURES.copy()
  changed[:, 5:] += 1
  (new, _), _ = layer.apply(variables, changed, do_eval=True)
  differs = (np.abs(np.asarray(new) - np.asarray(known)) > 1e-6).any((0, 2))
  assert differs.tolist() == [False, False, True]


def test_local_attention_sees_its_window():
  config = Config(ConformerBlock, input_dims=D, hidden_dims=9, num_heads=N, dims_per_head=H)
  config.attention_tpl.sliding_window = 2
  config.conv_tpl.kernel_size = 1
  layer = config.instantiate()
  variables = drawn_variables(layer.abstract_init())
  changed = X.copy()
  changed[:, 3] += np.arange(D)
  known, new = (np.asarray(layer.apply(variables, x, do_eval=True)[0]) for x in (X, changed))
  assert np.flatnonzero((np.abs(new - known) > 1e-6).any((0, 2))).tolist() == [2, 3, 4]


@pytest.mark.parametrize(
  'shape', [(1, 3, 1), pytest.param((1, 2, 3), marks=pytest.mark.slow), pytest.param((2, 2, 1), marks=pytest.mark.slow)]
)
def test_gradients_on_a_mesh_equal_one_device(shape):
  axes, features = ('replica', 'data', 'mdl'), np.random.default_rng(1).standard_normal((B, 11, 6)).astype(np.float32)
  layer = conformer_encoder().set(mesh_axis_names=axes).instantiate()
  variables = drawn_variables(layer.abstract_init())

  def step(layer, variables, args):
    def loss(variables, x, paddings):
      (y, of_y), side = layer.apply(variables, x, paddings, do_eval=False)
      return jnp.sum(jnp.where(of_y[..., None], 0, y) * jnp.cos(jnp.arange(y.size).reshape(y.shape))), side.updates

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(variables, *args)

  expected = jax.jit(functools.partial(step, layer))(variables, (features, PADDINGS))
  mesh = jax.make_mesh(shape, axes, devices=jax.devices()[: math.prod(shape)], axis_types=(AxisType.Auto,) * 3)
  padded = place_variables(layer, variables, mesh)
  found = step_on_mesh(step, layer, variables, mesh)(padded, (features, PADDINGS))
  for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
    np.testing.assert_allclose(a, e, atol=2e-5 * (1 + np.abs(e).max()))


def test_mistakes_are_named():
  def fails(match, cls, method='__call__', args=(X,), **fields):
    with pytest.raises(ConfigError, match=match):
      layer, variables = make(cls, **fields)
      layer.apply(variables, *args, method=method)

  fails(r'kernel_size: expected at least 1', DepthwiseConv1D, dims=D, kernel_size=0)
  fails('unknown activation', ConvSubsampling, input_dims=M, output_dims=D, activation='rely')
