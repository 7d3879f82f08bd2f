"""AnswerSampling: completes the batches of a `RewardedInput` with answers that the model samples at that step.

    prompts on the host -> answers on the mesh -> rewards on the host -> a batch on the mesh

Answers are drawn with the key of the run folded with the step, and each row draws its own numbers. So a run that
resumes, on any mesh, samples the same answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.processes import note_progress
from praxis_lite.common.trees import NestedDict
from praxis_lite.inputs.rewarded import RewardedInput
from praxis_lite.inputs.rows import Rows
from praxis_lite.training.partitioned_step import PartitionedStep
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.state import TrainState
from praxis_lite.training.steps import DecodeStepOutput
from praxis_lite.training.task import TrainParams


class AnswerSampling:
  """Samples answers to the prompts of an input.

  Args:
    partitioned: the task for the prompts of the input.
    takes: the step that is called with completed batches.
    data: the input; training samples from the model's distribution, evaluation decodes by `decoder_tpl`.
    key: PRNG key on the mesh, into which steps are folded.

  Raises:
    ConfigError: a run would save, evaluate or end between two steps that share answers, which would be lost.
  """

  def __init__(self, partitioned: PartitionedTask, takes: PartitionedStep, data: RewardedInput, key: jax.Array):
    if data.is_training:
      _check_intervals(data, partitioned.jax_task.train)
    partitioned = partitioned.untapped
    self.step: PartitionedStep[DecodeStepOutput] = (
      partitioned.sample_step if data.is_training else partitioned.decode_step
    )
    self._takes = takes
    self._data = data
    self._key = key
    self.steps_per_batch = data.steps_per_batch

  def complete(self, mdl_vars: NestedDict, global_step: jax.Array, batch: Rows) -> NestedDict:
    """Returns a batch with answers and rewards, on the mesh.

    Args:
      mdl_vars: padded variables on the mesh.
      global_step: int32, the number of steps taken.
      batch: the rows of this host that the input has yielded.
    """
    note_progress('answers to prompts')
    decoded = jax.device_get(self.step(mdl_vars, self._key, global_step, self._data.prompts(batch)).decoded)
    first, rows = self._data.host_rows[0], len(batch['num_given'])
    answers = {name: np.asarray(decoded[name])[first : first + rows] for name in ('ids', 'lengths', 'log_probs')}
    return self._takes.put_inputs(self._data.complete(batch, answers))

  def complete_all(self, batches: Iterable[Rows], state: Callable[[], TrainState]) -> Iterator[NestedDict]:
    """Yields a completed batch for each step, given `batches` of the input; `state` returns the current train state."""
    for batch in batches:
      completed = self.complete(state().mdl_vars, state().step, batch)
      yield completed
      while int(state().step) % self.steps_per_batch:
        yield completed


def _check_intervals(data: RewardedInput, settings: TrainParams) -> None:
  """Raises ConfigError unless a run saves, evaluates and ends only between batches of its input."""
  several = data.steps_per_batch
  intervals = ('num_train_steps', 'save_interval_steps', 'eval_interval_steps', 'decode_interval_steps')
  found = {f'task.train.{name}': getattr(settings, name) for name in intervals}
  found['task.train.emergency_copies.every_n_steps'] = settings.emergency_copies.every_n_steps
  for path, value in found.items():
    if value is not None and value % several:
      raise ConfigError(
        f'{path} = {value}: {data.label}.steps_per_batch = {several} steps share their answers, so this must be a '
        f'multiple of {several}'
      )


def prompt_struct(data: RewardedInput) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns shapes and dtypes of the prompts of a global batch."""
  int32, rows = np.int32, data.batch_size
  return {
    'ids': jax.ShapeDtypeStruct((rows, data.prompt_length), int32),
    'prompt_lengths': jax.ShapeDtypeStruct((rows,), int32),
  }
