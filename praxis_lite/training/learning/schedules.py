"""Learning rate schedules: functions of the step, as configurable objects.

A schedule returns a factor that the learner multiplies by its `learning_rate`. Any optax schedule works too:
`Config(optax.cosine_decay_schedule, init_value=1.0, decay_steps=1000)`. So does any function of the step:

    def halved_every(step, period=1000): ...

    learner.schedule = halved_every
    learner.schedule = Config(halved_every, period=500)      # The first argument, the step, is not set.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from praxis_lite.common.config import REQUIRED, Config, Configurable, config_values, target
from praxis_lite.common.errors import ConfigError, check_choice, check_range

Schedule = Callable[[jax.Array | int], ArrayLike]


def to_schedule(schedule: object, where: str) -> Schedule:
  """Returns the schedule, a function of the step, that a config describes; returns a function unchanged.

  If a config does not set the first argument of its function, this argument is the step, and the function with the
  other arguments is the schedule. Any other config is instantiated to get the schedule.

  Raises:
    ConfigError: the value is neither a config nor a function. `where` is the path of the field, for the message.
  """
  function: object = schedule
  if isinstance(schedule, Config):
    values = config_values(schedule)
    step = next(iter(values), None)
    is_function = not isinstance(target(schedule), type) and step is not None and values[step] is REQUIRED
    if is_function and REQUIRED not in [value for name, value in values.items() if name != step]:
      function = functools.partial(target(schedule), **{str(k): v for k, v in schedule.__arguments__.items()})
    else:
      function = schedule.instantiate()
  if not callable(function) or isinstance(function, type):
    raise ConfigError(f'{where}: expected a function of the step, or its Config, got {function!r}')
  return function


def check_schedule(function: Schedule, where: str) -> None:
  """Traces a function; raises ConfigError unless it takes a step and returns a scalar. Tracing may start JAX."""
  try:
    returned = jax.eval_shape(function, jax.ShapeDtypeStruct((), jnp.int32))
  except TypeError as error:
    remedy = '; choose by jnp.where' if isinstance(error, jax.errors.TracerBoolConversionError) else ''
    what = f'{str(error).splitlines()[0].rstrip(".")}{remedy}'
    raise ConfigError(f'{where}: {_name(function)} cannot be called with a step, an int32 scalar: {what}') from error
  if getattr(returned, 'shape', None) != ():
    raise ConfigError(
      f'{where}: {_name(function)} returns {returned}; a schedule returns a scalar, the factor at a step'
    )


def _name(function: Callable[..., object]) -> str:
  inner = function.func if isinstance(function, functools.partial) else function
  return getattr(inner, '__qualname__', type(inner).__name__)


class BaseSchedule(Configurable):
  """A function of the step.

  Raises ConfigError if a number in a field is not finite. Numbers in the fields that a subclass lists in `_positive`
  must be positive, and those in `_not_negative` at least 0.
  """

  _positive: ClassVar[tuple[str, ...]] = ()
  _not_negative: ClassVar[tuple[str, ...]] = ()

  def __post_init__(self) -> None:
    for field, value in vars(self).items():
      numbers = [x for x in (value if isinstance(value, tuple | list) else [value]) if isinstance(x, int | float)]
      if not all(map(math.isfinite, numbers)):
        raise ConfigError(f'{type(self).__name__}.{field}: expected finite numbers, got {value}')
    for field in self._not_negative:
      check_range(f'{type(self).__name__}.{field}', getattr(self, field), least=0)
    for field in self._positive:
      check_range(f'{type(self).__name__}.{field}', getattr(self, field), above=0)

  def __call__(self, step: jax.Array | int) -> jax.Array:
    """Returns the factor at `step`, a float32 scalar."""
    raise NotImplementedError


class Constant(BaseSchedule):
  """Always `value`."""

  value: float = 1.0
  _not_negative = ('value',)

  def __call__(self, step: jax.Array | int) -> jax.Array:
    return jnp.full((), self.value, jnp.float32)


class LinearRamp(BaseSchedule):
  """Linear from `start` to `limit`, both (step, value), and constant before and after.

  LinearRamp(start=(100, 0.1), limit=(200, 1.0)) is 0.1 up to step 100, 0.55 at step 150 and 1 from step 200 on.
  """

  start: tuple[int, float] = (0, 0.0)
  limit: tuple[int, float] = REQUIRED

  def __post_init__(self) -> None:
    super().__post_init__()
    name = type(self).__name__
    if min(self.start[1], self.limit[1]) < 0:
      raise ConfigError(f'{name}: expected values of at least 0, got {self.start[1]} and {self.limit[1]}')
    if self.start[0] >= self.limit[0]:
      raise ConfigError(f'{name}.limit: its step {self.limit[0]} must come after the step of start, {self.start[0]}')

  def __call__(self, step: jax.Array | int) -> jax.Array:
    (x0, y0), (x1, y1) = self.start, self.limit
    done = jnp.clip((_float(step) - x0) / (x1 - x0), 0.0, 1.0)
    return y0 + self._share(done) * (y1 - y0)

  def _share(self, done: jax.Array) -> jax.Array:
    """Returns how much of the change is complete after the fraction `done` of the steps; both go from 0 to 1."""
    return done


class Polynomial(LinearRamp):
  """Polynomial from `start` to `limit`, both (step, value), and constant before and after.

  Attributes:
    power: more than 0; 1 is linear.
    origin: the end at which the polynomial is flat if the power is more than 1. After a fraction d of the steps,
      'start' has done the fraction d^power of the change, and 'limit' the fraction 1 - (1 - d)^power.
  """

  start: tuple[int, float] = (0, 1.0)
  power: float = 1.0
  origin: str = 'start'
  _positive = ('power',)

  def __post_init__(self) -> None:
    super().__post_init__()
    check_choice('Polynomial.origin', self.origin, ('start', 'limit'))

  def _share(self, done: jax.Array) -> jax.Array:
    return done**self.power if self.origin == 'start' else 1 - (1 - done) ** self.power


class DelayedCosine(LinearRamp):
  """Half a cosine from `start` to `limit`, both (step, value), and constant before and after."""

  start: tuple[int, float] = (0, 1.0)

  def _share(self, done: jax.Array) -> jax.Array:
    return 0.5 * (1 - jnp.cos(math.pi * done))


class Cosine(BaseSchedule):
  """Half a cosine from `initial_value` at step 0 to `final_value` at `total_steps` (Loshchilov and Hutter, 2017)."""

  total_steps: int = REQUIRED
  initial_value: float = 1.0
  final_value: float = 0.0
  _positive = ('total_steps',)
  _not_negative = ('initial_value', 'final_value')

  def __call__(self, step: jax.Array | int) -> jax.Array:
    done = jnp.clip(_float(step) / self.total_steps, 0.0, 1.0)
    return self.final_value + (self.initial_value - self.final_value) * 0.5 * (1 + jnp.cos(math.pi * done))


class Exponential(BaseSchedule):
  """Exponential decay from 1 at step `start` to `limit` at step `end`; constant before and after."""

  start: int = 0
  end: int = REQUIRED
  limit: float = 0.01
  _positive = ('limit',)

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.end <= self.start:
      raise ConfigError(f'Exponential.end: step {self.end} must come after start, {self.start}')

  def __call__(self, step: jax.Array | int) -> jax.Array:
    done = jnp.clip((_float(step) - self.start) / (self.end - self.start), 0.0, 1.0)
    return jnp.exp(done * math.log(self.limit))


class ContinuousSchedule(BaseSchedule):
  """Constant up to step `start_step`, then halved every `half_life_steps`, down to `final_value`."""

  initial_value: float = 1.0
  final_value: float = 0.01
  start_step: int = 400_000
  half_life_steps: int = 100_000
  _positive = ('initial_value', 'half_life_steps')
  _not_negative = ('final_value',)

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.final_value > self.initial_value:
      raise ConfigError(
        f'ContinuousSchedule.final_value: expected at most initial_value, {self.initial_value}, got {self.final_value}'
      )

  def __call__(self, step: jax.Array | int) -> jax.Array:
    half_lives = jnp.maximum(_float(step) - self.start_step, 0.0) / self.half_life_steps
    return jnp.maximum(self.initial_value * 0.5**half_lives, self.final_value)


class SqrtDecay(BaseSchedule):
  """multiplier / sqrt(max(step - offset, decay_start)): constant, then the inverse square root of the step."""

  decay_start: int = 10_000
  multiplier: float = 1.0
  offset: int = 0
  _positive = ('decay_start', 'multiplier')

  def __call__(self, step: jax.Array | int) -> jax.Array:
    return self.multiplier * jax.lax.rsqrt(jnp.maximum(_float(step) - self.offset, float(self.decay_start)))


def check_one_more(where: str, values: Sequence[object], boundaries: Sequence[int]) -> None:
  """Raises ConfigError unless there is one more value than there are boundaries."""
  if len(values) != len(boundaries) + 1:
    raise ConfigError(f'{where}: expected {len(boundaries) + 1}, one more than boundaries, got {len(values)}')


class PiecewiseConstant(BaseSchedule):
  """`values[0]` before step `boundaries[0]`, then `values[i]` from step `boundaries[i - 1]` up to `boundaries[i]`."""

  boundaries: tuple[int, ...] = REQUIRED
  values: tuple[float, ...] = REQUIRED
  _not_negative = ('values',)

  def __post_init__(self) -> None:
    super().__post_init__()
    check_one_more('PiecewiseConstant.values', self.values, self.boundaries)
    if any(a >= b for a, b in zip(self.boundaries, self.boundaries[1:])):
      raise ConfigError(f'PiecewiseConstant.boundaries: steps must increase, got {tuple(self.boundaries)}')

  def __call__(self, step: jax.Array | int) -> jax.Array:
    passed = jnp.sum(jnp.asarray(step) >= jnp.asarray(self.boundaries))
    return jnp.asarray(self.values, jnp.float32)[passed]


class Transformer(BaseSchedule):
  """model_dims^-1/2 * min((step + 1) * warmup_steps^-3/2, (step + 1)^-1/2) (Vaswani et al., 2017).

  From step `decay_end` on, the factor is constant; None lets it decay forever.
  """

  model_dims: int = REQUIRED
  warmup_steps: int = 4000
  decay_end: int | None = None
  _positive = ('model_dims', 'warmup_steps')
  _not_negative = ('decay_end',)

  def __call__(self, step: jax.Array | int) -> jax.Array:
    count = (_float(step) if self.decay_end is None else jnp.minimum(_float(step), self.decay_end)) + 1
    return self.model_dims**-0.5 * jnp.minimum(count * self.warmup_steps**-1.5, count**-0.5)


class _Warmup(BaseSchedule):
  """Linear warm-up to `peak` for `warmup_steps` steps, then `decay`.

  The first step already changes the variables, and the last step of the warm-up has the peak. With `warmup_from_zero`,
  the first step has the factor 0, and the first step after the warm-up has the peak.
  """

  warmup_steps: int = REQUIRED
  warmup_from_zero: bool = False
  _not_negative: ClassVar[tuple[str, ...]] = ('warmup_steps',)

  def __call__(self, step: jax.Array | int) -> jax.Array:
    taken = _float(step) + (0 if self.warmup_from_zero else 1)
    warm = self.peak * jnp.minimum(taken / max(self.warmup_steps, 1), 1.0)
    return jnp.where(jnp.asarray(step) < self.warmup_steps, warm, self.decay(_float(step)))

  @property
  def peak(self) -> float:
    """The factor at the end of the warm-up."""
    return 1.0

  def decay(self, step: jax.Array) -> jax.Array:
    """Returns the factor from step `warmup_steps` on."""
    raise NotImplementedError


class _WarmupThenDecay(_Warmup):
  """Linear warm-up to 1, constant up to step `decay_start`, then a decay to `final_value` at step `total_steps`."""

  total_steps: int = REQUIRED
  final_value: float = 0.01
  decay_start: int | None = None
  _not_negative = ('warmup_steps', 'final_value')

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.decay_start is not None and self.decay_start < self.warmup_steps:
      raise ConfigError(
        f'{type(self).__name__}.decay_start: expected at least warmup_steps, {self.warmup_steps}, or None, got '
        f'{self.decay_start}'
      )

  @property
  def _span(self) -> tuple[int, int]:
    """The first and the last step of the decay."""
    start = self.warmup_steps if self.decay_start is None else self.decay_start
    return start, max(self.total_steps, start + 1)


class LinearWarmupCosine(_WarmupThenDecay):
  """Linear warm-up to 1, then half a cosine down to `final_value` at step `total_steps`.

  If `total_steps` is not set, a task fills in its number of train steps. The factor is 1 up to step `decay_start`, by
  default `warmup_steps`. A run that ends before `decay_start` has no decay. With `warmup_from_zero`, step s of the
  warm-up has the factor s / warmup_steps, as in Pax, instead of (s + 1) / warmup_steps.
  """

  final_value: float = 0.1

  def decay(self, step: jax.Array) -> jax.Array:
    start, end = self._span
    return Cosine(total_steps=end - start, final_value=self.final_value)(step - start)


class LinearWarmupPolynomialDecay(_WarmupThenDecay):
  """Linear warm-up to 1, then 1 - d^power * (1 - final_value), where d goes from 0 to 1 during the decay.

  A `power` of 1 is a linear decay. For the other fields, see `LinearWarmupCosine`.
  """

  power: float = 1.0
  _positive = ('power',)

  def decay(self, step: jax.Array) -> jax.Array:
    start, end = self._span
    return Polynomial(start=(start, 1.0), limit=(end, self.final_value), power=self.power)(step)


class LinearWarmupExponentialDecay(_WarmupThenDecay):
  """Linear warm-up to 1, then exponential decay to `final_value` at step `total_steps`.

  For the fields, see `LinearWarmupCosine`.
  """

  _positive = ('final_value',)

  def decay(self, step: jax.Array) -> jax.Array:
    start, end = self._span
    return Exponential(start=start, end=end, limit=self.final_value)(step)


class LinearWarmupSqrtDecay(_Warmup):
  """Linear warm-up to 1, then the inverse square root of the step: sqrt(warmup_steps / step).

  With `warmup_from_zero`, step s of the warm-up has the factor s / warmup_steps, as in Pax.
  """

  def decay(self, step: jax.Array) -> jax.Array:
    return jnp.sqrt(max(self.warmup_steps, 1) / jnp.maximum(step, 1))


class LinearWarmupPiecewiseConstant(_Warmup):
  """Linear warm-up to `values[0]`, then `values[i]` from step `boundaries[i - 1]` up to `boundaries[i]`.

  With `warmup_from_zero`, step s of the warm-up has the factor values[0] * s / warmup_steps, as in Pax.
  """

  boundaries: tuple[int, ...] = REQUIRED
  values: tuple[float, ...] = REQUIRED
  _not_negative = ('warmup_steps', 'values')

  def __post_init__(self) -> None:
    super().__post_init__()
    self._constants = PiecewiseConstant(boundaries=self.boundaries, values=self.values)
    if self.boundaries and self.boundaries[0] < self.warmup_steps:
      raise ConfigError(
        f'LinearWarmupPiecewiseConstant.boundaries: expected steps of at least warmup_steps, {self.warmup_steps}, got '
        f'{tuple(self.boundaries)}'
      )

  @property
  def peak(self) -> float:
    return self.values[0]

  def decay(self, step: jax.Array) -> jax.Array:
    return self._constants(step)


def _float(step: jax.Array | int) -> jax.Array:
  return jnp.asarray(step, jnp.float32)
