"""Fits the mesh of a task to fewer devices, and keeps the global batch.

The axes that only split the rows of a batch, 'replica' and then 'data', become as small as needed; all others stay.
Each device then has more rows of a batch. So the number of microbatches is multiplied by the ratio of the old to
the new number of devices, rounded up, so that no device computes more rows at a time than before.
"""

from __future__ import annotations

import math

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.figures import format_axes, number_of
from praxis_lite.training.task import SingleTask

_AXES = ('replica', 'data')


def fit_mesh(task: Config[SingleTask], num_devices: int) -> tuple[Config[SingleTask], str]:
  """Returns the config of a task with a mesh for `num_devices`, and a line about what changed ('' if nothing did).

  Raises:
    ConfigError: there are too few devices for the mesh, and `dcn_mesh_shape` is set; or there are too few even for a
      mesh in which the axes that may shrink have size 1.
  """
  sizes = task.instantiate().mesh_sizes(num_devices)
  if (needed := math.prod(sizes.values())) <= num_devices:
    return task, ''
  smaller = dict(sizes)
  for axis in _AXES:
    if axis in sizes and math.prod(smaller.values()) > num_devices:
      others = math.prod(smaller.values()) // smaller[axis]
      smaller[axis] = max(1, num_devices // others)
  if math.prod(smaller.values()) > num_devices or task.dcn_mesh_shape is not None:
    why = 'with several slices the mesh does not shrink' if task.dcn_mesh_shape else f'only {_AXES} shrink'
    raise ConfigError(
      f'task.ici_mesh_shape: the mesh {format_axes(sizes)} needs {number_of(needed, "device")}, and there are '
      f'{num_devices}; {why}'
    )
  used = math.prod(smaller.values())
  result = task.clone()
  result.ici_mesh_shape = tuple(smaller.values())
  factor, learner = math.ceil(needed / used), result.train.learner
  before = learner.num_microbatches
  learner.num_microbatches = before * factor
  return result, (
    f'{number_of(num_devices, "device")} for a mesh of {needed}: {format_axes(sizes)} becomes {format_axes(smaller)}, '
    f'and num_microbatches {before} becomes {before * factor}; the global batch is the same'
  )
