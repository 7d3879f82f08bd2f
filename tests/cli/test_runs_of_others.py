"""Runs of someone else, whose names have escape sequences, and runs with passwords: what is printed and written."""

from __future__ import annotations

import json
import os
import pathlib
import sys

import pytest

from praxis_lite.cli.main import main
from praxis_lite.common.config.trusted import UntrustedError
from praxis_lite.runs import open_run
from praxis_lite.runs.cluster.launch import Launcher
from praxis_lite.runs.console import Console, LiveConsole
from praxis_lite.runs.records.heartbeat import Heartbeat
from praxis_lite.runs.records.record import read_record
from praxis_lite.runs.sweep import grid

FILE = pathlib.Path(__file__).parent / 'tiny_experiment.py'
EXP = f'--exp={FILE}:Tiny'
EVIL = '\x1b]0;evil\x07\x1b[2J\u202e'


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  directory = tmp_path_factory.mktemp('runs') / 'run'
  secret = '--set=task.train.mirror=memory://user:geheim@host/run'
  arguments = ['train', EXP, '--nocompilation_cache', f'--job_log_dir={directory}', secret]
  before, sys.argv = sys.argv, ['praxis-lite', *arguments]
  try:
    assert main(arguments) == 0
  finally:
    sys.argv = before
  return directory


def test_a_password_is_in_no_file_of_a_run_and_the_same_command_goes_on(trained, capsys):
  assert (trained / 'checkpoints').exists()
  for path in trained.rglob('*'):
    assert b'geheim' not in path.name.encode() and (not path.is_file() or b'geheim' not in path.read_bytes()), path
  record = read_record(trained)
  assert 'memory://user:***@host/run' in record.commands[0] and 'memory://user:***@host/run' in record.text
  again = ['train', EXP, '--nocompilation_cache', f'--job_log_dir={trained}']
  assert main([*again, '--set=task.train.mirror=memory://user:geheim@host/run']) == 0
  out, err = capsys.readouterr()
  assert 'all steps are taken' in out and 'geheim' not in out + err and 'differs' not in out
  # By its directory alone, the password has to come again.
  assert main(['train', '--nocompilation_cache', f'--job_log_dir={trained}']) == 2
  out, err = capsys.readouterr()
  assert 'not recorded: task.train.mirror: its secret; where it is used, give it again' in err
  assert 'error: task.train.mirror = ' in err and 'passwords are not recorded; give the URL again' in err
  assert main(['show', f'--job_log_dir={trained}', '--set=task.train.mirror=memory://user:geheim@host/run']) == 0
  assert 'geheim' not in ''.join(capsys.readouterr())


def test_errors_and_sweeps_have_no_passwords(tmp_path, capsys):
  assert main(['checkpoints', 'list', 'nothing://user:geheim@host/x?token=geheim']) == 2
  assert main(['train', EXP, '--job_log_dir=s3://user:geheim@host/x']) == 2
  assert 'geheim' not in ''.join(capsys.readouterr())
  points = grid(['task.train.mirror=s3://u:geheim@a/x,s3://u:geheim@b/x', 'task.password=geheim'])
  assert len({point.name for point in points}) == 2 and 'geheim' not in ''.join(point.name for point in points)
  assert all('geheim' in point.overrides[0] for point in points)


@pytest.fixture
def hostile(trained, tmp_path):
  """A run in which every recorded string has escape sequences."""
  run = tmp_path / f'run{EVIL.replace("/", "")}'
  (run / 'checkpoints').mkdir(parents=True)

  def spoilt(value):
    if isinstance(value, dict):
      return {k: spoilt(v) for k, v in value.items()}
    if isinstance(value, list):
      return [spoilt(v) for v in value]
    return value + EVIL if isinstance(value, str) and ':' not in value and '/' not in value else value

  record = json.loads((trained / 'run.json').read_text())
  record['launches'] = spoilt(record['launches'])
  record['config']['task']['name'] = f'tiny{EVIL}'
  record['lost'] = {f'task.a{EVIL}': f'because{EVIL}'}
  (run / 'run.json').write_text(json.dumps(record))
  (run / 'config.txt').write_text((trained / 'config.txt').read_text() + f'task.x{EVIL} = {EVIL}\n')
  metrics = {'step': 1, 'split': f'eval/{EVIL}', 'metrics': {f'loss{EVIL}': 1.0}}
  (run / 'metrics.jsonl').write_text(json.dumps(metrics) + '\n')
  beat = json.loads(next((trained / 'heartbeats').glob('*.json')).read_text())
  beat |= {name: f'{EVIL}\nline' for name, value in beat.items() if isinstance(value, str)}
  (run / 'heartbeats').mkdir()
  (run / 'heartbeats' / '0.json').write_text(json.dumps(beat))
  return run


@pytest.mark.parametrize('command', ['show', 'check', 'status', 'runs', 'checkpoints', 'eval'])
def test_what_a_record_says_does_not_act_on_the_terminal(command, hostile, capsys):
  where = {'runs': [str(hostile.parent), f'--metric=x{EVIL}'], 'checkpoints': ['list', str(hostile)]}
  cache = ['--nocompilation_cache'] if command == 'eval' else []
  main([command, *where.get(command, [f'--job_log_dir={hostile}']), *cache])
  main(['runs', str(hostile.parent)])
  out, err = capsys.readouterr()
  assert out + err and '\\x1b' in out + err
  for character in EVIL:
    assert character in '[]0;evil2J' or character not in out + err


def test_names_are_shown_without_a_command_too(hostile):
  run = open_run(hostile)
  assert '\x1b' not in repr(run.metrics) and '\x1b' not in run.record.text and '\\x1b' in run.record.text
  assert not any('\x1b' in c for c in run.record.commands)
  from praxis_lite.runs.records.heartbeat import read_heartbeats

  (beat,) = read_heartbeats(hostile)
  assert isinstance(beat, Heartbeat) and '\x1b' not in beat.host and '\n' not in beat.host


def test_lines_of_a_run_and_of_hosts_are_filtered(capsys):
  Console(3).line(f'a{EVIL}')
  live = LiveConsole(3)
  live.line(f'b{EVIL}')
  live.close()
  lines = []
  code = f'print("from the host {EVIL}")'
  assert Launcher([sys.executable, '-S', '-c', code], 1, write=lines.append).run() == 0
  text = capsys.readouterr().out + ''.join(lines)
  assert (
    'a\\x1b]0;evil\\x07' in text and 'from the host \\x1b]0' in text and '\x1b]0;' not in text and '\x07' not in text
  )


OF_NO_USER = [
  'os:system',
  'subprocess:Popen',
  'posix:system',
  'builtins:eval',
  'pip:main',
]
OF_NO_USER += [
  'tensorflow.io:gfile.remove',
  'praxis_lite.common.importing:import_module',
  'jax.numpy:save',
  'orbax.checkpoint:Checkpointer',
]


@pytest.mark.parametrize('name', OF_NO_USER)
def test_code_that_is_of_no_user_is_not_proposed_to_be_trusted(name, trained, tmp_path):
  module = name.partition(':')[0]
  record = json.loads((trained / 'run.json').read_text())
  record['config']['task']['model'] = {'$config': name, 'command': 'true'}
  (tmp_path / 'run.json').write_text(json.dumps(record))
  with pytest.raises(UntrustedError) as refused:
    _ = read_record(tmp_path).config
  assert '--trust' not in str(refused.value) and 'trusted=' not in str(refused.value)
  assert f'No config needs code of {module}' in str(refused.value) and 'name the experiment with --exp' in str(
    refused.value
  )


def test_a_run_is_readable_by_those_that_the_umask_allows(trained):
  assert (trained / 'run.json').stat().st_mode & 0o777 == 0o666 & ~os.umask(os.umask(0o022)) & 0o777
