"""The page: one file that needs nothing else, with the numbers of the report."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from browser import IS_NARROW, needs_chromium, use_page

from praxis_lite.instruments.explain import Problem, Severity, ShardingReport, check, explain_task
from praxis_lite.instruments.explain.page import render_page, sort_arrays, write_page
from praxis_lite.training import registry


@pytest.fixture(scope='module')
def report() -> ShardingReport:
  return explain_task(registry.get('lm_sizes.Llama8B'))


def data_of(page: str) -> dict:
  return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


@pytest.mark.slow
def test_the_page_refers_to_nothing_outside_it(report: ShardingReport) -> None:
  page = render_page(report, 'x').replace('http://www.w3.org/2000/svg', '')  # The name of SVG, not an address.
  for pattern in (r'https?:', r'\bsrc\s*=', r'<link', r'@import', r'url\((?!#)', r'\bfetch\(', r'XMLHttpRequest'):
    assert not re.search(pattern, page), pattern
  assert not re.search(r'%[A-Z]+%', page)


def test_its_numbers_are_those_of_the_report(report: ShardingReport) -> None:
  data = data_of(render_page(report, 'Llama', check(registry.get('lm_sizes.Llama8B'))))
  assert sorted(a['path'] for a in data['arrays']) == sorted(e.path for e in report.arrays())
  by_path = {e.path: e for e in report.arrays()}
  for array in data['arrays']:
    e = by_path[array['path']]
    assert tuple(d[0] for d in array['dims']) == e.shape
    assert tuple(d[3] for d in array['dims']) == e.local_shape
    assert (array['bytes'], array['local'], array['waste']) == (e.bytes, e.bytes_per_device, e.wasted_bytes)
  assert data['mesh'] == [['replica', 1], ['data', 16], ['mdl', 4]]


def test_slots_stand_beside_their_variable_in_the_tree(report: ShardingReport) -> None:
  places = {a['path']: a['place'] for a in data_of(render_page(report, 'x'))['arrays']}
  slot = next(p for p in places if p.endswith('mu.lm.softmax.w'))
  assert places[slot] == ['lm', 'softmax', 'w · mu']
  order = [e.path for e in sort_arrays(report)]
  assert sorted(order) == sorted(e.path for e in report.arrays())
  at = order.index('lm.softmax.w')
  assert all(path.endswith('lm.softmax.w') for path in order[at : at + 3])
  assert places['lm.softmax.w'] == ['lm', 'softmax', 'w']


def test_text_cannot_end_the_script_or_become_markup(report: ShardingReport) -> None:
  nasty = '</script><img src=x onerror=alert(1)>'
  page = render_page(report, nasty, [Problem(Severity.WARNING, 'kind', 'path', nasty, nasty)])
  assert nasty not in page
  assert html.escape(nasty) in page
  assert nasty in data_of(page)['problems'][0]['text']


def test_it_is_written_where_asked(report: ShardingReport, tmp_path: Path) -> None:
  file = write_page(str(tmp_path / 'new' / 'page.html'), report, 'x')
  assert file.read_text(encoding='utf-8').startswith('<!doctype html>')


# Uses each control as a user would.
_SESSION = """
  const count = () => say($('count').textContent);
  count();
  $('search').value = 'softmax'; $('search').oninput(); count();
  $('search').value = ''; $('search').oninput();
  for (const button of document.querySelectorAll('#kinds button[aria-pressed=false]')) button.click();
  count();
  for (const array of data.arrays) select(array);
  document.querySelector('#map rect.group').onclick(); say($('crumbs').querySelectorAll('button').length);
  $('color').value = 'kind'; $('color').onchange();
  document.documentElement.className = ''; $('theme').click();
  say(document.documentElement.className);
  select(data.arrays.find((a) => a.path === 'lm.softmax.w'));
  say(document.querySelectorAll('figure .cell').length);
"""


@needs_chromium
def test_in_a_browser_it_filters_zooms_switches_themes_and_draws_every_array(
  report: ShardingReport, tmp_path: Path
) -> None:
  said = use_page(render_page(report, 'x'), _SESSION, tmp_path)
  stored, everything = len(report.variables) + len(report.slots), len(report.arrays())
  softmax = sum('softmax' in e.path for e in [*report.variables, *report.slots])
  assert said[:3] == [f'{n} of {everything} arrays' for n in (stored, softmax, everything)]
  # Crumbs 'all' and 'lm'; dark; 64 parts of the array and 64 devices of the mesh.
  assert said[3:] == ['2', 'dark', '128']


@needs_chromium
def test_on_a_phone_nothing_is_cut_and_reasons_have_a_line_of_their_own(report: ShardingReport, tmp_path: Path) -> None:
  widths = 'say(Math.min(...[...document.querySelectorAll("td.why")].map((cell) => cell.clientWidth)));'
  *fits, narrowest = use_page(render_page(report, 'x'), IS_NARROW + widths, tmp_path, width=400)
  assert fits == ['true'] * 3
  assert int(narrowest) > 250


_OPENED = """
  say(state.selected.kind, partsOf(state.selected), visible().includes(state.selected));
  say(document.querySelectorAll('figure').length, $('mesh').textContent);
"""


@needs_chromium
@pytest.mark.parametrize(
  ('name', 'opened'),
  [
    ('lm.StdlibLmData', ['activation', '8', 'true', '2', 'replica 8 x data 1 x mdl 1 = 8 devices']),
    ('lm.StdlibLmTiny', ['parameter', '1', 'true', '0', 'one device: nothing to split, so the page shows sizes']),
  ],
)
def test_it_opens_on_the_array_with_most_parts(name: str, opened: list[str], tmp_path: Path) -> None:
  assert use_page(render_page(explain_task(registry.get(name)), 'x'), _OPENED, tmp_path) == opened
