"""What a run trains, where, and on which data: built, and checked, before anything is compiled or saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from praxis_lite.errors import ConfigError
from praxis_lite.experiment import ExperimentConfig
from praxis_lite.inputs import BaseInput
from praxis_lite.inputs.rows import Struct
from praxis_lite.records.record import recorded_seed
from praxis_lite.records.run_config import RunKeys, build_datasets, check_all_take_part, check_intervals, run_keys
from praxis_lite.runtime.elastic import fitted
from praxis_lite.runtime.improvement import Watched, watched_metrics
from praxis_lite.runtime.loop.options import TrainOptions
from praxis_lite.runtime.programs import DecodeProgram, EvalProgram, Program, TaskOnMesh
from praxis_lite.runtime.throughput import StartupTimes
from praxis_lite.runtime.vocabulary import with_vocabulary
from praxis_lite.task import SingleTask, TrainParams
from praxis_lite.training.partitioned_task import PartitionedTask


class Job(NamedTuple):
  """What a run trains, where, and on which data.

  Attributes:
    config: the configs of the run, with the vocabulary that it keeps.
    directory: the run's directory.
    seed, keys: of all its random numbers.
    partitioned: the task on its mesh, for the batches of the training input.
    train_input, batch_struct: the training input, and the shapes and dtypes of a global batch of it.
    evaluation, decoding: programs for the other inputs.
    watched: the metrics that decide which checkpoint is the best, and when to stop.
    fit: a line that says how the mesh was made smaller; '' if it was not.
  """

  config: ExperimentConfig
  directory: Path
  seed: int
  keys: RunKeys
  partitioned: PartitionedTask
  train_input: BaseInput
  batch_struct: Struct
  evaluation: Sequence[Program]
  decoding: Sequence[Program]
  watched: Watched
  fit: str

  @property
  def task(self) -> SingleTask:
    """The task that is trained."""
    return self.partitioned.jax_task

  @property
  def settings(self) -> TrainParams:
    """Its `task.train`."""
    return self.task.train


def build_job(config: ExperimentConfig, directory: Path, options: TrainOptions, startup: StartupTimes) -> Job:
  """Builds the task, its mesh and its inputs, and traces its steps.

  Raises:
    UserError: a mistake in the config, the options or the data. Nothing has been compiled or written.
  """
  seed = recorded_seed(directory) if options.seed is None else options.seed
  config = with_vocabulary(config, directory)
  num_devices = len(options.devices or jax.devices())
  task_p, fit = fitted(config.task, num_devices) if options.elastic else (config.task, '')
  task = task_p.instantiate()
  check_intervals(task.train)
  if options.debug_nans and task.learner.on_nonfinite == 'ignore':
    raise ConfigError("task.train.learner.on_nonfinite = 'ignore' changes the state that debug_nans looks at")
  tasks = TaskOnMesh(task, task.create_mesh(options.devices))
  check_all_take_part(tasks.mesh)
  keys = run_keys(seed, tasks.mesh)
  startup.mark('task')

  datasets = build_datasets(config.datasets)
  train_input = datasets.the_training_input()
  decode_datasets = build_datasets(config.decode_datasets, 'decode_datasets')
  batch_struct = train_input.batch_struct()
  datasets.check([train_input, *datasets.evaluation], task.model)
  startup.mark('data')

  partitioned = tasks.taking(train_input)
  startup.mark('task')
  partitioned.train_step.trace()
  evaluation = [EvalProgram(tasks, data, keys.evaluate) for data in datasets.evaluation]
  decoding = [DecodeProgram(tasks, data, keys.evaluate, directory) for data in decode_datasets.inputs]
  watched = watched_metrics(task.train, {program.split: program.metric_names() for program in evaluation})
  startup.mark('trace')
  return Job(config, directory, seed, keys, partitioned, train_input, batch_struct, evaluation, decoding, watched, fit)
