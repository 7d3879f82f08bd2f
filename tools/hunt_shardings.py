"""Fuzzes shardings: checks that random programs compute the same on a mesh as on one device.

  python tools/hunt_shardings.py --seed=1 --cases=1000 --kind=graphs

Kinds of cases:

  operations   single operations
  graphs       graphs of some 30 operations with constraints between them
  tasks        whole tasks of many kinds with random splits of all arrays

They run on meshes of 2 to 24 devices.

Each case depends only on the seed and its number; `--layouts` consecutive tasks have the same model. `--first`
continues where another run ended. A wrong case is reduced as long as it stays wrong, and printed as a standalone
program. The exit code is 1 if any case was wrong.
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
os.environ.setdefault('JAX_TRACEBACK_IN_LOCATIONS_LIMIT', '0')

import jax
import numpy as np

from praxis_lite.common.jax_internals.flags import add_flags
from praxis_lite.common.jax_internals.threads import provide_threads
from tools.graphs import drawing, tasks
from tools.graphs.families import FAMILIES
from tools.hunt.cases import FuzzCase, Outcome, shrink

# They make compiling fast and do not affect the partitioner. The timeout allows for a busy machine.
_FLAGS = {
  'xla_force_host_platform_device_count': '24',
  'xla_backend_optimization_level': '0',
  'xla_cpu_use_fusion_emitters': 'false',
  'xla_cpu_parallel_codegen_split_count': '1',
  'xla_cpu_collective_call_terminate_timeout_seconds': '120',
}
os.environ['XLA_FLAGS'] = add_flags(os.environ.get('XLA_FLAGS', ''), _FLAGS)
provide_threads()

_KINDS: dict[str, Callable[[np.random.Generator], FuzzCase]] = {
  'operations': functools.partial(drawing.draw_program, families=FAMILIES, operations=1),
  'graphs': functools.partial(drawing.draw_program, families=FAMILIES),
}
# By default, this number of consecutive cases are layouts of one task, so it runs only once on one device.
_LAYOUTS = 3
# Cases run in child processes, because XLA may abort. Forking is safe while JAX has no threads.
_PROCESSES = multiprocessing.get_context('fork')
_ABORTED = Outcome('wrong', 'XLA aborts the process')
_HANGS = Outcome('wrong', 'the process does not end')
# A case that takes longer than this number of seconds, including its reduction, counts as hanging.
_MOST_SECONDS = 900.0
_SECONDS_OF_A_HANG = 60.0
_SECONDS_OF_SHRINKING = 180.0  # By default, a wrong case is reduced for this number of seconds.


class CaseReport(NamedTuple):
  """The outcome of a case, and for a wrong one, the smallest case that is still wrong."""

  number: int
  case: FuzzCase
  outcome: Outcome
  smallest: FuzzCase | None = None


def draw_case(kind: str, seed: int, number: int, layouts: int = _LAYOUTS) -> FuzzCase:
  """Returns the case with this seed and number; `layouts` consecutive tasks have the same model."""
  rng = np.random.default_rng([seed, number])
  if kind == 'tasks':
    return tasks.draw_task(rng, of_model=np.random.default_rng([seed, number // layouts, 1]))
  return _KINDS[kind](rng)


def report_cases(
  kind: str,
  seed: int,
  numbers: Iterable[int],
  seconds: float = _SECONDS_OF_SHRINKING,
  begin: Callable[[FuzzCase], object] = lambda case: None,
  layouts: int = _LAYOUTS,
) -> Iterator[CaseReport]:
  """Runs cases, and reduces each wrong one for at most `seconds`. It calls `begin` with each case before running it."""
  for number in numbers:
    case = draw_case(kind, seed, number, layouts)
    begin(case)
    outcome = run_sharding_case(case)
    smallest = None
    if outcome.kind == 'wrong':
      print(f'seed {seed}, case {number}: {outcome.why}; it is made smaller', file=sys.stderr, flush=True)
      smallest = shrink(case, _limit_time(functools.partial(_fails_like, outcome), seconds))
    yield CaseReport(number, case, outcome, smallest)
    if number % 50 == 49:  # JAX keeps all compiled programs, which would fill the memory in a long run.
      jax.clear_caches()


def _fails_like(outcome: Outcome, case: FuzzCase) -> bool:
  return run_sharding_case(case).fails_like(outcome)


def run_sharding_case(case: FuzzCase) -> Outcome:
  """Runs a case. If it fails on one device too, its outcome is 'skipped'."""
  try:
    return case.run()
  except Exception as error:
    return Outcome('skipped', type(error).__name__)


def hunt_in_processes(
  kind: str, seed: int, numbers: range, seconds: float = _SECONDS_OF_SHRINKING, layouts: int = _LAYOUTS
) -> Iterator[CaseReport]:
  """Like `report_cases`, but in a child process. If XLA aborts it or it hangs, the next case runs in a new one."""
  while numbers:
    receiving, sending = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_send, args=(sending, kind, seed, numbers, seconds, layouts), daemon=True)
    process.start()
    sending.close()
    case, ended = None, _ABORTED
    try:
      while numbers:
        if not receiving.poll(_MOST_SECONDS):
          ended = _HANGS
          break
        received = receiving.recv()
        if isinstance(received, CaseReport):
          yield received
          numbers, case = numbers[1:], None
        else:
          case = received
    except EOFError:
      pass
    finally:
      process.kill()
      process.join()
    if numbers and case is not None:
      print(f'seed {seed}, case {numbers[0]}: {ended.why}; it is made smaller', file=sys.stderr, flush=True)
      is_wrong = _limit_time(functools.partial(ends_badly, ended), seconds)
      yield CaseReport(numbers[0], case, ended, shrink(case, is_wrong, max_runs=120))
      numbers = numbers[1:]
    elif numbers:
      raise SystemExit(f'seed {seed}, case {numbers[0]}: the process ended before there was a case')


def _limit_time(is_wrong: Callable[[FuzzCase], bool], seconds: float) -> Callable[[FuzzCase], bool]:
  """Returns a predicate like `is_wrong` that is false for every case once the time is over, which ends a reduction."""
  end = time.monotonic() + seconds
  return lambda case: time.monotonic() < end and is_wrong(case)


def ends_badly(outcome: Outcome, case: FuzzCase) -> bool:
  """Returns whether a case also aborts its process, or hangs, as `outcome` says."""
  process = _PROCESSES.Process(target=run_sharding_case, args=(case,))
  process.start()
  process.join(_SECONDS_OF_A_HANG)
  hangs = process.is_alive()
  process.kill()
  process.join()
  return hangs if outcome is _HANGS else bool(process.exitcode) and not hangs


def _send(
  sending: Connection, kind: str, seed: int, numbers: Iterable[int], seconds: float, layouts: int = _LAYOUTS
) -> None:
  """Sends each case before it runs, so that the parent knows which case ended the process; then sends its report."""
  for report in report_cases(kind, seed, numbers, seconds, begin=sending.send, layouts=layouts):
    sending.send(report)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--first', type=int, default=0, help='number of the first case')
  parser.add_argument('--cases', type=int, default=1000)
  parser.add_argument('--layouts', type=int, default=_LAYOUTS, help='how many layouts each task has')
  parser.add_argument('--kind', choices=[*_KINDS, 'tasks'], default='operations')
  parser.add_argument('--minutes', type=float, default=float('inf'), help='no case begins after them')
  parser.add_argument('--shrinking', type=float, default=_SECONDS_OF_SHRINKING, help='seconds to make a case smaller')
  parser.add_argument(
    '--without', default='', help='families of operations that no graph has, with commas between them'
  )
  options = parser.parse_args()
  for family in filter(None, options.without.split(',')):
    FAMILIES.pop(family)
  counts: collections.Counter[str] = collections.Counter()
  start = time.monotonic()
  for number, case, outcome, smallest in hunt_in_processes(
    options.kind,
    options.seed,
    range(options.first, options.first + options.cases),
    options.shrinking,
    options.layouts,
  ):
    counts.update([outcome.kind, f'{case.family} {outcome.kind}', *['guarded'] * bool(outcome.guarded)])
    if outcome.kind in ('right', 'wrong'):
      counts['operations, without those of gradients'] += getattr(case, 'size', 1)
    if outcome.kind in ('refused', 'skipped'):
      counts[f'{outcome.kind}: {outcome.why}'] += 1
    if smallest is not None:
      print(
        f'# ---- seed {options.seed}, case {number}: {outcome.why.splitlines()[0]}\n{smallest.script()}', flush=True
      )
    if (number + 1) % 20 == 0:
      print(f'# before case {number + 1}: {dict(counts)}', flush=True)
    if time.monotonic() - start > 60 * options.minutes:
      break
  for name, count in sorted(counts.items()):
    print(f'{count:7} {name}')
  print(f'{time.monotonic() - start:.0f} s')
  return bool(counts['wrong'])


if __name__ == '__main__':
  sys.exit(main())
