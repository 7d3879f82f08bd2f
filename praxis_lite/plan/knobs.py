"""What may be changed of an experiment without changing what it learns: its mesh, what it recomputes, microbatches.

A setting is a value for each knob. Its neighbours differ in one knob by one step: a prime factor moves from one mesh
axis to another, a number of microbatches doubles or halves, or another policy of rematerialisation is taken.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from praxis_lite.config import Config
from praxis_lite.config.overrides import apply_overrides
from praxis_lite.errors import ConfigError
from praxis_lite.experiment import ExperimentConfig, configure
from praxis_lite.explain.report import Explained
from praxis_lite.layers.pipeline import Pipelined
from praxis_lite.layers.repeat import Repeat
from praxis_lite.task import SingleTask

# From what takes most memory to what takes most work.
_REMAT = ('none', 'products', 'dots_with_no_batch_dims_saveable', 'full')
_MOST_MICROBATCHES = 64

# A value for each knob, in their order.
Setting = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Knob:
  """Fields of a config that have one value.

  Attributes:
    paths: of the fields.
    own: the value that the experiment has.
    near: the values next to one.
  """

  paths: tuple[str, ...]
  own: Any
  near: Callable[[Any], Sequence[Any]]

  def overrides(self, value: object) -> list[str]:
    return [f'{path}={value}' for path in self.paths]


@dataclasses.dataclass(frozen=True)
class Configured:
  """The configs of an experiment, or of a task alone, and the shapes of a batch, if they were given."""

  roots: Mapping[str, Any]
  inputs: Mapping[str, object] | None = None

  @classmethod
  def of(cls, task: Explained, inputs: Mapping[str, object] | None = None) -> Configured:
    """Raises ConfigError unless `task` names the config of a task."""
    if isinstance(task, type):
      task = configure(task)
    if isinstance(task, ExperimentConfig):
      return cls(task.roots(), inputs)
    if isinstance(task, Config):
      return cls({'task': task}, inputs)
    raise ConfigError('plan: a task that is built cannot be changed; pass its config, or an experiment')

  @property
  def task(self) -> Config[SingleTask]:
    task: Config[SingleTask] = self.roots['task']
    return task

  def with_overrides(self, overrides: Sequence[str]) -> Configured:
    """A copy with some fields set; raises ConfigError if one cannot be."""
    roots = copy.deepcopy(dict(self.roots))
    apply_overrides(roots, overrides)
    return dataclasses.replace(self, roots=roots)

  @property
  def explained(self) -> Explained:
    """As `plan` takes it."""
    return ExperimentConfig(**self.roots) if 'datasets' in self.roots else self.task


def knobs_of(config: Configured, batch_sizes: Sequence[int] = ()) -> list[Knob]:
  """Returns the knobs of an experiment.

  Args:
    config: of it; its mesh fits the chips.
    batch_sizes: rows of a global batch to try, beside those that it has. They change what is learned.
  """
  task = config.task
  names = task.mesh_axis_names or ('data',)
  knobs = [Knob(('task.ici_mesh_shape',), tuple(task.ici_mesh_shape or (1,) * len(names)), _moved_factors)]
  by_policy: dict[str, list[str]] = {}
  model = task.instantiate().model
  for layer in model.descendants():
    path = f'task.model.{layer.path_name}'
    if isinstance(layer, Repeat) and isinstance(layer.remat, str) and not layer.remat_save_names:
      by_policy.setdefault(layer.remat, []).append(f'{path}.remat')
    if isinstance(layer, Pipelined) and layer.num_microbatches is not None:
      knobs.append(Knob((f'{path}.num_microbatches',), layer.num_microbatches, _doubled_or_halved))
  knobs += [Knob(tuple(paths), policy, _other_policies) for policy, paths in by_policy.items()]
  learner = task.train.learner
  if not any(isinstance(layer, Pipelined) for layer in model.descendants()):
    knobs.append(Knob(('task.train.learner.num_microbatches',), learner.num_microbatches, _doubled_or_halved))
  if batch_sizes and (where := batch_path(config)):
    path, rows = where
    sizes = sorted({rows, *batch_sizes})
    knobs.append(Knob((path,), rows, lambda value: [size for size in sizes if size != value]))
  return knobs


def batch_path(config: Configured) -> tuple[str, int] | None:
  """The path of the field that says the rows of a training batch, and their number; None if the data say it."""
  for i, dataset in enumerate(config.roots.get('datasets', ())):
    if getattr(dataset, 'is_training', False) and config.inputs is None:
      return f'datasets[{i}].batch_size', int(dataset.batch_size)
  return None


def neighbours(knobs: Sequence[Knob], setting: Setting) -> Iterator[Setting]:
  """Yields the settings that differ from one in one knob by one step."""
  for i, (knob, value) in enumerate(zip(knobs, setting)):
    for near in knob.near(value):
      yield (*setting[:i], near, *setting[i + 1 :])


def overrides_of(knobs: Sequence[Knob], setting: Setting) -> list[str]:
  """The overrides that make an experiment have a setting; none for what it has already."""
  return [line for knob, value in zip(knobs, setting) if value != knob.own for line in knob.overrides(value)]


def _moved_factors(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
  found = []
  for source, size in enumerate(shape):
    for prime in _primes(size):
      for to in range(len(shape)):
        if to != source:
          moved = list(shape)
          moved[source], moved[to] = size // prime, moved[to] * prime
          found.append(tuple(moved))
  return found


def _primes(number: int) -> list[int]:
  """The primes that divide a number, the smallest first."""
  found, prime = [], 2
  while number > 1:
    if number % prime == 0:
      found.append(prime)
      while number % prime == 0:
        number //= prime
    prime = prime + 1 if prime * prime <= number else max(number, prime + 1)
  return found


def _doubled_or_halved(count: int) -> list[int]:
  return [*([count // 2] if count % 2 == 0 else []), *([count * 2] if count < _MOST_MICROBATCHES else [])]


def _other_policies(policy: str) -> list[str]:
  return [other for other in _REMAT if other != policy]
