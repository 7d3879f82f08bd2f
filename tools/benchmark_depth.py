"""Measures how compile time grows with the number of repeated layers; it should not, because a scan has one layer.

  python tools/benchmark_depth.py                     4, 16 and 64 layers on 1 device
  python tools/benchmark_depth.py --devices=8         the same on 8 simulated devices

Prints the CPU time of the process for tracing and lowering the train step of the overhead benchmark, and for all of its
compilation: medians of several interleaved runs, and the ratio to the smallest number of layers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from praxis_lite.common.devices import simulate_cpu_devices
from tools.timing import measure_in_turn, seconds

if TYPE_CHECKING:  # It imports JAX, whose devices are simulated first.
  from tools.overhead_contestants import Contestant

LAYERS = (4, 16, 64)
LIMIT = 1.2


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--devices', type=int, default=1, choices=[1, 8])
  parser.add_argument('--runs', type=int, default=5)
  args = parser.parse_args()
  simulate_cpu_devices(args.devices)

  import jax

  jax.config.update('jax_enable_compilation_cache', False)
  from tools.overhead_contestants import praxis_lite_step, sizes

  steps = {n: praxis_lite_step(sizes['small']._replace(num_layers=n), args.devices) for n in LAYERS}

  def measure(step: Contestant[Any]) -> tuple[float, float]:
    return seconds(step.lower, time.process_time), seconds(step.compile, time.process_time)

  # The first round, which is not counted, fills JAX's caches.
  times = dict(zip(steps, measure_in_turn([partial(measure, step) for step in steps.values()], args.runs)))

  print(f'{"layers":>6} {"trace + lower":>14} {"growth":>7} {"compile":>9} {"growth":>7}')
  first = [statistics.median(column) for column in zip(*times[LAYERS[0]])]
  worst = 0.0
  for n in LAYERS:
    lower, compile_ = (statistics.median(column) for column in zip(*times[n]))
    growth = lower / first[0], compile_ / first[1]
    worst = max(worst, *growth)
    print(f'{n:>6} {lower:>12.2f} s {growth[0]:>7.2f} {compile_:>7.2f} s {growth[1]:>7.2f}')
  print(f'limit of growth: {LIMIT}')
  return int(worst > LIMIT)


if __name__ == '__main__':
  sys.exit(main())
