"""Weight declarations: fans against the published convention, initializers against the moments they promise."""

from __future__ import annotations

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.errors import ConfigError
from praxis_lite.sharding import weights
from praxis_lite.sharding.weights import (
  WeightHParams,
  WeightHParamsCollection,
  WeightInit,
  get_fan_in_fan_out,
  init_weight,
)

SHAPE = (4, 50, 30)
FIRST, FAN_IN, FAN_OUT = 4, 200, 120

# Standard deviation of each distribution at scale 1; that of the normal cut at two standard deviations is a known
# constant: 1 - 2 * 2 phi(2) / (Phi(2) - Phi(-2)), its root.
UNIFORM, TRUNCATED = 1 / math.sqrt(3), 0.8796256610342398
EXPECTED_STDDEV = {
  'Gaussian': 1.0,
  'Uniform': UNIFORM,
  'TruncatedGaussian': TRUNCATED,
  'Constant': 0.0,
  'Xavier': math.sqrt(2 / (FAN_IN + FAN_OUT)),
  'XavierWithFixupParams': math.sqrt(2 / (FAN_IN + FAN_OUT)),
  'GeoMeanXavier': (FAN_IN * FAN_OUT) ** -0.25,
  'UniformUnitScaling': (4 * 50) ** -0.5,
  # Columns of 50 entries with a norm of sqrt(50 / 30) at one of four places.
  'ScaledDeltaOrthogonal': math.sqrt(1 / 30 / 4),
  'TruncatedGaussianSqrtDim': TRUNCATED * FIRST**-0.5,
  'TruncatedGaussianFanOut': TRUNCATED * FAN_OUT**-0.5,
  'GaussianSqrtDim': FIRST**-0.5,
  'GaussianFanIn': FAN_IN**-0.5,
  'GaussianFanOut': FAN_OUT**-0.5,
  'GaussianFanAvg': ((FAN_IN + FAN_OUT) / 2) ** -0.5,
  'TruncatedGaussianFanIn': TRUNCATED * FAN_IN**-0.5,
  'UniformSqrtDim': UNIFORM * FIRST**-0.5,
  'UniformFanIn': UNIFORM * FAN_IN**-0.5,
}
CONSTRUCTORS = [name for name, _ in inspect.getmembers(WeightInit, inspect.ismethod)]


def draw(init, shape=SHAPE, seed=0, **fields):
  return np.asarray(init_weight(WeightHParams(shape, init=init, dtype=jnp.float32, **fields), jax.random.key(seed)))


@pytest.mark.parametrize(
  'shape, axes, expected',
  [
    ([], {}, (None, None)),
    ([1024], {}, (1024, 1024)),
    ([64, 1024, 8192], {}, (65536, 524288)),
    ([64, 1024, 8192], {'fan_in_axes': (-2,), 'fan_out_axes': (-1,)}, (1024, 8192)),
    ([3, 1024, 32, 128], {}, (98304, 393216)),
    ([3, 1024, 32, 128], {'fan_in_axes': (-3,), 'fan_out_axes': (-2, -1)}, (1024, 4096)),
  ],
)
def test_fans(shape, axes, expected):
  assert get_fan_in_fan_out(shape, **axes) == expected


@pytest.mark.parametrize('name', CONSTRUCTORS)
def test_initializer_has_the_promised_mean_and_stddev(name):
  scale = 2.5
  value = draw(getattr(WeightInit, name)(scale))
  if name == 'Constant':
    np.testing.assert_array_equal(value, np.full(SHAPE, scale, np.float32))
    return
  expected = scale * EXPECTED_STDDEV[name]
  assert value.shape == SHAPE
  assert value.std() == pytest.approx(expected, rel=0.03)
  assert abs(value.mean()) < 4 * expected / math.sqrt(value.size)


@pytest.mark.parametrize(
  'init, bound',
  [
    (WeightInit.Uniform(0.3), 0.3),
    (WeightInit.UniformFanIn(2.0), 2 * FAN_IN**-0.5),
    (WeightInit.TruncatedGaussian(0.3), 0.6),
    (WeightInit.Xavier(1.5), 1.5 * math.sqrt(6 / (FAN_IN + FAN_OUT))),
    (WeightInit.XavierWithFixupParams(1.5, 16, 2), 1.5 / 2 * math.sqrt(6 / (FAN_IN + FAN_OUT))),
    (WeightInit.GeoMeanXavier(1.5), 1.5 * math.sqrt(3 / math.sqrt(FAN_IN * FAN_OUT))),
    (WeightInit.UniformUnitScaling(1.5), 1.5 * math.sqrt(3 / (4 * 50))),
  ],
)
def test_bounded_initializers_reach_up_to_their_bound_and_not_beyond(init, bound):
  largest = np.abs(draw(init)).max()
  assert 0.95 * bound < largest <= bound * (1 + 1e-6)


@pytest.mark.parametrize('shape', [(6, 4), (4, 6), (1, 5), (3, 6, 4), (2, 3, 4, 6)])
def test_delta_orthogonal_is_an_orthogonal_matrix_in_the_middle_of_zeros(shape):
  value, (*window, inputs, outputs) = draw(WeightInit.ScaledDeltaOrthogonal(0.5), shape=shape), shape
  middle = tuple((size - 1) // 2 for size in window)
  matrix = value[middle]
  product = matrix @ matrix.T if inputs <= outputs else matrix.T @ matrix
  scale = 0.25 * max(inputs / outputs, 1)
  np.testing.assert_allclose(product, scale * np.eye(min(inputs, outputs)), atol=1e-6)
  assert np.count_nonzero(value) == np.count_nonzero(matrix)


def test_delta_orthogonal_in_bfloat16_and_repeated():
  one = WeightHParams((3, 3, 4, 4), init=WeightInit.ScaledDeltaOrthogonal(), dtype=jnp.bfloat16)
  value = init_weight(one.repeat(2), jax.random.key(0))
  assert value.shape == (2, 3, 3, 4, 4) and value.dtype == jnp.bfloat16
  first, second = np.asarray(value[:, 1, 1], np.float32)
  np.testing.assert_allclose(first @ first.T, np.eye(4), atol=0.03)
  assert np.abs(first - second).max() > 0.1


def test_gaussian_is_a_gaussian():
  value = draw(WeightInit.Gaussian())
  assert np.mean(np.abs(value) < 1) == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.02)
  assert np.abs(value).max() > 3


def test_declared_fan_axes_are_used():
  weight = {'shape': (40, 5, 30), 'fan_in_axes': (0,), 'fan_out_axes': (1, 2)}
  assert draw(WeightInit.GaussianFanIn(), **weight).std() == pytest.approx(40**-0.5, rel=0.05)
  assert draw(WeightInit.GaussianFanOut(), **weight).std() == pytest.approx(150**-0.5, rel=0.05)
  with pytest.raises(ConfigError, match=r'fan_in_axes=\(0,\) and fan_out_axes=None: give both, or neither'):
    WeightHParams((40, 5), fan_in_axes=(0,))


@pytest.mark.parametrize('name', CONSTRUCTORS)
def test_scalars_and_vectors_can_be_drawn(name):
  for shape in ((), (3,)):
    value = draw(getattr(WeightInit, name)(1.0), shape=shape)
    assert value.shape == shape
    assert np.isfinite(value).all()


def test_values_are_a_function_of_the_key():
  np.testing.assert_array_equal(draw(WeightInit.Gaussian(), seed=1), draw(WeightInit.Gaussian(), seed=1))
  assert not np.array_equal(draw(WeightInit.Gaussian(), seed=1), draw(WeightInit.Gaussian(), seed=2))


@pytest.mark.parametrize('method', ['gaussian', 'uniform', 'truncated_gaussian'])
def test_a_weight_drawn_alone_is_that_of_a_larger_program_and_is_quick_to_compile(method):
  quick = weights._quick_draw('cpu')
  for weight in (WeightHParams((3, 5), WeightInit(method, 0.3)), WeightHParams((5,), WeightInit(method), 'bfloat16')):
    for one in (weight, weight.repeat(2)):
      for key in (jax.random.key(1), jax.random.PRNGKey(1)):
        alone = init_weight(one, key)
        within = jax.jit(lambda k, one=one: init_weight(one, k))(key)
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (alone, within)), rtol=1e-6, atol=1e-7)
  assert (compiled := quick._cache_size())
  init_weight(WeightHParams((3, 5), WeightInit(method, 0.7)), jax.random.key(2))  # Another scale is no other program.
  on_two = jax.device_put(jax.random.key(1), jax.NamedSharding(jax.make_mesh((2,), 'x'), jax.P()))
  init_weight(WeightHParams((7, 5), WeightInit(method)), on_two)  # This has no guards, so it is for one device.
  assert quick._cache_size() == compiled


def test_a_key_may_be_an_array_of_numpy():
  weight, raw = WeightHParams((3, 5), WeightInit.Gaussian(0.7)), np.array([0, 1], np.uint32)
  np.testing.assert_array_equal(init_weight(weight, raw), init_weight(weight, jax.random.key(1)))


def test_dtype_of_the_declaration_is_that_of_the_value():
  for dtype in (jnp.bfloat16, jnp.float32, jnp.int32):
    weight = WeightHParams((3,), init=WeightInit.Constant(2.0), dtype=dtype)
    assert init_weight(weight, jax.random.key(0)).dtype == dtype == weight.as_struct().dtype


def test_repeated_weights_are_drawn_independently_at_the_scale_of_one():
  one = WeightHParams((50, 30), init=WeightInit.GaussianFanIn(), dtype=jnp.float32)
  value = np.asarray(init_weight(one.repeat(6), jax.random.key(0)))
  assert value.shape == (6, 50, 30)
  correlations = np.corrcoef(value.reshape(6, -1))
  assert np.abs(correlations - np.eye(6)).max() < 0.1
  np.testing.assert_allclose(value.std(axis=(1, 2)), 50**-0.5, rtol=0.1)


def test_repeating_twice_puts_the_outer_dimension_first():
  weight = WeightHParams((5, 7), tensor_split_dims_mapping=('data', None)).repeat(3).repeat(2, 'stage')
  assert weight.full_shape == (2, 3, 5, 7) == weight.as_struct().shape
  assert weight.full_split_dims_mapping == ('stage', None, 'data', None)
  assert WeightHParams((5, 7)).repeat(3, 'stage').full_split_dims_mapping == ('stage', None, None)


def test_trainable_unless_marked():
  assert WeightHParams((2,)).trainable
  assert not WeightHParams((2,), collections=frozenset({WeightHParamsCollection.NON_TRAINABLE})).trainable


def test_declarations_are_leaves_of_a_tree():
  tree = {'a': WeightHParams((2,)), 'b': {'c': WeightHParams((3,))}}
  assert [w.shape for w in jax.tree.leaves(tree)] == [(2,), (3,)]


def test_unknown_initializer_names_the_known_ones():
  with pytest.raises(ConfigError, match=r"'gausian'.*gaussian_fan_in"):
    WeightInit('gausian')


def test_weight_without_initializer_says_where_to_set_one():
  with pytest.raises(ConfigError, match='params_init'):
    init_weight(WeightHParams((2,)), jax.random.key(0))
