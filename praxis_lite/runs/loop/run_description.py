"""Describes a run in the lines that it prints first: what is trained, where and how, and warnings about its config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import fiddle as fdl
import jax

from praxis_lite.common.accelerators import accelerator_of
from praxis_lite.common.config import Config, target
from praxis_lite.common.figures import format_axes, number_of
from praxis_lite.inputs import TextInput
from praxis_lite.layers.dot_product import many_logits
from praxis_lite.layers.implementations import describe_implementations
from praxis_lite.layers.pipeline import describe_pipelines
from praxis_lite.training.adapters import describe_untypical_training
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.learning.multi_learner import nested_learners
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.slow_paths import describe_slow_paths, find_slow_paths
from praxis_lite.training.task import SingleTask

# Fields of inputs that do not change which examples are read.
_HOW_READ = ('name', 'is_training', 'batch_size', 'seed', 'shuffle', 'num_epochs', 'drop_remainder')


def describe_run(
  config: ExperimentConfig,
  task: SingleTask,
  partitioned: PartitionedTask,
  fit: str,
  devices: Sequence[jax.Device] | None,
) -> Iterator[str]:
  """Yields lines about the task, the devices it trains on, the implementations of its layers, and its data.

  Args:
    config, task, partitioned: what is trained; the built task, and the task on its mesh.
    fit: a line about a mesh that was made to fit the devices; '' if the task's own mesh is used.
    devices: the devices that the run may use; None means all.
  """
  mesh, ids = partitioned.mesh, partitioned.inputs_shape.get('ids')
  total, active = task.model.total_num_params, task.model.active_num_params
  of_token = '' if active == total else f' ({active:,} active for each token)'
  kind = mesh.devices.flat[0].device_kind
  where = f'1 device ({kind})' if mesh.size == 1 else f'{mesh.size} devices ({kind}), mesh {format_axes(mesh.shape)}'
  yield f'{task.name}: {number_of(total, "parameter")}{of_token} on {where}'
  if warning := describe_untypical_training(task):
    yield warning
  yield from describe_long_warmups(task)
  if fit:
    yield fit
  available = jax.device_count() if devices is None else len(devices)
  if available > mesh.size:
    yield _describe_unused_devices(task, mesh.size, available)
  if isinstance(ids, jax.ShapeDtypeStruct) and len(ids.shape) > 1:
    length = ids.shape[1]
    # For short sequences on a CPU, the implementation hardly matters.
    platform = mesh.devices.flat[0].platform
    if platform != 'cpu' or length**2 >= many_logits(platform):
      yield from describe_implementations(task.model, length, packed='segment_ids' in partitioned.inputs_shape)
  yield from describe_pipelines(task.model, partitioned.rows_of_microbatch)
  if accelerator := accelerator_of(kind):
    jaxpr = partitioned.train_step.trace().jaxpr
    yield from describe_slow_paths(find_slow_paths(jaxpr, task.model, accelerator, mesh.size))
  yield from describe_raw_lines(config)
  yield from describe_seen_examples(config)


def _describe_unused_devices(task: SingleTask, used: int, available: int) -> str:
  """Returns a line that says that the mesh leaves devices idle, and which mesh would use all of them."""
  names = task.mesh_axis_names or ('data',)
  axis = names.index('data') if 'data' in names else 0
  shape = ','.join(str(available if i == axis else 1) for i in range(len(names))) + ',' * (len(names) == 1)
  return f'{available} devices, and the mesh uses {used}: to use all, --set "task.ici_mesh_shape=({shape})"'


def describe_long_warmups(task: SingleTask) -> Iterator[str]:
  """Yields a warning for each learner whose learning rate still rises when the run ends."""
  steps = task.train.num_train_steps
  for path, learner in nested_learners(task.train.learner).items():
    warmup = getattr(learner.schedule, 'warmup_steps', None)
    if isinstance(warmup, int) and warmup > steps:
      field = '.'.join(filter(None, ['task.train.learner', path, 'schedule.warmup_steps']))
      yield f'warning: {field} = {warmup}: the run ends at step {steps}, before the learning rate has reached its peak'


def describe_seen_examples(config: ExperimentConfig) -> Iterator[str]:
  """Yields a warning for each dataset that evaluates on the examples of training."""
  trained_on = [_examples_of(data) for data in config.datasets if getattr(data, 'is_training', False)]
  for i, data in enumerate(config.datasets):
    if getattr(data, 'path', None) and not data.is_training and _examples_of(data) in trained_on:
      yield (
        f'warning: datasets[{i}].path: evaluation reads the same examples as training, so its metrics do not show how '
        f"good the model is on others; name other files: --set 'datasets[{i}].path=...'"
      )


def _examples_of(data: Config) -> tuple[object, dict[str, object]]:
  """Returns the class of an input, and the fields that decide which examples it reads, but not how."""
  fields = fdl.ordered_arguments(data, include_defaults=True)
  return target(data), {name: value for name, value in fields.items() if name not in _HOW_READ}


def describe_raw_lines(config: ExperimentConfig) -> Iterator[str]:
  """Yields a warning for each dataset that reads JSON Lines as plain text."""
  for i, dataset in enumerate(config.datasets):
    built, path = target(dataset), getattr(dataset, 'path', None)
    paths = [path] if isinstance(path, str) else path if isinstance(path, list | tuple) else []
    if not (isinstance(built, type) and issubclass(built, TextInput)):
      continue
    if raw := [each for each in paths if str(each).endswith('.jsonl')]:
      yield (
        f'warning: datasets[{i}].path: {raw[0]} is read as plain text, with the braces and names of JSON; '
        '`praxis-lite tokenize` reads a field of each line, and TokenizedInput its rows'
      )
