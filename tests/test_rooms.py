"""The rooms of the house import downward only, and each only what `docs/architecture.md` says."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / 'praxis_lite'

# From the bottom up: a room imports from the rooms before it, never from one after it.
ROOMS = [
  *(
    'errors',
    'foreign_text',
    'jax_internals',
    'importing',
    'native_log',
    'files',
    'figures',
    'hosts',
    'accelerators',
    'trees',
    'config',
    'mistakes',
    'weighted',
    'weights',
    'partitioning',
  ),
  *('call', 'layer', 'layers', 'inputs', 'decoding', 'learning', 'models', 'task'),
  *(
    'training',
    'checkpoints',
    't5x',
    'experiment',
    'registry',
    'explain',
    'verification',
    'plan',
    'testing',
    'records',
    'runtime',
    'hf',
    'cli',
    '__main__',
  ),
]
# A room below another that it must not know all the same.
NEVER = {
  'learning': {'layer', 'layers', 'models', 'inputs'},
  'layers': {'inputs', 'decoding'},
  'partitioning': {'config'},
  'checkpoints': {'layers', 'models', 'inputs', 'decoding', 'learning'},
  't5x': {'checkpoints', 'layers', 'models', 'inputs'},
  'explain': {'checkpoints', 'inputs'},
  'verification': {'checkpoints', 'inputs', 't5x'},
  'plan': {'checkpoints', 'inputs', 'verification', 't5x'},
  'testing': {'checkpoints', 'inputs', 'verification', 't5x'},
  'hosts': {'importing', 'native_log', 'files'},
  'records': {'explain', 'verification', 'plan', 'testing', 't5x', 'hosts'},
  'runtime': {'explain', 'verification', 'plan', 'testing', 't5x'},
  'hf': {'explain', 'verification', 'plan', 'testing', 't5x'},
}


def room_of(path):
  parts = path.relative_to(PACKAGE).parts
  return parts[0].removesuffix('.py')


def imported(path):
  """(line, room) of each import of this package; those under TYPE_CHECKING, and in functions, count too."""
  for node in ast.walk(ast.parse(path.read_text())):
    names = []
    if isinstance(node, ast.ImportFrom) and node.module == 'praxis_lite':
      names = [f'praxis_lite.{alias.name}' for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
      names = [node.module]
    elif isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    for name in names:
      if name.startswith('praxis_lite.'):
        yield node.lineno, name.split('.')[1]


FILES = [p for p in sorted(PACKAGE.rglob('*.py')) if room_of(p) not in ('__init__', 'experiments', 'tasks')]
# Names of the rooms above that Praxis and T5X have under `partitioning`, loaded when they are first used.
UPWARD = {PACKAGE / 'partitioning' / '__init__.py': {'training', 't5x', 'explain'}}


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downward(path):
  room = room_of(path)
  allowed = set(ROOMS[: ROOMS.index(room) + 1]) - NEVER.get(room, set()) | UPWARD.get(path, set())
  wrong = [f'{path.name}:{line} imports {other}' for line, other in imported(path) if other not in allowed]
  assert not wrong, wrong


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
  for node in ast.walk(ast.parse(path.read_text())):
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


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_what_jax_may_change_is_read_in_one_room(path):
  found = [f'{path.name}:{line} reads {name}' for line, name in of_jax(path)]
  assert room_of(path) == 'jax_internals' or not found, found


def test_there_are_no_cycles_between_modules():
  modules = {'.'.join(('praxis_lite', *p.relative_to(PACKAGE).with_suffix('').parts)): p for p in FILES}
  graph = {}
  for name, path in modules.items():
    froms = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ImportFrom) and n.module]
    found = {target for n in froms for target in (n.module, *(f'{n.module}.{a.name}' for a in n.names))}
    graph[name] = {m for m in found if m in modules and m != name}
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
