"""The site builds without a warning: all pages are in the navigation, and all links and anchors lead somewhere.

Building it takes half a minute; what can be said without it is read from its sources.
"""

import ast
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from markdown.extensions.toc import slugify

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / 'praxis_lite'


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """The folder of the built site."""
  folder = tmp_path_factory.mktemp('site')
  # Not --quiet: warnings that are not printed are not counted as errors either.
  command = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', str(folder)]
  env = os.environ | {'NO_MKDOCS_2_WARNING': '1'}
  done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  return folder


@pytest.fixture(scope='module')
def site(folder):
  """The built pages, by their path."""
  return {str(page.relative_to(folder)): page.read_text() for page in sorted(folder.rglob('*.html'))}


@pytest.mark.slow
def test_nothing_is_fetched_from_elsewhere(site):
  assert 'index.html' in site
  for name, text in site.items():
    loaded = re.findall(r'<(?:script|link|img|source|iframe)\b[^>]*?\b(?:src|href|srcset)="([^"]+)"', text)
    assert loaded and not [url for url in loaded if '//' in url], name


def headings(page):
  """The anchors of the headings of a page of docs/."""
  text = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.DOTALL | re.MULTILINE)
  return {
    slugify(re.sub(r'[`*]|\[(.*?)\]\(.*?\)', r'\1', line), '-') for line in re.findall(r'^#+ (.*)', text, re.MULTILINE)
  }


def test_links_lead_to_headings_that_are_there():
  for document in (ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))):
    for page, heading in re.findall(r'\]\((?!https?:)([^)#]*\.md|)#([^)]+)\)', document.read_text()):
      if not heading.startswith('praxis_lite.'):  # The build checks those of the reference.
        target = document.parent / page if page else document
        assert heading in headings(target), f'{document.name}: {page}#{heading}'


def words(text, separator):
  """The words that the search of the site finds in a text, as lunr makes them: without punctuation around them."""
  return {re.sub(r'^\W+|\W+$', '', part) for part in re.split(separator, text)}


def test_the_search_finds_names_next_to_punctuation():
  plugins = yaml.load((ROOT / 'mkdocs.yml').read_text(), yaml.BaseLoader)['plugins']
  (separator,) = (plugin['search']['separator'] for plugin in plugins if 'search' in plugin)
  texts = [page.read_text() for page in sorted((ROOT / 'docs').glob('*.md'))]
  for name in ('LoRA', 'learning_rate', 'get_next', 'num_train_steps', 'StdlibLm'):
    alone = [text for text in texts if re.search(rf'(?<!\w){name}(?!\w)', text)]
    assert alone and all(name in words(text, separator) for text in alone), name
  assert words('x = data.get_next()  # 0.5', separator) == {'x', 'data', 'get_next', '0.5', ''}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which('node') is None, reason='needs node, which runs the search of the site')
def test_the_search_finds_pasted_flags_and_names_of_several_words(folder):
  queries = ['max_tokens', '--max_tokens', '--max_tokens=200', 'set', '--set', 'html', '--html', 'import-hf']
  command = ['node', str(ROOT / 'tests' / 'site_search.js'), str(folder), *queries, 'generation_config.json']
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  tokens, flag, with_value, set_, set_flag, html, html_flag, importing, generation = json.loads(done.stdout)
  assert tokens == flag == with_value and 'decoding.html' in flag
  assert set_ == set_flag and html == html_flag and 'five-ways-to-shard.html' in html
  for pages in (importing, generation):  # Pages about other imports and other JSON do not come before the guide.
    assert not any(page.startswith('reference/') for page in pages[: pages.index('hugging-face.html')])


@pytest.mark.slow
def test_notebooks_are_pages_that_links_lead_to(site):
  for name in ('first-steps', 'shardings'):
    page = site[f'notebooks/{name}.html']
    assert page.count('class="highlight"') > 5 and f'href="{name}.ipynb"' in page
    assert f'notebooks/{name}.html' in site['index.html'] and f'notebooks/{name}.ipynb' not in site['index.html']


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


def test_the_reference_has_every_name_that_a_room_exports():
  pages = ''.join(page.read_text() for page in (ROOT / 'docs' / 'reference').glob('*.md'))
  documented = {*re.findall(r'^        - (\w+)$', pages, re.MULTILINE)}
  missing = [f'{room}.{name}' for room, name in exports() if name not in documented]
  assert not missing, f'add {missing} to the members of a page in docs/reference'
