"""The site builds without a warning: all pages are in the navigation, and all links and anchors lead somewhere."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / 'praxis_lite'


@pytest.fixture(scope='module')
def site(tmp_path_factory):
  """The built pages, by their path."""
  folder = tmp_path_factory.mktemp('site')
  # Not --quiet: warnings that are not printed are not counted as errors either.
  command = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', str(folder)]
  env = os.environ | {'NO_MKDOCS_2_WARNING': '1'}
  done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  return {str(page.relative_to(folder)): page.read_text() for page in sorted(folder.rglob('*.html'))}


def test_nothing_is_fetched_from_elsewhere(site):
  assert 'index.html' in site
  for name, text in site.items():
    loaded = re.findall(r'<(?:script|link|img|source|iframe)\b[^>]*?\b(?:src|href|srcset)="([^"]+)"', text)
    assert loaded and not [url for url in loaded if '//' in url], name


def test_links_of_the_readme_lead_to_headings_that_are_there(site):
  readme = (ROOT / 'README.md').read_text()
  for page, heading in re.findall(r'\]\(docs/([^)#]+)\.md#([^)]+)\)', readme):
    assert f'id="{heading}"' in site[f'{page}.html'], f'{page}.md#{heading}'


def exports():
  """(room, name) of what the rooms export."""
  for init in sorted(PACKAGE.rglob('__init__.py')):
    if init.parent in (PACKAGE, PACKAGE / 'partitioning', PACKAGE / 'sharding' / 'guards'):
      continue  # The first two name again what others define; guards are for the rest of the package.
    body = ast.parse(init.read_text()).body
    if any(isinstance(node, ast.ClassDef) for node in body):
      continue  # What it imports is for its own classes.
    late = [statement for node in body if isinstance(node, ast.If) for statement in node.body]
    for node in late or body:  # Where names are loaded when they are first used, type checkers read them.
      if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('praxis_lite.'):
        yield from ((init.parent.name, alias.asname or alias.name) for alias in node.names if alias.name != '*')


def test_the_reference_has_every_name_that_a_room_exports(site):
  reference = ' '.join(text for name, text in site.items() if name.startswith('reference'))
  documented = {anchor.rpartition('.')[2] for anchor in re.findall(r'id="(praxis_lite\.[^"]+)"', reference)}
  missing = [f'{room}.{name}' for room, name in exports() if name not in documented]
  assert not missing, 'list them in docs/reference'
