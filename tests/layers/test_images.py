"""Convolutions, pooling and image networks against plain loops."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import Conv2D, ConvNet, GlobalPooling, Mlp, Pooling
from praxis_lite.sharding import GuardedJit
from praxis_lite.sharding.weights import WeightHParamsCollection

B, H, W, C = 2, 6, 5, 4


def image(*shape):
  return np.random.default_rng(0).standard_normal(shape or (B, H, W, C)).astype(np.float32)


def run(cls, x, **fields):
  layer = Config(cls, **fields).instantiate()
  variables = layer.init(jax.random.key(0))
  return jax.tree.map(np.asarray, variables), np.asarray(layer.apply(variables, x, do_eval=True)[0])


def same_padding(size, filter_size, stride):
  """TensorFlow's 'SAME': the output has ceil(size / stride) entries, and the odd zero goes to the end."""
  total = max((-(-size // stride) - 1) * stride + filter_size - size, 0)
  return total // 2, total - total // 2


def looped_conv(x, w, strides, dilations, padding, groups):
  height, width, group_in, outputs = w.shape
  span = [(height - 1) * dilations[0] + 1, (width - 1) * dilations[1] + 1]
  if padding == 'SAME':
    x = np.pad(x, ((0, 0), *[same_padding(x.shape[a + 1], span[a], strides[a]) for a in range(2)], (0, 0)))
  elif padding == 'SYMMETRIC':
    x = np.pad(x, ((0, 0), *[((reach - 1) // 2,) * 2 for reach in span], (0, 0)))
  rows, cols = [(x.shape[a + 1] - span[a]) // strides[a] + 1 for a in range(2)]
  y = np.zeros((x.shape[0], rows, cols, outputs))
  group_out = outputs // groups
  for i, j, h, v, g in itertools.product(range(rows), range(cols), range(height), range(width), range(groups)):
    pixel = x[:, i * strides[0] + h * dilations[0], j * strides[1] + v * dilations[1]]
    out = slice(g * group_out, (g + 1) * group_out)
    y[:, i, j, out] += pixel[:, g * group_in : (g + 1) * group_in] @ w[h, v, :, out]
  return y


@pytest.mark.parametrize('padding', ['SAME', 'VALID', 'SYMMETRIC'])
@pytest.mark.parametrize(
  'filter_size, strides, dilations, groups',
  [
    ((1, 1), (1, 1), (1, 1), 1),
    ((3, 3), (1, 1), (1, 1), 1),
    ((3, 2), (2, 3), (1, 1), 2),
    ((2, 3), (1, 2), (2, 1), 4),
    ((4, 2), (2, 1), (1, 2), 1),
  ],
)
def test_convolution_is_the_loop_of_its_formula(padding, filter_size, strides, dilations, groups):
  fields = {'strides': strides, 'dilations': dilations, 'padding': padding, 'groups': groups}
  variables, y = run(Conv2D, image(), filter_shape=(*filter_size, C, 8), params_init=None, **fields)
  assert variables['w'].shape == (*filter_size, C // groups, 8)
  np.testing.assert_allclose(y, looped_conv(image(), variables['w'], strides, dilations, padding, groups), atol=1e-5)


@pytest.mark.parametrize(
  'images, out, fields',
  [
    ((None, 'a', None, None), (None, None, None, 'b'), {'filter_shape': (4, 2, C, 4), 'strides': (3, 1)}),
    (('a', None, None, None), (None, 'a', 'b', None), {'filter_shape': (3, 4, C, 4), 'strides': (2, 2)}),
    ((None, None, 'a', None), (None, 'a', None, None), {'filter_shape': (2, 1, C, 4), 'dilations': (2, 2)}),
  ],
)
def test_height_and_width_may_be_split_over_one_axis_of_several(images, out, fields):
  """XLA's own partitioning of these has wrong values, or wrong gradients of the filters."""
  mesh = jax.make_mesh((2, 2), ('a', 'b'), axis_types=(AxisType.Auto,) * 2)
  config = Config(Conv2D, padding='VALID', **fields)
  config.activation_split_dims_mapping.out = out
  variables, x = config.instantiate().init(jax.random.key(0)), image(2, 12, 11, C)

  def step(layer, variables, x):
    def loss(variables, x):
      y, _ = layer.apply(variables, x)
      return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))), y

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(variables, x)

  def on_mesh(variables, x):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*images)))
      return step(config.set(mesh_axis_names=('a', 'b')).instantiate(), variables, x)

  expected = step(config.instantiate(), variables, x)
  whole = NamedSharding(mesh, PartitionSpec())
  actual = GuardedJit(on_mesh, out_shardings=whole)(*jax.device_put((variables, x), whole))
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-3), actual, expected)


def test_bias_of_a_convolution_is_added_to_each_channel_and_not_regularized():
  layer = Config(Conv2D, filter_shape=(1, 1, C, 3)).instantiate()
  b = np.array([1.0, 2.0, 3.0], np.float32)
  y, _ = layer.apply({'w': np.zeros((1, 1, C, 3), np.float32), 'b': b}, image())
  np.testing.assert_array_equal(y, np.broadcast_to(b, (B, H, W, 3)))
  weights = layer.abstract_init()
  assert WeightHParamsCollection.SKIP_REGULARIZATION in weights['b'].collections
  assert not weights['w'].collections
  assert 'b' not in Config(Conv2D, filter_shape=(1, 1, C, 3), use_bias=False).instantiate().abstract_init()


def looped_pool(x, window, strides, padding, reduce):
  pads = [same_padding(x.shape[a + 1], window[a], strides[a]) if padding == 'SAME' else (0, 0) for a in range(2)]
  if padding == 'SYMMETRIC':
    pads = [((size - 1) // 2,) * 2 for size in window]
  x = np.pad(x.astype(np.float64), ((0, 0), *pads, (0, 0)), constant_values=np.nan)
  rows, cols = [(x.shape[a + 1] - window[a]) // strides[a] + 1 for a in range(2)]
  y = np.zeros((x.shape[0], rows, cols, x.shape[3]))
  for i, j in itertools.product(range(rows), range(cols)):
    top, left = i * strides[0], j * strides[1]
    y[:, i, j] = reduce(x[:, top : top + window[0], left : left + window[1]], axis=(1, 2))
  return y


@pytest.mark.parametrize('kind, reduce', [('max', np.nanmax), ('mean', np.nanmean)])
@pytest.mark.parametrize('padding', ['SAME', 'VALID', 'SYMMETRIC'])
@pytest.mark.parametrize('window, strides', [((2, 2), None), ((3, 2), (1, 2)), ((2, 3), (3, 1))])
def test_pooling_is_over_the_part_of_each_window_inside_the_image(kind, reduce, padding, window, strides):
  x = image() - 5  # All negative, so that padding with zeros would show in a maximum.
  _, y = run(Pooling, x, kind=kind, window=window, strides=strides, padding=padding)
  np.testing.assert_allclose(y, looped_pool(x, window, strides or window, padding, reduce), rtol=1e-5)


@pytest.mark.parametrize('kind, reduce', [('max', np.max), ('mean', np.mean)])
def test_global_pooling_is_over_the_image(kind, reduce):
  _, y = run(GlobalPooling, image(), kind=kind)
  np.testing.assert_allclose(y, reduce(image(), axis=(1, 2)), atol=1e-6)


def test_gradient_of_max_pooling_goes_to_the_greatest_entry():
  x = image()
  layer = Config(Pooling).instantiate()
  gradient = jax.grad(lambda x: layer.apply({}, x)[0].sum())(x)
  windows = x[:, :H, : W // 2 * 2].reshape(B, H // 2, 2, W // 2, 2, C)
  greatest = windows == windows.max(axis=(2, 4), keepdims=True)
  np.testing.assert_array_equal(gradient[:, :, : W // 2 * 2], greatest.reshape(B, H, -1, C))
  np.testing.assert_array_equal(gradient[:, :, W // 2 * 2 :], 0)


def test_means_of_bfloat16_are_summed_in_float32():
  x = jnp.full((1, 64, 64, 1), 1.01, jnp.bfloat16)
  for cls, fields in ((GlobalPooling, {}), (Pooling, {'kind': 'mean', 'window': (64, 64)})):
    y = Config(cls, fprop_dtype=jnp.bfloat16, **fields).instantiate().apply({}, x)[0]
    assert y.dtype == jnp.bfloat16
    assert y.ravel()[0] == x[0, 0, 0, 0]


def test_mlp_flattens_its_input_and_applies_its_layers_in_order():
  variables, y = run(Mlp, image(), input_dims=H * W * C, hidden_dims=(7, 3), activation='tanh')
  expected = image().reshape(B, -1)
  for i in range(2):
    expected = np.tanh(expected @ variables[f'linear_{i}']['w'] + variables[f'linear_{i}']['b'])
  np.testing.assert_allclose(y, expected, atol=1e-5)


def test_conv_net_is_convolution_norm_activation_pooling():
  fields = {'input_channels': C, 'channels': (3,), 'filter_size': (3, 2)}
  variables, y = run(ConvNet, image(), **fields)
  assert variables['conv_0'].keys() == {'w'}  # A norm's own bias makes another one pointless.
  h = looped_conv(image(), variables['conv_0']['w'], (1, 1), (1, 1), 'SAME', 1)
  h = np.maximum(h / np.sqrt(1 + 1e-3), 0)  # The norm's moving mean and variance are 0 and 1 at first.
  np.testing.assert_allclose(y, looped_pool(h, (2, 2), (2, 2), 'VALID', np.max).mean((1, 2)), atol=1e-5)


def test_output_dims_are_those_of_the_output():
  for cls, fields in (
    (Mlp, {'input_dims': H * W * C, 'hidden_dims': (7, 3)}),
    (Mlp, {'input_dims': H * W * C, 'hidden_dims': ()}),
    (ConvNet, {'input_channels': C, 'channels': (3, 5)}),
  ):
    _, y = run(cls, image(), **fields)
    assert y.shape == (B, Config(cls, **fields).instantiate().output_dims)


@pytest.mark.parametrize(
  'cls, fields, message',
  [
    (Conv2D, {'filter_shape': (3, 3, 4, 6), 'groups': 3}, r'groups: 3 does not divide both 4 and 6 channels'),
    (Conv2D, {'filter_shape': (3, 3, 4, 6), 'padding': 'same'}, r"padding: .*SAME.* got 'same'"),
    (Pooling, {'padding': 'FULL'}, r"padding: .*SAME.* got 'FULL'"),
    (Pooling, {'kind': 'avg'}, r"kind: .*'mean', got 'avg'"),
    (GlobalPooling, {'kind': 'sum'}, r"kind: .*'mean', got 'sum'"),
    (Mlp, {'input_dims': 3, 'hidden_dims': (3,), 'activation': 'rleu'}, r"activation: .*Did you mean 'relu'\?"),
    (ConvNet, {'input_channels': 3, 'channels': (3,), 'activation': 'rleu'}, r"activation: .*Did you mean 'relu'\?"),
  ],
)
def test_impossible_hyperparameters_are_refused_by_name(cls, fields, message):
  with pytest.raises(ConfigError, match=message):
    Config(cls, **fields).instantiate()


def test_a_window_may_reach_over_the_padding_around_an_image_and_no_further():
  _, y = run(Conv2D, image(1, 1, 2, C), filter_shape=(3, 3, C, 1), padding='SYMMETRIC')
  assert y.shape == (1, 1, 2, 1)
  with pytest.raises(ConfigError, match=r'filter_shape: a window of 4 x 1 is larger than the image, 1 x 2'):
    run(Conv2D, image(1, 1, 2, C), filter_shape=(4, 1, C, 1), padding='SYMMETRIC')


@pytest.mark.parametrize(
  'cls, fields, message',
  [
    (Conv2D, {'filter_shape': (7, 1, C, 2)}, r'filter_shape: a window of 7 x 1 is larger than the image'),
    (Conv2D, {'filter_shape': (2, 2, C, 2), 'dilations': (1, 9)}, r'filter_shape: a window of 2 x 10 is larger'),
    (Pooling, {'window': (2, 99)}, r'window: a window of 2 x 99 is larger than the image'),
  ],
)
def test_a_window_larger_than_the_image_is_refused(cls, fields, message):
  with pytest.raises(ConfigError, match=message):
    run(cls, image(), **fields, padding='VALID')
