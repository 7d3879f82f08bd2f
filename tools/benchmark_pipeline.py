"""Measures pipelines: compile time, step time compared with the theory of bubbles, and memory of each device.

  python tools/benchmark_pipeline.py                      all three tables
  python tools/benchmark_pipeline.py --only=time --runs=9

compile   CPU time of tracing, lowering and compiling a train step with 2 and with 8 stages, one for each device
time      a train step with M = 8 S microbatches, divided by a step with the same microbatches and one stage. The
program
          also computes bubbles, and drops their results. So with all stages on one device, the ratio of CPU times is
          (M + S - 1) / M, or (R M + S - 1) / (R M) in R rounds, if a tick costs nothing else. (Products are batched,
          with one matrix for each stage, and CPUs compute these slower than single products.) With a device for each
          stage and a core for each device, wall-clock time is measured, which in theory is S times less. The process
          then runs on as many cores as the step has devices, because XLA would use all cores for one device. Times are
          medians of runs in turn
memory    parameters and optimizer slots on each device, and the temporaries of a compiled step

Exits with 1 if compile time grows by more than a factor of 1.2, or if a step with a device for each stage takes more
than 5 % longer than in theory.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent))

from praxis_lite.common.devices import simulate_cpu_devices
from praxis_lite.common.jax_internals.flags import add_flags
from tools.timing import measure_in_turn, median_ratio, seconds

if TYPE_CHECKING:
  import numpy as np

  from praxis_lite.training.partitioned_task import PartitionedTask
  from praxis_lite.training.state import TrainState

GROWTH, OVER_THEORY = 1.2, 1.05
PARTS = ('compile', 'time', 'memory')
CORES = sorted(os.sched_getaffinity(0))

# A device computes one operation after another, each in one thread.
IN_ORDER = {'xla_cpu_multi_thread_eigen': 'false', 'xla_cpu_enable_concurrency_optimized_scheduler': 'false'}

T = TypeVar('T')


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--only', choices=PARTS)
  parser.add_argument('--runs', type=int, default=5)
  args = parser.parse_args()
  if args.only is None:  # Each in a new process, because even idle simulated devices have threads.
    command = [sys.executable, __file__, f'--runs={args.runs}']
    return max(subprocess.run([*command, f'--only={part}'], check=False).returncode for part in PARTS)
  os.environ['XLA_FLAGS'] = add_flags(os.environ.get('XLA_FLAGS', ''), IN_ORDER)
  simulate_cpu_devices(min(8, len(CORES)) if args.only == 'time' else 8)

  import jax

  jax.config.update('jax_enable_compilation_cache', False)
  tables = {'compile': compile_times, 'time': step_times, 'memory': memory_of_stages}
  return tables[args.only](args.runs)


def make_task(
  S: int, M: int, R: int = 1, *, devices: int, layers: int = 16, dims: int = 64, length: int = 64
) -> PartitionedTask:
  """Returns a language model in S stages over this number of devices, for M rows of `length` tokens."""
  import jax
  import numpy as np
  import optax

  from praxis_lite.common.config import Config
  from praxis_lite.models import set_pipeline, transformer_lm
  from praxis_lite.tasks.language_modelling import LanguageModelTask
  from praxis_lite.training.learning import Learner
  from praxis_lite.training.partitioned_task import PartitionedTask

  model = transformer_lm(vocab_size=128, model_dims=dims, num_layers=layers, num_heads=4).set(packed=False)
  set_pipeline(model, num_stages=S, num_microbatches=M, circular_repeat=R, stage_remat='full')
  task = Config(LanguageModelTask, model=model, mesh_axis_names=('stage', 'data'), ici_mesh_shape=(devices, 1))
  task.train.inputs_split_mapping = {'map_1d': ('data',), 'map_2d': ('data', None)}
  task.train.learner = Config(Learner, optimizer=Config(optax.adam), learning_rate=1e-3)
  struct = {name: jax.ShapeDtypeStruct((M, length), np.dtype('int32')) for name in ('ids', 'labels')}
  return PartitionedTask(
    task.instantiate(), {**struct, 'weights': jax.ShapeDtypeStruct((M, length), np.dtype('float32'))}
  )


def compile_times(runs: int) -> int:
  def build(S: int) -> None:
    make_task(S, 16, devices=S).train_step.compile()

  # The first round, which is not counted, fills JAX's caches.
  times = measure_in_turn([partial(seconds, partial(build, S), time.process_time) for S in (2, 8)], min(runs, 3))
  medians = dict(zip((2, 8), map(statistics.median, times)))
  growth = medians[8] / medians[2]
  for S, median in medians.items():
    print(f'{S} stages: {median:.2f} s of CPU to trace, lower and compile')
  print(f'growth {growth:.2f}, limit {GROWTH}\n')
  return int(growth > GROWTH)


def step_times(runs: int) -> int:
  """Prints step times of wide layers, so that computing takes most of the time of a tick."""
  import numpy as np

  from praxis_lite.layers import Pipelined
  from praxis_lite.models import LanguageModel

  worst = 0.0
  cases = [(2, 1, 1), (4, 1, 1), (4, 2, 1), (8, 1, 1)] + [(S, 1, S) for S in (2, 4, 8) if len(CORES) >= S]
  print('stages  rounds  devices  microbatches  ticks  time / one stage  theory  measured / theory')
  for S, R, devices in cases:
    # CPU time on one device, so that other programs on the machine do not count.
    M, clock = 8 * S, time.process_time if devices == 1 else time.perf_counter
    wide = {'layers': 8, 'dims': 256, 'length': 256}
    tasks = [make_task(1, M, devices=1, **wide), make_task(S, M, R, devices=devices, **wide)]
    ids = np.random.default_rng(0).integers(0, 128, (M, wide['length'] + 1)).astype(np.int32)
    batch = {'ids': ids[:, :-1], 'labels': ids[:, 1:], 'weights': np.ones(ids[:, 1:].shape, np.float32)}
    steps = [stepping(task, batch) for task in tasks]
    if devices > 1:
      steps = [pin_to_cores(count, step) for count, step in zip((1, devices), steps)]
    one, several = measure_in_turn([partial(seconds, step, clock) for step in steps], runs)
    model = tasks[1].jax_task.model
    assert isinstance(model, LanguageModel) and isinstance(model.lm.transformer, Pipelined)
    schedule = model.lm.transformer.schedule(M)
    ratio = median_ratio(several, one)
    theory = schedule.num_ticks / (R * M) / devices
    row = f'{S:>6} {R:>7} {devices:>8} {M:>13} {schedule.num_ticks:>6} {ratio:>17.3f}'
    print(f'{row} {theory:>7.3f} {ratio / theory:>18.3f}', flush=True)
    worst = max(worst, ratio / theory if devices == S else 0.0)
  print(f'limit of measured / theory with a device for each stage: {OVER_THEORY}\n')
  return int(worst > OVER_THEORY)


def stepping(task: PartitionedTask, batch: dict[str, np.ndarray]) -> Callable[[], TrainState]:
  """Returns a function that takes one train step per call and returns the new state."""
  import jax

  state = task.init_state(jax.random.key(0))

  def step() -> TrainState:
    nonlocal state
    state = task.train_step(state, jax.random.key(1), batch).state
    return state

  return step


def pin_to_cores(count: int, fn: Callable[[], T]) -> Callable[[], T]:
  """Returns `fn`, but with all threads of this process on the first `count` cores."""

  def run_pinned() -> T:
    for thread in os.listdir('/proc/self/task'):
      with contextlib.suppress(ProcessLookupError):  # The thread has ended.
        os.sched_setaffinity(int(thread), CORES[:count])
    return fn()

  return run_pinned


def memory_of_stages(runs: int) -> int:
  import jax

  del runs
  print('stages  parameters  slots  temporaries of a step, KiB on each device')
  previous, failed = math.inf, False
  for S in (1, 2, 4, 8):
    task = make_task(S, 16, devices=S)

    def bytes_on_each(tree: object) -> float:
      return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)) / 1024

    variables, slots = bytes_on_each(task.state_shapes.mdl_vars), bytes_on_each(task.state_shapes.opt_states)
    analysis = task.train_step.compiled.memory_analysis()
    temporaries = (analysis.temp_size_in_bytes if analysis else 0) / 1024
    print(f'{S:>6} {variables:>11,.0f} {slots:>6,.0f} {temporaries:>12,.0f}')
    failed, previous = failed or variables >= previous, variables
  return int(failed)


if __name__ == '__main__':
  sys.exit(main())
