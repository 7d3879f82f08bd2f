"""The report as one self-contained HTML page: a layer tree, a treemap of bytes, and the parts of each array."""

from __future__ import annotations

import html
import importlib.resources
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from praxis_lite.common.errors import UserError
from praxis_lite.instruments.explain.check import Problem
from praxis_lite.instruments.explain.explanation import ArrayKind, Explanation, ShardingReport, format_mesh

_HERE = 'praxis_lite.instruments.explain'


def write_page(path: str, report: ShardingReport, title: str, problems: Sequence[Problem] = ()) -> pathlib.Path:
  """Writes the page to the file `path`, as `write_file` does; see `render_page` for the other arguments."""
  return write_file(path, render_page(report, title, problems))


def write_file(path: str, page: str) -> pathlib.Path:
  """Writes a page to the file `path`, creates missing parent directories, and returns the path.

  Raises:
    UserError: the file cannot be written.
  """
  file = pathlib.Path(path)
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page, encoding='utf-8')
  except OSError as error:
    above = next((f'{folder} is a file' for folder in file.parents if folder.is_file()), error.strerror)
    raise UserError(f'cannot write the page {file}: {above}') from None
  return file


def render_page(report: ShardingReport, title: str, problems: Sequence[Problem] = ()) -> str:
  """Returns the page as HTML. `title` says what the report describes; `problems` of `check` stand above the report."""
  data = {
    'title': title,
    'mesh': [[name, size] for name, size in report.mesh_sizes.items()],
    'meshText': format_mesh(report.mesh_sizes),
    'arrays': [_array(e) for e in sort_arrays(report)],
    'problems': [
      {'severity': str(p.severity), 'text': f'{p.kind}: {p.path}: {p.message}', 'remedy': p.remedy} for p in problems
    ],
  }
  return fill_page(_HERE, f'{title}: sharding', data, 'page', ('picture', 'page'))


def fill_page(package: str, title: str, data: Mapping[str, object], name: str, scripts: Sequence[str]) -> str:
  """Returns a self-contained HTML page, made of the content, the style and the scripts of a Python package, and `data`.

  `package` contains the content `assets/{name}.html`, the style `assets/{name}.css`, and `scripts`, which run after the
  scripts that all pages share. The page stores `data` as JSON in the element `data`, where all scripts read it.
  """
  # HTML ends a script at the first '</', even inside a string.
  text = json.dumps(data, separators=(',', ':')).replace('</', '<\\/')
  style = '\n'.join([_asset(_HERE, 'common.css'), _asset(package, f'{name}.css')])
  sources = [(_HERE, 'common'), (_HERE, 'treemap'), *((package, part) for part in scripts)]
  script = '\n'.join(_asset(where, f'{part}.js') for where, part in sources)
  body = _asset(package, f'{name}.html').rstrip()
  parts = {'TITLE': html.escape(title), 'STYLE': style, 'BODY': body, 'DATA': text, 'SCRIPT': script}
  return re.sub('%([A-Z]+)%', lambda match: parts[match[1]], _asset(_HERE, 'shell.html'))


def _asset(package: str, name: str) -> str:
  return (importlib.resources.files(package) / 'assets' / name).read_text(encoding='utf-8')


def sort_arrays(report: ShardingReport) -> list[Explanation]:
  """Returns all arrays, each variable followed by its slots."""
  owners = {e.path: i for i, e in enumerate(report.variables)}
  state = sorted([*report.variables, *report.slots], key=lambda e: owners.get(e.owner or e.path, len(owners)))
  return [*state, *report.activations, *report.inputs]


def _array(e: Explanation) -> dict[str, Any]:
  return {
    'path': e.path,
    'place': _place(e),
    'kind': {ArrayKind.VARIABLE: 'parameter', ArrayKind.SLOT: 'slot'}.get(e.kind, str(e.kind)),
    'dtype': e.dtype.name,
    'dims': [[d.size, list(d.axes), d.parts, d.local, d.source] for d in e.dims],
    'copies': e.replication,
    'bytes': e.bytes,
    'local': e.bytes_per_device,
    'waste': e.wasted_bytes,
    'why': e.why,
    'remarks': list(e.remarks),
    'free': not e.constrained,
  }


def _place(e: Explanation) -> list[str]:
  """Returns the path of an array in the layer tree; a slot has the same parent as its variable."""
  if e.kind is ArrayKind.SLOT and e.owner:
    *layers, name = e.owner.split('.')
    before, _, after = e.path.partition(f'.{e.owner}')
    slot = before.rpartition('.')[2] + after
    return [*layers, f'{name} · {slot}']
  return e.path.split('.')
