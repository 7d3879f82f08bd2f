"""The registry: names of experiments, where they are looked for, and what is said when they are not found."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import subprocess
import sys
import textwrap

import pytest

from praxis_lite.common import importing
from praxis_lite.common.errors import UserError
from praxis_lite.training import registry
from praxis_lite.training.experiment import BaseExperiment, configure

HEADER = 'from praxis_lite.training import registry\nfrom praxis_lite.training.experiment import BaseExperiment\n'


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
  """An empty registry, and an empty folder that is the working directory, first on sys.path, and forgotten after."""
  monkeypatch.setattr(registry, '_entries', {})
  monkeypatch.chdir(tmp_path)
  # Without what other tests, such as those of guides, have left of theirs.
  elsewhere = [folder for folder in sys.path if not pathlib.Path(folder, 'my_experiments.py').exists()]
  monkeypatch.setattr(sys, 'path', [str(tmp_path), *elsewhere])
  monkeypatch.setattr(registry, 'PACKAGES', ('my_experiments',))
  for name in [name for name in sys.modules if name.partition('.')[0] == 'my_experiments']:  # A guide's, for example.
    monkeypatch.delitem(sys.modules, name)
  before = dict(sys.modules)
  yield tmp_path
  for name in set(sys.modules) - set(before):
    if str(tmp_path) in str(getattr(sys.modules[name], '__file__', '')) or name.startswith('my_experiments'):
      del sys.modules[name]
  importlib.invalidate_caches()


def experiment(*names, decorated=True):
  classes = [
    f'{"@registry.register" if decorated else ""}\nclass {name}(BaseExperiment):\n  "Doc."\n' for name in names
  ]
  return HEADER + ''.join(classes)


def write(folder, files):
  for path, text in files.items():
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text))
  importlib.invalidate_caches()


@pytest.fixture
def package(workspace):
  write(
    workspace,
    {
      'my_experiments/__init__.py': '',
      'my_experiments/lm.py': experiment('Small', 'StdlibLm'),
      'my_experiments/digits.py': experiment('Small', 'Mlp'),
      'my_experiments/deep/__init__.py': '',
      'my_experiments/deep/lm.py': experiment('Large'),
      'my_experiments/_private.py': 'raise RuntimeError("not to be imported")',
    },
  )


@pytest.mark.parametrize('name', ['my_experiments.lm.StdlibLm', 'lm.StdlibLm', 'StdlibLm'])
def test_full_name_and_unique_endings_find_the_class(package, name):
  assert registry.full_name(registry.get(name)) == 'my_experiments.lm.StdlibLm'


def test_ambiguous_ending_lists_the_candidates(package):
  with pytest.raises(
    UserError, match=r"'Small' is .* 2 experiments: my_experiments.digits.Small, my_experiments.lm.Small"
  ):
    registry.get('Small')
  assert registry.get('digits.Small').__module__ == 'my_experiments.digits'


def test_an_ending_starts_at_a_dot(package):
  with pytest.raises(UserError, match="no experiment 'Lm'"):
    registry.get('Lm')


def test_names_are_all_those_of_the_package(package):
  assert registry.load_all() == []
  assert registry.names() == [
    'my_experiments.deep.lm.Large',
    'my_experiments.digits.Mlp',
    'my_experiments.digits.Small',
    'my_experiments.lm.Small',
    'my_experiments.lm.StdlibLm',
  ]
  short = [registry.short_name(name) for name in registry.names()]
  assert short == ['lm.Large', 'digits.Mlp', 'digits.Small', 'lm.Small', 'lm.StdlibLm']
  assert [registry.get(name) for name in short] == [registry.get(name) for name in registry.names()]


def test_full_name_imports_its_module_only(package):
  registry.get('my_experiments.lm.StdlibLm')
  assert 'my_experiments.digits' not in sys.modules


@pytest.mark.parametrize(
  ('name', 'near'),
  [('StdlibLM', 'lm.StdlibLm'), ('lm.StdlbLm', 'lm.StdlibLm'), ('digit.Mlp', 'digits.Mlp'), ('mlp', 'digits.Mlp')],
)
def test_a_miss_names_what_is_near(package, name, near):
  with pytest.raises(UserError, match=f"no experiment '{name}'. Did you mean {near}"):
    registry.get(name)


def test_a_class_in_a_file_of_the_working_directory_is_suggested_and_not_imported(workspace):
  write(workspace, {'rings.py': 'open("imported", "w")\n' + experiment('Rings', decorated=False), 'broken.py': '('})
  for name in ('Rings', 'my.rings'):
    with pytest.raises(UserError, match=rf"no experiment '{name}'\. Did you mean rings\.py:Rings\?"):
      registry.get(name)
  assert not (workspace / 'imported').exists()


def test_a_miss_with_nothing_near(package):
  with pytest.raises(UserError, match=r"no experiment 'Qwxyz'\. `praxis-lite list` prints them all\.$"):
    registry.get('Qwxyz')


def test_without_any_package_of_experiments(workspace):
  assert registry.load_all() == [] and registry.names() == []


def test_a_missing_built_in_package_is_a_problem(monkeypatch):
  monkeypatch.setattr(registry, 'PACKAGES', ('praxis_lite.experiments', 'my_experiments'))
  monkeypatch.setitem(sys.modules, 'praxis_lite.experiments', None)
  assert registry.load_all() == ["there is no module 'praxis_lite.experiments'"]


def test_a_module_that_is_not_registered_is_found_by_name(workspace):
  write(workspace, {'my_project/__init__.py': '', 'my_project/runs.py': experiment('Mine', decorated=False)})
  assert registry.get('my_project.runs.Mine').__name__ == 'Mine'
  assert registry.get('my_project.runs:Mine').__name__ == 'Mine'


def test_a_module_of_the_user_may_share_its_name_with_one_of_the_package(package, workspace):
  write(workspace, {'lm.py': experiment('Mine')})
  assert registry.get('lm.Mine').__module__ == 'lm'
  assert registry.get('lm.StdlibLm').__module__ == 'my_experiments.lm'


def test_a_class_that_its_module_does_not_have(workspace):
  write(workspace, {'my_runs.py': experiment('Mine', 'Other')})
  with pytest.raises(
    UserError, match=r"my_runs.py has no experiment 'Mime'. Did you mean 'Mine'\? Its experiments: Mine, Other."
  ):
    registry.get('my_runs.Mime')


def test_a_class_that_is_no_experiment(workspace):
  write(workspace, {'my_runs.py': 'class Mine: pass\nthing = 3\n'})
  with pytest.raises(UserError, match=r'my_runs.Mine is not an experiment: derive a class from BaseExperiment'):
    registry.get('my_runs.Mine')
  with pytest.raises(UserError, match=r'my_runs.thing is not an experiment'):
    registry.get('my_runs.thing')
  with pytest.raises(UserError, match=r'int is not an experiment'):
    registry.register(int)
  plain = type('Plain', (), {'task': None.__class__, 'datasets': None.__class__})  # Has the methods, but not the base.
  with pytest.raises(UserError, match='Plain is not an experiment: derive a class from BaseExperiment'):
    registry.register(plain)
  with pytest.raises(UserError, match='Plain is not an experiment: derive it from BaseExperiment'):
    configure(plain)
  with pytest.raises(UserError, match='3 is not an experiment'):
    registry.register(3)


def test_a_file_and_what_lies_beside_it(workspace):
  write(
    workspace,
    {'some-where/my_run.py': 'import my_helper\n' + experiment('Mine', 'Other'), 'some-where/my_helper.py': ''},
  )
  mine = registry.get('some-where/my_run.py:Mine')
  assert mine.__name__ == 'Mine'
  assert registry.get(str(workspace / 'some-where' / 'my_run.py:Mine')) is mine
  with pytest.raises(UserError, match=r'some-where/my_run.py has 2 experiments; name one of them after a colon'):
    registry.get('some-where/my_run.py')
  with pytest.raises(UserError, match=r"some-where/my_run.py has no experiment 'Mime'. Did you mean 'Mine'"):
    registry.get('some-where/my_run.py:Mime')


def test_the_only_experiment_of_a_file_needs_no_name(workspace):
  write(workspace, {'my-run.py': experiment('Mine')})
  assert registry.get('my-run.py').__name__ == 'Mine'


def test_a_file_in_a_package_is_its_module(package):
  assert registry.get('my_experiments/deep/lm.py:Large') is registry.get('my_experiments.deep.lm.Large')


def test_files_of_the_same_name_are_told_apart(workspace):
  write(
    workspace, {'one/my_run.py': experiment('Mine'), 'two/my_run.py': experiment('Mine'), 'json.py': experiment('J')}
  )
  one, two = registry.get('one/my_run.py:Mine'), registry.get('two/my_run.py:Mine')
  assert one is not two
  assert registry.get('two/my_run.py:Mine') is two
  assert registry.get('json.py:J').__name__ == 'J'
  assert len(registry.names()) == 3


def test_a_file_that_is_not_there(workspace):
  with pytest.raises(UserError, match=r"there is no file 'nope.py'"):
    registry.get('nope.py:Mine')


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('x = 1\nimport does_not_exist\n', r"ModuleNotFoundError: No module named 'does_not_exist' \(my_run.py:2\)"),
    (
      'from praxis_lite.config import Config\n',
      r"ModuleNotFoundError: No module named 'praxis_lite.config'. It is praxis_lite.common.config now \(my_run.py:1\)",
    ),
    (
      'from praxis_lite.training.preferences import train_rewards\n',
      r'ModuleNotFoundError: .* It is praxis_lite.training.post_training now \(my_run.py:1\)',
    ),
    *(
      (
        f'from praxis_lite.{module} import {name}\n',
        rf"ImportError: cannot import name '{name}' .*It is praxis_lite.{now} now \(my",
      )
      for module, name, now in (
        ('training.learning', 'Linear', 'training.learning.LinearRamp'),
        ('models', 'without_adapters', 'models.remove_adapters'),
        ('models', 'without_quantization', 'models.remove_quantization'),
        ('runs.loggers', 'WandbLogger', 'runs.loggers.services.WandbLogger'),
      )
    ),
    (
      'from praxis_lite.training import adamw_learner\n',
      r"ImportError: cannot import name 'adamw_learner' .* It is in praxis_lite\.tasks\.learners \(my_run.py:1\)",
    ),
    (
      'from praxis_lite.models import nothing\n',
      r"ImportError: cannot import name 'nothing' from [^ ]* \([^ ]*\) \(my_run.py:1\)",
    ),
    ('import json\n\njson.loads("{")\n', r'JSONDecodeError: .* \(my_run.py:3\)'),
    ('def f(:\n', r'SyntaxError: .* \(my_run.py:1\)'),
    ('import my_broken\n', r'ZeroDivisionError: division by zero \(my_broken.py:2\)'),
  ],
)
def test_a_module_that_raises_says_what_and_where(workspace, text, message):
  write(workspace, {'my_run.py': text, 'my_broken.py': '\n1 / 0\n'})
  for module, name in (('my_run', 'my_run.Mine'), (r'my_run\.py', 'my_run.py:Mine')):
    with pytest.raises(UserError, match=f'cannot import {module}: {message}'):
      registry.get(name)


def test_only_this_package_is_searched_for_a_name(tmp_path):
  """Files beside the package, such as those of site-packages, are not read; folders of the package may be links."""
  copied = tmp_path / 'praxis_lite' / 'common' / 'importing.py'
  write(tmp_path, {'beside.py': 'def wanted(): pass\n', 'tasks/mine.py': 'class wanted:\n  pass\n'})
  (tmp_path / 'beside' / 'more').mkdir(parents=True)
  for name in ('beside/more/old.py', 'tasks/old.py'):
    (tmp_path / name).write_bytes(b'# caf\xe9\ndef other(): pass\n')
  write(tmp_path, {'praxis_lite/common/importing.py': pathlib.Path(importing.__file__).read_text()})
  (tmp_path / 'praxis_lite' / 'tasks').symlink_to('../tasks')
  (tmp_path / 'praxis_lite' / 'gone.py').symlink_to('nothing.py')
  spec = importlib.util.spec_from_file_location(importing.__name__, copied)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  for name, where in (('wanted', 'mine'), ('other', 'old')):
    error = ImportError(f"cannot import name '{name}' from 'praxis_lite.models'", name='praxis_lite.models')
    assert str(module.import_failure('x', error)).endswith(f'. It is in praxis_lite.tasks.{where}')


def test_a_failure_inside_a_library_is_located_in_the_users_own_code(workspace):
  write(workspace, {'my_run.py': 'from praxis_lite.common.errors import did_you_mean\n\ndid_you_mean("a", 3)\n'})
  with pytest.raises(UserError, match=r"TypeError: 'int' object is not iterable \(my_run.py:3\)"):
    registry.get('my_run.Mine')


def test_summaries_are_those_of_the_sources_and_of_ones_own_modules(package, workspace, monkeypatch):
  """Of one's own package also what its code registers in other ways, and what is wrong with it."""
  made = f'{HEADER}registry.register(type("Made", (BaseExperiment,), dict(__module__=__name__)))\n'
  write(workspace, {'my_experiments/made.py': made, 'my_experiments/broken.py': 'raise ValueError("oh no")\n'})
  monkeypatch.setattr(registry, 'PACKAGES', ('praxis_lite.experiments', 'my_experiments'))
  listed = registry.summaries()
  problem = 'cannot import my_experiments.broken: ValueError: oh no (my_experiments/broken.py:1)'
  assert listed.problems == [problem]
  assert (listed.by_name['lm.Large'], listed.by_name['made.Made']) == ('Doc.', '')
  assert {'my_experiments.lm.StdlibLm', 'experiments.lm.StdlibLm', 'vision.VitB16'} <= set(listed.by_name)
  assert listed.by_name['experiments.lm.StdlibLm'].startswith('The default: ')


def test_a_broken_module_hides_no_other_and_is_told(package, workspace):
  write(workspace, {'my_experiments/broken.py': '\nraise ValueError("oh no")\n'})
  assert registry.get('Mlp').__name__ == 'Mlp'
  problem = 'cannot import my_experiments.broken: ValueError: oh no (my_experiments/broken.py:2)'
  assert registry.load_all() == [problem]
  with pytest.raises(UserError) as error:
    registry.get('Absent')
  assert problem in str(error.value)


def test_two_classes_of_one_name_in_a_module(workspace):
  write(workspace, {'my_run.py': experiment('Mine', 'Mine')})
  with pytest.raises(UserError, match=r'two experiments are registered as my_run.Mine, in my_run.py; rename one'):
    registry.get('my_run.Mine')


def test_importing_a_module_again_replaces_its_experiments(workspace):
  write(workspace, {'my_run.py': experiment('Mine')})
  first = registry.get('my_run.Mine')
  second = importlib.reload(sys.modules['my_run']).Mine
  assert second is not first and registry.get('my_run.Mine') is second


def test_registering_a_class_twice_is_harmless():
  class Mine(BaseExperiment):
    pass

  assert registry.register(registry.register(Mine)) is Mine


def test_importing_the_registry_imports_no_jax():
  program = (
    'import sys, praxis_lite.training.registry; print([m for m in ("jax", "fiddle", "numpy") if m in sys.modules])'
  )
  done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == '[]'


def test_a_cell_of_a_notebook_can_be_changed_and_run_again():
  for version, cell in enumerate(('/tmp/ipykernel_1/11.py', '/tmp/ipykernel_1/22.py', '/tmp/ipykernel_1/22.py')):
    code = experiment('Mine') + f'  version = {version}\n'
    exec(compile(code, cell, 'exec'), {'__name__': '__main__'})
  assert registry.get('__main__.Mine').version == 2
