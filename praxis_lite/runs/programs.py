"""Programs that evaluate or decode a whole input.

Steps are dispatched ahead of the host, a few at a time, and the metrics of all batches are averaged on the host.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from praxis_lite.checkpoints.contents import array_records
from praxis_lite.common.figures import number_of
from praxis_lite.common.files import KnownFolder
from praxis_lite.common.processes import is_primary_process, meet_others, note_progress
from praxis_lite.common.trees import NestedDict, leaves_by_path, map_with_path, path_name
from praxis_lite.inputs import BaseInput, PrefetchIterator
from praxis_lite.inputs.rewarded import RewardedInput
from praxis_lite.inputs.rows import Rows, Struct
from praxis_lite.layers.base.call import Summary
from praxis_lite.runs.answers import AnswerSampling, prompt_struct
from praxis_lite.runs.console import metrics_line
from praxis_lite.runs.decoding_memory import check_memory_of_batch
from praxis_lite.runs.records.metrics import MAX_STEPS_IN_FLIGHT, DeviceMetrics, HostMetrics, MetricsAverage
from praxis_lite.runs.sized_steps import SizedSteps
from praxis_lite.sharding.layout import StateLayout
from praxis_lite.training.edits import Edits
from praxis_lite.training.partitioned_step import PartitionedStep
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.state import state_layout
from praxis_lite.training.steps import DecodeStepOutput, EvalStepOutput
from praxis_lite.training.taps import StepTaps, TappedParts, is_tapped
from praxis_lite.training.task import DecodeParams, EvalParams, SingleTask

# A batch is padded to a compiled size only if that size is at most this many times larger.
_MOST_PADDING = 8

Out = TypeVar('Out')


class TaskOnMesh:
  """One task on one mesh, partitioned for each batch shape. Inputs with the same shapes share compiled steps.

  Attributes:
    layout: the layout of the train state on the mesh; without `opt_states`, the task is only for inference.
    taps: statistics that its steps report; None reports none.
    edits: changes of values between layers during inference; None changes none.
    batch_sizes: the numbers of rows that `taking_rows_like` has chosen for each kind of batch. Batches of one kind
      differ only in their numbers of rows.
  """

  def __init__(
    self,
    jax_task: SingleTask,
    mesh: Mesh,
    layout: StateLayout | None = None,
    taps: StepTaps | None = None,
    edits: Edits | None = None,
  ):
    self.jax_task = jax_task
    self.mesh = mesh
    self.taps = taps
    self.edits = edits
    self._by_shape: dict[str, PartitionedTask] = {}
    self.layout = layout or state_layout(jax_task, mesh)
    self.batch_sizes: dict[str, list[int]] = {}

  @classmethod
  def make_for_inference(cls, jax_task: SingleTask, mesh: Mesh, taps: StepTaps | None = None) -> TaskOnMesh:
    """Returns a task on a mesh, with a layout that has no `opt_states`."""
    return cls(jax_task, mesh, state_layout(jax_task, mesh, optimizer=False), taps)

  @property
  def untapped(self) -> TaskOnMesh:
    """The same task without taps; if this task has taps, the returned one compiles its own steps."""
    return self if self.taps is None else TaskOnMesh(self.jax_task, self.mesh, self.layout, edits=self.edits)

  def taking(self, data: BaseInput) -> PartitionedTask:
    """Returns the task partitioned for the batches of `data`."""
    return self.taking_batches_of(data.batch_struct())

  def taking_batches_of(self, struct: Struct) -> PartitionedTask:
    """Returns the task partitioned for global batches of these shapes and dtypes."""
    if (shape := str(sorted(array_records(struct).items()))) not in self._by_shape:
      self._by_shape[shape] = PartitionedTask(
        self.jax_task, struct, layout=self.layout, taps=self.taps, edits=self.edits
      )
    return self._by_shape[shape]

  def taking_sizes_of(self, data: BaseInput) -> SizedSteps:
    """Returns the partitioned tasks for all sizes that batches of `data` may have."""

    def resize(size: int) -> Struct:
      return jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), data.batch_struct())

    return SizedSteps([self.taking_batches_of(resize(size)) for size in data.batch_sizes()])

  def answering(self, data: BaseInput, key: jax.Array, step: PartitionedStep) -> AnswerSampling | None:
    """Returns the `AnswerSampling` for the batches of `data`; None for inputs without prompts to answer.

    Args:
      key: PRNG key on the mesh, for answers.
      step: the step that is called with the completed batches.
    """
    if not isinstance(data, RewardedInput):
      return None
    return AnswerSampling(self.taking_batches_of(prompt_struct(data)), step, data, key)

  def taking_rows_like(self, rows: Rows) -> PartitionedTask:
    """Returns the task partitioned for as many rows as `rows` has.

    If the task is already partitioned for a slightly larger number of rows, returns that one.
    The caller, or a step of the task, adds rows of zero weight.
    """
    count = len(rows['weights'])
    kind = str(map_with_path(lambda path, x: (path_name(path), x.shape[1:], str(x.dtype)), rows))
    sizes = self.batch_sizes.setdefault(kind, [])
    size = min((size for size in sizes if count <= size <= _MOST_PADDING * count), default=count)
    if size not in sizes:
      sizes.append(size)
    return self.taking_batches_of(jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), rows))


class ProgramResult(NamedTuple):
  """The result of one pass over an input.

  Attributes:
    metrics: weighted means over all batches, on the host.
    seconds: duration, including compilation.
    summaries: the summaries that layers added in the first batch, except scalars, because those of one batch do not
      represent the input; and the statistics of taps over all batches.
    note: a text that the console adds to the line of the result.
  """

  metrics: HostMetrics
  num_batches: int
  seconds: float
  summaries: dict[str, Summary]
  note: str


class InputProgram(Generic[Out]):
  """Runs a step over one input: `EvalProgram` or `DecodeProgram`.

  Attributes:
    split: 'eval/<input>' or 'decode/<input>'.
    use_ema: whether it runs with the moving averages if the learner keeps them.
    is_of_average: whether it actually runs with the moving averages.
  """

  def __init__(
    self, split: str, step: PartitionedStep, data: BaseInput, prng_key: jax.Array, task: SingleTask, section: str
  ):
    settings: EvalParams | DecodeParams = getattr(task, section)
    self.split = split
    self.use_ema = settings.use_ema
    self.is_of_average = settings.use_ema and task.learner.keeps_averages
    self._step = step
    self._data = data
    self._key = prng_key
    self._answers: AnswerSampling | None = None
    self._max_batches = settings.max_batches

  def run(
    self, mdl_vars: NestedDict, global_step: jax.Array, interrupts: Callable[[], bool] = lambda: False
  ) -> ProgramResult | None:
    """Runs from the start of the input; returns None if `interrupts()` becomes true before the end."""
    start = time.perf_counter()
    average, in_flight, num_batches = MetricsAverage(), deque[DeviceMetrics](), 0
    self._summaries: dict[str, Summary] = {}
    self._lines: list[str] = []
    self._begin()
    self._step.compile()
    if self._answers is not None:
      self._answers.step.compile()
    meet_others()
    put = self._step.put_inputs if self._answers is None else None
    with PrefetchIterator(self._data.reset(), put) as batches:
      for batch in itertools.islice(batches, self._max_batches):
        if interrupts():
          return None
        num_batches += 1
        note_progress(f'{self.split}, batch {num_batches}')
        if self._answers is not None:
          batch = self._answers.complete(mdl_vars, global_step, batch)
        out = self._step(mdl_vars, self._key, global_step, batch)
        self._keep(out, batch)
        in_flight.append(self._metrics_of(out))
        if len(in_flight) > MAX_STEPS_IN_FLIGHT:
          average.add(in_flight.popleft())
    for metrics in in_flight:
      average.add(metrics)
    note = self._finish(int(global_step))
    return ProgramResult(average.means(), num_batches, time.perf_counter() - start, self._summaries, note)

  def metric_names(self) -> list[str]:
    """Returns the names of the metrics that are scalars."""
    out = self._step.trace().out_info
    return sorted(name for name, (mean, _) in self._metrics_of(out).items() if jnp.shape(mean) == ())

  def result_line(self, step: int, result: ProgramResult) -> str:
    """Returns the line that the console shows for a result."""
    batches = number_of(result.num_batches, 'batch')
    average = ', of the average' if self.is_of_average else ''
    return metrics_line(step, self.split, result.metrics, f'{batches}, {result.seconds:.1f} s{average}{result.note}')

  def _metrics_of(self, out: Out) -> DeviceMetrics:
    """Returns the metrics of a batch's outputs."""
    raise NotImplementedError

  def _begin(self) -> None:
    """Called before a pass."""

  def _keep(self, out: Out, batch: Mapping[str, Any]) -> None:
    """Called after each batch; keeps the part of the batch's outputs that the result needs."""

  def _finish(self, step: int) -> str:
    """Called at the end of a pass; returns the text for `ProgramResult.note`."""
    return ''


class EvalProgram(InputProgram[EvalStepOutput]):
  """Evaluates variables on one input; `prng_key`, which is on the mesh, is for models that draw random numbers."""

  def __init__(self, tasks: TaskOnMesh, data: BaseInput, prng_key: jax.Array):
    super().__init__(f'eval/{data.label}', tasks.taking(data).eval_step, data, prng_key, tasks.jax_task, 'evaluate')
    self._answers = tasks.answering(data, prng_key, self._step)

  def _metrics_of(self, out: EvalStepOutput) -> DeviceMetrics:
    return out.mean_metrics

  def _begin(self) -> None:
    self._tapped = TappedParts()

  def _keep(self, out: EvalStepOutput, batch: Mapping[str, Any]) -> None:
    self._tapped.add(out.summaries)
    self._summaries = self._summaries or {
      name: s for name, s in out.summaries.items() if s.kind != 'scalar' and not is_tapped(name)
    }

  def _finish(self, step: int) -> str:
    self._summaries |= self._tapped.statistics()
    return ''


class DecodeProgram(InputProgram[DecodeStepOutput]):
  """Decodes one input; writes the outputs, one example per line, to `job_log_dir/decoded/<input>/step_<n>.jsonl`."""

  def __init__(self, tasks: TaskOnMesh, data: BaseInput, prng_key: jax.Array, job_log_dir: Path):
    check_memory_of_batch(tasks.jax_task.model, tasks.mesh, data.batch_struct())
    task = tasks.taking(data)
    super().__init__(f'decode/{data.label}', task.decode_step, data, prng_key, tasks.jax_task, 'decode')
    self._examples = task.inference_rows.examples
    self._job_log_dir = KnownFolder(job_log_dir)
    self._label = data.label

  def _metrics_of(self, out: DecodeStepOutput) -> DeviceMetrics:
    return out.metrics

  def _keep(self, out: DecodeStepOutput, batch: Mapping[str, Any]) -> None:
    weights = np.asarray(multihost_utils.process_allgather(batch['weights'], tiled=True))[self._examples]
    self._lines += [json.dumps(example) for example in examples_of(out.decoded, weights)]

  def _finish(self, step: int) -> str:
    folder = f'decoded/{self._label}'
    path = self._job_log_dir.path / folder / f'step_{step:08d}.jsonl'
    if is_primary_process():
      self._job_log_dir.subfolder(folder)
      path.write_text(''.join(f'{line}\n' for line in self._lines), encoding='utf-8')
    return f', {path}'


def examples_of(decoded: NestedDict, weights: np.ndarray) -> Iterator[dict[str, object]]:
  """Yields the examples in `decoded` as JSON values, without the rows of zero weight that pad the last batch."""
  arrays = {path_name(path): np.asarray(x) for path, x in leaves_by_path(jax.device_get(decoded)).items()}
  # For NumPy, bfloat16 and similar types have the kind void.
  arrays = {name: x.astype(np.float32) if x.dtype.kind == 'V' else x for name, x in arrays.items()}
  for row in range(min(map(len, arrays.values()), default=0)):
    if np.any(weights[row] != 0):
      yield {name: _to_json(x[row]) for name, x in arrays.items()}


def _to_json(x: np.ndarray | np.generic) -> object:
  """Returns an array as nested lists, with None for numbers that are not finite, which JSON lacks."""
  if x.dtype.kind != 'f' or np.isfinite(x).all():
    return x.tolist()
  values = np.asarray(x, object)
  values[~np.isfinite(x)] = None
  return values.tolist()
