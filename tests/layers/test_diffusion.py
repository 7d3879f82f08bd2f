"""Diffusion: schedules and targets by their formulas, samplers on Gaussians with a known score, and DiT in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import DiffusionTransformer, ModulatedBlock
from praxis_lite.layers.diffusion import (
  SAMPLERS,
  add_noise,
  check_process,
  estimates,
  prediction_target,
  sample,
  signal_and_noise,
)
from praxis_lite.layers.image_coders import to_patches, to_pixels

PROCESSES = [('cosine', 'v'), ('cosine', 'epsilon'), ('linear', 'epsilon'), ('linear', 'v'), ('flow', 'velocity')]
MEAN, DEVIATION = 0.7, 0.4


def normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize('schedule, prediction', PROCESSES)
def test_a_right_prediction_gives_back_image_and_noise(schedule, prediction):
  x, noise, t = normal(4, 2, 3), normal(4, 2, 3, seed=1), jnp.array([0.1, 0.4, 0.6, 0.9])
  x_t = add_noise(x, noise, t, schedule)
  target = prediction_target(x, noise, t, schedule, prediction)
  for found, expected in zip(estimates(target, x_t, t, schedule, prediction), (x, noise)):
    np.testing.assert_allclose(found, expected, atol=2e-4)
  bounded, rest = estimates(target, x_t, t, schedule, prediction, limit=0.5)
  np.testing.assert_allclose(bounded, np.clip(x, -0.5, 0.5), atol=2e-4)
  alpha, sigma = (np.asarray(c)[:, None, None] for c in signal_and_noise(t, schedule))
  np.testing.assert_allclose(alpha * bounded + sigma * rest, x_t, atol=1e-4)


def test_schedules_are_their_formulas_and_end_in_noise():
  t = np.linspace(0, 1, 5)
  alpha, sigma = signal_and_noise(jnp.array(t), 'linear')
  beta = 0.1 * t + 19.9 * t**2 / 2  # The integral of beta.
  np.testing.assert_allclose(alpha, np.exp(-beta / 2), rtol=1e-5)
  np.testing.assert_allclose(np.square(alpha) + np.square(sigma), 1, atol=1e-6)
  for schedule in ('cosine', 'linear', 'flow'):
    alpha, sigma = signal_and_noise(jnp.array([0.0, 1.0]), schedule)
    np.testing.assert_allclose(alpha, [1, 0], atol=0.01)
    np.testing.assert_allclose(sigma, [0, 1], atol=0.01)


def gaussian_prediction(x_t, t, schedule, prediction):
  """The best prediction for images that are normal: E[x | x_t] in closed form."""
  alpha, sigma = signal_and_noise(t, schedule)
  variance = (alpha * DEVIATION) ** 2 + sigma**2
  x = MEAN + alpha * DEVIATION**2 / variance * (x_t - alpha * MEAN)
  noise = sigma / variance * (x_t - alpha * MEAN)
  return prediction_target(x, noise, jnp.broadcast_to(t, x_t.shape[:1]), schedule, prediction)


# Quick are all samplers with a process, and all processes with a sampler.
@pytest.mark.parametrize(
  'sampler, schedule, prediction',
  [
    pytest.param(sampler, *process, marks=[pytest.mark.slow] * (sampler != SAMPLERS[0] and process != PROCESSES[0]))
    for sampler in SAMPLERS
    for process in PROCESSES
  ],
)
def test_samplers_reach_the_mean_and_the_variance_of_a_gaussian(sampler, schedule, prediction):
  key, steps = jax.random.key(0), 200

  @jax.jit
  def run(start):
    return sample(
      lambda x_t, t: gaussian_prediction(x_t, t, schedule, prediction),
      start,
      lambda number: jax.random.normal(jax.random.fold_in(key, number), start.shape),
      num_steps=steps,
      schedule=schedule,
      prediction=prediction,
      sampler=sampler,
    )

  x = np.asarray(run(jnp.asarray(normal(20_000, 1))))
  assert x.mean() == pytest.approx(MEAN, abs=0.02)
  assert x.std() == pytest.approx(DEVIATION, rel=0.05 if sampler in ('euler', 'ancestral') else 0.03)


def test_patches_and_pixels_are_inverse_and_row_by_row():
  x = normal(2, 4, 6, 3)
  patches = to_patches(x, 2, 2)
  np.testing.assert_array_equal(patches[0, 1, 2], x[0, 2:4, 4:6].ravel())
  np.testing.assert_array_equal(to_pixels(patches, 2), x)


def standardize(x):
  return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


def silu(x):
  return x / (1 + np.exp(-x))


def gelu(x):
  return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def linear(v, x):
  return x @ v['w'] + v['b']


def block_by_hand(v, x, c):
  """A block on [T, D] with the condition [D]."""
  shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = np.split(linear(v['modulation'], silu(c)), 6)
  h = standardize(x) * (1 + scale_a) + shift_a
  q, k, value = (
    np.einsum('td,dnh->tnh', h, v['attention'][n]['w']) + v['attention'][n]['b'] for n in ('query', 'key', 'value')
  )
  logits = np.einsum('tnh,snh->nts', q, k) / np.sqrt(q.shape[-1])
  p = np.exp(logits - logits.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  out = np.einsum('nts,snh->tnh', p, value)
  x = x + gate_a * (
    np.einsum('tnh,nhd->td', out, v['attention']['out']['w'].reshape(*q.shape[1:], -1)) + v['attention']['out']['b']
  )
  h = standardize(x) * (1 + scale_f) + shift_f
  return x + gate_f * linear(v['ff']['down'], gelu(linear(v['ff']['up'], h)))


def drawn(layer):
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda w: (0.3 * rng.standard_normal(w.full_shape)).astype(np.float32), layer.abstract_init())


def test_dit_is_its_formulas():
  config = Config(DiffusionTransformer, image_channels=2, model_dims=8, num_layers=2, num_heads=2, num_classes=3)
  layer = config.instantiate()
  v, x, t, classes = drawn(layer), normal(2, 4, 6, 2), np.array([0.2, 0.9], np.float32), np.array([3, 1], np.int32)
  y, _ = layer.apply(v, x, t, classes)
  quarter = 10_000.0 ** (-np.arange(2) / 2)
  rates = np.exp(-np.log(10_000) * np.arange(128) / 128)
  for row in range(2):
    angles = 1000 * t[row] * rates
    c = linear(v['time']['out'], silu(linear(v['time']['enter'], np.concatenate([np.cos(angles), np.sin(angles)]))))
    c = c + v['classes']['w'][classes[row]]
    h = np.stack([x[row, i : i + 2, j : j + 2].ravel() for i in (0, 2) for j in (0, 2, 4)])
    h = linear(v['patch'], h)
    for n, (i, j) in enumerate((i, j) for i in range(2) for j in range(3)):
      h[n] += np.concatenate([f(p * quarter) for p in (i, j) for f in (np.sin, np.cos)])
    for turn in range(2):
      h = block_by_hand(jax.tree.map(lambda w, turn=turn: w[turn], v['blocks']['layers']), h, c)
    shift, scale = np.split(linear(v['modulation'], silu(c)), 2)
    h = linear(v['out'], standardize(h) * (1 + scale) + shift)
    for n, (i, j) in enumerate((i, j) for i in (0, 2) for j in (0, 2, 4)):
      np.testing.assert_allclose(y[row, i : i + 2, j : j + 2], h[n].reshape(2, 2, 2), rtol=2e-3, atol=2e-3)


def test_new_blocks_change_nothing_and_a_new_network_predicts_zero():
  block = Config(ModulatedBlock, input_dims=8, hidden_dims=9, num_heads=2).instantiate()
  x = normal(2, 3, 8)
  np.testing.assert_array_equal(block.apply(block.init(jax.random.key(0)), x, normal(2, 8))[0], x)
  network = Config(DiffusionTransformer, image_channels=1, model_dims=8, num_layers=1, num_heads=2).instantiate()
  y, _ = network.apply(network.init(jax.random.key(0)), normal(1, 2, 4, 1), np.zeros(1, np.float32))
  np.testing.assert_array_equal(y, np.zeros((1, 2, 4, 1)))


def test_impossible_settings_are_refused():
  with pytest.raises(ConfigError, match=r"task\.model\.prediction: 'v' needs the schedule 'cosine' or 'linear'"):
    check_process('flow', 'v', 'task.model')
  with pytest.raises(ConfigError, match=r"schedule: .*Did you mean 'cosine'"):
    check_process('cosin', 'v', 'task.model')
  network = Config(DiffusionTransformer, image_channels=1, model_dims=8, num_layers=1, num_heads=2).instantiate()
  with pytest.raises(ConfigError, match=r'multiples of patch_size, 2, got the shape \[1, 3, 4, 1\]'):
    network.apply(network.init(jax.random.key(0)), normal(1, 3, 4, 1), np.zeros(1, np.float32))
