"""Lines that a run prints at its beginning, and at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax

from praxis_lite.layers.attention import describe_attention
from praxis_lite.layers.pipeline import describe_pipelines
from praxis_lite.runtime.hooks import Run
from praxis_lite.runtime.loop.job import Job
from praxis_lite.task import SingleTask
from praxis_lite.training.partitioned_task import PartitionedTask


def introduction(job: Job, devices: Sequence[jax.Device] | None) -> Iterator[str]:
  """Yields what is trained, on which of the `devices`, and how its attention and its pipelines compute."""
  task, used, ids = job.task, job.partitioned.mesh.size, job.batch_struct.get('ids')
  yield _task_on_mesh(task.name, job.partitioned)
  if job.fit:
    yield job.fit
  available = jax.device_count() if devices is None else len(devices)
  if available > used:
    yield _unused_devices(task, used, available)
  if isinstance(ids, jax.ShapeDtypeStruct) and len(ids.shape) > 1:
    yield from describe_attention(task.model, ids.shape[1], packed='segment_ids' in job.batch_struct)
  yield from describe_pipelines(task.model, job.partitioned.rows_of_microbatch)


def conclusion(run: Run, first_step: int, where: str) -> str:
  """Returns how far a run has come, and where it is saved."""
  total = run.total_steps
  if run.step > total:
    return f'step {run.step}, past the {total} of task.train.num_train_steps, so no step was taken: saved in {where}'
  all_taken = '; all steps are taken' if run.step == first_step == total else ''
  return f'step {run.step} of {total}: saved in {where}{all_taken}'


def _task_on_mesh(name: str, partitioned: PartitionedTask) -> str:
  mesh = partitioned.mesh
  shape = ' x '.join(f'{axis} {size}' for axis, size in mesh.shape.items())
  total, active = partitioned.total_num_params, partitioned.active_num_params
  parameters = (
    f'{total:,} parameters' if active == total else f'{total:,} parameters ({active:,} active for each token)'
  )
  return f'{name}: {parameters}, mesh {shape} ({mesh.devices.flat[0].device_kind})'


def _unused_devices(task: SingleTask, used: int, available: int) -> str:
  """Returns the line that says that the mesh leaves devices idle, with a mesh of all of them."""
  names = task.mesh_axis_names or ('data',)
  axis = names.index('data') if 'data' in names else 0
  shape = ','.join(str(available if i == axis else 1) for i in range(len(names))) + ',' * (len(names) == 1)
  named = '' if task.mesh_axis_names else '--set "task.mesh_axis_names=(\'data\',)" '
  return f'{available} devices, and the mesh uses {used}: to use all, {named}--set "task.ici_mesh_shape=({shape})"'
