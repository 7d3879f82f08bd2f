"""The wings of the package import downward only, and each only what `docs/architecture.md` says."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / 'praxis_lite'

# From the bottom up, with the order inside each wing: a module imports from those before it, never from one after it.
ORDER = (
  'common.other_names',
  *('common.errors', 'common.foreign_text', 'common.jax_internals', 'common.moved', 'common.importing'),
  'common.native_log',
  *('common.files', 'common.figures', 'common.devices', 'common.processes', 'common.accelerators', 'common.trees'),
  *('common.config', 'common.weighted', 'common.mistakes', 'common'),
  *('sharding.weights', 'sharding'),
  *('layers.base.summaries', 'layers.base.taps', 'layers.base.call', 'layers.base', 'layers'),
  'inputs',
  *('models.decoding', 'models'),
  *('training.learning', 'training.task', 'training.experiment', 'training.registry', 'training'),
  'checkpoints',
  *('instruments.explain', 'instruments.verification', 'instruments.plan', 'instruments.testing', 'instruments'),
  *(
    'runs.records',
    'runs.stop_signals',
    'runs.nonfinite',
    'runs.throughput',
    'runs.console',
    'runs.decoding_memory',
    'runs.answers',
    'runs.sized_steps',
    'runs.programs',
  ),
  *('runs.observer', 'runs.hooks', 'runs.trouble', 'runs.cluster', 'runs'),
  *('bridges.t5x', 'bridges.hf', 'bridges.foreign', 'bridges'),
  'partitioning',  # The names of Praxis and T5X, from where they are defined.
  'cli',
  '__main__',
)
# What a module must not know although it is below.
NEVER = {
  'training.learning': ('layers', 'models', 'inputs'),
  'layers': ('inputs', 'models'),
  'sharding': ('common.config',),
  'checkpoints': ('layers', 'models', 'inputs', 'training.learning'),
  'instruments': ('checkpoints', 'inputs'),
  'instruments.plan': ('instruments.verification',),
  'instruments.testing': ('instruments.verification',),
  'runs': ('instruments',),
  'bridges': ('instruments',),
  'bridges.foreign': ('checkpoints', 'models', 'inputs', 'training', 'runs'),
  'bridges.t5x': ('checkpoints', 'layers', 'models', 'inputs', 'runs'),
}
MODULES = {
  '.'.join(path.relative_to(PACKAGE).with_suffix('').parts).removesuffix('__init__').rstrip('.'): path
  for path in sorted(PACKAGE.rglob('*.py'))
  if not {'experiments', 'tasks'} & {*path.relative_to(PACKAGE).parts[:1]}
}


@functools.cache
def nodes(path):
  """Of what a file consists; what the tests below do not look at is left out."""
  kinds = (ast.Import, ast.ImportFrom, ast.Call, ast.Attribute, ast.Constant)
  kept = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
  return [node for node in kept if not isinstance(node, ast.Attribute) or node.attr in CHANGING | {'_src'}]


def imports(path):
  """(line, module) of each import of this package, those under TYPE_CHECKING and in functions too."""
  for node in nodes(path):
    names = []
    if isinstance(node, ast.ImportFrom) and node.module:
      full = [f'{node.module}.{alias.name}' for alias in node.names]
      names = [name if name.removeprefix('praxis_lite.') in MODULES else node.module for name in full]
    elif isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # Of a table of `lazy_names`.
      names = [node.value] if node.value.removeprefix('praxis_lite.') in MODULES.keys() - {''} else []
    yield from ((node.lineno, name.removeprefix('praxis_lite.')) for name in names if name.startswith('praxis_lite.'))


def is_in(module, wing):
  return module == wing or module.startswith(f'{wing}.')


def place(module):
  return ORDER.index(max((wing for wing in ORDER if is_in(module, wing)), key=len))


def test_imports_point_downward():
  wrong = []
  for module, path in MODULES.items():
    if not module:
      continue  # The package itself names what users import from it.
    never = [other for wing, others in NEVER.items() if is_in(module, wing) for other in others]
    wrong += [
      f'{path.relative_to(PACKAGE)}:{line} imports {other}'
      for line, other in imports(path)
      if place(other) > place(module) or any(is_in(other, wing) for wing in never)
    ]
  assert not wrong, wrong


@pytest.mark.slow
def test_a_run_knows_the_cluster_only_where_its_observers_are_attached():
  allowed = ('runs', 'runs.cluster', 'runs.loop.observers', 'cli')  # Not what is in `runs`, only its list of names.
  for module, path in MODULES.items():
    found = [other for _, other in imports(path) if is_in(other, 'runs.cluster')]
    assert not found or module in allowed or is_in(module, 'runs.cluster') or is_in(module, 'cli'), (module, found)


@pytest.mark.slow
def test_there_are_no_circles():
  graph = {name: {other for _, other in imports(path) if other != name} for name, path in MODULES.items() if name}
  done, path = set(), []

  def visit(name):
    assert name not in path, ' -> '.join([*path[path.index(name) :], name])
    if name not in done:
      path.append(name)
      for other in sorted(graph[name]):
        visit(other)
      path.pop()
      done.add(name)

  for name in graph:
    visit(name)


def test_the_package_has_few_doors_and_the_page_on_architecture_names_each():
  doors = {p.name for p in PACKAGE.iterdir() if any(p.glob('*.py'))}
  assert {p.name for p in PACKAGE.glob('*.py')} == {'__init__.py', '__main__.py'}
  assert len(doors) <= 15 and doors - {'experiments', 'tasks'} == {wing.partition('.')[0] for wing in ORDER[:-1]}
  drawing = (ROOT / 'docs' / 'architecture.md').read_text().partition('## Wings')[2].partition('\n## ')[0]
  assert not [door for door in doors if not re.search(rf'\b{door}/', drawing)]


PRIVATE = ('jax._src', 'jax.interpreters', 'jaxlib')
# Words that differ between releases of JAX: parameters of loops and shard_map, and how an abstract device is made.
CHANGING = {
  'num_consts',
  'num_carry',
  'ft_in',
  'ft_out',
  'cond_nconsts',
  'body_nconsts',
  'newly_manual_axes',
  'AbstractDevice',
}


def of_jax(path):
  """What a file reads of JAX that JAX may change: private modules, and words that differ between releases."""
  for node in nodes(path):
    names = []
    if isinstance(node, ast.ImportFrom) and node.module:
      names = [node.module, *(f'{node.module}.{alias.name}' for alias in node.names)]
    elif isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
      names = [str(node.args[0].value)]  # Of import_module.
    elif isinstance(node, ast.Constant) and node.value in CHANGING:
      yield node.lineno, node.value
    elif isinstance(node, ast.Attribute) and node.attr in CHANGING | {'_src'}:
      yield node.lineno, node.attr
    yield from ((node.lineno, name) for name in names if f'{name}.'.startswith(tuple(f'{p}.' for p in PRIVATE)))


def test_what_jax_may_change_is_read_in_one_room():
  others = [path for module, path in MODULES.items() if not is_in(module, 'common.jax_internals')]
  found = [f'{path.relative_to(PACKAGE)}:{line} reads {name}' for path in others for line, name in of_jax(path)]
  assert not found, found
