"""Every registered experiment has a golden text config, so that a change of any default shows in a diff.

UPDATE_GOLDEN=1 python -m pytest tests/test_golden_configs.py     writes them anew
"""

import os
import pathlib

import pytest

from praxis_lite.common.config.text import to_text
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure

GOLDEN = pathlib.Path(__file__).parent / 'golden'
UPDATE = os.environ.get('UPDATE_GOLDEN') == '1'

registry.load_all()
NAMES = [name for name in registry.names() if name.startswith('praxis_lite.experiments.')]


@pytest.mark.parametrize('name', NAMES)
def test_config_is_as_recorded(name):
  text = to_text(configure(registry.get(name)).roots()) + '\n'
  path = GOLDEN / f'{name.removeprefix("praxis_lite.experiments.")}.txt'
  if UPDATE:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
  assert path.exists(), f'{path.name} is missing; UPDATE_GOLDEN=1 writes it'
  assert text == path.read_text(), 'the config has changed; if that is meant, UPDATE_GOLDEN=1 records it'


def test_no_golden_config_is_left_of_an_experiment_that_is_gone():
  assert {p.stem for p in GOLDEN.glob('*.txt')} == {name.removeprefix('praxis_lite.experiments.') for name in NAMES}
