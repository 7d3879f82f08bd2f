"""Running the eval and the decode step over a whole input.

Steps are dispatched ahead of the host, a few at a time, and the metrics of all batches are averaged on the host.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from praxis_lite.call import Summary
from praxis_lite.inputs import BaseInput, PrefetchIterator
from praxis_lite.runtime.distributed import is_primary_process
from praxis_lite.runtime.metrics import HostMetrics, MetricsAverage
from praxis_lite.runtime.state_names import records_of
from praxis_lite.training.partitioned_step import PartitionedStep
from praxis_lite.training.partitioned_task import PartitionedTask

# Steps dispatched and not yet known to be done: enough to keep devices busy, few enough to bound memory.
MAX_STEPS_IN_FLIGHT = 2


Interrupts = Callable[[], bool]


def never() -> bool:
  """Interrupts nothing."""
  return False


class ProgramResult(NamedTuple):
  """What one pass over an input gave.

  Attributes:
    metrics: weighted means over all batches, on the host.
    num_batches: how many batches there were.
    seconds: how long it took, compiling included.
    summaries: what layers have added in the first batch, scalars left out, which one batch does not stand for.
  """

  metrics: HostMetrics
  num_batches: int
  seconds: float
  summaries: dict[str, Summary]


class PartitionedTasks:
  """One task on one mesh, partitioned for each shape of batches it meets: inputs of one shape share compiled steps."""

  def __init__(self, jax_task: Any, mesh: Mesh):
    self.jax_task = jax_task
    self.mesh = mesh
    self._by_shape: dict[Any, PartitionedTask] = {}

  def taking(self, data: BaseInput) -> PartitionedTask:
    """Returns the task partitioned for the batches of `data`."""
    struct = data.batch_struct()
    shape = str(sorted(records_of(struct).items()))
    if shape not in self._by_shape:
      self._by_shape[shape] = PartitionedTask(self.jax_task, struct, mesh=self.mesh)
    return self._by_shape[shape]


class EvalProgram:
  """Evaluates variables on one input.

  Args:
    step: the eval step for the batches of `data`.
    data: the input.
    prng_key: for models that draw while they evaluate; on the mesh.
    settings: `task.evaluate`.
  """

  def __init__(self, step: PartitionedStep, data: BaseInput, prng_key: jax.Array, settings: Any):
    self.split = f'eval/{data.label}'
    self.use_ema: bool = settings.use_ema
    self._step = step
    self._data = data
    self._key = prng_key
    self._max_batches: int | None = settings.max_batches

  def run(self, mdl_vars: Any, global_step: jax.Array, interrupts: Interrupts = never) -> ProgramResult | None:
    """Evaluates from the start of the input; returns None if it was asked to stop before the end."""
    start = time.perf_counter()
    average, in_flight, num_batches = MetricsAverage(), deque[Any](), 0
    summaries: dict[str, Summary] = {}
    for batch in _batches(self._data, self._step.put_inputs, self._max_batches):
      if interrupts():
        return None
      out = self._step(mdl_vars, self._key, global_step, batch)
      if num_batches == 0:
        summaries = {name: s for name, s in out.summaries.items() if s.kind != 'scalar'}
      num_batches += 1
      in_flight.append(out.mean_metrics)
      if len(in_flight) > MAX_STEPS_IN_FLIGHT:
        average.add(in_flight.popleft())
    for metrics in in_flight:
      average.add(metrics)
    return ProgramResult(average.means(), num_batches, time.perf_counter() - start, summaries)


class DecodeProgram:
  """Decodes one input and writes what comes out, an example a line.

  Args:
    step: the decode step for the batches of `data`.
    data, prng_key: as of `EvalProgram`.
    settings: `task.decode`.
    job_log_dir: outputs go to `decoded/<input>/step_<n>.jsonl` in it.
  """

  def __init__(self, step: PartitionedStep, data: BaseInput, prng_key: jax.Array, settings: Any, job_log_dir: Path):
    self.split = f'decode/{data.label}'
    self.use_ema: bool = settings.use_ema
    self._step = step
    self._data = data
    self._key = prng_key
    self._max_batches: int | None = settings.max_batches
    self._directory = job_log_dir / 'decoded' / data.label

  def output_path(self, step: int) -> Path:
    """The file that decoding at `step` writes."""
    return self._directory / f'step_{step:08d}.jsonl'

  def run(self, mdl_vars: Any, global_step: jax.Array, interrupts: Interrupts = never) -> ProgramResult | None:
    """Decodes from the start of the input; returns None if it was asked to stop before the end."""
    start = time.perf_counter()
    average, num_batches = MetricsAverage(), 0
    lines: list[str] = []
    for batch in _batches(self._data, self._step.put_inputs, self._max_batches):
      if interrupts():
        return None
      out = self._step(mdl_vars, self._key, global_step, batch)
      average.add(out.metrics)
      lines += [json.dumps(example) for example in _examples(out.decoded, batch)]
      num_batches += 1
    if is_primary_process():
      self._directory.mkdir(parents=True, exist_ok=True)
      path = self.output_path(int(global_step))
      path.write_text(''.join(f'{line}\n' for line in lines), encoding='utf-8')
    return ProgramResult(average.means(), num_batches, time.perf_counter() - start, {})


def _batches(data: BaseInput, put_inputs: Callable[[Any], Any], limit: int | None) -> Iterator[Any]:
  with PrefetchIterator(data.reset(), put_inputs) as batches:
    for count, batch in enumerate(batches, start=1):
      yield batch
      if count == limit:
        return


def _examples(decoded: Any, batch: Any) -> Iterator[dict[str, Any]]:
  """The rows of `decoded` that stand for examples, as JSON holds them; rows that fill up a batch weigh zero."""
  weights = batch['weights']
  if jax.process_count() > 1:
    weights = multihost_utils.process_allgather(weights, tiled=True)
  weights = np.asarray(weights)
  leaves = jax.tree_util.tree_flatten_with_path(jax.device_get(decoded))[0]
  names = [jax.tree_util.keystr(path, simple=True, separator='.') for path, _ in leaves]
  rows = min((len(x) for _, x in leaves), default=0)
  for row in range(rows):
    if np.any(weights[row] != 0):
      yield {name: _as_json(x[row]) for name, (_, x) in zip(names, leaves)}


def _as_json(x: Any) -> Any:
  array = np.asarray(x)
  # NumPy does not know bfloat16 and its like, and calls them void.
  return (array.astype(np.float32) if array.dtype.kind == 'V' else array).tolist()
