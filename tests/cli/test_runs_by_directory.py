"""Commands on a run by its directory alone: they use the config that it records, and --set edits it."""

from __future__ import annotations

import re

import pytest

from praxis_lite.cli.main import main
from praxis_lite.config.text import to_text
from praxis_lite.runtime.record import read_record

TINY = ['--exp=lm.SyntheticLmTiny', '--nocompilation_cache']


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run of two steps, of a narrow model, with a seed."""
  directory = tmp_path_factory.mktemp('run')
  narrow = ['--set=task.model.model_dims=12', '--set=task.train.num_train_steps=2', '--seed=5']
  assert main(['train', *TINY, f'--job_log_dir={directory}', *narrow]) == 0
  return directory


def call(capsys, command, run, *arguments, code=0):
  cache = ['--nocompilation_cache'] if command in ('train', 'eval', 'decode') else []
  assert main([command, f'--job_log_dir={run}', *cache, *arguments]) == code
  out, err = capsys.readouterr()
  return err if code else out


def test_eval_decode_show_and_check_need_no_experiment(run, capsys):
  assert re.search(r'step 2 eval/validation', call(capsys, 'eval', run))
  assert 'task.model.model_dims = 12' in call(capsys, 'show', run)
  call(capsys, 'check', run)
  assert 'task.model.model_dims = 12' in call(capsys, 'show', run, '--set=task.name=other')
  assert '--prompt needs an experiment' in call(capsys, 'decode', run, '--prompt=a', code=2)


def test_set_edits_what_is_recorded(run, capsys):
  before = read_record(run).text
  assert 'lm.softmax' in call(capsys, 'eval', run, '--set=task.model.vocab_size=50', code=2)
  assert read_record(run).text == before


def test_a_model_that_does_not_match_the_checkpoint_is_refused_by_its_path(run, capsys):
  for command in ('train', 'eval'):
    error = call(capsys, command, run, '--set=task.model.model_dims=18', code=2)
    assert 'is a checkpoint of another model' in error
    assert 'task.model.model_dims: 12 -> 18' in error
    assert len(error.splitlines()) == 1
  error = call(
    capsys, 'train', run, '--set=task.train.learner.optimizer=optax.lion', '--set=task.train.num_train_steps=9', code=2
  )
  assert 'task.train.learner.optimizer: optax.adamw -> optax.lion' in error
  assert 'num_train_steps' not in error
  assert len(read_record(run).launches) == 1  # What was refused is not recorded.


def test_training_resumes_by_the_directory_alone_and_prints_what_changed(run, capsys):
  changes = ['--set=task.train.num_train_steps=3', '--set=task.train.learner.learning_rate=0.01', '--devices=8']
  out = call(capsys, 'train', run, *changes, '--set=task.ici_mesh_shape=(1,2,1)')
  assert 'the config differs from the recorded one:' in out
  for line in (
    'num_train_steps: 2 -> 3',
    'learner.learning_rate: 0.003 -> 0.01',
    '-> (1, 2, 1)',
  ):
    assert line in out
  assert 'seed' not in out  # The recorded one goes on.
  record = read_record(run)
  assert [launch.seed for launch in record.launches] == [5, 5]
  assert record.launches[-1].mesh == {'replica': 1, 'data': 2, 'mdl': 1}
  assert 'differs' not in call(capsys, 'train', run)


def test_with_an_experiment_what_differs_from_the_record_is_printed_too(run, capsys, tmp_path):
  import shutil

  copy = tmp_path / 'copy'
  shutil.copytree(run, copy)
  error = call(capsys, 'train', copy, '--exp=lm.SyntheticLmTiny', code=2)
  assert 'task.model.model_dims: 12 -> 18' in error
  assert to_text(read_record(copy).config.roots()) == to_text(read_record(run).config.roots())


def test_a_directory_that_records_nothing(tmp_path, capsys):
  for command in ('show', 'check', 'eval', 'train', 'verify', 'decode'):
    assert main([command, f'--job_log_dir={tmp_path / "nothing"}']) == 2
    assert re.search('--exp is missing: .*nothing records none', capsys.readouterr().err)
  assert not (tmp_path / 'nothing').exists()
