"""Measures how much slower a training step with taps is. A run that logs every tenth step may be at most 5 % slower.

  python tools/benchmark_taps.py                                    a language model that a CPU trains
  python tools/benchmark_taps.py --model_dims=2048 --num_layers=8 --length=2048 --dtype=bfloat16     for a GPU

For several choices of taps, it prints the median time of a step with them, the median ratio to a step without taps, and
the resulting ratio for a run in which every tenth step has taps. Steps take turns.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools.timing import measure_in_turn, median_ratio, seconds

BLOCKS = 'lm.transformer.layers:rms,max_abs'
EVERY = 'lm.transformer.*:rms,max_abs'
VARIABLES = ('grad(*):rms', 'update(*):rms,ratio')
TAPS = {
  'none': (),
  'blocks': (BLOCKS,),
  'every layer': (EVERY,),
  'every layer, variables': (EVERY, *VARIABLES),
  'histograms of blocks': ('lm.transformer.layers:hist',),
}
LIMIT, EVERY_N_STEPS = 1.05, 10


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  sizes = {
    'batch': 4,
    'length': 256,
    'model_dims': 256,
    'num_layers': 4,
    'num_heads': 4,
    'vocab_size': 1024,
    'rounds': 9,
  }
  for name, value in sizes.items():
    parser.add_argument(f'--{name}', type=int, default=value)
  parser.add_argument('--dtype', default='float32')
  args = parser.parse_args()

  import jax
  import numpy as np

  from praxis_lite.common.config import Config
  from praxis_lite.models import transformer_lm
  from praxis_lite.training.partitioned_task import PartitionedTask
  from praxis_lite.training.taps import step_taps
  from praxis_lite.training.task import SingleTask

  wanted = ('vocab_size', 'model_dims', 'num_layers', 'num_heads')
  model = transformer_lm(**{name: getattr(args, name) for name in wanted}, repeat=True).set(packed=False)
  task = Config(SingleTask, model=model.set(fprop_dtype=args.dtype)).instantiate()
  random = np.random.default_rng(0)
  ids, labels = random.integers(0, args.vocab_size, (2, args.batch, args.length)).astype(np.int32)
  batch = {'ids': ids, 'labels': labels, 'weights': np.ones(ids.shape, np.float32)}

  def contestant(taps: tuple[str, ...]) -> Any:
    partitioned = PartitionedTask(task, batch, taps=step_taps(task, taps) if taps else None)
    state = {'now': partitioned.init_state(jax.random.key(0))}
    inputs, key = partitioned.train_step.put_inputs(batch), jax.random.key(1)

    def step() -> object:
      out = partitioned.train_step(state['now'], key, inputs)
      state['now'] = out.state
      return out

    return functools.partial(seconds, step)

  times = dict(zip(TAPS, measure_in_turn([contestant(taps) for taps in TAPS.values()], args.rounds, warm_up=2)))
  worst = 0.0
  print(f'on {jax.devices()[0].device_kind}')
  for name, measured in times.items():
    ratio = median_ratio(measured, times['none'])
    of_run = 1 + (ratio - 1) / EVERY_N_STEPS
    worst = max(worst, of_run if name.startswith('every layer') else 0)
    print(f'{name:<24} {1e3 * statistics.median(measured):>9.2f} ms {ratio:>7.3f} {of_run:>7.3f}')
  print(f'limit of taps of every layer: {LIMIT}')
  return int(worst > LIMIT)


if __name__ == '__main__':
  sys.exit(main())
