"""Shows for which splits of its arrays XLA computes an operation rightly, by running all of them.

  python tools/enumerate_splits.py --minutes=20                       some cases of each kind on each mesh
  python tools/enumerate_splits.py --kinds=products --cases=100000    more of them
  python tools/enumerate_splits.py --unguarded                        without the guards: what they are there for

For each kind of operation, each of its programs and each mesh, all splits are run with which the operation is local to
each device, those that differ in one array, and others, at most `--cases` of each. The guards leave those of the class
that was shown right as they are, and put others into canonical form; all are compared with NumPy, on each device.
Counts are added to a file, so that a run that was stopped goes on where it was. The exit code is 1 if any case was not
right.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Collection, Iterator, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax

from tools.splits.assign import Splits, all_of, axes_of_mesh, shown
from tools.splits.batches import Found
from tools.splits.kinds import KINDS
from tools.splits.workers import Worker

MESHES = (
  *((2,), (3,), (4,), (5,), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (3, 4), (2, 5), (6, 2)),
  *((2, 2, 2), (2, 2, 3), (2, 3, 2), (3, 2, 2), (2, 2, 5), (2, 4, 2), (2, 3, 3), (2, 3, 4), (2, 2, 2, 2), (2, 2, 2, 3)),
)
_BATCH = 200
Counts = collections.Counter[str]


def enumerate_splits(options: argparse.Namespace, done: Collection[str]) -> Iterator[tuple[str, Counts, list[str]]]:
  """For each batch that is not done: its name, how many of its cases ended how, and those that were not right."""
  until = time.monotonic() + 60 * options.minutes
  kinds = options.kinds.split(',') if options.kinds else KINDS
  programs = {kind: [*KINDS[kind]()] for kind in kinds}
  meshes = [tuple(map(int, mesh.split('x'))) for mesh in options.meshes.split(',')] if options.meshes else MESHES
  for mesh in meshes:
    worker = Worker(mesh)
    for kind, number, program in ((kind, i, one) for kind, every in programs.items() for i, one in enumerate(every)):
      cases = [*all_of(axes_of_mesh(mesh), program.dims, options.cases)]
      for first in range(0, len(cases), _BATCH):
        name = (
          f'jax {jax.__version__}, mesh {"x".join(map(str, mesh))}, {kind} {program.name}, {options.cases}, {first}'
        )
        if name not in done and time.monotonic() < until:
          batch = cases[first : first + _BATCH]
          yield name, *_summary(kind, batch, worker.run(kind, number, batch, not options.unguarded))
    worker.close()


def _summary(kind: str, cases: Sequence[Splits], found: Sequence[Found]) -> tuple[Counts, list[str]]:
  counts: Counts = collections.Counter()
  for one in found:
    counts[f'{kind} {"put into canonical form" if one.guarded else "in the class"} {one.outcome}'] += 1
  return counts, [f'{one.outcome}: {shown(splits)}' for splits, one in zip(cases, found) if one.outcome != 'right']


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--kinds', help=f'of {",".join(KINDS)}; default: all')
  parser.add_argument('--meshes', help='such as 2x2x3,4; default: 22 meshes of 2 to 24 devices')
  parser.add_argument(
    '--cases', type=int, default=200, help='at most as many local splits, others in one array, others'
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
