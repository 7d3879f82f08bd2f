"""Every registered experiment has a golden text config, so that a change of any default shows in a diff.

UPDATE_GOLDEN=1 python -m pytest tests/test_golden_configs.py     writes them anew
"""

import importlib
import os
import pathlib
import re

import pytest
from warm_python import finished

from praxis_lite.common.config.references import dotted_name
from praxis_lite.common.config.text import to_text
from praxis_lite.common.moved import current_name
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure

GOLDEN = pathlib.Path(__file__).parent / 'golden'
# All classes and functions that configs named in any version: recorded runs have these names, so none is ever removed.
NAMED = GOLDEN / 'names' / 'ever_named.txt'
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


def test_no_config_asks_for_devices():
  """A command configures the experiment first, and then simulates devices, or starts the processes that use them."""
  found = finished(
    'from praxis_lite.common.jax_internals.devices import backends_have_started\n'
    'from praxis_lite.training import registry\n'
    'from praxis_lite.training.experiment import configure\n'
    'registry.load_all()\n'
    'names = [name for name in registry.names() if name.startswith("praxis_lite.experiments.")]\n'
    'for name in names:\n'
    '  configure(registry.get(name))\n'
    '  assert not backends_have_started(), name\n'
    'print(len(names))\n'
  )
  assert found.returncode == 0, found.stderr
  assert int(found.stdout) == len(NAMES)


def test_no_golden_config_is_left_of_an_experiment_that_is_gone():
  assert {p.stem for p in GOLDEN.glob('*.txt')} == {name.removeprefix('praxis_lite.experiments.') for name in NAMES}


def test_what_recorded_configs_name_is_recorded():
  named = {name for path in GOLDEN.glob('*.txt') for name in re.findall(r'praxis_lite(?:\.\w+)+', path.read_text())}
  if UPDATE:
    NAMED.write_text('\n'.join(sorted({*NAMED.read_text().split(), *named})) + '\n')
  assert named <= set(NAMED.read_text().split()), 'new names; UPDATE_GOLDEN=1 records them'


@pytest.mark.parametrize('name', NAMED.read_text().split())
def test_what_a_config_of_any_version_names_is_found(name):
  """If this fails, what was moved or renamed needs a line in common/moved.py: recorded runs have the old name."""
  old_module, _, old_name = name.rpartition('.')
  module, _, found = current_name(f'{old_module}:{old_name}').partition(':')
  assert dotted_name(getattr(importlib.import_module(module), found)) == current_name(name) == f'{module}.{found}'
