"""What a run is given: its configs, and the keys that its seed makes."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.config import Config
from praxis_lite.errors import ConfigError


class RunConfig(Protocol):
  """The configs of a run; `experiment.configure` makes them."""

  @property
  def task(self) -> Config: ...
  @property
  def datasets(self) -> list[Config]: ...
  @property
  def decode_datasets(self) -> list[Config]: ...


class RunKeys(NamedTuple):
  """PRNG keys, replicated over the mesh. Steps fold theirs with the step, so a resumed run draws the same numbers."""

  init: jax.Array
  train: jax.Array
  evaluate: jax.Array


def run_keys(seed: int, mesh: Mesh) -> RunKeys:
  """Returns the keys of a run."""

  def make() -> RunKeys:
    return RunKeys(*jax.random.split(jax.random.key(seed), 3))

  # Made by a program on the mesh: with several processes none of them could put an array on all of it.
  return jax.jit(make, out_shardings=NamedSharding(mesh, PartitionSpec()))()


def check_intervals(settings: Any) -> None:
  """Checks the numbers of `task.train`.

  Raises:
    ConfigError: a number of steps is not positive.
  """
  optional = ('eval_interval_steps', 'decode_interval_steps')
  for name in ('num_train_steps', 'log_interval_steps', 'save_interval_steps', *optional):
    value = getattr(settings, name)
    if value is None and name in optional:
      continue
    if not isinstance(value, int) or value < 1:
      or_none = ' or None' if name in optional else ''
      raise ConfigError(f'task.train.{name} = {value!r}: expected an integer of at least 1{or_none}')


def is_due(step: int, interval: int | None) -> bool:
  """Whether something that is done every `interval` steps is done after `step` of them."""
  return interval is not None and step > 0 and step % interval == 0
