"""What start-up must not wait for: each package is imported by the command that needs it, and by no other."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Each takes a good part of a second, TensorFlow several.
HEAVY = {'tensorflow', 'orbax', 'sklearn', 'sentencepiece', 'tensorboardX', 'scipy.stats', 'matplotlib', 'pandas'}
ALL = """
import importlib, pkgutil, praxis_lite.{0} as package
for module in pkgutil.iter_modules(package.__path__, 'praxis_lite.{0}.'):
  importlib.import_module(module.name)
"""

OPTAX_TOO = {*HEAVY, 'optax'}
# What must not be imported by what; those of a line run in one process, in this order.
IMPORTS_OF = [
  (
    {*HEAVY, 'jax', 'numpy'},
    {
      'help': 'from praxis_lite.cli.main import main\nmain(["--help"]); main(["train", "--help"])',
      'list': 'main(["list"])',
    },
  ),
  (
    OPTAX_TOO,
    {'praxis_lite': 'import praxis_lite', **{room: ALL.format(room) for room in ('layers', 'models', 'inputs')}},
  ),
  (
    HEAVY,
    {
      'experiments': 'from praxis_lite.training import registry\nassert not registry.load_all()',
      'sharding': ALL.format('sharding'),
      'runs': ALL.format('runs'),
      'show': 'from praxis_lite.cli.main import main\nassert main(["show", "--exp=lm_sizes.Llama8B"]) == 0',
    },
  ),
]


@pytest.fixture(scope='module')
def imported():
  """Of each name, what was imported by then that must not be."""
  found = {}
  for unwanted, codes in IMPORTS_OF:
    check = f'\nprint("FOUND", sorted(set(sys.modules) & {unwanted!r}))\n'
    code = 'import sys\n' + ''.join(code + check for code in codes.values())
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith('FOUND ')]
    found |= dict(zip(codes, lines, strict=True))
  return found


@pytest.mark.parametrize('name', [name for _, codes in IMPORTS_OF for name in codes])
def test_what_is_heavy_is_not_imported(name, imported):
  assert imported[name] == 'FOUND []'
