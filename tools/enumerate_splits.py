"""Runs operations with all splits of their arrays, and reports for which ones XLA computes right results.

  python tools/enumerate_splits.py --minutes=20                       some cases of each kind on each mesh
  python tools/enumerate_splits.py --kinds=products --cases=100000    more of them
  python tools/enumerate_splits.py --unguarded                        without the guards
  python tools/enumerate_splits.py --class --meshes=2x2x3             every case that guards accept

For each kind of operation, each of its programs and each mesh, it runs the splits for which the operation is local to
each device, splits that differ from these in one array, and other splits: at most `--cases` of each. With `--class`, it
runs all splits of products and convolutions that the guards accept, or `--cases` of them, drawn at random. (The guards
change all other splits to accepted ones.) All results are compared with NumPy, on each device. Counts are added to a
file, so that an interrupted run continues where it was. The exit code is 1 if any case was wrong.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import pathlib
import random
import sys
import time
from collections.abc import Collection, Iterator, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax

from tools.splits.assign import Dims, Splits, axes_of_mesh, format_splits, left_as_stated, make_cases
from tools.splits.batches import CaseResult
from tools.splits.kinds import KINDS
from tools.splits.workers import Worker

MESHES = (
  *((2,), (3,), (4,), (5,), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (3, 4), (2, 5), (6, 2)),
  *((2, 2, 2), (2, 2, 3), (2, 3, 2), (3, 2, 2), (2, 2, 5), (2, 4, 2), (2, 3, 3), (2, 3, 4), (2, 2, 2, 2), (2, 2, 2, 3)),
)
_BATCH = 200
_CASES = 200
# The kinds of operations for which the guards do not change splits that `is_nearly_local` accepts.
_OF_A_CLASS = ('products', 'convolutions')
Counts = collections.Counter[str]


def enumerate_splits(options: argparse.Namespace, done: Collection[str]) -> Iterator[tuple[str, Counts, list[str]]]:
  """Runs each batch that is not done yet; yields its name, counts of outcomes, and the cases that were not right."""
  until = time.monotonic() + 60 * options.minutes
  kinds = options.kinds.split(',') if options.kinds else _OF_A_CLASS if options.all_of_class else KINDS
  programs = {kind: [one for one in enumerate(KINDS[kind]()) if options.program in one[1].name] for kind in kinds}
  meshes = [tuple(map(int, mesh.split('x'))) for mesh in options.meshes.split(',')] if options.meshes else MESHES
  for mesh in meshes:
    worker = Worker(mesh)
    for kind, number, program in ((kind, i, one) for kind, every in programs.items() for i, one in every):
      cases, which = _cases(mesh, program.dims, options)
      for first in range(0, len(cases), _BATCH):
        name = f'jax {jax.__version__}, mesh {"x".join(map(str, mesh))}, {kind} {program.name}, {which}, {first}'
        if name not in done and time.monotonic() < until:
          batch = cases[first : first + _BATCH]
          yield name, *_summary(kind, batch, worker.run(kind, number, batch, not options.unguarded))
    worker.close()


def _cases(mesh: Sequence[int], dims: Dims, options: argparse.Namespace) -> tuple[list[Splits], str]:
  """Returns the cases of a program on a mesh, and a name for them."""
  if not options.all_of_class:
    most = _CASES if options.cases is None else options.cases
    return [*make_cases(axes_of_mesh(mesh), dims, most)], f'{most}'
  every = left_as_stated(mesh, dims)
  if options.cases is None or options.cases >= len(every):
    return every, 'all of the class'
  return random.Random(0).sample(every, options.cases), f'{options.cases} of {len(every)} of the class'


def _summary(kind: str, cases: Sequence[Splits], found: Sequence[CaseResult]) -> tuple[Counts, list[str]]:
  counts: Counts = collections.Counter()
  for one in found:
    otherwise = '' if one.is_reached else 'split otherwise than stated, '
    counts[f'{kind} {otherwise}{"put into canonical form" if one.guarded else "in the class"} {one.outcome}'] += 1
  return counts, [
    f'{one.outcome}: {format_splits(splits)}' for splits, one in zip(cases, found) if one.outcome != 'right'
  ]


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--kinds', help=f'of {",".join(KINDS)}; default: all')
  parser.add_argument('--meshes', help='such as 2x2x3,4; default: 22 meshes of 2 to 24 devices')
  parser.add_argument('--program', default='', help='only programs with this in their names, such as "bv,vc->bc b=3"')
  parser.add_argument(
    '--class', dest='all_of_class', action='store_true', help='all splits that the guards leave as they are'
  )
  parser.add_argument(
    '--cases',
    type=int,
    help=f'at most as many local splits, others in one array, others; default: {_CASES}, and all with --class',
  )
  parser.add_argument('--minutes', type=float, default=math.inf, help='no batch begins after them')
  parser.add_argument('--unguarded', action='store_true', help='what plain JAX does')
  parser.add_argument('--record', type=pathlib.Path, help='a file to which counts are added, and from which it goes on')
  options = parser.parse_args()
  total: Counts = collections.Counter()
  lines = options.record.read_text().splitlines() if options.record and options.record.exists() else []
  batches = [json.loads(line) for line in lines]
  for batch in batches:
    total.update(batch['counts'])
  for name, counts, wrong in enumerate_splits(options, {batch['name'] for batch in batches}):
    total.update(counts)
    for case in wrong:
      print(f'{name}: {case}', flush=True)
    if options.record:
      with options.record.open('a') as file:
        print(json.dumps({'name': name, 'counts': counts, 'wrong': wrong}), file=file)
  for what, count in sorted(total.items()):
    print(f'{count:8} {what}')
  return int(any(not what.endswith(' right') for what in total))


if __name__ == '__main__':
  sys.exit(main())
