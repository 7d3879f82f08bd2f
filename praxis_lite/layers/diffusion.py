"""Diffusion and flow matching: schedules that turn images into noise, what a network predicts, and samplers.

    x_t = alpha(t) x + sigma(t) noise,  t from 0 to 1

    schedule   alpha, sigma                                              (paper)
    'cosine'   cos(pi t / 2), sin(pi t / 2)                              (Nichol and Dhariwal, 2021)
    'linear'   exp(-(beta_0 t + (beta_1 - beta_0) t^2 / 2) / 2), sqrt(1 - alpha^2), beta from 0.1 to 20  (DDPM, Ho et
               al., 2020, in continuous time)
    'flow'     1 - t, t                                                  (flow matching, Lipman et al., 2023)

    prediction   target of the network
    'epsilon'    noise
    'v'          alpha noise - sigma x, if alpha^2 + sigma^2 = 1         (Salimans and Ho, 2022)
    'velocity'   noise - x, which is dx_t / dt of 'flow'

The functions are pure. Times are [B], or scalars that all rows share.

B batch.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.errors import ConfigError, check_choice

SCHEDULES = ('cosine', 'linear', 'flow')
PREDICTIONS = ('epsilon', 'v', 'velocity')
SAMPLERS = ('ddim', 'ancestral', 'euler', 'heun')
_BETAS = (0.1, 20.0)
_TINY = 1e-4  # The least number that estimates of x and of the noise are divided by.


def check_process(schedule: str, prediction: str, where: str) -> None:
  """Raises ConfigError, which names `where`, if the schedule or the prediction is unknown, or they do not fit."""
  check_choice(f'{where}.schedule', schedule, SCHEDULES)
  check_choice(f'{where}.prediction', prediction, PREDICTIONS)
  fitting = {'v': ('cosine', 'linear'), 'velocity': ('flow',)}.get(prediction, SCHEDULES)
  if schedule not in fitting:
    raise ConfigError(
      f'{where}.prediction: {prediction!r} needs the schedule {" or ".join(map(repr, fitting))}, not {schedule!r}'
    )


def signal_and_noise(t: jax.Array, schedule: str) -> tuple[jax.Array, jax.Array]:
  """Returns alpha and sigma at times t, of any shape."""
  if schedule == 'cosine':
    return jnp.cos(0.5 * np.pi * t), jnp.sin(0.5 * np.pi * t)
  if schedule == 'linear':
    low, high = _BETAS
    log_alpha = -0.5 * (low * t + 0.5 * (high - low) * jnp.square(t))
    return jnp.exp(log_alpha), jnp.sqrt(-jnp.expm1(2 * log_alpha))
  return 1 - t, t


def add_noise(x: jax.Array, noise: jax.Array, t: jax.Array, schedule: str) -> jax.Array:
  """Returns x_t, [B, ...], for x and noise [B, ...] and times [B]."""
  alpha, sigma = (_expand_rows(c, x) for c in signal_and_noise(t, schedule))
  return alpha * x + sigma * noise


def prediction_target(x: jax.Array, noise: jax.Array, t: jax.Array, schedule: str, prediction: str) -> jax.Array:
  """Returns what the network should predict, [B, ...]; the arguments are the same as for `add_noise`."""
  if prediction == 'epsilon':
    return noise
  if prediction == 'velocity':
    return noise - x
  alpha, sigma = (_expand_rows(c, x) for c in signal_and_noise(t, schedule))
  return alpha * noise - sigma * x


def estimates(
  output: jax.Array, x_t: jax.Array, t: jax.Array, schedule: str, prediction: str, limit: float | None = None
) -> tuple[jax.Array, jax.Array]:
  """Returns the estimates of x and of the noise, [B, ...] each, that a prediction implies.

  Args:
    output, x_t: what the network predicts, and its input, [B, ...].
    t: [B] or a scalar.
    schedule, prediction: see the top of this file.
    limit: the largest absolute value of the estimate of x; the noise then follows from x_t and the bounded x. None
      sets no limit.
  """
  alpha, sigma = (_expand_rows(c, x_t) for c in signal_and_noise(t, schedule))
  if prediction == 'epsilon':
    x, noise = (x_t - sigma * output) / jnp.maximum(alpha, _TINY), output
  elif prediction == 'v':
    x, noise = alpha * x_t - sigma * output, sigma * x_t + alpha * output
  else:
    x, noise = x_t - sigma * output, x_t + alpha * output
  if limit is None:
    return x, noise
  bounded = jnp.clip(x, -limit, limit)
  return bounded, jnp.where(bounded == x, noise, (x_t - alpha * bounded) / jnp.maximum(sigma, _TINY))


def sample(
  predict: Callable[[jax.Array, jax.Array], jax.Array],
  start: jax.Array,
  draw: Callable[[jax.Array], jax.Array],
  *,
  num_steps: int,
  schedule: str,
  prediction: str,
  sampler: str = 'ddim',
  limit: float | None = None,
) -> jax.Array:
  """Returns samples, [B, ...], made from noise in `num_steps` steps of equal length from t = 1 to t = 0.

  A step goes from a time t to the next time s < t. x and noise are the estimates at t; see `estimates`. alpha' and
  sigma' are the derivatives of alpha and sigma with respect to t.

      'ddim'       x_s = alpha_s x + sigma_s noise                                             (Song et al., 2021)
      'ancestral'  draws x_s given x_t and x, as DDPM does
      'euler'      x_s = x_t + (s - t) dx_t/dt, with dx_t/dt = alpha' x + sigma' noise
      'heun'       like 'euler', with the mean of dx/dt at t and dx/dt at s after an 'euler' step; the last is 'euler'

  Args:
    predict: (x_t, t scalar) -> what the network predicts, [B, ...].
    start: noise of variance 1, [B, ...].
    draw: (number of the step) -> noise like `start`, for 'ancestral'.
    num_steps: at least 1; 'heun' calls the network twice in a step.
    schedule, prediction, limit: see `estimates`.
  """
  check_choice('sampler', sampler, SAMPLERS)
  # At t = 1, alpha is 0, so the noise that the network predicts says nothing about x.
  first = 0.999 if prediction == 'epsilon' and schedule != 'linear' else 1.0
  # At t = 0, the derivative of sigma of 'linear' is infinite.
  times = jnp.asarray(np.linspace(first, 0, num_steps + 1), jnp.float32)

  def estimate(x_t: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
    return estimates(predict(x_t, t), x_t, t, schedule, prediction, limit)

  def slope(x_t: jax.Array, t: jax.Array) -> jax.Array:
    x, noise = estimate(x_t, t)
    _, (of_alpha, of_sigma) = jax.jvp(lambda t: signal_and_noise(t, schedule), (t,), (jnp.ones_like(t),))
    return of_alpha * x + of_sigma * noise

  def step(x_t: jax.Array, number: jax.Array) -> jax.Array:
    t, s = times[number], times[number + 1]
    if sampler == 'euler':
      return x_t + (s - t) * slope(x_t, t)
    if sampler == 'heun':
      here = slope(x_t, t)
      return x_t + (s - t) * 0.5 * (here + slope(x_t + (s - t) * here, s))
    x, noise = estimate(x_t, t)
    alpha_s, sigma_s = signal_and_noise(s, schedule)
    if sampler == 'ddim':
      return alpha_s * x + sigma_s * noise
    alpha_t, sigma_t = signal_and_noise(t, schedule)
    kept = alpha_t * sigma_s / (alpha_s * sigma_t)
    variance = jnp.square(sigma_s) * (1 - jnp.square(kept))
    return alpha_s * x + sigma_s * kept * noise + jnp.sqrt(jnp.maximum(variance, 0)) * draw(number)

  in_loop = num_steps - (sampler == 'heun')
  x, _ = jax.lax.scan(lambda x, number: (step(x, number).astype(x.dtype), None), start, jnp.arange(in_loop))
  if sampler == 'heun':
    x = x + (times[-1] - times[-2]) * slope(x, times[-2])
  return x


def _expand_rows(c: jax.Array, x: jax.Array) -> jax.Array:
  """Returns coefficients [B] as [B, 1, ...], with the rank of x; scalars are returned unchanged."""
  return c.reshape(*c.shape, *(1,) * (x.ndim - 1)) if c.ndim else c
