"""Compares a language model with its copies in few bits: size, perplexity, and tokens per second when it decodes.

    python tools/benchmark_quantized.py runs/demo

The run must have float weights. `quantize_run` makes the copies in a temporary directory; calibration reads 16 batches
of the training dataset. Perplexity is measured on the dataset `validation`, and speed in the second of two calls, with
8 prompts in a batch.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path

from praxis_lite.common.config import Config
from praxis_lite.common.trees import leaves
from praxis_lite.layers import QuantizedWeights
from praxis_lite.runs import open_run
from praxis_lite.runs.calibration import Calibration
from praxis_lite.runs.quantized import quantize_run
from praxis_lite.runs.records.record import read_record

RULES = {
  'int8': Config(QuantizedWeights, format='int8'),
  'int4': Config(QuantizedWeights, format='int4'),
  'int4, groups of 32': Config(QuantizedWeights, format='int4', group_size=32),
  'int4, groups of 32, not symmetric': Config(QuantizedWeights, format='int4', group_size=32, symmetric=False),
  'nf4, groups of 64': Config(QuantizedWeights, format='nf4', group_size=64),
  'mxfp8': Config(QuantizedWeights, format='mxfp8'),
  'nvfp4': Config(QuantizedWeights, format='nvfp4'),
  'int2, groups of 32': Config(QuantizedWeights, format='int2', group_size=32),
}
CALIBRATED = ('int4', 'int4, groups of 32', 'int2, groups of 32')


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0])
  parser.add_argument('run', help='the directory of a run')
  parser.add_argument('--tokens', type=int, default=100, help='tokens to decode for each prompt; 0 decodes none')
  args = parser.parse_args()
  config = read_record(args.run).config
  print(f'{"weights":36} {"MB":>7} {"perplexity":>10} {"tokens/s":>8}')
  with tempfile.TemporaryDirectory() as folder:
    report('floats', args.run, args)
    for name, rule in RULES.items():
      out = Path(folder) / name.replace(', ', '-').replace(' ', '-')
      for method in (None, *(('awq', 'gptq') if name in CALIBRATED else ())):
        of_method = out if method is None else out.with_name(f'{out.name}-{method}')
        quantize_run(config, args.run, of_method, rule, calibration=Calibration(method) if method else None)
        report(f'{name}, {method}' if method else name, of_method, args)


def report(name: str, run: str | Path, args: argparse.Namespace) -> None:
  model = open_run(run).load()
  size = sum(x.nbytes for x in leaves(model.variables).values())
  loss = float(model.evaluate('validation')['loss'])
  speed = math.nan
  for _ in range(2 if args.tokens else 0):
    start = time.perf_counter()
    model.decode(['def main('] * 8, max_tokens=args.tokens, temperature=1.0, seed=1)
    speed = 8 * args.tokens / (time.perf_counter() - start)
  print(f'{name:36} {size / 1e6:7.2f} {math.exp(loss):10.4f} {speed:8.0f}', flush=True)


if __name__ == '__main__':
  main()
