"""Plans the experiments of published sizes with the compilers of their chips, and compares the plans with snapshots.

python tools/plan_snapshots.py                  prints what has become worse, and then exits with 1
python tools/plan_snapshots.py --update         rewrites the snapshots
python tools/plan_snapshots.py lm_sizes.Gpt2Xl  one of them

The snapshots are in tests/golden/plans. The test suite compares only what needs no compiler. This tool takes 10 minutes
on 2 cores, and needs the packages of `praxis_lite[plan]`.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from praxis_lite.cli.plan_flags import cache_of_plans, prepare
from praxis_lite.instruments.plan import parse_topology, plan, regressions, snapshot_of
from praxis_lite.instruments.plan.snapshot import keep, read
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure

FOLDER = pathlib.Path(__file__).parent.parent / 'tests' / 'golden' / 'plans'
TOPOLOGIES = {
  'lm_sizes.Gpt2Small': 'h100:1x1',
  'lm_sizes.Gpt2Xl': 'h100:1x8',
  'lm_sizes.Llama1B': 'h100:1x8',
  'lm_sizes.Llama8B': 'h100:8x8',
  'long_context.Llama8B128k': 'h100:32x8',
  'moe.Mixtral8x7B': 'h100:8x8',
  'moe.FineGrained16B': 'h100:8x8',
  'pipelines.Gpt3': 'h100:64x8',
}


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('experiments', nargs='*', help='all by default', metavar='experiment', choices=[*TOPOLOGIES, []])
  parser.add_argument('--update', action='store_true', help='write the snapshots anew')
  arguments = parser.parse_args()
  prepare(parse_topology('h100:1x1'))
  registry.load_all()
  failed = False
  for name in arguments.experiments or TOPOLOGIES:
    start, path = time.perf_counter(), FOLDER / f'{name}.txt'
    found = plan(configure(registry.get(name)), None, TOPOLOGIES[name], cache=cache_of_plans())
    new = snapshot_of(found, name)
    if arguments.update:
      keep(new, path)
    worse = regressions(read(path), new)
    failed |= bool(worse)
    says = '\n  '.join(['has become worse:', *worse]) if worse else 'is as it was, or better'
    print(f'{name} on {TOPOLOGIES[name]} {says} ({time.perf_counter() - start:.0f} s)', flush=True)
  return int(failed)


if __name__ == '__main__':
  sys.exit(main())
