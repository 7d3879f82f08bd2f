"""The page of a plan: one file that needs nothing else, with the numbers of the plan."""

import dataclasses
import html
import json
import re

import pytest
from browser import IS_NARROW, needs_chromium, use_page
from small_lm import small_lm

from praxis_lite.instruments.plan import plan as plan_task
from praxis_lite.instruments.plan.cost import cost_of
from praxis_lite.instruments.plan.hlo import parse
from praxis_lite.instruments.plan.layer_names import LayerNames
from praxis_lite.instruments.plan.links import Links
from praxis_lite.instruments.plan.memory import Memory, StateArray, StateBytes, live_memory
from praxis_lite.instruments.plan.page import render_plan_page
from praxis_lite.instruments.plan.planning import ModelWork, Plan
from praxis_lite.instruments.plan.topology import parse_topology

LAYERS = ('lm', 'lm.stack', 'lm.stack.layers', 'lm.stack.layers.ff', 'lm.stack.layers.ff.up', 'lm.softmax')
UP = 'jit(step)/jvp(Model)/lm/stack/while/body/layers/ff/up'

# A loop of 4 rounds that gathers weights beside a product, and stacks its results; after it an all-reduce that waits.
PROGRAM = f"""HloModule step, is_scheduled=true, num_partitions=16

%body (p: (s32[], f32[512,512], f32[4,512,512])) -> (s32[], f32[512,512], f32[4,512,512]) {{
  %p = (s32[], f32[512,512], f32[4,512,512]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[512,512] get-tuple-element(%p), index=1
  %s = f32[4,512,512] get-tuple-element(%p), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one), metadata={{op_name="{UP}/add"}}
  %start = (f32[32,512], f32[512,512]) all-gather-start(%x), replica_groups=[1,16]<=[16], dimensions={{0}}, metadata={{op_name="{UP}/gather"}}
  %y = f32[512,512] dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="{UP}/dot_general"}}
  %w = f32[512,512] all-gather-done(%start)
  %z = f32[512,512] dot(%y, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="{UP}/dot_general"}}
  %u = f32[4,512,512] dynamic-update-slice(%s, %z, %i), metadata={{op_name="{UP}/dynamic_update_slice"}}
  ROOT %out = (s32[], f32[512,512], f32[4,512,512]) tuple(%next, %z, %u)
}}

%condition (q: (s32[], f32[512,512], f32[4,512,512])) -> pred[] {{
  %q = (s32[], f32[512,512], f32[4,512,512]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %four = s32[] constant(4)
  ROOT %lt = pred[] compare(%j, %four), direction=LT
}}

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

ENTRY %main (x.1: f32[512,512]) -> f32[512,512] {{
  %x.1 = f32[512,512] parameter(0)
  %zero = s32[] constant(0)
  %empty = f32[4,512,512] broadcast(%x.1), dimensions={{}}, metadata={{op_name="{UP}/broadcast"}}
  %init = (s32[], f32[512,512], f32[4,512,512]) tuple(%zero, %x.1, %empty)
  %loop = (s32[], f32[512,512], f32[4,512,512]) while(%init), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"4"}}}}, metadata={{op_name="jit(step)/jvp(Model)/lm/stack/while"}}
  %last = f32[512,512] get-tuple-element(%loop), index=1
  %all = f32[4,512,512] get-tuple-element(%loop), index=2
  %v = f32[512,512] fusion(%last, %all), kind=kLoop, calls=%sum, metadata={{op_name="jit(step)/transpose(jvp(Model))/lm/softmax/mul"}}
  ROOT %r = f32[512,512] all-reduce(%v), replica_groups=[4,4]<=[4,4]T(1,0), to_apply=%sum, metadata={{op_name="jit(step)/transpose(jvp(Model))/lm/softmax/reduce"}}
}}
"""  # noqa: E501


@pytest.fixture(scope='module')
def plan():
  topology, program, mesh = parse_topology('h100:2x8'), parse(PROGRAM), {'data': 4, 'mdl': 4}
  names = LayerNames(tuple(path.split('.')) for path in LAYERS)
  cost = cost_of(program, topology.target, Links(topology), mesh=mesh, layers=names)
  mib = 2**20
  state = StateBytes(
    *(mib, 2 * mib, 0, 100),
    (
      StateArray('parameters', 'lm.stack.layers.ff.up', 'w', 'f32[512, 512]', mib),
      StateArray('optimizer slots', 'lm.stack.layers.ff.up', 'w · mu', 'f32[512, 512]', mib),
      StateArray('optimizer slots', 'lm.stack.layers.ff.up', 'w · nu', 'f32[512, 512]', mib),
      StateArray('inputs', '', 'ids', 's32[25]', 100),
    ),
  )
  live, over_time = live_memory(program, names)
  temporaries = sum(part.bytes for part in live) + 1000  # Of which the schedule does not tell 1000.
  sizes = (state.total, state.total, state.total, temporaries, 0)
  memory = Memory(2**23, state, *sizes, live, over_time)
  work = ModelWork(10**6, 10**6, 4096, 6e9, 5e9, is_by_token=True)
  how = {'compile_seconds': 1.0, 'notes': ('assumed </script>',)}
  about = {'name': 'lm', 'topology': topology, 'mesh': mesh, 'mode': 'compiled'}
  return Plan(**about, memory=memory, cost=cost, work=work, **how)


def data_of(page):
  return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_refers_to_nothing_outside_it_and_text_is_no_markup(plan):
  nasty = '</script><img src=x onerror=alert(1)>'
  page = render_plan_page(plan, nasty)
  assert nasty not in page and html.escape(nasty) in page
  assert data_of(page)['title'] == nasty
  page = render_plan_page(plan, 'x').replace('http://www.w3.org/2000/svg', '')  # The name of SVG, not an address.
  for pattern in (r'https?:', r'\bsrc\s*=', r'<link', r'@import', r'url\((?!#)', r'\bfetch\(', r'XMLHttpRequest'):
    assert not re.search(pattern, page), pattern
  assert not re.search(r'%[A-Z]+%', page)


def test_its_numbers_are_those_of_the_plan(plan):
  data, memory, cost = data_of(render_plan_page(plan, 'lm.Example')), plan.memory, plan.cost
  head = data['headline']
  assert (head['fits'], head['seconds'], head['tokensPerSecond']) == (False, plan.step_seconds, plan.tokens_per_second)
  assert (head['mfu'], head['causalMfu'], head['bottleneck']) == (plan.mfu, plan.causal_mfu, plan.bottleneck)
  assert data['limits'] == cost.seconds_by_limit(plan.topology.target)
  assert (data['memory']['peak'], data['memory']['capacity']) == (memory.peak, memory.capacity)
  assert data['memory']['kinds'] == memory.bytes_by_kind()
  for kind, size in memory.bytes_by_kind().items():
    leaves = sum(leaf[4] for leaf in data['memory']['leaves'] if leaf[0] == kind)
    assert leaves == (0 if kind == 'other' else size)
  # Results that a loop stacks are a large block, whose title says what they are; XLA's name for the operation does not.
  names = {name: size for _, _, _, name, size, _ in data['memory']['leaves']}
  assert names['kept in each round of a loop'] == 4 * 512 * 512 * 4 and 'dynamic_update_slice' not in names
  assert sum(count * seconds for *_, count, _, _, seconds, _ in data['operations']) == pytest.approx(
    sum(op.count * op.seconds for op in cost.operations)
  )
  assert [(c['kind'], c['axes'], c['layer'], c['exposed']) for c in data['collectives']] == [
    (c.kind, list(c.axes), c.layer, c.exposed) for c in cost.collectives
  ]


def test_the_schedule_is_that_of_the_plan(plan):
  data = data_of(render_plan_page(plan, 'x'))
  (loop,) = [row for row in data['schedule'] if len(row) > 4]
  name, start, end, live, rounds, inside = loop
  assert (name, rounds, live) == ('loop', 4, 4 * 512 * 512 * 4)
  gather = next(i for i, c in enumerate(data['collectives']) if c['kind'] == 'all-gather')
  assert [row[0] for row in inside].count(-1 - gather) == 1
  assert end - start == pytest.approx(4 * max(row[2] for row in inside), rel=0.02)
  peak = live + max(row[3] for row in inside) + data['memory']['always']
  assert peak == data['memory']['peak'] - 1000
  assert max(row[2] for row in data['schedule']) == pytest.approx(plan.step_seconds)


# Uses each control as a user would.
_SESSION = """
  const text = (id) => $(id).textContent;
  say(text('bottleneck'), $('totals').querySelector('.bad dt').textContent, text('notes'));
  say(document.querySelectorAll('#map rect.leaf').length, document.querySelectorAll('#roofline circle').length);
  document.querySelector('#map rect.group').onclick(); say($('crumbs').querySelectorAll('button').length);
  document.querySelector('#map rect').focus();
  $('map').onkeydown({ key: 'Backspace', preventDefault() {} }); say($('crumbs').querySelectorAll('button').length);
  say($('loop-chips').textContent, timelines.whole.lanes.map((lane) => lane.key).join(' '));
  timelines.round.canvas.onkeydown({ key: '+', preventDefault() {} });
  say((timelines.round.length / (timelines.round.to - timelines.round.from)).toFixed(1));
  timelines.round.canvas.ondblclick();
  const { whole, round } = timelines;
  say(tipOf(whole.hit(whole.width - 2, whole.lane('memory').y + 5))[1].split(',')[1]);
  say(tipOf(round.hit(round.x(round.length * 0.999), round.lane('compute').y + 5))[0]);
  const count = () => document.querySelectorAll('#collectives tr').length - 1;
  say(count());
  $('search').value = 'softmax reduce'; $('search').oninput(); say(count());
  $('search').value = ''; $('search').oninput();
  $('collective-axes').querySelector('button').click(); say(count());
  $('collective-axes').querySelector('button').click(); $('collective-causes').querySelector('button').click();
  say(document.querySelector('td.surprise').textContent);
  for (const button of document.querySelectorAll('#phases button')) button.click();
  for (const button of document.querySelectorAll('th button')) button.click();
  document.documentElement.className = ''; $('theme').click(); say(document.documentElement.className);
"""


@needs_chromium
def test_in_a_browser_it_filters_zooms_sorts_and_switches_themes(plan, tmp_path):
  # A surprise, as plans that know causes have it.
  cause = '"cause":{"reason":"resharded","fields":["a.b"],"what":"it moves","remedy":"set a.b"}'
  said = use_page(render_plan_page(plan, 'x').replace('"cause":null', cause, 1), _SESSION, tmp_path)
  assert said[:2] == [f'Bottleneck: {plan.bottleneck}.', 'does not fit']
  assert said[2].startswith('assumed </script>h100: 989 T FLOP/s in bf16 × 0.69')  # noqa: RUF001
  # Areas, circles; crumbs of a kind of memory, and of all; the loop, and the lanes that are used.
  assert said[3:9] == ['6', '1', '2', '0', said[7], 'phase loops compute fast network memory']
  assert re.fullmatch(r'forward lm\.stack: 4 \S .* µs', said[7])
  # Zoomed by two; what is live; what runs at the end of a round; collectives: all, filtered, of one axis, surprises.
  assert said[9:] == ['2.0', ' by the schedule', 'lm.stack.layers.ff.up', '2', '1', '1', 'resharded', 'dark']


_WITHOUT_SCHEDULE = """
  say($('time').hidden, $('layers-roofline').hidden, $('notes').textContent.includes('no timeline and no roofline'));
  say([...$('kinds').children].map((item) => item.textContent.split(':')[0]).join());
  say(document.querySelectorAll('#map rect.leaf').length > 20);
  data.limits = { compute: 84, communication: 16 }; drawShares();  // The last part is so narrow that its name is cut.
  const edge = (id) => document.getElementById(id).getBoundingClientRect().right;
  const texts = [...document.querySelectorAll('.strip text')];
  say(texts.length > 2, texts.every((text) => text.getBoundingClientRect().right <= edge(text.parentNode.id) + 0.1));
"""


_IN_ONE_ROW = """
  const figures = [...$('totals').children], tops = figures.map((figure) => figure.getBoundingClientRect().top);
  say(figures.length, new Set(tops).size, document.documentElement.scrollWidth <= innerWidth);
  say(figures.every((figure) => figure.scrollWidth <= figure.clientWidth), $('rounds').textContent);
  const size = (kinds) => kinds.reduce((sum, [, size]) => sum + size, 0);
  say(size(kindsOfPeak()) === data.memory.peak, figures[0].querySelector('dd').textContent, $('crumbs').textContent);
"""


@needs_chromium
def test_its_figures_stand_in_one_row_and_rounds_are_explained(plan, tmp_path):
  # The compiler needs less than the schedule says, by sharing memory; the figure and the card of memory say the same.
  sizes = dataclasses.replace(plan.memory, temporaries=2**20)
  assert sizes.bytes_by_kind()['other'] < -sizes.bytes_by_kind()['temporaries']
  page = render_plan_page(dataclasses.replace(plan, memory=sizes), 'lm_sizes.Llama8B')
  # A fifth figure, with as many words as those of decoding have.
  more = '["caches", "1.501 GiB", "on all devices, 192.2 MiB a row; about, of these lengths"]'
  page = page.replace('"headline":{', f'"headline":{{"more":[{more}],', 1)
  said = use_page(page, _IN_ONE_ROW, tmp_path, width=1400)
  assert said[:4] == ['5', '1', 'true', 'true'] and said[4].endswith('32 layers may be 15 rounds.')
  assert said[5:] == ['true', '4.00 MiB of 8.00 MiB', '4.00 MiB']


@needs_chromium
def test_without_a_compiler_it_has_no_empty_cards_and_divides_the_temporaries(tmp_path):
  found = plan_task(small_lm((1, 1, 1)), None, 'h100:1', compile=False)
  word = f'a compiler may say {"long/" * 40}'  # Notes repeat what a compiler says about an operation.
  page = render_plan_page(dataclasses.replace(found, notes=(*found.notes, word)), 'x')
  said = use_page(page, _WITHOUT_SCHEDULE + IS_NARROW, tmp_path, width=400)
  kinds = 'parameters,optimizer slots,inputs,saved activations,temporaries'
  assert said == ['true', 'true', 'true', kinds, *['true'] * 6]


_NAMES = """
  const wide = 'word-break: normal; overflow-wrap: normal; white-space: nowrap';
  const broken = [...document.querySelectorAll('#layers td:first-child')].filter((cell) => {
    const parts = cell.textContent.split(/(?<=\\.)/), probe = document.createElement('span');
    probe.style.cssText = wide; cell.append(probe);
    const width = (part) => { probe.textContent = part; return probe.getBoundingClientRect().width; };
    const wider = parts.some((part) => width(part) > cell.clientWidth);
    probe.remove();
    return wider || cell.querySelectorAll('wbr').length !== parts.length - 1;
  });
  say(document.querySelectorAll('#layers td:first-child').length > 5, broken.length);
"""


@needs_chromium
def test_on_a_phone_the_names_of_layers_break_after_dots_only(tmp_path):
  page = render_plan_page(plan_task(small_lm((1, 1, 1)), None, 'h100:1', compile=False), 'x')
  assert use_page(page, _NAMES, tmp_path, width=400) == ['true', '0']
