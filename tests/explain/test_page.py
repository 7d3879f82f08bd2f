"""The page: one file that needs nothing else, with the numbers of the report."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from praxis_lite.instruments.explain import Problem, Severity, ShardingReport, check, explain_task
from praxis_lite.instruments.explain.page import render_page, write_page
from praxis_lite.training import registry

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')


@pytest.fixture(scope='module')
def report() -> ShardingReport:
  return explain_task(registry.get('lm_sizes.Llama8B'))


def data_of(page: str) -> dict:
  return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_refers_to_nothing_outside_it(report: ShardingReport) -> None:
  page = render_page(report, 'x').replace('http://www.w3.org/2000/svg', '')  # The name of SVG, not an address.
  for pattern in (r'https?:', r'\bsrc\s*=', r'<link', r'@import', r'url\((?!#)', r'\bfetch\(', r'XMLHttpRequest'):
    assert not re.search(pattern, page), pattern
  assert not re.search(r'%[A-Z]+%', page)


def test_its_numbers_are_those_of_the_report(report: ShardingReport) -> None:
  data = data_of(render_page(report, 'Llama', check(registry.get('lm_sizes.Llama8B'))))
  assert [a['path'] for a in data['arrays']] == [e.path for e in report.arrays()]
  for array, e in zip(data['arrays'], report.arrays()):
    assert tuple(d[0] for d in array['dims']) == e.shape
    assert tuple(d[3] for d in array['dims']) == e.local_shape
    assert (array['bytes'], array['local'], array['waste']) == (e.bytes, e.bytes_per_device, e.wasted_bytes)
  assert data['mesh'] == [['replica', 1], ['data', 16], ['mdl', 4]]


def test_slots_stand_beside_their_variable_in_the_tree(report: ShardingReport) -> None:
  places = {a['path']: a['place'] for a in data_of(render_page(report, 'x'))['arrays']}
  slot = next(p for p in places if p.endswith('mu.lm.softmax.w'))
  assert places[slot] == ['lm', 'softmax', 'w · mu']
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


# Uses each control as a user would, and leaves what the page then says in its title.
_SESSION = """
<script>
const said = [], count = () => said.push($('count').textContent);
try {
  count();
  $('search').value = 'softmax'; $('search').oninput(); count();
  $('search').value = ''; $('search').oninput();
  for (const button of document.querySelectorAll('#kinds button[aria-pressed=false]')) button.click();
  count();
  for (const array of data.arrays) select(array);
  document.querySelector('#map rect.group').onclick(); said.push($('crumbs').querySelectorAll('button').length);
  $('color').value = 'kind'; $('color').onchange();
  document.documentElement.className = ''; $('theme').click();
  said.push(document.documentElement.className);
  select(data.arrays.find((a) => a.path === 'lm.softmax.w'));
  said.push(document.querySelectorAll('figure .cell').length);
} catch (error) { said.push('ERROR ' + error.stack); }
document.title = said.join(' | ');
</script></body>
"""


@pytest.mark.skipif(CHROMIUM is None, reason='needs Chromium')
def test_in_a_browser_it_filters_zooms_switches_themes_and_draws_every_array(
  report: ShardingReport, tmp_path: Path
) -> None:
  page = tmp_path / 'page.html'
  page.write_text(render_page(report, 'x').replace('</body>', _SESSION), encoding='utf-8')
  flags = '--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking'
  command = [CHROMIUM, *flags.split(), '--disable-component-update', '--disable-sync', f'--user-data-dir={tmp_path}/u']
  done = subprocess.run(
    [*command, '--dump-dom', page.as_uri()], capture_output=True, text=True, timeout=600, check=True
  )
  said = re.search(r'<title>(.*?)</title>', done.stdout, re.DOTALL)[1].split(' | ')
  stored, everything = len(report.variables) + len(report.slots), len(report.arrays())
  softmax = sum('softmax' in e.path for e in [*report.variables, *report.slots])
  assert said[:3] == [f'{n} of {everything} arrays' for n in (stored, softmax, everything)]
  # Crumbs 'all' and 'lm'; dark; 64 parts of the array and 64 devices of the mesh.
  assert said[3:] == ['2', 'dark', '128']
