"""What the commands print about themselves and about experiments."""

from __future__ import annotations

import os
import pathlib
import re

import pytest

from praxis_lite.cli import list_experiments
from praxis_lite.cli.main import _MODULES, COMMANDS as ALL, main
from praxis_lite.training import registry

COMMANDS = sorted(ALL)


def test_main_lists_each_file_with_a_command():
  files = pathlib.Path(list_experiments.__file__).parent.glob('*.py')
  defined = {file.stem for file in files if re.search('^COMMAND = ', file.read_text(), re.MULTILINE)}
  missing = sorted(defined - {module.__name__.rpartition('.')[2] for module in _MODULES})
  assert not missing, f'add {missing} to _NAMES in praxis_lite/cli/main.py'


@pytest.mark.parametrize('arguments', [[], ['--help'], *([name, '--help'] for name in COMMANDS)], ids=str)
def test_help_shows_an_example_and_fits_80_columns(capsys, arguments):
  assert main(arguments) == 0
  out = capsys.readouterr().out
  assert 'Example:' in out and max(map(len, out.splitlines())) <= 80


def test_help_of_a_command_is_what_its_flag_prints(capsys):
  assert main(['help', 'train']) == main(['train', '--help']) == 0
  of_both = capsys.readouterr().out
  assert of_both[: len(of_both) // 2] * 2 == of_both and '--job_log_dir' in of_both
  assert main(['help', 'trian']) == 2
  assert "no command 'trian'. Did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize('name', COMMANDS)
def test_each_flag_shows_an_example_of_itself(capsys, name):
  main([name, '--help'])
  entries = re.split(r'\n  (?=--)', capsys.readouterr().out.partition('\nFlags:')[2])[1:]
  assert entries
  for entry in entries:
    flag = re.match(r'--(?:\[no\])?(\w+)', entry).group(1)
    assert re.search(rf'Example: --(no)?{flag}\b', entry), entry


@pytest.mark.parametrize('name', COMMANDS)
def test_the_example_of_a_command_parses(capsys, monkeypatch, name):
  import shlex

  command = ALL[name]
  program, typed, *arguments = shlex.split(command.example)
  assert (program, typed) == ('praxis-lite', name)
  seen = {}
  monkeypatch.setitem(ALL, name, command._replace(run=lambda v: seen.update(exp=v) or 0))
  assert main([name, *arguments]) == 0, capsys.readouterr().err
  assert seen


def test_flags_of_one_call_are_not_left_for_the_next(capsys):
  assert main(['list', 'StdlibLmTiny']) == 0
  assert len(capsys.readouterr().out.splitlines()) == 1
  assert main(['list']) == 0
  assert len(capsys.readouterr().out.splitlines()) > 10


def test_list_prints_each_registered_experiment_with_its_summary(capsys):
  assert main(['list']) == 0
  out, err = capsys.readouterr()
  names, _, summaries = zip(*(line.partition(' ') for line in out.splitlines()))
  lines = {name: summary.strip() for name, summary in zip(names, summaries)}
  registry.load_all()
  prefix = 'praxis_lite.experiments.'  # Other tests may have registered others.
  built_in = {name.removeprefix(prefix): registry.get(name) for name in registry.names() if name.startswith(prefix)}
  assert {name: lines[name] for name in built_in} == {name: c.__doc__.split('\n')[0] for name, c in built_in.items()}
  assert lines['lm.StdlibLm'].startswith('The default: a model of the Python standard library')
  assert err == ''


@pytest.mark.parametrize('columns', [40, 80, 100])
def test_list_fits_the_terminal(capsys, monkeypatch, columns):
  monkeypatch.setattr(list_experiments.sys.stdout, 'isatty', lambda: True, raising=False)
  monkeypatch.setattr(list_experiments.shutil, 'get_terminal_size', lambda *_, **__: os.terminal_size((columns, 24)))
  assert main(['list']) == 0
  lines = capsys.readouterr().out.splitlines()
  assert max(map(len, lines)) <= columns
  assert any(line.endswith('…') for line in lines)
  assert all(len(line) > columns - 15 for line in lines if line.endswith('…'))


def test_list_says_when_nothing_matches(capsys):
  assert main(['list', '--match=no such thing']) == 0
  assert capsys.readouterr().out == "no experiment matches 'no such thing'\n"
