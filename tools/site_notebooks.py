"""For the site: shows the notebooks of the documentation as pages; links to a notebook lead to its page.

The notebooks are stored without outputs, so the pages have none. `mkdocs.yml` names this hook.
"""

from __future__ import annotations

import json
import pathlib

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
  """Called once, with the files of the docs: adds a page for each notebook."""
  for file in [file for file in files if file.src_uri.endswith('.ipynb')]:
    assert file.abs_src_path is not None
    text = notebook_to_markdown(pathlib.Path(file.abs_src_path).read_text(encoding='utf-8'), file.name + '.ipynb')
    files.append(File.generated(config, file.src_uri.removesuffix('.ipynb') + '.md', content=text))
  return files


def on_page_markdown(markdown: str, *, page: Page, **kwargs: object) -> str:
  """Called for each page: makes links to notebooks lead to their pages, except the link of that page itself."""
  return markdown if 'notebooks/' in page.file.src_uri else markdown.replace('.ipynb)', '.md)')


def notebook_to_markdown(notebook: str, name: str) -> str:
  """Returns a notebook as Markdown: its texts, and its code as blocks. A link to the file follows the title."""
  parts = []
  for cell in json.loads(notebook)['cells']:
    source = ''.join(cell['source'])
    parts.append(source if cell['cell_type'] == 'markdown' else f'```python\n{source}\n```')
  title, _, rest = parts[0].partition('\n')
  link = f'This page is a notebook, without its outputs. Run it: [{name}]({name}).'
  return '\n\n'.join([title, link, rest.strip(), *parts[1:]]) + '\n'
