"""SingleTask: one model, how it is trained, evaluated and decoded, and the mesh it is split over.

A task config describes a whole run except its data:

    task.model       the config of a `BaseModel`
    task.train       learner, steps, intervals, `inputs_split_mapping`
    task.evaluate    whether moving averages are used, number of batches
    task.decode      the same for decoding
    task.ici_mesh_shape, task.dcn_mesh_shape, task.mesh_axis_names
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from praxis_lite.config import REQUIRED, Config, Configurable, template
from praxis_lite.errors import ConfigError, did_you_mean, located
from praxis_lite.learning import Learner
from praxis_lite.models.base import BaseModel
from praxis_lite.partitioning.mesh import create_device_mesh, mesh_sizes

PARTITIONINGS = ('auto', 'shard_map')


class TrainParams(Configurable):
  """How the task is trained.

  Attributes:
    learner: optimizer, schedule, clipping, moving averages, accumulation.
    num_train_steps: steps of the whole run.
    inputs_split_mapping: `map_1d`, `map_2d`, ...: how inputs are split inside the step, by rank; None leaves them split
      over all mesh axes on the batch dimension.
    log_interval_steps: steps between lines on the console and scalars in the event files.
    eval_interval_steps: steps between evaluations; None evaluates only at the end.
    decode_interval_steps: steps between decoding runs; None never decodes in training.
    save_interval_steps: steps between checkpoints; the last step is always saved.
    max_to_keep: how many of the newest checkpoints are kept.
    keep_interval_steps: checkpoints at multiples of this step are never deleted; None disables it.
  """

  learner: Config = template(Learner)
  num_train_steps: int = 1000
  inputs_split_mapping: dict[str, Any] | None = None
  log_interval_steps: int = 10
  eval_interval_steps: int | None = None
  decode_interval_steps: int | None = None
  save_interval_steps: int = 500
  max_to_keep: int = 3
  keep_interval_steps: int | None = None


class EvalParams(Configurable):
  """How the task is evaluated.

  Attributes:
    use_ema: evaluate the moving averages if the learner keeps them.
    max_batches: maximum number of batches; None evaluates the whole set.
  """

  use_ema: bool = True
  max_batches: int | None = None


class DecodeParams(Configurable):
  """How the task decodes its `decode_datasets()`.

  Attributes:
    use_ema: decode with the moving averages if the learner keeps them.
    max_batches: maximum number of batches; None decodes the whole set.
  """

  use_ema: bool = True
  max_batches: int | None = None


class SingleTask(Configurable):
  """A model and everything that its training run needs, except data.

  `model`, `train`, `evaluate` and `decode` are configs in the config of a task; the task has what is built from them.

  Attributes:
    name: name of the task, for logs.
    model: the model.
    mesh_axis_names: names of the mesh axes, in the order of the mesh shapes.
    ici_mesh_shape: mesh shape within a slice (devices with a fast interconnect); None means one device.
    dcn_mesh_shape: number of slices along each axis; None means one slice.
    logical_axis_rules: pairs (logical name, mesh axes) for mappings that name logical axes; earlier rules win.
    strategy: pairs (regex of variable paths, ops), such as `('.*', 'fsdp(axis="data")')`: it places the weights that
      declare no mapping.
    partitioning: of the train step. 'auto': XLA inserts the communication. 'shard_map': collectives are explicit; each
      device computes its own rows, gathers weights where it uses them, and averages gradients.
    train, evaluate, decode: see the classes.
  """

  name: str = 'task'
  model: BaseModel = REQUIRED
  mesh_axis_names: tuple[str, ...] | None = None
  ici_mesh_shape: tuple[int, ...] | None = None
  dcn_mesh_shape: tuple[int, ...] | None = None
  logical_axis_rules: tuple[tuple[str, Any], ...] | None = None
  strategy: list[tuple[str, str]] | None = None
  partitioning: str = 'auto'
  train: TrainParams = template(TrainParams)
  evaluate: EvalParams = template(EvalParams)
  decode: DecodeParams = template(DecodeParams)

  def __post_init__(self) -> None:
    if self.partitioning not in PARTITIONINGS:
      close = did_you_mean(str(self.partitioning), PARTITIONINGS)
      raise ConfigError(f"task.partitioning: expected 'auto' or 'shard_map', got {self.partitioning!r}.{close}")
    if self.ici_mesh_shape is not None and self.mesh_axis_names is None:
      raise ConfigError('task.mesh_axis_names: ici_mesh_shape is set, so each of its axes needs a name')
    for section in ('train', 'evaluate', 'decode'):
      config = getattr(self, section)
      if not isinstance(config, Config):
        raise ConfigError(f'task.{section}: expected the config of its settings, got {config!r}')
      setattr(self, section, config.instantiate())
    for section in ('evaluate', 'decode'):
      max_batches = getattr(self, section).max_batches
      if max_batches is not None and max_batches < 1:
        raise ConfigError(f'task.{section}.max_batches = {max_batches}: expected at least 1, or None for all')
    with located('task.train'):
      self.learner: Learner = _with_total_steps(self.train.learner, self.train.num_train_steps).instantiate()
    model_p: object = self.model
    if not isinstance(model_p, Config):
      raise ConfigError(f'task.model: expected the config of a BaseModel, got {model_p!r}')
    inherited = ('mesh_axis_names', 'logical_axis_rules')
    model = model_p.instantiate(**{f: getattr(self, f) for f in inherited if getattr(model_p, f) is None})
    if not isinstance(model, BaseModel):
      raise ConfigError(f'task.model: expected the config of a BaseModel, got {type(model).__name__}')
    self.model = model

  def mesh_sizes(self) -> dict[str, int]:
    """Returns the size of each mesh axis by name, without creating the mesh."""
    with located('task'):
      return mesh_sizes(*self._mesh_shape())

  def create_mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of the task; without a mesh shape, one device with every axis of size 1.

    Raises:
      ShardingError: the mesh needs more devices than there are, or its shape and names do not fit.
    """
    ici, dcn, names = self._mesh_shape()
    with located('task'):
      return create_device_mesh(ici, dcn, names, devices)

  def _mesh_shape(self) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[str, ...]]:
    names = self.mesh_axis_names or ('data',)
    return self.ici_mesh_shape or (1,) * len(names), self.dcn_mesh_shape, names


def _with_total_steps(learner: Config, num_train_steps: int) -> Config:
  """Sets `total_steps` of a schedule that requires it and does not have it to the steps of the run."""
  schedule = learner.schedule
  if getattr(schedule, 'total_steps', None) is REQUIRED:
    learner = learner.clone()
    learner.schedule.total_steps = num_train_steps
  return learner
