# ruff: noqa: E402
"""Measures the parts of the time to the first step, and to the first token, of a model from Hugging Face.

  python tools/benchmark_startup.py                              2, 12 and 24 small layers, and the demo's model
  python tools/benchmark_startup.py --sizes=124m --layers=12

All times are CPU seconds of the process, which other work on the machine changes little. The cache of compiled programs
is off. A train step takes 8 rows of `--length` tokens. The first call of `decode` returns one token after a prompt of
16 tokens; `a token` is the time of each further token of a later call.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools')]
os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import numpy as np
from benchmark_decode import SIZES, to_markdown, write_random_checkpoint
from timing import seconds

from praxis_lite import open_run
from praxis_lite.bridges.hf import import_run
from praxis_lite.runs.programs import TaskOnMesh

_ROWS, _PROMPT, _TOKENS = 8, list(range(1, 17)), 33

cpu_seconds = partial(seconds, clock=time.process_time)


def times_of_training(run: Path, length: int) -> list[float]:
  """Returns the times of tracing and lowering a train step, of compiling it, and of the first step."""
  task = open_run(run).config.task.instantiate()
  ids = np.ones((_ROWS, length), np.int32)
  batch = {'ids': ids, 'labels': ids, 'weights': np.ones(ids.shape, np.float32)}
  struct = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
  partitioned = TaskOnMesh(task, task.create_mesh()).taking_batches_of(struct)
  state, step = partitioned.init_state(jax.random.key(0)), partitioned.train_step
  before, compiled = cpu_seconds(step.trace), cpu_seconds(step.compile)
  return [before, compiled, cpu_seconds(lambda: step(state, jax.random.key(1), batch).state)]


def times_of_decoding(run: Path) -> list[float]:
  """Returns the times of the first call, of a later one, and of each further token."""
  model = open_run(run).load()
  first, again, more = (
    cpu_seconds(partial(model.decode, [_PROMPT], max_tokens=tokens, temperature=0)) for tokens in (1, 1, _TOKENS)
  )
  return [first, again, (more - again) / (_TOKENS - 1)]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--sizes', default='small,demo', help=f'of {", ".join(SIZES)}, separated by commas')
  parser.add_argument('--layers', default='2,12,24', help='numbers of layers of each size except demo')
  parser.add_argument('--length', type=int, default=1024, help='tokens of a row in training')
  parser.add_argument('--dtype', default='float32', choices=['float32', 'bfloat16'])
  args = parser.parse_args()
  jax.config.update('jax_enable_compilation_cache', False)
  rows: list[list[str]] = []
  for size in args.sizes.split(','):
    for layers in [4] if size == 'demo' else map(int, args.layers.split(',')):
      with tempfile.TemporaryDirectory() as directory:
        folder, run = Path(directory, 'checkpoint'), Path(directory, 'run')
        parameters = write_random_checkpoint(folder, size, args.dtype, num_layers=layers)
        import_run(folder, run, overrides=['task.model.decoder_tpl.stop_ids=()'])
        found = [*times_of_training(run, args.length), *times_of_decoding(run)]
      rows.append(
        [size, str(layers), f'{parameters:,}', *(f'{x:.3g}' for x in found[:-1]), f'{1e3 * found[-1]:.1f} ms']
      )
      jax.clear_caches()
  print(f'jax {jax.__version__}, {os.cpu_count()} CPU cores, {args.dtype}; CPU seconds')
  head = ['size', 'layers', 'parameters', 'trace', 'compile', 'first step', 'first decode', 'later decode', 'a token']
  print(to_markdown(head, rows))


if __name__ == '__main__':
  main()
