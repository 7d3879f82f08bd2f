"""A fuzzer of shardings: does a program on a mesh compute what it computes on one device?

  python tools/hunt_shardings.py --seed=1 --cases=1000 --kind=operations

Each case is drawn from the seed and its number alone. A wrong one is made as small as it stays wrong and printed as a
program that runs by itself. The exit code is 1 if any case was wrong.
"""

from __future__ import annotations

import argparse
import collections
import functools
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
if 'xla_force_host_platform_device_count' not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count=8'

import jax
import numpy as np

from tools.hunt import models, operations
from tools.hunt.cases import Case, Outcome, shrink

_KINDS: dict[str, Callable[[np.random.Generator], Case]] = {'operations': operations.draw, 'models': models.draw}
# Processes begin before JAX has a thread, so that forking is safe; one that XLA aborts takes no other with it.
_PROCESSES = multiprocessing.get_context('fork')
_ABORTED = Outcome('wrong', 'XLA aborts the process')


class Report(NamedTuple):
  """What became of a case, and if it was wrong, the smallest one that is."""

  number: int
  case: Case
  outcome: Outcome
  smallest: Case | None = None


def hunt(kind: str, seed: int, numbers: Iterable[int]) -> Iterator[Report]:
  """Runs cases, each drawn from the seed and its number alone, and makes the wrong ones small."""
  for number in numbers:
    case = _KINDS[kind](np.random.default_rng([seed, number]))
    outcome = run(case)
    smallest = None
    if outcome.kind == 'wrong':
      print(f'seed {seed}, case {number}: {outcome.why}; it is made smaller', file=sys.stderr, flush=True)
      smallest = shrink(case, functools.partial(_fails_like, outcome))
    yield Report(number, case, outcome, smallest)
    if number % 50 == 49:  # JAX keeps every program; a long run would fill the memory.
      jax.clear_caches()


def _fails_like(outcome: Outcome, case: Case) -> bool:
  return run(case).fails_like(outcome)


def run(case: Case) -> Outcome:
  """Runs a case; one that does not run on one device either is 'skipped'."""
  try:
    return case.run()
  except Exception as error:
    return Outcome('skipped', type(error).__name__)


def hunt_in_processes(kind: str, seed: int, numbers: range) -> Iterator[Report]:
  """The same, in a process of its own, and in another one from the next case on if XLA aborts it."""
  while numbers:
    receiving, sending = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_send, args=(sending, hunt(kind, seed, numbers)), daemon=True)
    process.start()
    sending.close()
    try:
      while numbers:
        yield receiving.recv()
        numbers = numbers[1:]
    except EOFError:
      case = _KINDS[kind](np.random.default_rng([seed, numbers[0]]))
      yield Report(numbers[0], case, _ABORTED, shrink(case, aborts, max_runs=60))
      numbers = numbers[1:]
    finally:
      process.terminate()


def aborts(case: Case) -> bool:
  """Whether a case ends its process."""
  process = _PROCESSES.Process(target=run, args=(case,))
  process.start()
  process.join()
  return bool(process.exitcode)


def _send(sending: Connection, reports: Iterator[Report]) -> None:
  for report in reports:
    sending.send(report)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--first', type=int, default=0, help='number of the first case')
  parser.add_argument('--cases', type=int, default=1000)
  parser.add_argument('--kind', choices=[*_KINDS], default='operations')
  parser.add_argument('--minutes', type=float, default=float('inf'), help='no case begins after them')
  options = parser.parse_args()
  counts: collections.Counter[str] = collections.Counter()
  start = time.monotonic()
  for number, case, outcome, smallest in hunt_in_processes(
    options.kind, options.seed, range(options.first, options.first + options.cases)
  ):
    counts.update([outcome.kind, f'{case.family} {outcome.kind}', *['guarded'] * bool(outcome.guarded)])
    if outcome.kind in ('refused', 'skipped'):
      counts[f'{outcome.kind}: {outcome.why}'] += 1
    if smallest is not None:
      print(
        f'# ---- seed {options.seed}, case {number}: {outcome.why.splitlines()[0]}\n{smallest.script()}', flush=True
      )
    if time.monotonic() - start > 60 * options.minutes:
      break
  for name, count in sorted(counts.items()):
    print(f'{count:7} {name}')
  print(f'{time.monotonic() - start:.0f} s')
  return bool(counts['wrong'])


if __name__ == '__main__':
  sys.exit(main())
