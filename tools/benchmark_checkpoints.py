# ruff: noqa: E402
"""Measures the cost of saving and restoring a train state: how long training stalls, host memory, verification.

  python tools/benchmark_checkpoints.py --gigabytes=2

On a CPU, the restored arrays are in host memory too, so its peak is at least the size of the state. The state consists
of random numbers, which compress about as badly as trained weights.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=4')

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from timing import measure_in_turn, median_ratio, seconds

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.checkpoints.orbax import work_arounds
from praxis_lite.training.state import TrainState

_ROWS, _COLUMNS, _ARRAYS = 4096, 1024, 3  # 16 MiB for each array: a variable and its two moments.


def state_shapes(gigabytes: float) -> TrainState:
  """Returns the shapes of a train state of about this size, split over all devices."""
  mesh = jax.make_mesh((jax.device_count(),), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  split, replicated = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (('data',), ()))
  count = max(1, round(gigabytes * 1e9 / (_ROWS * _COLUMNS * 4 * _ARRAYS)))
  variables = {f'w{i}': jax.ShapeDtypeStruct((_ROWS, _COLUMNS), jnp.float32, sharding=split) for i in range(count)}
  return TrainState(
    jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated), variables, {'mu': variables, 'nu': variables}
  )


def random_state(shapes: TrainState) -> TrainState:
  rng = np.random.default_rng(0)

  def make(x: Any) -> jax.Array:
    value = rng.standard_normal(x.shape, np.float32) if x.shape else np.int32(0)
    return jax.device_put(value, x.sharding)

  return jax.tree.map(make, shapes)


def process_memory(field: str) -> int:
  """Returns the bytes that this process uses: now with 'VmRSS', at its peak with 'VmHWM'."""
  lines = Path('/proc/self/status').read_text().splitlines()
  return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024


def time_save(state: TrainState, shapes: TrainState, directory: str) -> tuple[float, float]:
  """Returns two durations in seconds: until `save` returns, and until the checkpoint is on the disk."""
  checkpointer = Checkpointer(directory)
  start = time.perf_counter()
  checkpointer.save(0, state, shapes, None)
  stall = time.perf_counter() - start
  checkpointer.close()
  return stall, time.perf_counter() - start


def restore(directory: str, shapes: TrainState) -> TrainState:
  checkpointer = Checkpointer(directory, read_only=True)
  state = checkpointer.restore(shapes, shapes)
  checkpointer.close()
  return state


def print_peak(directory: str, gigabytes: float) -> None:
  """Prints the largest growth of this process's memory during a restore, in bytes."""
  shapes = state_shapes(gigabytes)
  restore(f'{directory}/small', state_shapes(0))  # Imports Orbax and starts its threads.
  before = process_memory('VmRSS')
  state = jax.block_until_ready(restore(f'{directory}/checked', shapes))
  del state
  print(process_memory('VmHWM') - before)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--gigabytes', type=float, default=2)
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--directory', help='where to write; by default a temporary directory')
  parser.add_argument('--peak_of', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.peak_of:
    print_peak(args.peak_of, args.gigabytes)
    return
  shapes = state_shapes(args.gigabytes)
  num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
  with tempfile.TemporaryDirectory(dir=args.directory) as directory:
    state = random_state(shapes)
    time_save(random_state(state_shapes(0)), state_shapes(0), f'{directory}/small')  # Imports, and starts threads.
    stall, blocking = time_save(state, shapes, f'{directory}/checked')
    with_checksums = work_arounds.add_chunk_checksums

    def remove_checksums(spec: dict[str, Any]) -> dict[str, Any]:
      spec = with_checksums(spec)
      spec['metadata']['codecs'][-1]['configuration']['checksum'] = False
      return spec

    work_arounds.add_chunk_checksums = remove_checksums
    time_save(state, shapes, f'{directory}/unchecked')
    work_arounds.add_chunk_checksums = with_checksums
    del state
    print(f'state of {num_bytes / 1e9:.2f} GB in {len(jax.tree.leaves(shapes))} arrays')
    print(f'save: {blocking:.2f} s; training stalls {stall:.3f} s, {stall / blocking:.1%} of it', flush=True)
    arguments = [sys.executable, __file__, f'--peak_of={directory}', f'--gigabytes={args.gigabytes}']
    peak = int(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)
    print(f'restore: host memory grows by {peak / 1e9:.2f} GB at most, {peak / num_bytes:.2f} of the state', flush=True)
    folders = [f'{directory}/{name}' for name in ('checked', 'unchecked')]
    # CPU time shows the cost of verification. Wall-clock time also depends on other programs on the machine.
    clocks = (time.perf_counter, time.process_time)
    measures = [lambda f=f, c=c: seconds(lambda: restore(f, shapes), c) for c in clocks for f in folders]
    times = measure_in_turn(measures, args.rounds)
    for name, (checked, unchecked) in zip(('on the clock', 'of processors'), (times[:2], times[2:])):
      ratio = median_ratio(checked, unchecked)
      share = f'{statistics.median(checked):.2f} s verified, {statistics.median(unchecked):.2f} s not'
      print(f'restore, {name}: {share}: verification takes {1 - 1 / ratio:+.1%}', flush=True)


if __name__ == '__main__':
  main()
