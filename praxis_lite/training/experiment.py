"""BaseExperiment: a task and its data, registered by name and launched from the command line.

Its methods return configs:

    @registry.register
    class TinyLm(BaseExperiment):
      ici_mesh_shape = (2, 4)
      mesh_axis_names = ('data', 'mdl')

      def task(self): ...
      def datasets(self): ...
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from praxis_lite.common.config import Config, field_names, target
from praxis_lite.common.errors import ConfigError, UnknownFieldError, did_you_mean
from praxis_lite.sharding.mesh import GivenMeshShape, read_mesh_shape

T = TypeVar('T')

_MESH_FIELDS = ('ici_mesh_shape', 'dcn_mesh_shape', 'mesh_axis_names')


class BaseExperiment:
  """A task and its data.

  Attributes:
    ici_mesh_shape: mesh shape within a slice; None uses the mesh shape of the task, by default one device.
    dcn_mesh_shape: number of slices along each axis; None means one slice.
    mesh_axis_names: names of the mesh axes.
  """

  ici_mesh_shape: GivenMeshShape | None = None
  dcn_mesh_shape: tuple[int, ...] | None = None
  mesh_axis_names: tuple[str, ...] | None = None

  def task(self) -> Config:
    """Returns the config of the task."""
    raise ConfigError(f'{type(self).__qualname__} has no method task(), which returns the Config of a task; define it')

  def datasets(self) -> list[Config]:
    """Returns configs of `BaseInput`s: one with `is_training=True`, and any number for evaluation."""
    raise ConfigError(f'{type(self).__qualname__} has no method datasets(), which returns Configs of inputs; define it')

  def decode_datasets(self) -> list[Config]:
    """Returns configs of `BaseInput`s whose batches are prompts to decode."""
    return []

  def validate(self) -> None:
    """Raises a `ConfigError` if the experiment is inconsistent; called before anything is built."""


@dataclasses.dataclass
class ExperimentConfig:
  """The configs of one run. Fields may be replaced; override paths begin with the name of a field.

  Setting a field raises ConfigError if the value is not the config of a task, or a list of configs of inputs.
  """

  task: Config
  datasets: list[Config]
  decode_datasets: list[Config] = dataclasses.field(default_factory=list)

  def __setattr__(self, name: str, value: object) -> None:
    known = [field.name for field in dataclasses.fields(self)]
    if name not in known:
      raise UnknownFieldError(f'an experiment has no {name!r}.{did_you_mean(name, known)} It has {", ".join(known)}.')
    if name != 'task':
      value = _inputs(value, name, verb='is')
    elif not isinstance(value, Config):
      raise ConfigError(f'task is {type(value).__name__}; it must be a Config of a task')
    super().__setattr__(name, value)

  def roots(self) -> dict[str, Config | list[Config]]:
    """Returns the configs by field name, for `apply_overrides` and `to_text`."""
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  def _replace(self, **changes: Any) -> ExperimentConfig:
    """Returns a copy with some of the configs replaced, like `_replace` of named tuples."""
    return dataclasses.replace(self, **changes)


def configure(experiment_class: type[BaseExperiment]) -> ExperimentConfig:
  """Returns an experiment's configs. Its mesh attributes fill in those that the task's config does not set.

  Raises:
    ConfigError: `task()` or `datasets()` does not return configs, or the class misspells a mesh attribute.
  """
  name = experiment_class.__qualname__
  if not callable(getattr(experiment_class, 'validate', None)):
    raise ConfigError(f'{name} is not an experiment: derive it from BaseExperiment')
  experiment = _call(experiment_class, name)
  experiment.validate()
  task = _call(experiment.task, f'{name}.task')
  if not isinstance(task, Config):
    raise ConfigError(f'{name}.task() returned {type(task).__name__}; it must return a Config of a task')
  if not {'model', 'train', 'ici_mesh_shape'} <= set(field_names(task) or ()):
    raise ConfigError(
      f'{name}.task() returned the Config of {_built_by(task)}; it must return that of a task, as in '
      'Config(SingleTask, model=Config(MyModel))'
    )
  for field in _MESH_FIELDS:
    if getattr(task, field) is None:
      setattr(task, field, getattr(experiment, field))
  _check_spelling(experiment_class, [field for field in _MESH_FIELDS if getattr(task, field) is None])
  read_sizes(task)
  datasets = _inputs(_call(experiment.datasets, f'{name}.datasets'), f'{name}.datasets()')
  prompts = _call(experiment.decode_datasets, f'{name}.decode_datasets')
  return ExperimentConfig(task, datasets, _inputs(prompts, f'{name}.decode_datasets()'))


def _check_spelling(experiment_class: type[BaseExperiment], unset: Sequence[str]) -> None:
  """Raises ConfigError if the class sets an attribute whose name seems to misspell one of the names in `unset`."""
  for cls in experiment_class.__mro__:
    for name in () if cls in (BaseExperiment, object) else vars(cls):
      close = difflib.get_close_matches(name.lower(), unset, n=1, cutoff=0.9)
      if close and not hasattr(BaseExperiment, name) and not callable(getattr(cls, name)):
        where = f'{cls.__qualname__}.{name}'
        raise ConfigError(f"{where}: an experiment has no such attribute. Did you mean '{close[0]}'?")


def read_sizes(task: Config) -> None:
  """Replaces 'auto' in the mesh shape of a task's config, in place: the shape becomes a tuple of integers, or None."""
  task.ici_mesh_shape = read_mesh_shape(task.ici_mesh_shape, task.mesh_axis_names)


def _call(fn: Callable[[], T], name: str) -> T:
  """Calls a function without arguments and returns the result; raises ConfigError if the function needs arguments."""
  try:
    inspect.signature(fn).bind()
  except (TypeError, ValueError):  # ValueError if a method has no `self`.
    raise ConfigError(f'{name} takes arguments, or lacks self; it is called as {name}(), without any') from None
  return fn()


def _built_by(config: Config) -> str:
  return getattr(target(config), '__qualname__', repr(target(config)))


def _inputs(configs: object, where: str, verb: str = 'returned') -> list[Config]:
  if not isinstance(configs, list | tuple):
    must = 'be' if verb == 'is' else 'return'
    raise ConfigError(f'{where} {verb} {type(configs).__name__}; it must {must} a list of Configs of inputs')
  for i, config in enumerate(configs):
    if not isinstance(config, Config):
      raise ConfigError(f'{where}[{i}] is {type(config).__name__}; it must be the Config of an input')
    fields = field_names(config)
    if fields is not None and 'host_index' not in fields:
      raise ConfigError(
        f'{where}[{i}] is the Config of {_built_by(config)}; it must be that of an input, as in '
        'Config(ArrayInput, arrays=..., batch_size=32, is_training=True)'
      )
  return list(configs)
