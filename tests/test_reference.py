"""The pages of the reference list the names that they document, with a line each, for readers of the repository itself.

UPDATE_GOLDEN=1 python -m pytest tests/test_reference.py     writes the lists anew, from the docstrings
"""

import importlib
import os
import pathlib
import re

import griffe
import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [p for p in sorted((ROOT / 'docs' / 'reference').glob('*.md')) if ':::' in p.read_text()]
UPDATE = os.environ.get('UPDATE_GOLDEN') == '1'
HEAD = '| name | what it is |\n|---|---|\n'
# A list, if there is one, and the directive below it, of which the site makes the documentation.
DIRECTIVE = re.compile(
  rf'(?:{re.escape(HEAD)}(?:\|.*\n)+\n)?(::: (\S+)\n    options:\n      members:\n((?:        - \w+\n)+))'
)


@pytest.fixture(scope='module')
def package():
  def load():
    return griffe.load('praxis_lite', search_paths=[str(ROOT)], resolve_aliases=True)

  try:
    return load()
  except (
    SystemError
  ):  # A fault of CPython 3.11, "AST constructor recursion depth mismatch", if another thread parses too.
    return load()


def line_about(package, module, name):
  """Returns the first sentence of what the docstring of a name says, on one line."""
  found = package[f'{module.removeprefix("praxis_lite.")}.{name}']
  found = found.final_target if found.is_alias else found
  text = found.docstring.value if found.docstring else ''
  first = ' '.join((text or '').partition('\n\n')[0].split())
  return re.split(r'(?<=\S\.)\s(?=[A-Z`])', first)[0].rstrip(':').replace('|', '\\|')


def with_lists(package, text):
  def listed(match):
    directive, module, members = match.groups()
    rows = [f'| `{name}` | {line_about(package, module, name)} |\n' for name in re.findall(r'- (\w+)', members)]
    return f'{HEAD}{"".join(rows)}\n{directive}'

  return DIRECTIVE.sub(listed, text)


@pytest.mark.slow_cases
@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.stem)
def test_the_page_lists_its_names(page, package):
  text = page.read_text()
  expected = with_lists(package, text)
  if UPDATE:
    page.write_text(expected)
  else:
    assert text == expected, (
      'names or docstrings have changed: run UPDATE_GOLDEN=1 python -m pytest tests/test_reference.py'
    )
  assert expected.count(HEAD) == expected.count(':::')
  assert not re.findall(r'^\| `\w+` \|  \|$', expected, re.MULTILINE), 'a name without a docstring'


@pytest.mark.parametrize('package', ['layers', 'models', 'inputs', 'partitioning', 'training.learning'])
def test_each_exported_name_is_on_a_page(package):
  listed = {name for page in PAGES for name in re.findall(r'^        - (\w+)$', page.read_text(), re.MULTILINE)}
  missing = set(importlib.import_module(f'praxis_lite.{package}').__all__) - listed
  assert not missing, f'add {sorted(missing)} to the members of a page in docs/reference'
