"""Run directories of any name: what is saved in them is restored from them, or they are refused before training."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys

import pytest
from tiny_runs import tiny_run

from praxis_lite.checkpoints import Checkpointer, saved_steps
from praxis_lite.checkpoints.orbax.work_arounds import load_orbax
from praxis_lite.cli.main import main
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.common.files import user_path
from praxis_lite.runs import run_train

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))
from tools.faults.comparison import differences, results_of

pytestmark = pytest.mark.usefixtures('shared_programs')

ALL_AT_ONCE = 'sp ace/[x]?*{1}/%41#"q"\'s;&$HOME ünïcödé\n日本'


def short_run(steps=4, **train):
  return tiny_run(**{'num_train_steps': steps, 'save_interval_steps': 2} | train)


@pytest.fixture
def here(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  return tmp_path


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
  """A run of 2 steps, and then 2 more, in a directory of a plain name: its directory after 2 steps, and its end."""
  directory = tmp_path_factory.mktemp('plain')
  run_train(short_run(2), directory / 'run')
  shutil.copytree(directory / 'run', directory / 'half')
  run_train(short_run(), directory / 'run')
  return directory / 'half', results_of(directory / 'run')


def contents(*directories):
  files = [file for directory in directories for file in pathlib.Path(directory).rglob('*') if file.is_file()]
  return {file: file.read_bytes() for file in files}


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'name',
  ['a[x]b', 'a*b', 'a?b', '[!a]', '**', ALL_AT_ONCE, '-dash/', '~no-such-user', '../work/./up/../odd', 'b' * 255],
)
def test_a_run_goes_on_in_a_directory_of_any_name(here, name, plain, capfd):
  half, end = plain
  (here / 'work').mkdir()
  os.chdir(here / 'work')
  others = [shutil.copytree(half, other) for other in ('axb', 'b', 'x', 'sp ace/x1{1}')]
  before = contents(*others)
  run_train(short_run(2), name)
  capfd.readouterr()
  run_train(short_run(), name)
  assert 'restored step 2 of 4' in capfd.readouterr().out
  assert main(['checkpoints', 'verify', f'./{name}']) == 0
  assert not differences(results_of(user_path(name)), end)
  assert contents(*others) == before  # The name may be a pattern of theirs.


@pytest.mark.slow
def test_a_run_goes_on_through_a_symbolic_link(here, plain):
  (here / 'elsewhere [1]').mkdir()
  (here / 'link').symlink_to('elsewhere [1]')
  run_train(short_run(2), 'link/1')
  run_train(short_run(), here / 'elsewhere [1]' / '1')
  assert not differences(results_of(here / 'link' / '1'), plain[1])


@pytest.mark.parametrize(
  ('name', 'why'),
  [
    ('a\\b', 'TensorStore takes a backslash for a slash'),
    ('bad\udcff', 'its name is not UTF-8'),
    ('zero\0', 'it has a zero byte'),
    ('/s3/runs/1', 'Orbax takes /s3 for an object store; make a symbolic link'),
    ('/gs', 'Orbax takes /gs for an object store; make a symbolic link'),
    ('x/' * 1990, r'has \d,\d+ bytes, and the names of files below it need room: at most 3,840'),
    ('c' * 256, 'is not writable: File name too long'),
    (f'{"c" * 256}/checkpoints/run', 'is not writable: File name too long'),
  ],
)
def test_what_cannot_be_restored_from_is_refused_before_anything_is_trained(here, name, why):
  with pytest.raises(UserError, match=why) as error:
    run_train(short_run(), name)
  assert '\n' not in str(error.value)
  assert not list(here.iterdir())
  if 'writable' not in why:
    with pytest.raises(UserError, match=why):
      Checkpointer(name, read_only=True)


def test_a_version_of_orbax_that_takes_names_for_patterns_is_refused_at_the_start(here, monkeypatch):
  from etils import epath

  load_orbax()
  path_class = type(epath.Path('/'))
  monkeypatch.setattr(path_class, 'glob', lambda self, pattern: iter(()))
  with pytest.raises(UserError, match='could not be restored: this version of Orbax takes the name for a pattern'):
    run_train(short_run(), 'a[x]b')
  assert not saved_steps('a[x]b')


def test_all_that_names_a_path_takes_any_name(here, capfd):
  """Emergency copies, the start from another run, copies of checkpoints; a copy in an object store is refused."""
  source = f'source/{ALL_AT_ONCE}'
  (here / 'disk [1]').mkdir()
  config = short_run()
  config.task.train.emergency_copies.set(every_n_steps=1, directories=('disk [1]',))
  run_train(config, source)
  target = short_run()
  target.task.train.init_from.path = source
  run_train(target, 'a[x]b')
  assert 'last values of 2 of 2 variables, 2 with the same name and shape' in capfd.readouterr().out
  assert main(['checkpoints', 'copy', source, 'copy[1]']) == 0 and main(['checkpoints', 'verify', 'copy[1]']) == 0
  for url in ('memory://odd/a[x]b', 'memory://odd/*', 'file:///tmp/a?b'):
    mirrored = short_run()
    mirrored.task.train.mirror = url
    with pytest.raises(ConfigError, match=r'object stores take \* \? \[ \] for patterns; choose a URL without'):
      run_train(mirrored, 'mirrored')
  assert not (here / 'mirrored').exists()
