"""The knobs of an experiment: mesh, rematerialisation and microbatches, which do not change what it learns.

A setting is a value for each knob. Its neighbours differ in one knob by one step: a prime factor moves from one mesh
axis to another, a number of microbatches doubles or halves, or the policy of rematerialisation changes.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from praxis_lite.common.config import Config
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.common.errors import ConfigError
from praxis_lite.instruments.explain.report import Explained
from praxis_lite.layers.base.facts import KnobKind, double_or_halve
from praxis_lite.training.experiment import ExperimentConfig, configure
from praxis_lite.training.task import SingleTask

Setting = tuple[Any, ...]  # A value for each knob, in the order of the knobs.


@dataclasses.dataclass(frozen=True)
class SharedKnob:
  """Config fields that a search always sets to the same value; `own` is the experiment's own value."""

  paths: tuple[str, ...]
  own: Any
  neighbours: Callable[[Any], Sequence[Any]]
  kind: KnobKind = KnobKind.OTHER

  def overrides(self, value: object) -> list[str]:
    return [f'{path}={value}' for path in self.paths]


@dataclasses.dataclass(frozen=True)
class Configured:
  """The configs of an experiment, or only of its task, and the shapes of a batch if the caller gave them."""

  roots: Mapping[str, Any]
  inputs: Mapping[str, object] | None = None

  @property
  def task(self) -> Config[SingleTask]:
    task: Config[SingleTask] = self.roots['task']
    return task

  def change(self, overrides: Sequence[str]) -> Configured:
    """Returns a copy with overrides applied. Raises ConfigError if a field cannot be set."""
    roots = copy.deepcopy(dict(self.roots))
    apply_overrides(roots, overrides)
    return dataclasses.replace(self, roots=roots)

  @property
  def explained(self) -> Explained:
    """The experiment or task, in the form that `plan` takes."""
    return ExperimentConfig(**self.roots) if 'datasets' in self.roots else self.task


def configure_task(task: Explained, inputs: Mapping[str, object] | None = None) -> Configured:
  """Returns the configs of `task`. Raises ConfigError if it is neither an experiment nor the config of a task."""
  if isinstance(task, type):
    task = configure(task)
  if isinstance(task, ExperimentConfig):
    return Configured(task.roots(), inputs)
  if isinstance(task, Config):
    return Configured({'task': task}, inputs)
  raise ConfigError('plan: a task that is built cannot be changed; pass its config, or an experiment')


def knobs_of(config: Configured, batch_sizes: Sequence[int] = ()) -> list[SharedKnob]:
  """Returns the knobs of an experiment whose mesh fits the chips.

  `batch_sizes` are further global batch sizes to try, in rows. They change what the experiment learns.
  """
  task = config.task
  names = task.mesh_axis_names or ('data',)
  knobs = [SharedKnob(('task.ici_mesh_shape',), tuple(task.ici_mesh_shape or (1,) * len(names)), _moved_factors)]
  policies: dict[Any, SharedKnob] = {}
  layers = list(task.instantiate().model.descendants())
  for layer in layers:
    for knob in layer.knobs():
      path = f'task.model.{layer.path_name}.{knob.field}'
      shared = SharedKnob((path,), knob.value, knob.neighbours, knob.kind)
      if knob.kind is not KnobKind.REMATERIALISATION:
        knobs.append(shared)
      elif (known := policies.setdefault(knob.value, shared)) is not shared:
        policies[knob.value] = dataclasses.replace(known, paths=(*known.paths, path))
  knobs += policies.values()
  if not any(layer.has_microbatches for layer in layers):
    path, own = 'task.train.learner.num_microbatches', task.train.learner.num_microbatches
    knobs.append(SharedKnob((path,), own, double_or_halve, KnobKind.MICROBATCHES))
  if batch_sizes and (where := batch_path(config)):
    path, rows = where
    sizes = sorted({rows, *batch_sizes})
    knobs.append(SharedKnob((path,), rows, lambda value: [size for size in sizes if size != value]))
  return knobs


def batch_path(config: Configured) -> tuple[str, int] | None:
  """Returns the path of the field that sets the training batch size, and its value.

  Returns None if the shapes of a batch were given, or no dataset is for training.
  """
  for i, dataset in enumerate(config.roots.get('datasets', ())):
    if getattr(dataset, 'is_training', False) and config.inputs is None:
      return f'datasets[{i}].batch_size', int(dataset.batch_size)
  return None


def neighbours(knobs: Sequence[SharedKnob], setting: Setting) -> Iterator[Setting]:
  """Yields the settings that differ from `setting` in one knob by one step."""
  for i, (knob, value) in enumerate(zip(knobs, setting)):
    for near in knob.neighbours(value):
      yield (*setting[:i], near, *setting[i + 1 :])


def overrides_of(knobs: Sequence[SharedKnob], setting: Setting) -> list[str]:
  """Returns the overrides that apply a setting to an experiment, without knobs that keep the experiment's value."""
  return [line for knob, value in zip(knobs, setting) if value != knob.own for line in knob.overrides(value)]


def _moved_factors(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
  """Returns all shapes that result from `shape` if a prime factor is moved from one size to another."""
  found = []
  for source, size in enumerate(shape):
    primes = [n for n in range(2, size + 1) if size % n == 0 and all(n % m for m in range(2, n))]
    for prime, to in itertools.product(primes, range(len(shape))):
      if to != source:
        moved = list(shape)
        moved[source], moved[to] = size // prime, moved[to] * prime
        found.append(tuple(moved))
  return found
