"""Files of a user that a run names are trusted by its user's later commands on it; nobody else's run or file is."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import sys

import pytest

from praxis_lite.cli.main import main
from praxis_lite.runs.records import consents
from praxis_lite.runs.records.record import read_record
from praxis_lite.training import registry

FILE = pathlib.Path(__file__).parent / 'tiny_experiment.py'
NAME = 'mine_of_consents'


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """A folder with a file of a user, a run of it, and the state folder in which its consent is."""
  folder = tmp_path_factory.mktemp('user')
  shutil.copy(FILE, folder / f'{NAME}.py')
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('XDG_STATE_HOME', str(folder / 'state'))
    exp = f'--exp={folder / NAME}.py:Tiny'
    assert main(['train', exp, f'--job_log_dir={folder / "run"}', '--nocompilation_cache']) == 0
  return folder


@pytest.fixture
def user(trained, tmp_path, monkeypatch):
  """A copy of that folder, at the path of the original, in what looks like a new process."""
  backup = shutil.copytree(trained, tmp_path / 'backup')
  monkeypatch.setenv('XDG_STATE_HOME', str(trained / 'state'))
  monkeypatch.delitem(sys.modules, NAME, raising=False)
  yield trained
  shutil.rmtree(trained)
  shutil.copytree(backup, trained)


def call(capsys, *arguments, code=0):
  sys.modules.pop(NAME, None)
  capsys.readouterr()
  assert main([*arguments]) == code
  out, err = capsys.readouterr()
  return err if code else out


def show(capsys, run, *arguments, code=0):
  return call(capsys, 'show', f'--job_log_dir={run}', '--noparameters', *arguments, code=code)


def refusal(capsys, run, trust=NAME):
  line = show(capsys, run, code=2)
  assert f'{NAME} is not one of the packages that a recorded config may name' in line
  assert f'--trust={trust} ' in line and line.count('\n') == 1
  return line


def test_later_commands_need_no_trust_and_so_do_those_on_a_copy(user, capsys):
  assert 'TinyModel' in show(capsys, user / 'run')
  shutil.copytree(user / 'run', user / 'moved')
  assert 'TinyModel' in show(capsys, user / 'moved')
  sys.modules.pop(NAME)
  assert read_record(user / 'run').config.task.model.hidden == 7


def test_a_consent_is_of_one_user_and_only_that_user_can_read_it(user, capsys, monkeypatch):
  folder = user / 'state' / 'praxis_lite' / 'consents'
  (file,) = folder.iterdir()
  assert file.stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700
  (named,) = json.loads(file.read_text())['files']
  assert named == str(user / f'{NAME}.py')
  monkeypatch.setenv('XDG_STATE_HOME', str(user / 'of_another_user'))
  refusal(capsys, user / 'run')
  monkeypatch.setattr(os, 'getuid', lambda: os.geteuid() + 1)  # The file belongs to somebody else.
  monkeypatch.setenv('XDG_STATE_HOME', str(user / 'state'))
  refusal(capsys, user / 'run')


def test_a_file_that_changed_is_refused_until_it_is_named_again(user, capsys):
  with (user / f'{NAME}.py').open('a') as file:
    file.write('\nCHANGED = True\n')
  file = user / f'{NAME}.py'
  line = refusal(capsys, user / 'run', trust=file)
  assert line.startswith(f'praxis-lite show: error: {file} has changed since you trained the run. {user / "run"}')
  assert line.index(f'--trust={file} ') < line.index("--exp names the experiment instead, and takes today's defaults")
  assert 'TinyModel' in show(capsys, user / 'run', f'--exp={user / NAME}.py:Tiny')
  assert 'TinyModel' in show(capsys, user / 'run')
  with (user / f'{NAME}.py').open('a') as file:
    file.write('\nCHANGED = False\n')
  refusal(capsys, user / 'run', trust=user / f'{NAME}.py')
  assert 'TinyModel' in show(capsys, user / 'run', f'--trust={user / NAME}.py')
  assert 'TinyModel' in show(capsys, user / 'run')


def test_a_file_that_is_as_it_was_trained_or_trusted_is_trusted_after_another_content_was(user, capsys):
  file = user / f'{NAME}.py'
  trained = file.read_text()
  contents = [trained, *(f'{trained}\nCHANGED = {i}\n' for i in range(2))]
  for content in contents[1:]:
    file.write_text(content)
    refusal(capsys, user / 'run', trust=file)
    show(capsys, user / 'run', f'--trust={file}')
  for content in contents:
    file.write_text(content)
    assert 'TinyModel' in show(capsys, user / 'run')


def test_a_file_that_is_missing_is_not_said_to_have_changed(user, capsys, monkeypatch):
  file, moved = user / f'{NAME}.py', user / 'elsewhere'
  moved.mkdir()
  file.rename(user / 'other_name.py')
  for arguments in ([], [f'--trust={user / "other_name.py"}']):
    line = show(capsys, user / 'run', *arguments, code=2)
    assert f'You trained the run with {file}, which is missing: put it back; or, if it has moved' in line
    assert 'has changed' not in line and line.count('\n') == 1
  assert 'TinyModel' in show(capsys, user / 'run', f'--exp={user / "other_name.py"}:Tiny')
  (user / 'other_name.py').rename(moved / file.name)
  monkeypatch.setattr(registry, '_entries', {})  # As in a new process.
  assert 'TinyModel' in show(capsys, user / 'run', f'--trust={moved / file.name}')


def test_a_checkpoint_of_other_shapes_names_the_file_that_changed_also_when_it_is_trusted(user, capsys):
  file = user / f'{NAME}.py'
  file.write_text(
    file.read_text().replace('(self.hidden,', '(self.hidden + 1,').replace('self.hidden)', 'self.hidden + 1)')
  )
  evaluate = ['eval', f'--job_log_dir={user / "run"}', '--nocompilation_cache']
  for arguments in ([*evaluate, f'--trust={file}'], evaluate):
    line = call(capsys, *arguments, code=2)
    assert f'your own code has changed since the run was trained: {file} declares other variables' in line
    assert 'commit' not in line


def test_show_says_how_the_config_of_exp_differs_from_the_record(user, capsys):
  show(capsys, user / 'run')
  file = user / f'{NAME}.py'
  file.write_text(file.read_text().replace('hidden: int = 7', 'hidden: int = 8'))
  sys.modules.pop(NAME)
  assert main(['show', f'--job_log_dir={user / "run"}', f'--exp={file}:Tiny', '--noparameters']) == 0
  assert 'the config differs from the recorded one: task.model.hidden: 7 -> 8' in capsys.readouterr().err


def test_a_run_that_somebody_else_made_or_edited_is_refused(user, capsys):
  """Also after the user has named a file of their own for it: the record could call functions of that file."""
  record = json.loads((user / 'run' / 'run.json').read_text())
  record['config']['task']['name'] = 'theirs'
  (user / 'run' / 'run.json').write_text(json.dumps(record))
  refusal(capsys, user / 'run')
  assert 'TinyModel' in show(capsys, user / 'run', f'--exp={user / NAME}.py:Tiny')
  refusal(capsys, user / 'run')
  show(capsys, user / 'run', f'--trust={user / NAME}.py')
  refusal(capsys, user / 'run')


def test_a_run_that_goes_on_by_its_directory_keeps_its_consent(user, capsys):
  more = ['--set=task.train.num_train_steps=3', '--nocompilation_cache']
  assert '  task.train.num_train_steps: 2 -> 3' in call(capsys, 'train', f'--job_log_dir={user / "run"}', *more)
  assert 'TinyModel' in show(capsys, user / 'run')


@pytest.mark.parametrize(
  'content', ['', '{', '[]', '3', '{"files": 3}', '{"files": {"/x.py": null}}', '[' * 99_999, b'\xff']
)
def test_a_consent_that_cannot_be_read_is_none(user, capsys, content):
  (file,) = (user / 'state' / 'praxis_lite' / 'consents').iterdir()
  file.write_bytes(content if isinstance(content, bytes) else content.encode())
  refusal(capsys, user / 'run')


def test_a_consent_that_others_could_have_written_is_none(user, capsys):
  folder = user / 'state' / 'praxis_lite' / 'consents'
  (file,) = folder.iterdir()
  for path, mode in ((file, 0o602), (file, 0o660), (folder, 0o777)):
    before = path.stat().st_mode
    path.chmod(mode)
    refusal(capsys, user / 'run')
    path.chmod(before)
  show(capsys, user / 'run')
  file.unlink()
  os.mkfifo(file)
  refusal(capsys, user / 'run')


def test_without_a_home_that_can_be_written_there_is_no_consent_and_no_error(user, capsys, monkeypatch):
  (user / 'a_file').touch()
  for home in (str(user / 'a_file'), '/dev/null'):
    monkeypatch.setenv('XDG_STATE_HOME', home)
    consents.give_consent('0', [str(FILE)])
    assert consents.consented_files('0') == {}
  monkeypatch.chdir(user)
  monkeypatch.setenv('XDG_STATE_HOME', 'state')  # Whoever made the working directory may have made it.
  monkeypatch.setenv('HOME', str(user / 'home'))
  refusal(capsys, user / 'run')
  monkeypatch.setattr(pathlib.Path, 'home', lambda: (_ for _ in ()).throw(RuntimeError('no home')))
  consents.give_consent('0', [str(FILE)])
  assert consents.consented_files('0') == {}


def test_code_of_a_user_that_a_helper_file_or_set_brought_is_trusted_too(user, capsys, monkeypatch):
  (user / 'helper_of_consents.py').write_text('def schedule(step):\n  return 1.0\n')
  monkeypatch.syspath_prepend(user)
  more = ['--set=task.train.learner.schedule=helper_of_consents.schedule', '--nocompilation_cache']
  call(capsys, 'train', f'--exp={user / NAME}.py:Tiny', f'--job_log_dir={user / "other"}', *more)
  (helper, own) = sorted(read_record(user / 'other').consented_files())
  assert (helper, own) == (str(user / 'helper_of_consents.py'), str(user / f'{NAME}.py'))
  monkeypatch.delitem(sys.modules, 'helper_of_consents')
  assert 'helper_of_consents.schedule' in show(capsys, user / 'other')
  monkeypatch.delitem(sys.modules, 'helper_of_consents')
  (user / 'helper_of_consents.py').write_text('def schedule(step):\n  return 2.0\n')
  assert 'helper_of_consents is not one of' in show(capsys, user / 'other', code=2)


def test_a_changed_file_is_refused_also_if_an_unchanged_one_imports_it(user, capsys, monkeypatch):
  layers = user / 'layers_of_consents.py'
  layers.write_text('from praxis_lite.layers import Linear\n\n\nclass Mine(Linear):\n  gain: int = 1\n')
  file = user / f'{NAME}.py'
  text = file.read_text().replace(
    'class TinyModel(BaseModel):', 'class TinyModel(BaseModel):\n  part_tpl: Config = template(Mine)'
  )
  imports = 'from layers_of_consents import Mine\nfrom praxis_lite import template\n'
  file.write_text(text.replace('import jax.numpy as jnp\n', f'import jax.numpy as jnp\n{imports}', 1))
  more = ['--set=task.train.num_train_steps=1', '--nocompilation_cache']
  call(capsys, 'train', f'--exp={file}:Tiny', f'--job_log_dir={user / "both"}', *more)

  def show_both(*arguments, code=0):
    monkeypatch.delitem(sys.modules, layers.stem, raising=False)
    return show(capsys, user / 'both', *arguments, code=code)

  assert 'TinyModel' in show_both()
  for trusted in (layers, file):  # A file that imports a changed one may be named in its place.
    layers.write_text(f'{layers.read_text()}\n')
    line = show_both(code=2)
    assert f'{layers} has changed since you trained the run.' in line and f'--trust={layers} ' in line
    assert 'TinyModel' in show_both(f'--trust={trusted}')
    assert 'TinyModel' in show_both()


def test_a_default_that_its_user_edited_is_as_recorded_on_the_command_line(user, capsys):
  file, run = user / f'{NAME}.py', f'--job_log_dir={user / "run"}'
  text = file.read_text()
  assert 'hidden: int = 7' in text
  file.write_text(text.replace('hidden: int = 7', 'hidden: int = 8'))
  line = 'defaults in the code have changed; the recorded values are used: task.model.hidden = 7 (now 8)\n'
  exported = f'--out={user / "exported"}'
  for command, shown in {
    ('show', '--all', '--noparameters', f'--trust={file}'): 'task.model.hidden = 7',
    ('eval', '--nocompilation_cache'): 'eval/valid loss',
    ('export', '--format=stablehlo', '--batch_size=2', exported): 'exported',
  }.items():
    sys.modules.pop(NAME, None)
    assert main([*command, run]) == 0
    out, err = capsys.readouterr()
    assert err == line and shown in out
  assert main(['eval', run, '--nocompilation_cache', f'--exp={file}:Tiny']) == 2
  assert 'task.model.hidden: 7 -> 8. Start a new run in another --job_log_dir; or' in capsys.readouterr().err
