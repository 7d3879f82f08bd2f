"""Measures the overhead of the framework over a training step written by hand: time, tracing, compiling, memory.

  python tools/benchmark_overhead.py                       1 device
  python tools/benchmark_overhead.py --devices=8           8 simulated devices, data x mdl = 2 x 4
  python tools/benchmark_overhead.py --size=large

Both steps have the same architecture, optimizer and batch, and are compiled in one process. Then they take turns, and
each ratio is the median over pairs of runs: on a shared machine, single times vary by 15 %, but ratios of neighbouring
runs vary less. Tracing is measured in CPU time of the process, everything else in wall-clock time. On 8 devices, the
last ratio shows the cost of padding: the time of our step with every split dimension smaller by 1, so that the mesh
does not divide it, divided by the time of our step with dimensions that the mesh divides.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from praxis_lite.common.devices import simulate_cpu_devices
from tools.timing import measure_in_turn, median_ratio

if TYPE_CHECKING:  # They import JAX, whose devices are simulated first.
  from tools.handwritten_lm import Size
  from tools.overhead_contestants import Contestant

# The largest allowed ratio of our step to the step by hand, for each figure.
LIMITS = {
  'step': 1.02,
  'trace + lower': 1.15,
  'compile': 1.10,
  'memory': 1.05,
  'flops': 1.01,
  'bytes': 1.01,
  'padding': 1.05,
  'collectives': 1.0,
  'parameters': 1.0,
}
# These should be equal in both programs, so their ratio must not be below the inverse of the limit either.
TWO_SIDED = ('flops', 'bytes', 'collectives', 'parameters')


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--devices', type=int, default=1, choices=[1, 8])
  parser.add_argument('--size', default='small', choices=['small', 'large'])
  parser.add_argument('--pairs', type=int, default=25, help='pairs of steps')
  parser.add_argument('--traces', type=int, default=25, help='pairs of traces')
  parser.add_argument('--compiles', type=int, default=5, help='pairs of compilations')
  args = parser.parse_args()
  simulate_cpu_devices(args.devices)

  import jax

  jax.config.update('jax_enable_compilation_cache', False)
  from tools.overhead_contestants import handwritten_step, praxis_lite_step, sizes

  size = sizes[args.size]
  print(f'{size}\n{args.devices} device(s), {args.pairs} pairs of steps, {args.compiles} pairs of compilations\n')
  results: dict[str, float] = {}

  built_ours, built_hand = praxis_lite_step(size, args.devices), handwritten_step(size, args.devices)
  traced = measure_pair((built_ours, built_hand), lambda c: c.lower(), args.traces, warm_up=2)
  results['trace + lower'] = report('trace + lower', *traced, 's')
  compiled = measure_pair((built_ours, built_hand), lambda c: c.compile(), args.compiles)
  results['compile'] = report('compile', *compiled, 's')
  for what, value in (
    ('parameters', lambda c: c.num_params),
    ('memory', lambda c: c.peak_bytes / 2**20),
    ('flops', lambda c: c.cost['flops']),
    ('bytes', lambda c: c.cost['bytes accessed']),
  ):
    results[what] = report(what, [value(built_ours)], [value(built_hand)], 'MiB' if what == 'memory' else '')
  stepped = measure_pair((built_ours, built_hand), lambda c: c.step(), args.pairs, warm_up=2)
  results['step'] = report('step', *stepped, 's')
  print(f'loss after these steps: ours {built_ours.loss():.5f}, by hand {built_hand.loss():.5f}')

  if args.devices > 1:
    from praxis_lite.instruments.testing import collectives

    even = built_ours
    uneven = praxis_lite_step(one_short(size), args.devices)
    uneven.compile()
    counts = [{k: c.count for k, c in collectives(x.compiled).items() if c.count} for x in (uneven, even)]
    print(f'\ncollectives, one short of divisible: {counts[0]}\n             divisible:              {counts[1]}')
    stepped = measure_pair((uneven, even), lambda c: c.step(), args.pairs, warm_up=2)
    results['padding'] = report('padding', *stepped, 's', ('one short', 'divisible'))
    results['collectives'] = 1.0 if counts[0] == counts[1] else 2.0

  missed = [what for what, ratio in results.items() if not within_limit(what, ratio)]
  print('\nall within their limits' if not missed else f'\nover the limit: {", ".join(missed)}')
  return bool(missed)


def within_limit(what: str, ratio: float) -> bool:
  return ratio <= LIMITS[what] and (what not in TWO_SIDED or 1 / ratio <= LIMITS[what])


def measure_pair(
  pair: Sequence[Contestant[Any]], measure: Callable[[Contestant[Any]], float], pairs: int, warm_up: int = 1
) -> tuple[list[float], list[float]]:
  """Measures both contestants in turn; returns all values of each."""
  first, second = measure_in_turn([partial(measure, contestant) for contestant in pair], pairs, warm_up)
  return first, second


def report(
  what: str, first: list[float], second: list[float], unit: str, names: tuple[str, str] = ('ours', 'by hand')
) -> float:
  """Prints both medians and the median of the ratios of pairs, and returns the latter."""
  ratio = median_ratio(first, second)
  limit = f'limit {LIMITS[what]}'
  a, b = statistics.median(first), statistics.median(second)
  print(f'{what:>14}  {names[0]} {a:14,.4f} {unit:<3}  {names[1]} {b:14,.4f} {unit:<3}  ratio {ratio:.4f}  {limit}')
  return ratio


def one_short(size: Size) -> Size:
  """Returns a size whose split dimensions are smaller by 1: heads, dims, hidden dims, vocabulary, batch."""
  return size._replace(
    model_dims=size.model_dims - 1,
    num_heads=size.num_heads - 1,
    head_dims=size.dims_per_head,
    hidden_dims=size.hidden_dims - 1,
    vocab=size.vocab - 1,
    batch=size.batch - 1,
  )


if __name__ == '__main__':
  sys.exit(main())
