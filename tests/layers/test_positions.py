"""Positions: formulas in NumPy, and the properties they are chosen for."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import (
  LearnedPositions,
  RelativeBias,
  RotaryPositions,
  SinusoidalPositions,
  SinusoidalPositions2D,
  grid_positions,
)
from praxis_lite.layers.positions import (
  LinearRotaryScaling,
  Llama3RotaryScaling,
  LongRotaryScaling,
  YarnRotaryScaling,
  relative_position_bucket,
)

B, T, D, N, H = 2, 5, 6, 3, 8


def normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def positions():
  """Two packed rows: positions begin anew within a row."""
  return np.array([[0, 1, 2, 0, 1], [3, 4, 5, 6, 7]], np.int32)


def run(cls, variables, *args, **fields):
  return np.asarray(Config(cls, **fields).instantiate().apply(variables, *args)[0], np.float32)


# ---------------------------------------------------------------- sinusoidal, learned


@pytest.mark.parametrize('dims', [6, 7, 2])
def test_sinusoids_are_those_of_the_formula(dims):
  y = run(SinusoidalPositions, {}, positions(), dims=dims, min_timescale=2.0, max_timescale=50.0)
  scales = np.geomspace(2, 50, dims // 2) if dims > 2 else np.array([2.0])
  angles = positions()[..., None] / scales
  expected = np.concatenate([np.sin(angles), np.cos(angles), np.zeros((B, T, dims % 2))], axis=-1)
  np.testing.assert_allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize('middle', [(0, 0), (1.5, 2.0)], ids=['corner', 'middle'])
def test_sinusoids_of_a_grid_are_those_of_rows_and_columns(middle):
  """Counted from the middle, they are those of Praxis's PositionalEmbedding2D; see docs/from-pax.md."""
  (height, width), dims = (3, 4), 12
  rows, columns = (place - start for place, start in zip(grid_positions(height, width), middle))
  y = run(SinusoidalPositions2D, {}, np.float32(rows), np.float32(columns), dims=dims)
  assert y.shape == (1, height * width, dims)
  rates = 10_000 ** (-np.arange(3) / 3)
  for i in range(height):
    for j in range(width):
      of_row, of_column = (i - middle[0]) * rates, (j - middle[1]) * rates
      expected = np.concatenate([np.sin(of_row), np.cos(of_row), np.sin(of_column), np.cos(of_column)])
      np.testing.assert_allclose(y[0, i * width + j], expected, atol=1e-5)


def test_sinusoids_of_some_patches_are_those_of_the_grid():
  """As a masked autoencoder needs them, each row with patches of its own."""
  rows, columns = grid_positions(3, 4)
  every = run(SinusoidalPositions2D, {}, rows, columns, dims=8)
  kept = np.array([[5, 0, 11], [7, 7, 2]])
  y = run(SinusoidalPositions2D, {}, rows[0][kept], columns[0][kept], dims=8)
  np.testing.assert_allclose(y, every[0][kept], rtol=1e-6)


def test_dims_of_a_grid_that_are_no_multiple_of_4_are_refused():
  with pytest.raises(ConfigError, match=r'SinusoidalPositions2D\.dims: expected a multiple of 4, got 6'):
    Config(SinusoidalPositions2D, dims=6).instantiate()


@pytest.mark.parametrize('dims', [2, 6, 7])
@pytest.mark.parametrize('m, M', [(1.0, 10_000.0), (2.0, 50.0), (0.5, 100.0)])
def test_sinusoids_of_praxis_have_other_timescales(dims, m, M):
  """Its rates are m * exp(-i log(M / m) / (count - 1)); see docs/from-pax.md."""
  y = run(SinusoidalPositions, {}, positions(), dims=dims, min_timescale=1 / m, max_timescale=M / m**2)
  count = dims // 2
  rates = m * np.exp(-np.arange(count) * np.log(M / m) / max(count - 1, 1))
  angles = positions()[..., None] * rates
  expected = np.concatenate([np.sin(angles), np.cos(angles), np.zeros((B, T, dims % 2))], axis=-1)
  np.testing.assert_allclose(y, expected, atol=1e-5)


def test_sinusoids_of_far_positions_are_accurate_in_bfloat16():
  """The angle is computed in float32; in bfloat16, position 4001 would be 4000."""
  far = np.array([[4001]], np.int32)
  y = run(SinusoidalPositions, {}, far, dims=2, fprop_dtype=jnp.bfloat16)
  np.testing.assert_allclose(y[0, 0], [np.sin(4001), np.cos(4001)], atol=0.01)


def test_learned_positions_are_rows_of_a_table():
  table = normal(8, D)
  np.testing.assert_array_equal(run(LearnedPositions, {'w': table}, positions(), max_len=8, dims=D), table[positions()])


def test_positions_past_the_table_show_and_padding_does_not():
  layer, table = Config(LearnedPositions, max_len=8, dims=D).instantiate(), {'w': normal(8, D)}
  y = jax.jit(lambda pos: layer.apply(table, pos)[0])(np.array([[7, 8, -1]]))
  np.testing.assert_array_equal(np.isnan(y).any(-1), [[False, True, False]])


# ---------------------------------------------------------------- rotary


def test_rotary_multiplies_complex_numbers_by_phases():
  """Dims i and i + H/2 are the real and imaginary part of one number."""
  x = normal(B, T, N, H)
  y = run(RotaryPositions, {}, x, positions(), dims=H, max_timescale=100.0)
  numbers = x[..., : H // 2] + 1j * x[..., H // 2 :]
  rates = 100.0 ** (-np.arange(H // 2) / (H // 2))
  turned = numbers * np.exp(1j * positions()[:, :, None, None] * rates)
  np.testing.assert_allclose(y, np.concatenate([turned.real, turned.imag], axis=-1), atol=1e-5)


def test_interleaved_rotary_positions_pair_neighbours():
  x, order = normal(B, T, N, H), np.arange(H).reshape(2, -1).T.ravel()  # 0, H/2, 1, H/2 + 1, ...
  by_halves = run(RotaryPositions, {}, x, positions(), dims=H, max_timescale=100.0)
  found = run(RotaryPositions, {}, x[..., order], positions(), dims=H, max_timescale=100.0, interleaved=True)
  np.testing.assert_array_equal(found, by_halves[..., order])


def test_rotary_timescales_are_those_of_praxis():
  """Pair i turns by position / (min * (max / min)^(2 i / H))."""
  x = normal(B, T, N, H)
  y = run(RotaryPositions, {}, x, positions(), dims=H, min_timescale=4.0, max_timescale=100.0)
  timescales = 4.0 * (100.0 / 4.0) ** (2 * np.arange(H // 2) / H)
  angles = positions()[:, :, None, None] / timescales
  first, second = np.split(x, 2, axis=-1)
  expected = [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)]
  np.testing.assert_allclose(y, np.concatenate(expected, axis=-1), atol=1e-5)


def test_rotary_products_depend_on_offsets_alone():
  query, key = normal(1, 1, 1, H), normal(1, 1, 1, H, seed=1)

  def product(query_pos, key_pos):
    turned = [run(RotaryPositions, {}, x, np.array([[pos]]), dims=H) for x, pos in ((query, query_pos), (key, key_pos))]
    return float((turned[0] * turned[1]).sum())

  for offset in (-3, 0, 5):
    np.testing.assert_allclose(product(7 + offset, 7), product(207 + offset, 207), atol=1e-4)
  assert abs(product(7, 7) - product(10, 7)) > 0.1


def test_rotary_counts_from_zero_where_no_positions_are_given():
  x = normal(B, T, N, H)
  counted = np.broadcast_to(np.arange(T), (B, T))
  np.testing.assert_array_equal(run(RotaryPositions, {}, x, dims=H), run(RotaryPositions, {}, x, counted, dims=H))


def test_rotary_keeps_lengths_and_leaves_position_zero():
  x = normal(B, T, N, H)
  y = run(RotaryPositions, {}, x, dims=H)
  np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)
  np.testing.assert_array_equal(y[:, 0], x[:, 0])


def test_rotary_of_far_positions_is_accurate_in_bfloat16():
  x = np.zeros((1, 1, 1, 2), np.float32)
  x[..., 0] = 1
  layer = Config(RotaryPositions, dims=2, fprop_dtype=jnp.bfloat16).instantiate()
  y, _ = layer.apply({}, jnp.asarray(x, jnp.bfloat16), np.array([[4001]], np.int32))
  assert y.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(y, np.float32).ravel(), [np.cos(4001), np.sin(4001)], atol=0.01)


def test_linear_scaling_divides_positions():
  x = normal(B, T, N, H)
  scaled = run(RotaryPositions, {}, x, 4 * positions(), dims=H, scaling_tpl=Config(LinearRotaryScaling, factor=4.0))
  np.testing.assert_allclose(scaled, run(RotaryPositions, {}, x, positions(), dims=H), atol=1e-5)


def test_llama3_scaling_slows_the_slow_rates_only():
  scaling = Llama3RotaryScaling(factor=8.0, original_max_len=100)
  per_turn = 2 * np.pi / 100  # Of a pair that turns once in the original context.
  rates = per_turn * np.array([0.5, 1.0, 2.5, 4.0, 50.0])
  np.testing.assert_allclose(scaling(rates) / rates, [1 / 8, 1 / 8, (1 + 1 / 8) / 2, 1, 1], rtol=1e-6)
  with pytest.raises(ConfigError, match=r'low_freq_factor, 4.0, must be less than high_freq_factor, 4.0'):
    Llama3RotaryScaling(factor=8.0, original_max_len=100, low_freq_factor=4.0)


def test_yarn_scaling_has_the_rates_and_the_magnitude_of_transformers():
  config = Config(YarnRotaryScaling, factor=32.0, original_max_len=4096)
  scaling = config.instantiate()
  rates = 10_000.0 ** -(np.arange(32) / 32)
  theirs = [1.0, 0.1, 0.0269097686, 0.00552884629, 0.000805772666, 4.1672547e-06]
  np.testing.assert_allclose(scaling(rates)[[0, 8, 12, 16, 20, 31]], theirs, rtol=1e-7)
  assert scaling.magnitude == pytest.approx(1.3465735902799727)
  x = normal(1, 1, 1, 64)
  rotated = run(RotaryPositions, {}, x, positions()[:1, :1], dims=64, scaling_tpl=config)
  np.testing.assert_allclose(np.linalg.norm(rotated), scaling.magnitude * np.linalg.norm(x), rtol=1e-6)
  with pytest.raises(ConfigError, match=r'beta_slow, 32.0, must be less than beta_fast, 32.0'):
    YarnRotaryScaling(factor=32.0, original_max_len=4096, beta_slow=32.0)


def test_long_scaling_has_factors_for_short_and_for_long_contexts():
  config = Config(LongRotaryScaling, factor=4.0, original_max_len=24, short_factors=(1.0, 2.0), long_factors=(3.0, 8.0))
  rates = np.array([1.0, 0.1])
  for is_long, expected in ((False, [1.0, 0.05]), (True, [1 / 3, 0.0125])):
    scaling = config.clone().set(is_long=is_long).instantiate()
    np.testing.assert_allclose(scaling(rates), expected, rtol=1e-12)
    assert scaling.magnitude == pytest.approx(np.sqrt(1 + np.log(4) / np.log(24)))
  assert config.clone().set(factor=1.0).instantiate().magnitude == 1
  assert config.clone().set(attention_factor=1.2).instantiate().magnitude == 1.2
  with pytest.raises(ConfigError, match='short_factors: 2 factors for 3 pairs of dims'):
    Config(RotaryPositions, dims=6, name='rotary', scaling_tpl=config).instantiate()


def test_odd_dims_cannot_be_rotated():
  with pytest.raises(ConfigError, match=r'dims: rotary positions rotate pairs of dims, and 7 is odd'):
    Config(RotaryPositions, dims=7).instantiate()


# ---------------------------------------------------------------- relative bias


def test_t5_buckets_of_reference_offsets():
  offsets = jnp.array([5, 2, 0, 12, -3, -1, -15, 1])
  np.testing.assert_array_equal(relative_position_bucket(offsets, 8, 8, True), [7, 6, 0, 7, 2, 1, 3, 5])


def exact_bucket(offset, num_buckets, max_distance, bidirectional):
  """T5's definition in rational numbers: where the logarithms are equal, powers are."""
  base = 0
  if bidirectional:
    num_buckets //= 2
    base = num_buckets if offset > 0 else 0
    distance = abs(offset)
  else:
    distance = max(-offset, 0)
  exact = num_buckets // 2
  if distance < exact:
    return base + distance
  far = num_buckets - exact
  ratio = Fraction(distance, exact) ** far
  return base + exact + sum(Fraction(max_distance, exact) ** k <= ratio for k in range(1, far))


@pytest.mark.parametrize(
  'num_buckets, max_distance, bidirectional', [(32, 128, True), (32, 128, False), (8, 8, True), (64, 256, True)]
)
def test_t5_buckets_are_exact_at_their_edges(num_buckets, max_distance, bidirectional):
  offsets = np.arange(-2 * max_distance, 2 * max_distance + 1)
  actual = relative_position_bucket(jnp.asarray(offsets), num_buckets, max_distance, bidirectional)
  expected = [exact_bucket(int(o), num_buckets, max_distance, bidirectional) for o in offsets]
  np.testing.assert_array_equal(actual, expected)


def test_bias_is_looked_up_by_head_and_bucket():
  table = normal(8, N)
  fields = {'num_heads': N, 'num_buckets': 8, 'max_distance': 8, 'bidirectional': True}
  query_pos, key_pos = positions(), positions()[:, :4]
  y = run(RelativeBias, {'w': table}, query_pos, key_pos, **fields)
  assert y.shape == (B, N, T, 4)
  for b, n, t, s in np.ndindex(y.shape):
    assert y[b, n, t, s] == table[exact_bucket(int(key_pos[b, s] - query_pos[b, t]), 8, 8, True), n]


@pytest.mark.parametrize('fields', [{'num_buckets': 2, 'bidirectional': True}, {'num_buckets': 32, 'max_distance': 16}])
def test_too_few_buckets_are_refused(fields):
  with pytest.raises(ConfigError, match='num_buckets hold'):
    Config(RelativeBias, num_heads=N, **fields).instantiate()


def test_gradients_reach_the_bias():
  layer = Config(RelativeBias, num_heads=N, num_buckets=8).instantiate()
  pos, of_y = positions(), normal(B, N, T, T)
  gradient = jax.grad(lambda w: jnp.sum(layer.apply({'w': w}, pos, pos)[0] * of_y))(normal(8, N))
  expected = np.zeros((8, N))
  for b, n, t, s in np.ndindex(of_y.shape):
    expected[exact_bucket(int(pos[b, s] - pos[b, t]), 8, 128, False), n] += of_y[b, n, t, s]
  np.testing.assert_allclose(gradient, expected, atol=1e-5)
