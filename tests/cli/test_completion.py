"""The completion scripts, run by the shell itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from praxis_lite.cli.completion import script
from praxis_lite.cli.main import COMMANDS, main
from praxis_lite.training import registry


@pytest.fixture(scope='module')
def program(tmp_path_factory):
  """A folder with a `praxis-lite` to put on PATH."""
  folder = tmp_path_factory.mktemp('bin')
  file = folder / 'praxis-lite'
  file.write_text(f'#!/bin/sh\nexec {sys.executable} -m praxis_lite "$@"\n')
  file.chmod(0o755)
  return folder


def completed(program, cwd, *words):
  """What bash offers for the last of the words, split as bash splits them."""
  (cwd / 'script').write_text(script('bash', COMMANDS))
  quoted = ' '.join(f"'{word}'" for word in words)
  code = (
    f'. ./script; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _praxis_lite; printf "%s\\n" "${{COMPREPLY[@]}}"'
  )
  env = os.environ | {'PATH': f'{program}:{os.environ["PATH"]}'}
  done = subprocess.run(['bash', '-c', code], capture_output=True, text=True, check=True, cwd=cwd, env=env)
  assert done.stderr == ''
  return done.stdout.split()


@pytest.mark.skipif(shutil.which('bash') is None, reason='there is no bash')
def test_bash_completes_commands_flags_experiments_and_files(program, tmp_path):
  (tmp_path / 'experiments').mkdir()
  (tmp_path / 'experiments' / 'mine.py').write_text(
    'raise Exception\n@registry.register\nclass Mine(Base):\n  pass\n@register\nclass Own: pass\nclass Other: pass\n'
  )
  assert completed(program, tmp_path, 'praxis-lite', 'tr') == ['train']
  assert set(completed(program, tmp_path, 'praxis-lite', '')) == set(COMMANDS)
  assert completed(program, tmp_path, 'praxis-lite', 'train', '--see') == ['--seed=']
  assert completed(program, tmp_path, 'praxis-lite', 'train', '--noveri') == ['--noverify_numerics', '--noverify']
  assert completed(program, tmp_path, 'praxis-lite', 'train', '--exp', '=', 'lm.Syn') == [
    'lm.SyntheticLmTiny',
    'lm.SyntheticLoraTiny',
  ]
  assert completed(program, tmp_path, 'praxis-lite', 'show', '--exp', '=', 'mine.') == ['mine.Mine', 'mine.Own']
  assert 'digits.DigitsMlp' in completed(program, tmp_path, 'praxis-lite', 'show', '--exp', '=')
  assert completed(program, tmp_path, 'praxis-lite', 'eval', '--job_log_dir', '=', 'exp') == ['experiments']
  assert completed(program, tmp_path, 'praxis-lite', 'completion', 'z') == ['zsh']


@pytest.mark.skipif(shutil.which('zsh') is None, reason='there is no zsh')
def test_zsh_takes_the_script(tmp_path):
  (tmp_path / 'script').write_text('compdef() { :; }\n' + script('zsh', COMMANDS))
  subprocess.run(['zsh', '-f', '-c', '. ./script; whence _praxis_lite'], check=True, cwd=tmp_path)


def test_the_scripts_have_all_commands_and_no_mark_is_left():
  for shell in ('bash', 'zsh'):
    text = script(shell, COMMANDS)
    assert all(f'{name}) choices="--' in text for name in COMMANDS)
    assert '@C' not in text and '@D' not in text


def test_names_in_sources_are_those_that_are_registered():
  registry.load_all()
  ours = {n.removeprefix('praxis_lite.experiments.') for n in registry.names() if n.startswith('praxis_lite.')}
  assert ours <= set(registry.names_in_sources())


@pytest.mark.parametrize(('arguments', 'message'), [([], 'name a shell'), (['fish'], "'bash' or 'zsh', got 'fish'")])
def test_another_shell_is_refused(capsys, arguments, message):
  assert main(['completion', *arguments]) == 2
  assert message in capsys.readouterr().err
