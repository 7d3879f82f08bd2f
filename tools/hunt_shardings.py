"""A fuzzer of shardings: does a program on a mesh compute what it computes on one device?

  python tools/hunt_shardings.py --seed=1 --cases=1000 --kind=operations

Each case is drawn from the seed and its number alone. A wrong one is made as small as it stays wrong and printed as a
program that runs by itself. The exit code is 1 if any case was wrong.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import sys
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
if 'xla_force_host_platform_device_count' not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count=8'

import jax
import numpy as np

from tools.hunt import models, operations
from tools.hunt.cases import Case, shrink

_KINDS: dict[str, Callable[[np.random.Generator], Case]] = {'operations': operations.draw, 'models': models.draw}


def hunt(
  kind: str,
  seed: int,
  cases: int,
  *,
  first: int = 0,
  minutes: float = float('inf'),
  log: Callable[[str], object] = print,
) -> tuple[collections.Counter[str], list[Case]]:
  """Runs cases of a kind.

  Args:
    kind: 'operations' or 'models'.
    seed, first, cases: what is drawn: this many cases, from this number on.
    minutes: no case begins after them.
    log: gets a line for each refusal of a new kind, and the script of each wrong case, made small.

  Returns:
    How many cases there were of each family and outcome, and the wrong ones, made small.
  """
  counts: collections.Counter[str] = collections.Counter()
  wrong: list[Case] = []
  start = time.monotonic()
  for number in range(first, first + cases):
    if time.monotonic() - start > 60 * minutes:
      break
    case = _KINDS[kind](np.random.default_rng([seed, number]))
    try:
      outcome = case.run()
    except Exception as error:
      counts[f'not on one device: {type(error).__name__}'] += 1
      continue
    counts[f'{case.family} {outcome.kind}'] += 1
    counts[outcome.kind] += 1
    counts['guarded'] += bool(outcome.guarded)
    if outcome.kind == 'refused':
      counts[f'refused: {outcome.why}'] += 1
    if outcome.kind == 'wrong':
      smallest = shrink(case, _is_wrong)
      wrong.append(smallest)
      log(f'# ---- seed {seed}, case {number}: {outcome.why}\n# smallest: {smallest.run().why}\n{smallest.script()}')
    if number % 50 == 49:  # JAX keeps every program; a long run would fill the memory.
      jax.clear_caches()
  return counts, wrong


def _is_wrong(case: Case) -> bool:
  try:
    return case.run().kind == 'wrong'
  except Exception:
    return False  # It does not run on one device.


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--first', type=int, default=0, help='number of the first case')
  parser.add_argument('--cases', type=int, default=1000)
  parser.add_argument('--kind', choices=[*_KINDS], default='operations')
  parser.add_argument('--minutes', type=float, default=float('inf'))
  options = parser.parse_args()
  start = time.monotonic()

  def log(text: str) -> None:
    print(text, flush=True)

  counts, wrong = hunt(
    options.kind, options.seed, options.cases, first=options.first, minutes=options.minutes, log=log
  )
  for name, number in sorted(counts.items()):
    log(f'{number:7} {name}')
  log(f'{time.monotonic() - start:.0f} s')
  return bool(wrong)


if __name__ == '__main__':
  sys.exit(main())
