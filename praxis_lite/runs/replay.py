"""Repeats steps of a run.

`replay` runs one step operation by operation, and finds the layer that first computes a value that is not finite.
`compare_with_checkpoint` repeats the steps between two checkpoints, to check that they give the same bits again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from praxis_lite.checkpoints import Checkpointer, saved_steps
from praxis_lite.common.errors import CheckpointError, ConfigError, DataError, UserError, first_lines
from praxis_lite.common.files import user_path
from praxis_lite.common.jax_internals import UnknownJax, reading
from praxis_lite.common.statistics import bin_edges
from praxis_lite.common.trees import NestedDict
from praxis_lite.inputs import PrefetchIterator
from praxis_lite.runs.determinism import bit_differences, rotate_devices
from praxis_lite.runs.nonfinite import NonFiniteError
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.records.heartbeat import read_heartbeats
from praxis_lite.runs.records.run_config import run_keys
from praxis_lite.runs.records.run_inputs import build_datasets, use_kept_vocabulary
from praxis_lite.runs.records.runs import read_run
from praxis_lite.runs.trouble import batches_to_skip, read_troubles
from praxis_lite.sharding.padding import slice_to
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.first_nonfinite import Trace
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.state import TrainState
from praxis_lite.training.steps import loss_and_gradients
from praxis_lite.training.taps import finish_summaries, step_taps

_SHOWN = 5


def trace_on_one_device(
  partitioned: PartitionedTask, state: TrainState, prng_key: jax.Array, batch: NestedDict
) -> Trace:
  """Computes the loss and the gradients of a step on one device, one operation at a time; donates no argument.

  Raises:
    ConfigError: there are several hosts, so one device cannot receive all arrays.
  """
  if jax.process_count() > 1:
    raise ConfigError('a step can be traced on one host only; run `praxis-lite replay` on one host')
  here = jax.sharding.SingleDeviceSharding(partitioned.mesh.devices.flat[0])
  variables = jax.device_put(slice_to(state.mdl_vars, partitioned.layout.mdl_vars.unpadded_shapes), here)
  step, key, rows = jax.device_put((state.step, prng_key, batch), here)
  model = partitioned.jax_task.model
  trace = Trace('' if model.name else type(model).__name__)
  trace.run(lambda v, s, k, b: loss_and_gradients(partitioned.jax_task, v, s, k, b), variables, step, key, rows)
  return trace


def check_finite(
  partitioned: PartitionedTask, before: int, state: TrainState, prng_key: jax.Array, batch: NestedDict
) -> None:
  """Raises NonFiniteError for a step that was not finite; its message names the layer.

  Args:
    before: the number of steps taken before this step.
    state: the state after this step, in which the learner has changed only the step number.
  """
  step = jax.device_put(np.asarray(before, np.int32), state.step.sharding)
  try:
    with reading('a step, operation by operation'):
      trace = trace_on_one_device(partitioned, state.replace(step=step), prng_key, batch)
  except UnknownJax as error:
    raise NonFiniteError(f'step {before + 1} is not finite; the layer is not known: {error}') from error
  origin = trace.origins[0] if trace.origins else 'it is finite when each operation is run on its own on one device'
  raise NonFiniteError(f'step {before + 1} is not finite; the first value that is not: {origin}')


def replay(
  config: ExperimentConfig, job_log_dir: str | Path, step: int, seed: int, line: Callable[[str], object] = print
) -> Trace:
  """Runs a step of a run again and prints what each layer computes; nothing in the directory is changed.

  It restores the last checkpoint before the step, and reads the same batches as the run did.

  Args:
    config, job_log_dir, seed: the configs, the directory and the seed of the run.
    step: the number of the step, from 1.
    line: prints a line.

  Raises:
    UserError: the run never took this step; or it has no checkpoint before the step, and did not begin from its seed.
  """
  partitioned, state, prng_key, batch, _ = _repeat_until(config, job_log_dir, step, seed, line)
  trace = trace_on_one_device(partitioned, state, prng_key, batch)
  width = max([5, *map(len, trace.layers)])
  line(f'{"layer":<{width}}  {"rms":>9}  {"largest":>9}  not finite')
  for name, s in trace.layers.items():
    bad = f'{s.not_finite} of {s.size}' if s.not_finite else ''
    line(f'{name:<{width}}  {s.rms:>9.3g}  {s.largest:>9.3g}  {bad}'.rstrip())
  for i, origin in enumerate(trace.origins):
    line(f'{"first" if i == 0 else "then"} not finite: {origin}')
  if not trace.origins:
    line('all values are finite')
  return trace


def replay_taps(
  config: ExperimentConfig,
  job_log_dir: str | Path,
  step: int,
  seed: int,
  tap: Sequence[str] | str,
  line: Callable[[str], object] = print,
) -> dict[str, np.ndarray]:
  """Runs a step of a run again on its mesh; prints and returns statistics of values in it, by path.

  Args:
    config, job_log_dir, step, seed, line: see `replay`.
    tap: the statistics, such as 'lm.transformer.*.attention:rms,max'; see `praxis_lite.training.taps`. Histograms are
      counts of values in the bins of `common/statistics.py`.

  Raises:
    ConfigError: a tap is not valid, or matches nothing.
    UserError: the step cannot be reached, see `replay`.
  """
  partitioned, state, prng_key, batch, _ = _repeat_until(config, job_log_dir, step, seed, line, tap=tap)
  assert partitioned.taps is not None
  for text in partitioned.taps.left_out:
    line(text)
  found = finish_summaries(jax.device_get(partitioned.train_step(state, prng_key, batch).summaries))
  statistics = {name: np.asarray(found[name].value) for name in sorted(found) if found[name].kind in ('scalar', 'bins')}
  for name, value in statistics.items():
    is_histogram = found[name].kind == 'bins'
    text = _describe_bins(value) if is_histogram else np.array2string(value, precision=4, max_line_width=10**6)
    line(f'{name} {text}')
  return statistics


def _describe_bins(counts: np.ndarray) -> str:
  """Returns a text with the upper edge and the count of each bin of a histogram that is not empty."""
  edges = np.where(np.arange(counts.size) == counts.size // 2, 0, bin_edges())
  return ', '.join(f'to {edges[i]:.4g}: {counts[i]:.0f}' for i in np.flatnonzero(counts))


def compare_with_checkpoint(
  config: ExperimentConfig,
  job_log_dir: str | Path,
  step: int,
  seed: int,
  line: Callable[[str], object] = print,
  other_devices: bool = False,
) -> list[str]:
  """Repeats the steps from one checkpoint to the next, and compares the result with the later one bit by bit.

  A difference means that a device gave wrong values, now or when the run took these steps.

  Args:
    config, job_log_dir, seed: the run; nothing in it is changed.
    other_devices: repeat the steps with each device doing the work of another; see `rotate_devices`.

  Returns:
    a line for each part of an array that differs.

  Raises:
    UserError: there is no checkpoint of this step; or the step cannot be reached, see `replay`.
  """
  directory = user_path(job_log_dir).absolute()
  if step not in saved_steps(directory):
    steps = ', '.join(map(str, saved_steps(directory))) or 'none'
    raise CheckpointError(f'--step={step}: there is no checkpoint of this step to compare with; there are: {steps}')
  partitioned, state, prng_key, batch, start = _repeat_until(config, directory, step, seed, line, other_devices)
  repeated = partitioned.train_step(state, prng_key, batch).state
  with contextlib.closing(Checkpointer(directory, read_only=True)) as checkpointer:
    saved = checkpointer.restore(partitioned.state_shapes, partitioned.unpadded_state_shapes, step=step)
  found = bit_differences(repeated, saved)
  first = 1 if start is None else start + 1
  steps = f'step {step}' if first == step else f'steps {first} to {step}'
  if found:
    line(f'{steps} repeated: the checkpoint of step {step} has other bits: {"; ".join(first_lines(found, _SHOWN))}')
  else:
    line(f'{steps} repeated: the checkpoint of step {step} has the same bits')
  return found


def _repeat_until(
  config: ExperimentConfig,
  job_log_dir: str | Path,
  step: int,
  seed: int,
  line: Callable[[str], object],
  other_devices: bool = False,
  tap: Sequence[str] | str = (),
) -> tuple[PartitionedTask, TrainState, jax.Array, NestedDict, int | None]:
  """Restores the last checkpoint before `step`, and takes the steps between them, without taps.

  Returns the task for batches of this step's size, the other arguments of the step, and the step of the checkpoint,
  which is None if the run was repeated from its start.
  """
  directory = user_path(job_log_dir).absolute()
  if step < 1:
    raise UserError(f'--step={step}: expected the number of a step, from 1 on')
  _check_was_taken(config, directory, step)
  config = use_kept_vocabulary(config, directory)
  task = config.task.instantiate()
  mesh = task.create_mesh()
  mesh = rotate_devices(mesh) if other_devices else mesh
  keys = run_keys(seed, mesh)
  train_input = build_datasets(config.datasets).the_training_input()
  tasks = TaskOnMesh(task, mesh, taps=step_taps(task, tap) if tap else None)
  steps, partitioned = tasks.taking_sizes_of(train_input), tasks.taking(train_input)
  if tap:
    partitioned.train_step.trace()  # Raises an error if a tap matches nothing.
  answers = tasks.answering(train_input, keys.evaluate, partitioned.train_step)

  troubles = [trouble for trouble in read_troubles(directory) if trouble.action != 'repeat']
  number = next((i for i, t in enumerate(troubles) if t.first <= step <= t.last), None)
  newest = step - 1
  if number is not None:
    line(f'step {step} was in trouble: {troubles[number].what}; action: {troubles[number].action}')
    newest = min([newest, *(t.back_to for t in troubles[number:] if t.back_to is not None)])
  start = max((s for s in saved_steps(directory) if s <= newest), default=None)
  if start is None:
    if task.train.init_from.path is not None:
      raise CheckpointError(f'there is no checkpoint of step {newest} or before in {directory} to start from')
    state = jax.block_until_ready(partitioned.init_state(keys.init))
  else:
    with contextlib.closing(Checkpointer(directory, read_only=True)) as checkpointer:
      state = checkpointer.restore(partitioned.state_shapes, partitioned.unpadded_state_shapes, step=start)
      saved = checkpointer.input_state(start)
    if saved is not None:
      train_input.set_state(saved)
  line(f'from {"the start" if start is None else f"the checkpoint of step {start}"} to step {step}')
  skipped = batches_to_skip(troubles[:number])

  def latest() -> TrainState:
    return state

  put = steps.put if answers is None else None
  with PrefetchIterator(train_input, put, left_out=skipped) as batches:
    for batch in batches if answers is None else answers.complete_all(batches, latest):
      if int(state.step) == step - 1:
        break
      state = steps.taking(batch).untapped.train_step(state, keys.train, batch).state
    else:
      raise DataError(f'reached the end of the training data after step {int(state.step)}')
    line(f'its batch begins at {batches.state_before}')
    for example in train_input.examples_at(batches.state_before):
      line(f'  {example}')
  return steps.taking(batch), state, keys.train, batch, start


def _check_was_taken(config: ExperimentConfig, directory: Path, step: int) -> None:
  """Raises UserError if the files of a run end before step `step`.

  The files of an interrupted run may lack its last steps. So `step` may be up to `log_interval_steps` after their end.
  """
  taken = [beat.step for beat in read_heartbeats(directory)] + [trouble.last for trouble in read_troubles(directory)]
  reached, train = max([read_run(directory).step, *taken]), config.task.train
  last = max(reached, min(reached + train.log_interval_steps, train.num_train_steps))
  if step > last:
    raise UserError(f'--step={step}: the run is at step {reached}; name a step that it has taken')
