"""What a run trains, where, and on which data: built and checked before anything is compiled or saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs import BaseInput
from praxis_lite.inputs.rows import Struct
from praxis_lite.layers.attention import describe_attention
from praxis_lite.layers.pipeline import describe_pipelines
from praxis_lite.runs.elastic import fit_mesh
from praxis_lite.runs.improvement import Watched, watched_metrics
from praxis_lite.runs.loop.options import TrainOptions
from praxis_lite.runs.programs import DecodeProgram, EvalProgram, InputProgram, TaskOnMesh
from praxis_lite.runs.records.record import recorded_seed
from praxis_lite.runs.records.run_config import RunKeys, build_datasets, check_all_take_part, check_intervals, run_keys
from praxis_lite.runs.throughput import StartupTimes
from praxis_lite.runs.vocabulary import use_kept_vocabulary
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask, TrainParams


class TrainJob(NamedTuple):
  """What a run trains, where, and on which data.

  Attributes:
    config: the configs of the run, with the vocabulary that its directory keeps.
    directory: the run's directory.
    seed, keys: the source of all its random numbers.
    task, settings: the task that is trained, and its `task.train`.
    partitioned: the task on its mesh, for the batches of the training input.
    train_input, batch_struct: the training input, and the shapes and dtypes of its global batches.
    evaluation, decoding: programs for the other inputs.
    watched: the metrics that decide which checkpoint is the best, and when to stop.
    lines: lines to print about what is trained, on which devices, and how.
  """

  config: ExperimentConfig
  directory: Path
  seed: int
  keys: RunKeys
  task: SingleTask
  settings: TrainParams
  partitioned: PartitionedTask
  train_input: BaseInput
  batch_struct: Struct
  evaluation: Sequence[InputProgram]
  decoding: Sequence[InputProgram]
  watched: Watched
  lines: Sequence[str]


def build_job(config: ExperimentConfig, directory: Path, options: TrainOptions, startup: StartupTimes) -> TrainJob:
  """Builds the task, its mesh and its inputs, and traces its steps.

  Raises:
    UserError: a mistake in the config, the options or the data. Nothing has been compiled or written.
  """
  seed = recorded_seed(directory) if options.seed is None else options.seed
  config = use_kept_vocabulary(config, directory)
  num_devices = len(options.devices or jax.devices())
  task_p, fit = fit_mesh(config.task, num_devices) if options.elastic else (config.task, '')
  task = task_p.instantiate()
  if options.debug_nans and task.learner.on_nonfinite == 'ignore':
    raise ConfigError("task.train.learner.on_nonfinite = 'ignore' changes the state that debug_nans looks at")
  check_intervals(task.train)
  mesh = task.create_mesh(options.devices)
  check_all_take_part(mesh)
  keys = run_keys(seed, mesh)
  tasks = TaskOnMesh(task, mesh)
  startup.mark('task')

  datasets = build_datasets(config.datasets)
  data = datasets.the_training_input()
  decode_datasets = build_datasets(config.decode_datasets, 'decode_datasets')
  batch = data.batch_struct()
  datasets.check([data, *datasets.evaluation], task.model)
  startup.mark('data')

  partitioned = tasks.taking(data)
  startup.mark('task')
  partitioned.train_step.trace()
  evaluation = [EvalProgram(tasks, i, keys.evaluate) for i in datasets.evaluation]
  decoding = [DecodeProgram(tasks, i, keys.evaluate, directory) for i in decode_datasets.inputs]
  watched = watched_metrics(task.train, {program.split: program.metric_names() for program in evaluation})
  startup.mark('trace')
  lines = list(_describe(task, partitioned, batch, fit, options.devices))
  return TrainJob(
    config, directory, seed, keys, task, task.train, partitioned, data, batch, evaluation, decoding, watched, lines
  )


def _describe(
  task: SingleTask, partitioned: PartitionedTask, batch_struct: Struct, fit: str, devices: Sequence[jax.Device] | None
) -> Iterator[str]:
  """Yields lines about what is trained, on which of the `devices`, and how its attention and its pipelines compute."""
  mesh, ids = partitioned.mesh, batch_struct.get('ids')
  shape = ' x '.join(f'{axis} {size}' for axis, size in mesh.shape.items())
  total, active = partitioned.total_num_params, partitioned.active_num_params
  of_token = '' if active == total else f' ({active:,} active for each token)'
  yield f'{task.name}: {total:,} parameters{of_token}, mesh {shape} ({mesh.devices.flat[0].device_kind})'
  if fit:
    yield fit
  available = jax.device_count() if devices is None else len(devices)
  if available > mesh.size:
    yield _describe_unused_devices(task, mesh.size, available)
  if isinstance(ids, jax.ShapeDtypeStruct) and len(ids.shape) > 1:
    yield from describe_attention(task.model, ids.shape[1], packed='segment_ids' in batch_struct)
  yield from describe_pipelines(task.model, partitioned.rows_of_microbatch)


def _describe_unused_devices(task: SingleTask, used: int, available: int) -> str:
  """Returns the line that says that the mesh leaves devices idle, and how a mesh would use all of them."""
  names = task.mesh_axis_names or ('data',)
  axis = names.index('data') if 'data' in names else 0
  shape = ','.join(str(available if i == axis else 1) for i in range(len(names))) + ',' * (len(names) == 1)
  named = '' if task.mesh_axis_names else '--set "task.mesh_axis_names=(\'data\',)" '
  return f'{available} devices, and the mesh uses {used}: to use all, {named}--set "task.ici_mesh_shape=({shape})"'
