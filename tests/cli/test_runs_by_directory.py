"""Commands on a run by its directory alone: they use the config that it records, and --set edits it."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from praxis_lite.cli.main import main
from praxis_lite.common.config import target
from praxis_lite.common.config.text import to_text
from praxis_lite.runs.records.record import read_record
from praxis_lite.sharding.weights import WeightHParams

FILE = pathlib.Path(__file__).parent / 'tiny_experiment.py'
EXP = f'--exp={FILE}:Tiny'


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """A run of two steps, of a wider model, with a seed."""
  directory = tmp_path_factory.mktemp('run')
  changes = ['--set=task.model.hidden=9', '--seed=5']
  assert main(['train', EXP, '--nocompilation_cache', f'--job_log_dir={directory}', *changes]) == 0
  return directory


@pytest.fixture
def run(trained, tmp_path):
  return shutil.copytree(trained, tmp_path / 'run')


def call(capsys, command, run, *arguments, code=0):
  cache = ['--nocompilation_cache'] if command in ('train', 'eval', 'decode') else []
  assert main([command, f'--job_log_dir={run}', *cache, *arguments]) == code
  out, err = capsys.readouterr()
  assert not code or len(err.splitlines()) == 1
  return err if code else out


@pytest.mark.slow
def test_eval_show_check_verify_and_decode_need_no_experiment(run, capsys):
  assert re.search(r'step 2 eval/valid', call(capsys, 'eval', run))
  assert 'task.model.hidden = 9' in call(capsys, 'show', run)
  call(capsys, 'check', run)
  assert 'equal to one device' in call(capsys, 'verify', run, '--quick')
  assert 'a prompt needs a language model; the model of this experiment is of class' in call(
    capsys, 'decode', run, '--prompt=a', code=2
  )


def test_set_edits_what_is_recorded(run, capsys):
  before = (run / 'run.json').read_text()
  assert 'task.model.hidden = 4' in call(capsys, 'show', run, '--set=task.model.hidden=4')
  assert "no field 'hiden'" in call(capsys, 'eval', run, '--set=task.model.hiden=4', code=2)
  call(capsys, 'eval', run, '--set=datasets[1].batch_size=3')
  assert (run / 'run.json').read_text() == before


def test_a_model_that_does_not_match_the_checkpoint_is_refused_by_its_path(run, capsys):
  for command in ('train', 'eval'):
    error = call(capsys, command, run, '--set=task.model.hidden=7', '--set=task.train.num_train_steps=9', code=2)
    assert 'is a checkpoint of another model' in error
    assert 'What differs from the recorded config: task.model.hidden: 9 -> 7. ' in error
    assert 'leave out --exp, and the --set of these fields' in error
  lion = ['--set=task.train.learner.optimizer=optax.lion', '--set=task.train.num_train_steps=9']
  error = call(capsys, 'train', run, *lion, code=2)
  assert 'task.train.learner.optimizer: optax.adamw -> optax.lion' in error
  assert 'num_train_steps' not in error and 'learning_rate' not in error
  assert len(read_record(run).launches) == 1  # What was refused is not recorded.


def test_code_that_declares_other_variables_is_told_from_another_config(run, capsys, monkeypatch):
  model = target(read_record(run, trusted=[str(FILE)]).config.task.model)
  setup = model.setup

  def wider(self):
    setup(self)
    self.create_variable('b', WeightHParams((1,)))

  monkeypatch.setattr(model, 'setup', wider)
  error = call(capsys, 'eval', run, code=2)
  difference = 'mdl_vars.b is missing in the checkpoint and float32[1] in the task.'
  assert f'{difference} The config is as recorded, so the code has changed' in error
  assert 'commit ' in error and 'What differs' not in error


def test_training_resumes_by_the_directory_alone_and_prints_what_changed(run, capsys):
  changes = ['--set=task.train.num_train_steps=3', '--set=task.train.learner.learning_rate=0.01', '--devices=8']
  lines = call(capsys, 'train', run, *changes, '--set=task.ici_mesh_shape=(2,)').splitlines()
  start = lines.index('the config differs from the recorded one:')
  assert lines[start + 1 : start + 4] == [
    '  task.ici_mesh_shape: None -> (2,)',
    '  task.train.learner.learning_rate: 0.001 -> 0.01',
    '  task.train.num_train_steps: 2 -> 3',
  ]
  assert not any('seed' in line for line in lines)  # The recorded one goes on.
  record = read_record(run)
  assert [(launch.seed, launch.step, launch.mesh) for launch in record.launches] == [
    (5, 0, {'data': 1}),
    (5, 2, {'data': 2}),
  ]
  assert 'differs' not in call(capsys, 'train', run)
  first, *later = read_record(run).commands
  made, *resumed = re.findall('^(?:made|resumed) by  (.*)$', call(capsys, 'show', run), re.M)
  assert (made, resumed) == (first, later)
  assert '  seed: 5 -> 6' in call(capsys, 'train', run, '--seed=6')


def test_with_an_experiment_what_differs_from_the_record_is_found_too(run, capsys):
  before = to_text(read_record(run).config.roots())
  assert 'task.model.hidden: 9 -> 7' in call(capsys, 'train', run, EXP, code=2)
  assert to_text(read_record(run).config.roots()) == before


def test_a_command_that_restores_says_how_the_config_of_exp_differs(run, capsys):
  given = [EXP, '--set=task.model.hidden=9']
  assert main(['eval', *given, f'--job_log_dir={run}', '--nocompilation_cache', '--set=datasets[1].batch_size=3']) == 0
  assert capsys.readouterr().err == 'the config differs from the recorded one: datasets[1].batch_size: 4 -> 3\n'
  assert main(['eval', *given, f'--job_log_dir={run}', '--nocompilation_cache']) == 0
  assert capsys.readouterr().err == ''


@pytest.mark.slow
def test_code_of_the_user_is_imported_where_it_is_trusted_only(run, tmp_path):
  """In a process of another user, who has not named it for this run."""

  environment = os.environ | {'XDG_STATE_HOME': str(tmp_path)}

  def show(*arguments):
    command = [sys.executable, '-m', 'praxis_lite', 'show', f'--job_log_dir={run}', '--noparameters', *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)

  refused = show()
  assert refused.returncode == 2
  (line,) = refused.stderr.splitlines()
  assert 'task.model: tiny_experiment is not one of the packages' in line
  assert '--trust=tiny_experiment' in line and 'This run was made by: ' in line
  trusted = show(f'--trust={FILE}')
  assert (trusted.returncode, trusted.stderr) == (0, '')
  assert 'task.model.hidden = 9' in trusted.stdout


def test_what_could_not_be_recorded_is_told(run, capsys):
  import json

  record = json.loads((run / 'run.json').read_text())
  record['lost'] = {'datasets[0].arrays': 'datasets[0].arrays: an array of 2.0 MiB'}
  (run / 'run.json').write_text(json.dumps(record))
  assert main(['show', f'--job_log_dir={run}']) == 0
  assert capsys.readouterr().err == 'not recorded: datasets[0].arrays: an array of 2.0 MiB\n'


def test_a_new_run_with_an_old_config_says_that_its_weights_begin_from_the_seed(run, tmp_path, capsys):
  told = call(capsys, 'train', tmp_path / 'new', f'--exp={run}', '--set=task.train.num_train_steps=1')
  assert f'weights begin from the seed; to begin with those of the run: --set task.train.init_from.path={run}' in told


def test_a_directory_that_records_nothing(tmp_path, capsys):
  for command in ('show', 'check', 'train', 'verify'):
    assert re.search('--exp is missing: .*nothing records none', call(capsys, command, tmp_path / 'nothing', code=2))
  for command in ('eval', 'decode'):
    assert 'nothing records no run; there is no' in call(capsys, command, tmp_path / 'nothing', code=2)
  (tmp_path / 'file').touch()
  assert 'file records no run; it is a file, and a run is a' in call(capsys, 'eval', tmp_path / 'file', code=2)
  assert not (tmp_path / 'nothing').exists()


def test_runs_whose_record_cannot_be_read_are_listed_with_the_reason(tmp_path, capsys):
  for name, text in (('empty', ''), ('cut', '{"a": ')):
    (tmp_path / name).mkdir()
    (tmp_path / name / 'run.json').write_text(text)
  (tmp_path / 'older' / 'checkpoints' / '7').mkdir(parents=True)  # It has no record, so there is nothing to say.
  assert main(['runs', str(tmp_path)]) == 0
  out, err = capsys.readouterr()
  assert all(name in out for name in ('empty', 'cut', 'older'))
  cut, empty = err.splitlines()
  assert cut.startswith(f'note: {tmp_path}/cut/run.json is not JSON') and 'name its experiment with --exp' in cut
  assert empty.startswith(f'note: {tmp_path}/empty/run.json is empty; name its experiment with --exp')


def test_the_runs_near_a_directory_that_is_none_are_named(run, capsys):
  told = call(capsys, 'eval', run.parent, code=2)
  assert 'the runs below it are ' in told and str(run) in told
  assert f'it is a part of the run {run}' in call(capsys, 'eval', run / 'checkpoints', code=2)
  assert f"no such directory. Did you mean '{run.name}'?" in call(capsys, 'eval', f'{run}s', code=2)
  assert f"', and no run; there is no such directory. Did you mean '{run.name}'?" in call(
    capsys, 'show', run, f'--diff={run}s', code=2
  )
  (run.parent / 'a_bcd').mkdir()
  (run.parent / 'a_bcd' / 'run.json').touch()
  assert call(capsys, 'eval', run.parent / 'a_xyd', code=2).endswith('records no run; there is no such directory.\n')


def test_a_run_whose_record_is_missing_is_not_said_to_be_below_itself(run, capsys, tmp_path):
  (tmp_path / 'checkpoints').mkdir()
  shutil.copy(run / 'config.txt', tmp_path)
  for command in ('show', 'eval'):
    told = call(capsys, command, tmp_path, code=2)
    assert (
      f'{tmp_path} records no run, though there are other files of a run; name its experiment with --exp, and train'
      in told
    )
    assert told.endswith(f'; {tmp_path / "config.txt"} has its config as text\n')
