"""Schedules made of other schedules, which follow one another once or in a cycle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.errors import ConfigError, check_range
from praxis_lite.training.learning.schedules import BaseSchedule, Schedule, check_one_more, to_schedule


class _Composed(BaseSchedule):
  """Base of the schedules that are made of `schedules`."""

  schedules: tuple[Config | Schedule, ...] = REQUIRED

  def __post_init__(self) -> None:
    super().__post_init__()
    name = type(self).__name__
    if not self.schedules:
      raise ConfigError(f'{name}.schedules: expected at least one schedule')
    self._parts = [to_schedule(part, f'{name}.schedules[{i}]') for i, part in enumerate(self.schedules)]


class PiecewiseSchedule(_Composed):
  """`schedules[i]` from step `boundaries[i - 1]` to `boundaries[i]`; each schedule counts steps from its own start.

  Attributes:
    boundaries: increasing steps.
    schedules: a config of a schedule, or a function of the step, for each interval: one more than there are boundaries.
  """

  boundaries: tuple[int, ...] = REQUIRED

  def __post_init__(self) -> None:
    super().__post_init__()
    check_one_more('PiecewiseSchedule.schedules', self.schedules, self.boundaries)
    if any(a >= b for a, b in zip((0, *self.boundaries), self.boundaries)):
      raise ConfigError(
        f'PiecewiseSchedule.boundaries: expected steps of at least 1 that increase, got {tuple(self.boundaries)}'
      )

  def __call__(self, step: jax.Array | int) -> jax.Array:
    return jnp.asarray(optax.join_schedules(self._parts, list(self.boundaries))(jnp.asarray(step)), jnp.float32)


class CycleSchedule(_Composed):
  """A cycle of schedules: `schedules[i]` for `steps[i]` steps; after the last one, the first one again.

  Unlike the schedules of a `PiecewiseSchedule`, each one is a function of the step of the run.

  Attributes:
    schedules: a config of a schedule, or a function of the step, for each part of the cycle.
    steps: the length of each part, at least 1.
  """

  steps: tuple[int, ...] = REQUIRED

  def __post_init__(self) -> None:
    super().__post_init__()
    if len(self.steps) != len(self.schedules):
      raise ConfigError(
        f'CycleSchedule.steps: {len(self.schedules)} schedules need as many numbers of steps, got {len(self.steps)}'
      )
    check_range('CycleSchedule.steps', tuple(self.steps), least=1)

  def __call__(self, step: jax.Array | int) -> jax.Array:
    in_cycle, end = jnp.asarray(step) % sum(self.steps), sum(self.steps)
    value = jnp.zeros((), jnp.float32)
    for part, steps in zip(reversed(self._parts), reversed(self.steps)):
      value = jnp.where(in_cycle < end, jnp.asarray(part(step), jnp.float32), value)
      end -= steps
    return value
