"""Stacked frames against windows cut by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import StackingOverTime


def stacking(**fields):
  return Config(StackingOverTime, **fields).instantiate()


def by_hand(x, outside, left, right, stride, copy_left=False, copy_right=False):
  """Returns [B, U, W, ...] for x [B, T, ...]."""
  T = x.shape[1]

  def frame(t):
    if 0 <= t < T:
      return x[:, t]
    if t < 0:
      return x[:, 0] if copy_left else np.full_like(x[:, 0], outside)
    return x[:, -1] if copy_right else np.full_like(x[:, 0], outside)

  windows = [np.stack([frame(t) for t in range(u - left, u + right + 1)], axis=1) for u in range(0, T, stride)]
  return np.stack(windows, axis=1)


def test_the_example_of_the_docstring():
  x = np.array([4, 1, 9, 3, 5, 2, 8], np.float32).reshape(1, 7, 1)
  y, paddings = stacking(left_context=1, right_context=1, stride=3).apply({}, x)[0]
  np.testing.assert_array_equal(y[0], [[0, 4, 1], [9, 3, 5], [2, 8, 0]])
  assert paddings is None


@pytest.mark.slow_cases
@pytest.mark.parametrize('length', [1, 6])
@pytest.mark.parametrize('left, right, stride', [(0, 0, 1), (2, 1, 1), (1, 0, 3), (3, 4, 2)])
def test_windows_of_frames_and_paddings(left, right, stride, length):
  rng = np.random.default_rng(0)
  x, paddings = (
    rng.standard_normal((2, length, 3)).astype(np.float32),
    rng.integers(0, 2, (2, length)).astype(np.float32),
  )
  for copies in ((False, False), (True, False), (True, True)):
    layer = stacking(
      left_context=left,
      right_context=right,
      stride=stride,
      pad_with_left_frame=copies[0],
      pad_with_right_frame=copies[1],
    )
    y, stacked = layer.apply({}, x, paddings)[0]
    expected = by_hand(x, 0, left, right, stride, *copies)
    assert y.shape == (2, -(-length // stride), 3 * layer.window_size)
    np.testing.assert_array_equal(y, expected.reshape(y.shape))
    of_paddings = by_hand(paddings, 1, left, right, stride, *copies)
    np.testing.assert_array_equal(stacked, of_paddings.min(axis=-1))


@pytest.mark.parametrize('dtype', [bool, np.int32, np.float32])
def test_a_window_is_padding_if_all_or_any_of_its_frames_are(dtype):
  x, paddings = np.zeros((1, 4, 1), np.float32), np.array([[0, 0, 1, 1]], dtype)
  fields = {'left_context': 1, 'stride': 1}
  _, least = stacking(**fields).apply({}, x, paddings)[0]
  np.testing.assert_array_equal(least, [[0, 0, 0, 1]])
  _, most = stacking(**fields, padding_reduce_option='reduce_max').apply({}, x, paddings)[0]
  np.testing.assert_array_equal(most, [[1, 0, 1, 1]])
  assert least.dtype == most.dtype == dtype


@pytest.mark.parametrize('left, right, stride', [(0, 0, 1), (2, 1, 4), (3, 0, 3), (1, 3, 2)])
@pytest.mark.parametrize('length', [1, 8])
def test_unstacking_returns_the_frames(left, right, stride, length):
  x = np.random.default_rng(0).standard_normal((2, length, 3)).astype(np.float32)
  layer = stacking(left_context=left, right_context=right, stride=stride)
  (y, _), _ = layer.apply({}, x)
  frames, _ = layer.apply({}, y, method='unstack')
  num_windows = -(-length // stride)
  assert frames.shape == (2, (num_windows - 1) * stride + right + 1, 3)
  real = min(length, frames.shape[1])
  np.testing.assert_array_equal(frames[:, :real], x[:, :real])
  np.testing.assert_array_equal(frames[:, real:], 0 * frames[:, real:])


def test_the_gradient_of_a_frame_counts_its_windows():
  layer = stacking(left_context=1, right_context=1)
  grad = jax.grad(lambda x: jnp.sum(layer.apply({}, x)[0][0]))(jnp.ones((1, 4, 2)))
  np.testing.assert_array_equal(grad[0], [[2, 2], [3, 3], [3, 3], [2, 2]])


def test_mistakes_are_named():
  with pytest.raises(ConfigError, match=r'StackingOverTime\.left_context: expected at least 0, got -1'):
    stacking(left_context=-1)
  with pytest.raises(ConfigError, match=r'StackingOverTime\.stride: expected at least 1, got 0'):
    stacking(stride=0)
  with pytest.raises(ConfigError, match=r"padding_reduce_option: expected 'reduce_min' or 'reduce_max', got 'min'"):
    stacking(padding_reduce_option='min')
  with pytest.raises(ConfigError, match=r'StackingOverTime\.stride: 3 skips frames between windows of 2'):
    stacking(left_context=1, stride=3).apply({}, np.ones((1, 2, 2), np.float32), method='unstack')
