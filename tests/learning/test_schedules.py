"""Schedules have the values of their formulas at every step."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite.common.config import Config, target
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.common.errors import ConfigError
from praxis_lite.training import learning


@pytest.mark.parametrize(
  ('step', 'value'), [(0, 0.1), (50, 0.1), (100, 0.1), (120, 0.28), (150, 0.55), (200, 1.0), (201, 1.0), (10_000, 1.0)]
)
def test_linear(step: int, value: float) -> None:
  schedule = learning.Linear(start=(100, 0.1), limit=(200, 1.0))
  np.testing.assert_allclose(schedule(jnp.int32(step)), value, rtol=1e-6)


def test_linear_may_go_down() -> None:
  schedule = learning.Linear(start=(0, 1.0), limit=(10, 0.5))
  np.testing.assert_allclose([schedule(s) for s in (0, 5, 10, 11)], [1.0, 0.75, 0.5, 0.5])


def test_constant() -> None:
  assert learning.Constant()(7) == 1.0
  assert learning.Constant(value=0.25)(7) == 0.25


def test_cosine_is_optax_cosine() -> None:
  ours = learning.Cosine(total_steps=50, initial_value=2.0, final_value=0.5)
  theirs = optax.cosine_decay_schedule(2.0, 50, alpha=0.25)
  for step in (0, 1, 25, 49, 50, 80):
    np.testing.assert_allclose(ours(step), theirs(step), rtol=1e-6)


def test_exponential_goes_by_equal_factors() -> None:
  schedule = learning.Exponential(start=10, end=30, limit=0.01)
  np.testing.assert_allclose([schedule(s) for s in (0, 10, 20, 30, 99)], [1.0, 1.0, 0.1, 0.01, 0.01], rtol=1e-5)


def test_piecewise_constant_changes_at_its_boundaries() -> None:
  schedule = learning.PiecewiseConstant(boundaries=(10, 20), values=(1.0, 0.5, 0.1))
  np.testing.assert_allclose([schedule(s) for s in (0, 9, 10, 19, 20, 99)], [1, 1, 0.5, 0.5, 0.1, 0.1])


def test_transformer() -> None:
  schedule = learning.Transformer(model_dims=512, warmup_steps=4000)
  for step in (0, 1, 3998, 3999, 4000, 100_000):
    n = step + 1
    np.testing.assert_allclose(schedule(step), 512**-0.5 * min(n**-0.5, n * 4000**-1.5), rtol=1e-5)


def test_warmup_then_cosine() -> None:
  schedule = learning.LinearWarmupCosine(warmup_steps=10, total_steps=110, final_value=0.2)
  np.testing.assert_allclose([schedule(s) for s in (0, 4, 9, 10)], [0.1, 0.5, 1.0, 1.0], rtol=1e-6)
  np.testing.assert_allclose([schedule(s) for s in (60, 110, 500)], [0.6, 0.2, 0.2], rtol=1e-5)
  np.testing.assert_allclose(schedule(35), 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2, rtol=1e-5)


def test_warmup_then_inverse_square_root() -> None:
  schedule = learning.LinearWarmupSqrtDecay(warmup_steps=100)
  np.testing.assert_allclose([schedule(s) for s in (49, 99, 100, 400, 10_000)], [0.5, 1.0, 1.0, 0.5, 0.1], rtol=1e-6)


def test_warmup_then_exponential() -> None:
  schedule = learning.LinearWarmupExponentialDecay(warmup_steps=10, total_steps=30, final_value=0.01)
  np.testing.assert_allclose([schedule(s) for s in (4, 9, 10, 20, 30, 99)], [0.5, 1, 1, 0.1, 0.01, 0.01], rtol=1e-5)


SCHEDULES = [
  Config(learning.Constant),
  Config(learning.Linear, start=(0, 1.0), limit=(3, 0.1)),
  Config(learning.Cosine, total_steps=3),
  Config(learning.Exponential, end=3),
  Config(learning.PiecewiseConstant, boundaries=(1, 2), values=(1.0, 0.5, 0.1)),
  Config(learning.Transformer, model_dims=8, warmup_steps=2),
  Config(learning.LinearWarmupCosine, warmup_steps=1, total_steps=3),
  Config(learning.LinearWarmupCosine, warmup_steps=0, total_steps=3),
  Config(learning.LinearWarmupCosine, warmup_steps=5, total_steps=3),
  Config(learning.LinearWarmupSqrtDecay, warmup_steps=2),
  Config(learning.LinearWarmupSqrtDecay, warmup_steps=0),
  Config(learning.LinearWarmupExponentialDecay, warmup_steps=1, total_steps=3),
  Config(learning.LinearWarmupExponentialDecay, warmup_steps=5, total_steps=3),
]


@pytest.mark.parametrize('config', SCHEDULES, ids=lambda c: target(c).__name__)
def test_schedules_are_float32_finite_and_the_same_when_traced(config: Config) -> None:
  schedule = config.instantiate()
  steps = jnp.arange(8, dtype=jnp.int32)
  traced = jax.jit(jax.vmap(schedule))(steps)
  assert traced.dtype == jnp.float32
  assert np.all(np.isfinite(traced))
  assert np.all(traced >= 0)
  np.testing.assert_allclose(traced, [schedule(int(s)) for s in steps], rtol=1e-6)
  assert schedule(0).shape == ()


@pytest.mark.parametrize(
  ('config', 'message'),
  [
    (Config(learning.Linear, start=(10, 0.0), limit=(10, 1.0)), r'Linear\.limit.*10'),
    (Config(learning.Cosine, total_steps=0), r'Cosine\.total_steps: expected more than 0, got 0'),
    (Config(learning.Exponential, start=5, end=5), r'Exponential\.end'),
    (Config(learning.Exponential, end=5, limit=0.0), r'Exponential\.limit'),
    (Config(learning.PiecewiseConstant, boundaries=(1, 2), values=(1.0, 2.0)), r'2 boundaries need 3 values, got 2'),
    (Config(learning.PiecewiseConstant, boundaries=(2, 2), values=(1.0, 2.0, 3.0)), r'must increase'),
    (Config(learning.Transformer, model_dims=0), r'Transformer\.model_dims'),
    (Config(learning.LinearWarmupSqrtDecay, warmup_steps=-1), r'LinearWarmupSqrtDecay\.warmup_steps'),
    (Config(learning.LinearWarmupExponentialDecay, warmup_steps=1, total_steps=9, final_value=0.0), r'final_value'),
    (Config(learning.Constant, value=float('nan')), r'Constant\.value: expected finite numbers, got nan'),
    (Config(learning.Constant, value=-1.0), r'Constant\.value: expected at least 0, got -1'),
    (Config(learning.Cosine, total_steps=9, final_value=-0.1), r'Cosine\.final_value: expected at least 0'),
    (Config(learning.Linear, limit=(9, float('inf'))), r'Linear\.limit: expected finite numbers'),
    (Config(learning.Linear, limit=(9, -1.0)), r'Linear: expected values of at least 0, got 0\.0 and -1\.0'),
    (
      Config(learning.PiecewiseConstant, boundaries=(1,), values=(1.0, -1.0)),
      r'PiecewiseConstant\.values: .*at least 0',
    ),
    (
      Config(learning.LinearWarmupCosine, warmup_steps=1, total_steps=9, final_value=-1.0),
      r'final_value: .*at least 0',
    ),
    (Config(learning.Linear), r'Linear\.limit: a value is required'),
  ],
)
def test_schedules_that_cannot_be_are_refused(config: Config, message: str) -> None:
  with pytest.raises(ConfigError, match=message):
    config.instantiate()


def halved_every(step: jax.Array, period: int = 1000) -> jax.Array:
  return 0.5 ** (step // period)


FUNCTIONS = {
  'function': (halved_every, 1.0),
  'config of a function': (Config(halved_every, period=2), 0.25),
  'lambda': (lambda step: 0.5, 0.5),
  'optax, built': (optax.linear_schedule(1.0, 0.0, 10), 0.6),
  'optax, to be built': (Config(optax.linear_schedule, init_value=1.0, end_value=0.0, transition_steps=10), 0.6),
}


@pytest.mark.parametrize(('schedule', 'value'), FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_of_the_step_are_schedules(schedule: object, value: float) -> None:
  config = Config(learning.Learner, learning_rate=1.0)
  config.schedule = schedule
  np.testing.assert_allclose(config.instantiate().learning_rate_at(jnp.int32(4)), value, rtol=1e-6)


def test_a_function_can_be_named_on_the_command_line() -> None:
  config = Config(learning.Learner)
  apply_overrides(config, [f'schedule={__name__}.halved_every', 'schedule.period=4'])
  np.testing.assert_allclose(config.clone(learning_rate=1.0).instantiate().learning_rate_at(4), 0.5)


NO_SCHEDULES = {
  'vector': (lambda step: jnp.ones(3), r'returns .*\(3,\).*; a schedule returns a scalar'),
  'two arguments': (lambda step, other: 1.0, r"cannot be called with a step, an int32 scalar: .*'other'"),
  'branch': (lambda step: 1.0 if step < 3 else 0.5, r'Attempted boolean conversion .*; choose by jnp\.where$'),
  'number': (3, r'expected a function of the step, or its Config, got 3'),
  'factory': (Config(optax.cosine_decay_schedule, init_value=1.0), r'cosine_decay_schedule\.decay_steps: a value is'),
}


@pytest.mark.parametrize(('schedule', 'message'), NO_SCHEDULES.values(), ids=NO_SCHEDULES)
def test_what_is_no_schedule_is_told(schedule: object, message: str) -> None:
  with pytest.raises(ConfigError, match=message):
    Config(learning.Learner, schedule=schedule).instantiate().bind({})
