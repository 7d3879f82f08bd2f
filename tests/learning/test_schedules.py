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
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training import learning


@pytest.mark.parametrize(
  ('step', 'value'), [(0, 0.1), (50, 0.1), (100, 0.1), (120, 0.28), (150, 0.55), (200, 1.0), (201, 1.0), (10_000, 1.0)]
)
def test_linear(step: int, value: float) -> None:
  schedule = learning.LinearRamp(start=(100, 0.1), limit=(200, 1.0))
  np.testing.assert_allclose(schedule(jnp.int32(step)), value, rtol=1e-6)


def test_linear_may_go_down() -> None:
  schedule = learning.LinearRamp(start=(0, 1.0), limit=(10, 0.5))
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


def values_of(schedule, steps) -> np.ndarray:
  return np.asarray([schedule(step) for step in steps])


@pytest.mark.parametrize('power', [0.5, 1, 2])
@pytest.mark.parametrize('origin', ['start', 'limit'])
def test_polynomial(power: float, origin: str) -> None:
  schedule = learning.Polynomial(start=(10, 1.0), limit=(30, 0.2), power=power, origin=origin)
  done = np.clip((np.arange(0, 40) - 10) / 20, 0, 1)
  share = done**power if origin == 'start' else 1 - (1 - done) ** power
  np.testing.assert_allclose(values_of(schedule, range(40)), 1 - 0.8 * share, rtol=1e-5)


def test_polynomial_that_is_flat_at_its_limit_is_that_of_optax() -> None:
  ours = learning.Polynomial(start=(4, 2.0), limit=(24, 0.5), power=3, origin='limit')
  theirs = optax.polynomial_schedule(2.0, 0.5, power=3, transition_steps=20, transition_begin=4)
  np.testing.assert_allclose(values_of(ours, range(30)), values_of(theirs, range(30)), rtol=1e-5)


def test_delayed_cosine_is_a_cosine_from_its_start_on() -> None:
  schedule = learning.DelayedCosine(start=(10, 2.0), limit=(60, 0.5))
  expected = values_of(learning.Cosine(total_steps=50, initial_value=2.0, final_value=0.5), range(60))
  np.testing.assert_allclose(values_of(schedule, range(10, 70)), expected, rtol=1e-5)
  assert schedule(3) == 2.0


def test_sqrt_decay() -> None:
  schedule = learning.SqrtDecay(decay_start=16, multiplier=8.0, offset=20)
  np.testing.assert_allclose(values_of(schedule, (0, 20, 36, 84, 420)), [2, 2, 2, 1, 0.4], rtol=1e-6)


def test_continuous_schedule_halves_down_to_its_final_value() -> None:
  schedule = learning.ContinuousSchedule(initial_value=0.8, final_value=0.15, start_step=100, half_life_steps=10)
  expected = [0.8, 0.8, 0.8 / math.sqrt(2), 0.4, 0.2, 0.15, 0.15]
  np.testing.assert_allclose(values_of(schedule, (0, 100, 105, 110, 120, 130, 9999)), expected, rtol=1e-6)


def test_transformer_that_ends_is_constant_from_there_on() -> None:
  ends, goes_on = (learning.Transformer(model_dims=64, warmup_steps=10, decay_end=end) for end in (40, None))
  np.testing.assert_allclose(values_of(ends, (5, 30, 40, 41, 500)), values_of(goes_on, (5, 30, 40, 40, 40)), rtol=1e-6)


def test_warmup_then_polynomial() -> None:
  schedule = learning.LinearWarmupPolynomialDecay(warmup_steps=10, total_steps=30, final_value=0.2, power=2)
  np.testing.assert_allclose(values_of(schedule, (4, 9, 10)), [0.5, 1, 1], rtol=1e-6)
  np.testing.assert_allclose(values_of(schedule, (15, 20, 30, 99)), [0.95, 0.8, 0.2, 0.2], rtol=1e-6)


@pytest.mark.parametrize(
  'cls',
  [learning.LinearWarmupCosine, learning.LinearWarmupPolynomialDecay, learning.LinearWarmupExponentialDecay],
)
def test_a_decay_that_starts_late_is_the_same_decay_after_a_plateau(cls) -> None:
  late = cls(warmup_steps=10, decay_start=25, total_steps=45, final_value=0.1)
  np.testing.assert_allclose(values_of(late, (0, 4, 9, 10, 24, 25)), [0.1, 0.5, 1, 1, 1, 1], rtol=1e-6)
  at_once = cls(warmup_steps=0, total_steps=20, final_value=0.1)
  np.testing.assert_allclose(values_of(late, range(25, 60)), values_of(at_once, range(35)), rtol=1e-5)


def test_warmup_from_zero_counts_steps_as_pax_does() -> None:
  """Its schedules are optax's, joined: linear from 0 at step 0, then the decay."""
  ours = learning.LinearWarmupCosine(
    warmup_steps=8, decay_start=12, total_steps=40, final_value=0.05, warmup_from_zero=True
  )
  parts = [optax.linear_schedule(0, 1, 8), lambda step: 1.0, optax.cosine_decay_schedule(1.0, 28, alpha=0.05)]
  theirs = optax.join_schedules(parts, [8, 12])
  np.testing.assert_allclose(values_of(ours, range(50)), values_of(theirs, range(50)), rtol=1e-5, atol=1e-7)
  root = learning.LinearWarmupSqrtDecay(warmup_steps=4, warmup_from_zero=True)
  np.testing.assert_allclose(values_of(root, (0, 1, 3, 4, 16)), [0, 0.25, 0.75, 1, 0.5], rtol=1e-6)


def test_warmup_then_constants() -> None:
  fields = {'warmup_steps': 4, 'boundaries': (6, 8), 'values': (2.0, 1.0, 0.5)}
  schedule = learning.LinearWarmupPiecewiseConstant(**fields)
  np.testing.assert_allclose(values_of(schedule, range(10)), [0.5, 1, 1.5, 2, 2, 2, 1, 1, 0.5, 0.5], rtol=1e-6)
  as_pax = learning.LinearWarmupPiecewiseConstant(**fields, warmup_from_zero=True)
  np.testing.assert_allclose(values_of(as_pax, range(10)), [0, 0.5, 1, 1.5, 2, 2, 1, 1, 0.5, 0.5], rtol=1e-6)
  assert learning.LinearWarmupPiecewiseConstant(warmup_steps=2, boundaries=(), values=(3.0,))(0) == 1.5


# ---------------------------------------------------------------- schedules of schedules


def test_piecewise_schedule_gives_each_part_its_own_steps() -> None:
  linear = Config(learning.LinearRamp, start=(0, 0.0), limit=(4, 1.0))
  schedule = learning.PiecewiseSchedule(boundaries=(3, 7), schedules=(linear, Config(learning.Constant), linear))
  expected = [0, 0.25, 0.5, 1, 1, 1, 1, 0, 0.25, 0.5, 0.75, 1, 1]
  np.testing.assert_allclose(values_of(schedule, range(13)), expected, rtol=1e-6)


def test_cycle_schedule_gives_all_parts_the_steps_of_the_run() -> None:
  linear = Config(learning.LinearRamp, start=(0, 0.0), limit=(10, 1.0))
  schedule = learning.CycleSchedule(steps=(2, 1, 1), schedules=(linear, Config(learning.Constant), lambda step: 5.0))
  np.testing.assert_allclose(values_of(schedule, range(10)), [0, 0.1, 1, 5, 0.4, 0.5, 1, 5, 0.8, 0.9], rtol=1e-6)
  alone = learning.CycleSchedule(steps=(3,), schedules=(linear,))
  np.testing.assert_allclose(values_of(alone, range(12)), np.minimum(np.arange(12) / 10, 1), rtol=1e-6)


def test_a_schedule_of_schedules_is_edited_on_the_command_line() -> None:
  parts = (Config(learning.Constant), Config(learning.Cosine, total_steps=10))
  config = Config(learning.Learner, learning_rate=1.0)
  config.schedule = Config(learning.PiecewiseSchedule, boundaries=(5,), schedules=parts)
  apply_overrides(config, ['schedule.schedules[0].value=0.25', 'schedule.boundaries=(3,)'])
  np.testing.assert_allclose([config.instantiate().learning_rate_at(step) for step in (2, 3)], [0.25, 1.0])


def test_the_rate_is_reduced_when_the_loss_stops_falling() -> None:
  """This depends on the losses of the run, so it is no schedule but a part of the optimizer, which keeps a state."""
  plateau = Config(optax.contrib.reduce_on_plateau, patience=2, factor=0.5)
  config = Config(learning.Learner, optimizer=Config(optax.chain, Config(optax.sgd), plateau), learning_rate=1.0)
  learner, variables = config.instantiate().bind({'w': WeightHParams((1,), dtype='float32')}), {'w': jnp.zeros(1)}
  states, changes = learner.init(variables), []
  for step, loss in enumerate([3.0, 2.0, 2.0, 2.0, 2.0, 1.0]):
    update = learner.update({'w': jnp.ones(1)}, jnp.float32(loss), variables, states, None, jnp.int32(step))
    changes.append(float((variables['w'] - update.mdl_vars['w'])[0]))
    variables, states = update.mdl_vars, update.opt_states
  np.testing.assert_allclose(changes, [1, 1, 1, 0.5, 0.5, 0.5])


SCHEDULES = [
  Config(learning.Constant),
  Config(learning.LinearRamp, start=(0, 1.0), limit=(3, 0.1)),
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
  Config(learning.LinearWarmupPolynomialDecay, warmup_steps=1, total_steps=3, power=0.5),
  Config(learning.LinearWarmupPolynomialDecay, warmup_steps=0, total_steps=3, warmup_from_zero=True),
  Config(learning.LinearWarmupPiecewiseConstant, warmup_steps=2, boundaries=(3,), values=(1.0, 0.5)),
  Config(learning.LinearWarmupCosine, warmup_steps=0, total_steps=3, warmup_from_zero=True, decay_start=2),
  Config(learning.Polynomial, limit=(3, 0.1), power=0.5),
  Config(learning.DelayedCosine, start=(1, 1.0), limit=(3, 0.1)),
  Config(learning.ContinuousSchedule, start_step=1, half_life_steps=2),
  Config(learning.SqrtDecay, decay_start=2, offset=-1),
  Config(
    learning.PiecewiseSchedule, boundaries=(2,), schedules=(Config(learning.Constant), lambda step: 1 / (1 + step))
  ),
  Config(learning.PiecewiseSchedule, boundaries=(), schedules=(lambda step: 1,)),
  Config(learning.CycleSchedule, steps=(2, 1), schedules=(Config(learning.SqrtDecay), lambda step: 3)),
]


def test_every_schedule_is_tested() -> None:
  """Each exported class has an example above."""
  exported = {
    value for value in vars(learning).values() if isinstance(value, type) and issubclass(value, learning.BaseSchedule)
  }
  assert exported - {learning.BaseSchedule} == {target(config) for config in SCHEDULES}


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
    (Config(learning.LinearRamp, start=(10, 0.0), limit=(10, 1.0)), r'LinearRamp\.limit.*10'),
    (Config(learning.Cosine, total_steps=0), r'Cosine\.total_steps: expected more than 0, got 0'),
    (Config(learning.Exponential, start=5, end=5), r'Exponential\.end'),
    (Config(learning.Exponential, end=5, limit=0.0), r'Exponential\.limit'),
    (
      Config(learning.PiecewiseConstant, boundaries=(1, 2), values=(1.0, 2.0)),
      r'\.values: expected 3, one more than boundaries, got 2',
    ),
    (Config(learning.PiecewiseConstant, boundaries=(2, 2), values=(1.0, 2.0, 3.0)), r'must increase'),
    (Config(learning.Transformer, model_dims=0), r'Transformer\.model_dims'),
    (Config(learning.LinearWarmupSqrtDecay, warmup_steps=-1), r'LinearWarmupSqrtDecay\.warmup_steps'),
    (Config(learning.LinearWarmupExponentialDecay, warmup_steps=1, total_steps=9, final_value=0.0), r'final_value'),
    (Config(learning.Constant, value=float('nan')), r'Constant\.value: expected finite numbers, got nan'),
    (Config(learning.Constant, value=-1.0), r'Constant\.value: expected at least 0, got -1'),
    (Config(learning.Cosine, total_steps=9, final_value=-0.1), r'Cosine\.final_value: expected at least 0'),
    (Config(learning.LinearRamp, limit=(9, float('inf'))), r'LinearRamp\.limit: expected finite numbers'),
    (Config(learning.LinearRamp, limit=(9, -1.0)), r'LinearRamp: expected values of at least 0, got 0\.0 and -1\.0'),
    (
      Config(learning.PiecewiseConstant, boundaries=(1,), values=(1.0, -1.0)),
      r'PiecewiseConstant\.values: .*at least 0',
    ),
    (
      Config(learning.LinearWarmupCosine, warmup_steps=1, total_steps=9, final_value=-1.0),
      r'final_value: .*at least 0',
    ),
    (Config(learning.LinearRamp), r'LinearRamp\.limit: a value is required'),
    (Config(learning.Polynomial, limit=(9, 0.0), power=0), r'Polynomial\.power: expected more than 0'),
    (Config(learning.Polynomial, limit=(9, 0.0), origin='end'), r"Polynomial\.origin: expected 'start' or 'limit'"),
    (Config(learning.DelayedCosine, start=(9, 1.0), limit=(9, 0.0)), r'DelayedCosine\.limit: its step 9 must'),
    (Config(learning.SqrtDecay, decay_start=0), r'SqrtDecay\.decay_start: expected more than 0'),
    (Config(learning.ContinuousSchedule, half_life_steps=0), r'half_life_steps: expected more than 0'),
    (Config(learning.ContinuousSchedule, final_value=2.0), r'final_value: expected at most initial_value, 1\.0, got 2'),
    (Config(learning.Transformer, model_dims=4, decay_end=-1), r'Transformer\.decay_end: expected at least 0'),
    (
      Config(learning.LinearWarmupCosine, warmup_steps=5, total_steps=9, decay_start=4),
      r'LinearWarmupCosine\.decay_start: expected at least warmup_steps, 5, or None, got 4',
    ),
    (
      Config(learning.LinearWarmupPiecewiseConstant, warmup_steps=5, boundaries=(4,), values=(1.0, 0.5)),
      r'boundaries: expected steps of at least warmup_steps, 5, got \(4,\)',
    ),
    (
      Config(learning.PiecewiseSchedule, boundaries=(2,), schedules=(Config(learning.Constant),)),
      r'PiecewiseSchedule\.schedules: expected 2, one more than boundaries, got 1',
    ),
    (
      Config(learning.PiecewiseSchedule, boundaries=(0,), schedules=(Config(learning.Constant),) * 2),
      r'PiecewiseSchedule\.boundaries: expected steps of at least 1 that increase, got \(0,\)',
    ),
    (
      Config(learning.PiecewiseSchedule, boundaries=(2,), schedules=(Config(learning.Constant), 3)),
      r'PiecewiseSchedule\.schedules\[1\]: expected a function of the step, or its Config, got 3',
    ),
    (Config(learning.CycleSchedule, schedules=(), steps=()), r'CycleSchedule\.schedules: expected at least one'),
    (
      Config(learning.CycleSchedule, schedules=(Config(learning.Constant),), steps=(1, 2)),
      r'CycleSchedule\.steps: 1 schedules need as many numbers of steps, got 2',
    ),
    (
      Config(learning.CycleSchedule, schedules=(Config(learning.Constant),), steps=(0,)),
      r'CycleSchedule\.steps: expected at least 1 each, got \(0,\)',
    ),
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
