"""The steps of the experiments of published sizes are as they were planned, as far as shapes tell.

python tools/plan_snapshots.py            compiles them anew, and compares collectives and memory too
python tools/plan_snapshots.py --update   writes them anew
"""

import pathlib

import pytest
from declared_plans import declared_snapshot

from praxis_lite.instruments.plan import Reason
from praxis_lite.instruments.plan.snapshot import read, regressions
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure

GOLDEN = pathlib.Path(__file__).parent.parent / 'golden' / 'plans'
PUBLISHED = ['Gpt2Small', 'Gpt2Xl', 'Llama1B', 'Llama8B', 'Llama8B128k', 'Mixtral8x7B', 'FineGrained16B', 'Gpt3']


@pytest.mark.parametrize('name', PUBLISHED)
def test_weights_and_state_are_as_planned(name):
  (path,) = GOLDEN.glob(f'*.{name}.txt')
  kept = read(path)
  assert str(kept) == path.read_text()
  assert not regressions(kept, declared_snapshot(configure(registry.get(kept.experiment)), kept))
  assert kept.mode == 'compiled' and kept.memory['peak'] > kept.memory['parameters']


@pytest.mark.parametrize('name', PUBLISHED)
def test_nothing_in_their_collectives_is_a_surprise(name):
  (path,) = GOLDEN.glob(f'*.{name}.txt')
  surprising = {reason for reason in map(str, Reason) if not Reason(reason).expected}
  assert not [key for key, group in read(path).collectives.items() if group.why in surprising]
