"""Orbax stays behind one folder of the package, and its next API reads what this one writes."""

from __future__ import annotations

import ast
import pathlib

import jax
import numpy as np
import pytest
from small_states import layout_on, random_state

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.checkpoints.contents import stored_shape, to_stored
from praxis_lite.common.trees import leaves_by_path, nest

PACKAGE = pathlib.Path(__file__).parents[2] / 'praxis_lite'
ADAPTER = PACKAGE / 'checkpoints' / 'orbax'
THEIRS = {'orbax', 'etils'}  # etils: the paths that Orbax takes and returns.


def imports_of_theirs(source):
  """Lines that import Orbax, wherever in the source: at its top, inside functions, or by name."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      names = [] if node.level else [node.module]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(('import_module', '__import__')):
      names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    else:
      continue
    if any(str(name).partition('.')[0] in THEIRS for name in names):
      yield node.lineno


@pytest.mark.slow
def test_nothing_else_imports_orbax():
  files = [path for path in sorted(PACKAGE.rglob('*.py')) if ADAPTER not in path.parents]
  assert len(files) > 200
  found = [f'{path.relative_to(PACKAGE)}:{line}' for path in files for line in imports_of_theirs(path.read_text())]
  assert not found, f'{found}: use praxis_lite.checkpoints.orbax.store.OrbaxStore, or add to it what is missing'


def test_nothing_else_of_the_package_uses_the_work_arounds():
  outside = [path for path in sorted(PACKAGE.rglob('*.py')) if ADAPTER not in path.parents]
  used = {
    node.module.removeprefix('praxis_lite.checkpoints.orbax')
    for path in outside
    if 'checkpoints.orbax' in path.read_text()
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('praxis_lite.checkpoints.orbax')
  }
  assert used == {'.on_disk', '.save_barrier', '.store'}


@pytest.mark.parametrize(
  'line',
  [
    'import orbax.checkpoint as ocp',
    'from orbax.checkpoint import args',
    'def f():\n  from etils import epath',
    "importlib.import_module('orbax.checkpoint')",
  ],
)
def test_an_import_that_is_added_is_found(line):
  assert list(imports_of_theirs(line))


def test_the_adapter_says_how_to_drop_each_of_its_work_arounds():
  about = ast.get_docstring(ast.parse((ADAPTER / '__init__.py').read_text()))
  tree = ast.parse((ADAPTER / 'work_arounds.py').read_text())
  (load,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == 'load_orbax')
  called = {n.func.id for n in ast.walk(load) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
  assert called and not [name for name in called if name not in about]


def test_the_next_api_of_orbax_reads_what_is_saved(tmp_path):
  v1 = pytest.importorskip('orbax.checkpoint.experimental.v1')
  state, target = random_state(layout_on(3)), layout_on(2).shapes  # Padded differently.
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, state, layout_on(3).true_shapes, {'position': 7})
  checkpointer.close()
  context = v1.Context()
  context.array.loading.enable_padding_and_truncation = True
  context.pytree.loading.partial_load = True
  with context:
    reader = v1.training.Checkpointer(tmp_path / 'checkpoints')
    shapes = nest(leaves_by_path(jax.tree.map(stored_shape, target)))
    read = reader.load_checkpointables(1, {'state': shapes, 'inputs': None})
    reader.close()
  assert read['inputs']['input_state'] == {'position': 7}
  ours = Checkpointer(tmp_path, read_only=True).restore(target, layout_on(2).true_shapes)
  expected = nest(leaves_by_path(jax.tree.map(to_stored, ours)))
  jax.tree.map(np.testing.assert_array_equal, read['state'], expected)
