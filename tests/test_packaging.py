"""What installing praxis_lite puts on a user's path, and that a user's own `experiments` and `tasks` work beside it."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
import zipfile

import pytest

from praxis_lite import inputs
from praxis_lite.inputs.tfdata import BaseTFInput

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ('experiments', 'praxis_lite', 'tasks')

OWN_PACKAGES = {
  'tasks/__init__.py': '',
  'tasks/mine.py': 'from praxis_lite.tasks.language_modelling import LanguageModelTask\n'
  'class MyTask(LanguageModelTask): pass\n',
  'experiments/__init__.py': '',
  'experiments/mine.py': """
    from praxis_lite import Config, registry
    from praxis_lite.experiments.lm import StdlibLmTiny
    from tasks.mine import MyTask

    @registry.register
    class Mine(StdlibLmTiny):
      'My own experiment.'
      def task(self): return Config(MyTask, model=self.model())
    """,
  # The same module and class as a built-in one.
  'experiments/digits.py': """
    from praxis_lite.training import registry
    from praxis_lite.experiments import digits

    @registry.register
    class DigitsMlp(digits.DigitsMlp):
      'My own digits.'
    """,
}

# Prints the module and the task's class of each experiment.
FIND = """
import sys
from praxis_lite import registry

def find(names):
  for name in names:
    found = registry.get(name)
    print(name, found.__module__, type(found().task().instantiate()).__module__)
"""
LIST = """
from praxis_lite.cli.main import main
print('LISTED', main(['list']))
"""
NAMES = {
  'mine.Mine': 'experiments.mine tasks.mine',
  'experiments.mine:Mine': 'experiments.mine tasks.mine',
  'experiments.digits.DigitsMlp': 'experiments.digits praxis_lite.tasks.image_classification',
  'praxis_lite.experiments.digits.DigitsMlp': 'praxis_lite.experiments.digits praxis_lite.tasks.image_classification',
  'experiments.digits.DigitsConvNet': 'praxis_lite.experiments.digits praxis_lite.tasks.image_classification',
  'experiments.lm.StdlibLm': 'praxis_lite.experiments.lm praxis_lite.tasks.language_modelling',
  'experiments.lm:StdlibLm': 'praxis_lite.experiments.lm praxis_lite.tasks.language_modelling',
  'lm.StdlibLm': 'praxis_lite.experiments.lm praxis_lite.tasks.language_modelling',
}


def python(*arguments, cwd, path):
  env = os.environ | {'PYTHONPATH': str(path), 'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)
  assert done.returncode == 0 and done.stderr == '', done.stderr
  return done.stdout.splitlines()


def test_readme_lists_all_dependencies_of_the_small_installation():
  readme = (ROOT / 'README.md').read_text()
  command = re.search(r'without TensorFlow: `pip install (.*?) && pip\s+install --no-deps', readme, re.DOTALL)
  named = {re.match(r'[\w-]+', word)[0] for word in shlex.split(command[1])}
  declared = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['dependencies']
  needed = {re.match(r'[\w-]+', text)[0] for text in declared} - {'tensorflow', 'tensorflow-cpu', 'jaxlib'}
  assert named == needed  # jax requires its own jaxlib.


def test_readme_names_what_needs_tensorflow():
  (sentence,) = re.findall(r'is TensorFlow, which only (.*?) need\.', (ROOT / 'README.md').read_text(), re.DOTALL)
  exported = [name for name in inputs.__all__ if isinstance(getattr(inputs, name), type)]
  of_tensorflow = {name for name in exported if issubclass(getattr(inputs, name), BaseTFInput)}
  assert {*re.findall(r'`(\w+)`', sentence)} == of_tensorflow and sentence.endswith('SavedModels')


# What a declared package requires itself; pandas, for those who have it; and a file that an export has.
NOT_DECLARED = {'array_record', 'etils', 'h11', 'ml_dtypes', 'scipy', 'tensorstore', 'pandas', 'load'}
NAMES_ON_INDEX = {'absl': 'absl-py', 'google': 'protobuf', 'orbax': 'orbax-checkpoint', 'sklearn': 'scikit-learn'}


def test_what_is_imported_is_declared():
  """So no other package, such as typeguard, of which libraries pin versions, comes in."""
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  texts = [*project['dependencies'], *(text for extra in project['optional-dependencies'].values() for text in extra)]
  declared = {re.match(r'[\w-]+', text)[0].replace('-', '_') for text in texts}
  statement = re.compile(r'^ *(?:import (\w+)[\w.]*(?: as \w+)?|from (\w+)[\w.]* import .*)$', re.MULTILINE)
  files = [path for folder in FOLDERS for path in (ROOT / folder).rglob('*.py')]
  imported = {name for path in files for names in statement.findall(path.read_text()) for name in names if name}
  others = imported - sys.stdlib_module_names - {*FOLDERS}
  assert 'jax' in others
  named = {NAMES_ON_INDEX.get(name, name).replace('-', '_') for name in others}
  assert named - NOT_DECLARED <= declared


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
  """A wheel of this checkout, unpacked as in site-packages."""
  pytest.importorskip('setuptools', minversion='77')
  source, out = tmp_path_factory.mktemp('source'), tmp_path_factory.mktemp('wheel')
  for folder in FOLDERS:
    shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns('__pycache__'))
  for file in ('pyproject.toml', 'README.md', 'LICENSE'):
    shutil.copy(ROOT / file, source)
  build = f'from setuptools import build_meta; build_meta.build_wheel({str(out)!r})'
  subprocess.run([sys.executable, '-c', build], cwd=source, capture_output=True, check=True)
  (built,) = out.glob('*.whl')
  with zipfile.ZipFile(built) as archive:
    archive.extractall(out / 'site-packages')
  return out / 'site-packages'


@pytest.fixture(scope='module', params=['wheel', 'checkout'])
def printed(request, tmp_path_factory):
  """What is listed, and what names find, beside a user's own packages."""
  workspace = tmp_path_factory.mktemp('workspace')
  for path, text in OWN_PACKAGES.items():
    (workspace / path).parent.mkdir(exist_ok=True)
    (workspace / path).write_text(textwrap.dedent(text))
  installed = request.getfixturevalue('wheel') if request.param == 'wheel' else ROOT
  # Names are found first, before everything is loaded.
  code = f'{FIND}\nfind({[*NAMES]})\n{LIST}'
  lines = python('-c', code, cwd=workspace, path=installed)
  assert lines.pop() == 'LISTED 0'
  return lines[: len(NAMES)], lines[len(NAMES) :]


def test_a_wheel_has_one_name_and_all_modules(wheel):
  assert [p.name for p in wheel.iterdir() if not p.name.endswith('.dist-info')] == ['praxis_lite']
  ours = {p.relative_to(ROOT) for p in (ROOT / 'praxis_lite').rglob('*.py')}
  ours |= {pathlib.Path('praxis_lite', f, p.name) for f in ('experiments', 'tasks') for p in (ROOT / f).glob('*.py')}
  assert {p.relative_to(wheel) for p in wheel.rglob('*.py')} == ours


@pytest.mark.slow_cases
def test_own_and_built_in_experiments_are_listed_together(printed):
  _, listed = printed
  summaries = [line.split(maxsplit=1) for line in listed]
  assert len(dict(summaries)) == len(summaries)
  assert {
    'mine.Mine': 'My own experiment.',
    'experiments.digits.DigitsMlp': 'My own digits.',
    'digits.DigitsConvNet': 'Digits, classified by a small convolutional network with batch norm.',
  }.items() <= dict(summaries).items()
  assert {'lm.StdlibLm', 'praxis_lite.experiments.digits.DigitsMlp'} <= dict(summaries).keys()


@pytest.mark.slow_cases
def test_names_find_own_and_built_in_experiments(printed):
  found, _ = printed
  assert dict(line.split(maxsplit=1) for line in found) == NAMES


@pytest.mark.slow
def test_in_a_checkout_no_experiment_is_imported_twice():
  everything = 'from praxis_lite.training import registry; print(registry.load_all(), *registry.names(), sep="\\n")'
  names = python('-c', everything, cwd=ROOT, path=ROOT)
  assert names[0] == '[]' and all(name.startswith('praxis_lite.experiments.') for name in names[1:])
  file = ROOT / 'experiments' / 'lm.py'
  spellings = ['experiments.lm.StdlibLm', 'lm.StdlibLm', f'{file}:StdlibLm', 'experiments/lm.py:StdlibLm']
  again = 'import experiments.lm; print(registry.load_all(), len(registry.names()), experiments.lm.__name__)'
  out = python('-c', f'{FIND}\nfind({spellings})\n{again}', cwd=ROOT, path=ROOT)
  assert out == [
    *(f'{s} praxis_lite.experiments.lm praxis_lite.tasks.language_modelling' for s in spellings),
    f'[] {len(names) - 1} experiments.lm',
  ]


USER_PROJECT = """
import jax

from praxis_lite import Config, Layer, SingleTask, child, registry
from praxis_lite.layers import Linear

config = Config(Linear, input_dims=2, output_dims=3)
layer: Linear = config.instantiate()
task: Config[SingleTask] = Config(SingleTask)
wrong: int = Config(Linear).instantiate()


class Twice(Layer):
  dims: int = 2

  first: Linear = child()
  others: list[Linear] = child()
  any_layer: Layer = child()

  def setup(self) -> None:
    linear = Config(Linear, input_dims=self.dims, output_dims=self.dims)
    self.create_child('first', linear)
    self.create_children('others', templates=[linear])
    self.last = self.create_child('last', linear)

  def __call__(self, x: jax.Array) -> jax.Array:
    reveal_type(self.first)
    reveal_type(self.others[0](x))
    reveal_type(self.last)
    reveal_type(self.any_layer(x))
    self.frist(x)
    return self.first(x)


Twice(first=layer)
"""


@pytest.mark.slow
def test_the_types_of_the_wheel_reach_the_project_of_a_user(wheel, tmp_path):
  assert (wheel / 'praxis_lite' / 'py.typed').exists()
  (tmp_path / 'mine.py').write_text(USER_PROJECT)
  env = os.environ | {'MYPYPATH': str(wheel), 'MYPY_CACHE_DIR': str(tmp_path / 'cache')}
  # Errors of the package itself are those of `make types`.
  command = [sys.executable, '-m', 'mypy', '--strict', '--follow-imports=silent', 'mine.py']
  done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
  lines = [line.partition(': ')[2] for line in done.stdout.splitlines() if ': note:' in line or ': error:' in line]
  assert lines == [
    'error: Incompatible types in assignment (expression has type "Linear", variable has type "int")  [assignment]',
    'note: Revealed type is "praxis_lite.layers.linears.Linear"',
    'note: Revealed type is "jax._src.basearray.Array"',
    'note: Revealed type is "praxis_lite.layers.linears.Linear"',
    'note: Revealed type is "Any"',
    'error: "Twice" has no attribute "frist"; maybe "first"?  [attr-defined]',
    'error: Unexpected keyword argument "first" for "Twice"  [call-arg]',
  ], done.stdout + done.stderr
