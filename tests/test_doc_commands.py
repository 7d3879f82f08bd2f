"""The command line accepts every command in README and guides, and the names of the package in them exist."""

import ast
import pathlib
import pkgutil
import re
import shlex

import pytest

from praxis_lite.cli import main as cli
from praxis_lite.cli.command import configured_experiment

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').rglob('*.md'))]
BLOCK = re.compile(r'^```(\w*)\n(.*?)^```', re.DOTALL | re.MULTILINE)


def commands(page):
  """The words of each command `praxis-lite` in the blocks of a page that are for a shell, marked so or not marked."""
  for language, block in BLOCK.findall(page.read_text()):
    for line in block.replace('\\\n', ' ').splitlines() if language in ('', 'sh') else ():
      # `praxis-lite train: error: ...` is output.
      if line.startswith('praxis-lite ') and not line.split()[1].endswith(':'):
        yield shlex.split(line, comments=True)[1:]


def definitions(page):
  """What the Python blocks of a page import and define, without what they compute."""
  code = '\n'.join(block for language, block in BLOCK.findall(page.read_text()) if language == 'python')
  kept = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
  return '\n\n'.join(ast.unparse(node) for node in ast.parse(code).body if isinstance(node, kept))


@pytest.mark.parametrize('page', [p for p in PAGES if any(commands(p))], ids=lambda p: p.stem)
def test_commands_are_accepted(page, tmp_path, monkeypatch):
  """Command, flags, experiment and overrides; nothing is run. Files named in --exp have the definitions of the page."""
  monkeypatch.chdir(tmp_path)
  own = definitions(page)

  def accept(values):
    exp = values.exp if 'exp' in values else None
    file, _, name = (exp or '').partition(':')
    is_defined = not name or f'class {name}(' in own  # Others are placeholders, such as MyExperiment.
    if name and is_defined:
      pathlib.Path(file).write_text(own)
    if exp and is_defined and 'parallel' not in values:  # What a sweep's --set says is several values.
      configured_experiment(values)
    return 0

  for name, command in cli.COMMANDS.items():
    monkeypatch.setitem(cli.COMMANDS, name, command._replace(run=accept))
  for arguments in commands(page):
    assert cli.main(arguments) == 0, shlex.join(arguments)


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.stem)
def test_names_of_the_package_exist(page):
  for name in re.findall(r'(?:`|^::: )(praxis_lite(?:\.\w+)+)\b', page.read_text(), re.MULTILINE):
    pkgutil.resolve_name(name)  # Raises if there is none.
