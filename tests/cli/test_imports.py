"""What start-up must not wait for: each package is imported by the command that needs it, and by no other."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# Each takes a good part of a second, TensorFlow several.
HEAVY = {'tensorflow', 'orbax', 'sklearn', 'sentencepiece', 'tensorboardX', 'scipy.stats', 'matplotlib', 'pandas'}
# All but what extends a class of Orbax, and is imported where a checkpoint is written.
ALL = """
import importlib, pkgutil, praxis_lite.{0} as package
for module in pkgutil.iter_modules(package.__path__, 'praxis_lite.{0}.'):
  if module.name != 'praxis_lite.checkpoints.streamed_writes':
    importlib.import_module(module.name)
"""

IMPORTS_OF = {
  'praxis_lite': ('import praxis_lite', {*HEAVY, 'optax'}),
  'experiments': ('from praxis_lite import registry\nassert not registry.load_all()', HEAVY),
  'layers': (ALL.format('layers'), {*HEAVY, 'optax'}),
  'models': (ALL.format('models'), {*HEAVY, 'optax'}),
  'inputs': (ALL.format('inputs'), {*HEAVY, 'optax'}),
  'partitioning': (ALL.format('partitioning'), HEAVY),
  'runtime': (ALL.format('runtime'), HEAVY),
  'help': (
    'from praxis_lite.cli.main import main\nmain(["--help"]); main(["train", "--help"])',
    {*HEAVY, 'jax', 'numpy'},
  ),
  'list': ('from praxis_lite.cli.main import main\nmain(["list"])', HEAVY),
  'show': ('from praxis_lite.cli.main import main\nassert main(["show", "--exp=lm_sizes.Llama8B"]) == 0', HEAVY),
}


@pytest.mark.parametrize(('code', 'unwanted'), IMPORTS_OF.values(), ids=IMPORTS_OF)
def test_what_is_heavy_is_not_imported(code, unwanted):
  check = f'\nimport sys\nprint("FOUND", sorted(set(sys.modules) & {unwanted!r}))'
  done = subprocess.run([sys.executable, '-c', code + check], capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[-1] == 'FOUND []'
