"""The train steps of a run whose batches have several sizes; see `GrowingBatches`."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from praxis_lite.common.trees import NestedDict
from praxis_lite.inputs.rows import Rows
from praxis_lite.sharding.batch import batch_size
from praxis_lite.training.partitioned_task import PartitionedTask


class SizedSteps:
  """The train steps of a task, partitioned for batches of each size, the smallest first."""

  def __init__(self, tasks: Sequence[PartitionedTask]):
    self._tasks = tasks

  def compile(self) -> None:
    for task in self._tasks:
      task.train_step.compile()
      task.untapped.train_step.compile()  # The same program as `task.train_step`, unless there are taps.

  def put(self, batch: Rows) -> NestedDict:
    """Puts a host batch on the mesh, padded to the rows of the smallest step that has room for it.

    Raises:
      DataError: no step takes such a batch.
    """
    rows = batch_size(batch) * jax.process_count()
    task = next((task for task in self._tasks if _rows(task) >= rows), self._tasks[-1])
    return task.train_step.put_inputs(batch)

  def taking(self, batch: NestedDict) -> PartitionedTask:
    """Returns the task whose step takes this batch. The batch is on the mesh."""
    if len(self._tasks) == 1:
      return self._tasks[0]
    return next(task for task in self._tasks if _rows(task) == batch_size(batch))


def _rows(task: PartitionedTask) -> int:
  return batch_size(task.train_step.arguments[-1])
