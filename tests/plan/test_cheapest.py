"""The cheapest run to a goal: which offer is the best, what it takes, and what is left out."""

import dataclasses
import datetime
import math
import re
import types

import jax
import pytest
from browser import IS_NARROW, needs_chromium, use_page
from small_lm import TOKENS, small_lm

from praxis_lite.cli.main import main
from praxis_lite.cli.plan_cheapest import read_deadline
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.common.errors import UserError
from praxis_lite.instruments.plan import parse_topology, plan, planning
from praxis_lite.instruments.plan.cheapest import (
  CheapestRun,
  Goal,
  Offer,
  Option,
  excess,
  find_cheapest,
  offers_of,
  order_options,
)
from praxis_lite.instruments.plan.cheapest_text import format_cheapest
from praxis_lite.instruments.plan.goodput import Interruptions
from praxis_lite.instruments.plan.loss_goal import LossGoal
from praxis_lite.instruments.plan.lowered_steps import LoweredSteps, StepKey
from praxis_lite.instruments.plan.page import page_of_cheapest, render_page_of_cheapest
from praxis_lite.instruments.plan.price import Price
from praxis_lite.instruments.plan.topology import time_factors
from praxis_lite.layers.gpu_capability import _capability_of
from praxis_lite.sharding import mesh
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure

DAY = 86400.0
NO_FAILURES = Interruptions(failures_per_chip_day=0)


def option(name, days, money, mode='compiled'):
  price = Price(1e9, 1.0, days * DAY, None, days * DAY, 1.0, money)
  found = types.SimpleNamespace(mode=mode, mesh={'data': 8})
  return Option(parse_topology(name), ('task.ici_mesh_shape=(8,)',), found, 1.0, 2.0**30, price)


FEW, MORE, MANY, DEAR = OPTIONS = (
  *(option('h100:1x1', 40, 1000), option('h100:1x8', 10, 1100), option('h100:8x8', 2, 1500)),
  option('a100:8x8', 5, 3000, 'analytic'),
)


@pytest.mark.parametrize(
  'goal, best, reached',
  [
    (Goal(), FEW, True),
    (Goal(seconds=20 * DAY), MORE, True),
    (Goal(budget=2000), MANY, True),  # No other limit: the fastest.
    (Goal(budget=1200), MORE, True),
    (Goal(budget=2000, seconds=20 * DAY), MORE, True),
    (Goal(seconds=DAY), MANY, False),
    (Goal(budget=900), FEW, False),
    (Goal(budget=1400, seconds=3 * DAY), MANY, False),  # 1.07 times the budget; `MORE` takes 3.3 times the time.
  ],
)
def test_the_best_option_reaches_the_goal_or_is_the_nearest(goal, best, reached):
  found = CheapestRun(goal, OPTIONS, {}, 4)
  assert found.best is best and found.is_reached is reached
  assert ('nothing reaches the goal' in format_cheapest(found)) is not reached
  assert (order_options(OPTIONS, goal)[0], found.frontier) == (best, [FEW, MORE, MANY])


def test_a_goal_that_earlier_errors_leave_open_comes_with_a_safe_option():
  goal = Goal(seconds=12 * DAY)
  assert excess(MORE, goal) < 1 < excess(MORE, goal, at_most=True)
  text = ' '.join(format_cheapest(CheapestRun(goal, OPTIONS, {}, 4)).split())
  assert 'it may miss the goal; the cheapest that reaches it even so: h100:8x8, 2.0 d' in text
  assert '10.0 d 13.5 d 1,100 1,485 as planned' in text and 'no, 3.33 x' in text
  nowhere = CheapestRun(Goal(seconds=10.5 * DAY), (MORE,), {}, 1)
  assert 'it may miss the goal; so may all others' in format_cheapest(nowhere)


def test_ranges_include_that_of_the_tokens_for_a_loss():
  wide = dataclasses.replace(MORE, tokens_range=(0.5, 2.0))
  assert wide.factors == (0.5 * MORE.factors.least, 2 * MORE.factors.largest)
  endless = dataclasses.replace(MORE, tokens_range=(0.5, math.inf))
  goal = Goal(1e9, seconds=12 * DAY, loss=LossGoal(2.5, 1e9, 5e8, math.inf, ('the law',)))
  found = CheapestRun(goal, (endless,), {}, 1)
  text = ' '.join(format_cheapest(found).split())
  assert '10.0 d no limit 1,100 no limit as planned' in text and 'the law' in text
  assert 'a loss of 2.5, 1.00B tokens (500M or more) within 12.0 d' in text
  assert 'by the errors of earlier plans and of the tokens, it may miss the goal; so may all others' in text
  (row,) = page_of_cheapest(found, 'x')['options']
  assert (row['factors'], row['timeMost'], row['moneyMost']) == (None, 'no limit', 'no limit')


TOKENS_OF_RUN = Goal(1e9)


def run_on(offers, goal=TOKENS_OF_RUN, verify=0, config=None, **how):
  return find_cheapest(
    config or small_lm(), None, offers, goal, interruptions=NO_FAILURES, verify=verify, seconds=0.01, **how
  )


def offers(numbers=(1, 2), **prices):
  kinds = [Offer(parse_topology(f'{name}:1'), price) for name, price in prices.items()]
  return offers_of(kinds, numbers)


@pytest.fixture(scope='module')
def found():
  return run_on(offers((1, 2, 256), h100=2.0, a100=1.0))


@pytest.mark.slow
def test_time_and_money_follow_from_the_step(found):
  assert {o.topology.name for o in found.options} == {'h100:1x1', 'h100:1x2', 'a100:1x1', 'a100:1x2'}
  assert [o.money for o in found.options] == sorted(o.money for o in found.options)
  for o in found.options:
    price = 2.0 if o.topology.target.name == 'h100' else 1.0
    assert o.seconds == pytest.approx(1e9 / TOKENS * o.step_seconds)
    assert o.money == pytest.approx(o.seconds / 3600 * o.topology.num_chips * price)
    settings = small_lm()
    apply_overrides(settings.roots(), o.overrides)
    again = plan(settings, None, o.topology, compile=False)  # The overrides give this very plan.
    assert (again.step_seconds, again.memory.peak) == (o.step_seconds, o.peak)
    assert o.largest(o.money) == o.money * time_factors(o.topology, False).largest


def test_offers_that_the_batch_is_too_small_for_are_left_out_with_the_reason(found):
  assert set(found.left_out) == {'h100:32x8', 'a100:32x8'}
  assert 'datasets[*].batch_size: 16 rows' in found.left_out['h100:32x8']
  with pytest.raises(UserError, match='batch_size: 16 rows'):
    run_on(offers((256,), h100=1))


def test_without_a_number_of_tokens_there_are_20_for_each_parameter():
  found = run_on(offers((1,), h100=1), Goal())
  assert found.goal.tokens == 20 * found.options[0].plan.work.active_parameters


def test_offers_without_room_for_the_state_are_not_estimated():
  (offer,) = offers((1,), h100=1)
  small = dataclasses.replace(offer.topology, target=dataclasses.replace(offer.topology.target, memory=1000.0))
  found = run_on([Offer(small, 1.0)])
  assert (found.best, found.is_reached, found.estimates) == (None, False, 0)
  assert 'no setting fits on any of the 1 numbers of chips' in format_cheapest(found)
  assert 'h100:1x1: the state takes' in format_cheapest(found)


@pytest.mark.slow
def test_an_experiment_without_tokens_has_no_price():
  with pytest.raises(UserError, match='have no tokens'):
    run_on(offers((1,), h100=1), config=configure(registry.get('digits.DigitsMlp')))


@pytest.mark.slow
def test_estimates_that_have_one_program_lower_it_once(monkeypatch):
  monkeypatch.setattr(mesh, '_QUESTIONS', {})  # What tests before this one have asked.
  lowered, program_for = [], planning.program_for
  monkeypatch.setattr(planning, 'program_for', lambda *args: (lowered.append(args[1].name), program_for(*args))[1])
  shared = run_on(offers((1, 2), h100=2.0, a100=1.0))
  number = len(lowered)
  assert number == 3  # One for one chip, two for two chips, none for the second kind.
  monkeypatch.setattr(LoweredSteps, 'find', lambda self, key, lower: lower())
  alone = run_on(offers((1, 2), h100=2.0, a100=1.0))
  assert len(lowered) - number == 2 * number and shared.estimates == alone.estimates
  assert [facts(o) for o in shared.options] == [facts(o) for o in alone.options]


def facts(o):
  parts = (o.plan.memory, o.plan.cost, o.plan.work, o.plan.notes, o.plan.slow_paths, o.plan.mesh)
  return o.topology.name, o.overrides, o.step_seconds, o.peak, o.money, *map(repr, parts)


def test_only_equal_steps_are_shared(monkeypatch):
  monkeypatch.setattr(mesh, '_QUESTIONS', {})
  h100, h200, a100 = (parse_topology(f'{name}:1').target.cuda.name for name in ('h100', 'h200', 'a100'))
  key = StepKey(small_lm().task, {'ids': jax.ShapeDtypeStruct((2, 3), 'int32')}, {'data': 2}, 'gpu', h100)
  assert key.is_same_step(dataclasses.replace(key, task=small_lm().task, kind=a100))
  for change in (
    {'task': small_lm(hidden_dims=64).task},
    {'inputs': {'ids': jax.ShapeDtypeStruct((2, 4), 'int32')}},
    {'inputs': {}},
    {'mesh': {'data': 4}},
    {'mesh': {'mdl': 2}},
    {'platform': 'tpu'},
  ):
    assert not key.is_same_step(dataclasses.replace(key, **change)), change
  mesh._QUESTIONS[_capability_of] = None  # As if a layer had asked for it.
  assert key.is_same_step(dataclasses.replace(key, kind=h200))
  assert not key.is_same_step(dataclasses.replace(key, kind=a100))


def test_a_layer_asks_about_the_devices_of_the_ambient_mesh(monkeypatch):
  monkeypatch.setattr(mesh, '_QUESTIONS', {})
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh({'data': 2}, 'gpu', 'NVIDIA H200')):
    assert (mesh.ask_device(len), mesh.device_kind()) == (11, 'NVIDIA H200')
  assert not mesh.have_same_answers('NVIDIA H200', 'NVIDIA B200')  # `device_kind` asks for the very name.
  del mesh._QUESTIONS[str]
  assert mesh.have_same_answers('NVIDIA H200', 'NVIDIA B200') and not mesh.have_same_answers('NVIDIA H200', 'x')


@pytest.mark.slow
def test_compiled_options_say_so_and_correct_the_others_of_their_kind():
  cpus = [Offer(parse_topology(f'cpu:{n}'), 1.0) for n in (1, 2, 4)]
  by_formulas = {o.topology.name: o for o in run_on(cpus).options}
  found = run_on(cpus, verify=1)
  (compiled,) = [o for o in found.options if o.is_compiled]
  assert compiled.step_seconds == compiled.plan.step_seconds and compiled.plan.mode == 'compiled'
  assert f'{compiled.topology.name}, ' in format_cheapest(found) and '1 of them compiled' in format_cheapest(found)
  for o in found.options:
    if not o.is_compiled:
      assert o.step_seconds != by_formulas[o.topology.name].step_seconds


@pytest.mark.parametrize('kind', ['v5p:1x1x1', 'v5e:1x1', 'h100:1'])
def test_kinds_come_only_in_some_numbers(kind):
  found = offers_of([Offer(parse_topology(kind), 1.0)], [1, 3, 4, 12, 16, 1 << 20])
  names = [offer.topology.name for offer in found]
  assert all(parse_topology(name).name == name for name in names)  # They can be written as --topology.
  assert {offer.topology.num_chips for offer in found} <= {1, 3, 4, 12, 16, 1 << 20}
  assert not {'h100:1x12', 'v5p:1x1x3'} & {*names}


def test_deadlines_are_days_hours_or_the_end_of_a_date():
  now = datetime.datetime(2026, 11, 24, 12)
  assert (read_deadline('30d'), read_deadline('1.5h')) == (30 * DAY, 5400)
  assert read_deadline('2026-11-25', now) == pytest.approx(1.5 * DAY)
  with pytest.raises(UserError, match='2026-11-23 has passed; today is 2026-11-24'):
    read_deadline('2026-11-23', now)
  for wrong in ('', '0d', '30', 'soon', '-1d', '2026-13-01'):
    with pytest.raises(UserError, match='expected days, hours or a date'):
      read_deadline(wrong)


@pytest.mark.parametrize(
  'arguments, told',
  [
    (['--cheapest'], r'--cheapest needs the price per hour.*--prices=h100=2.5.*v5p'),
    (['--cheapest', '--prices=h100'], r"--prices: expected chips with a price .*got 'h100'"),
    (['--cheapest', '--prices=h100=0'], r"got 'h100=0'"),
    (['--cheapest', '--prices=h100=nan'], r"got 'h100=nan'"),
    (['--cheapest', '--prices=h101=2'], r"no accelerator 'h101'.*Did you mean"),
    (['--cheapest', '--prices=cpu=2'], r'simulated devices have no price'),
    (['--cheapest', '--prices=h100=2,H100=3'], r'it has two prices'),
    (['--cheapest', '--prices=h100=2', '--chips=x'], r"--chips: expected numbers of chips such as 64,128, got 'x'"),
    (['--cheapest', '--prices=h100=2', '--chips=12'], r'--chips=12: none of h100 comes in such numbers'),
    (['--cheapest', '--prices=h100=2', '--budget=0'], r'--budget=0: expected'),
    (['--cheapest', '--prices=h100=2', '--topology=h100:8'], r'--topology is for a plan of given chips'),
    (['--cheapest', '--prices=h100=2', '--search'], r'--search is for a plan of given chips'),
    (['--topology=h100:8', '--budget=5'], r'--budget needs --cheapest'),
    (['--cheapest', '--prices=h100=2', '--hf=x'], r'--hf needs --set .datasets\[\*\].batch_size=256'),
  ],
)
def test_mistakes_are_one_line(arguments, told, capsys):
  bare = [] if '--hf=x' in arguments else ['lm.SyntheticLmTiny']
  assert main(['plan', *bare, *arguments]) == 2
  lines = capsys.readouterr().err.strip().splitlines()
  assert len(lines) == 1 and re.search(told, lines[0]), lines


@pytest.mark.slow
def test_a_command_prints_and_writes_the_options(tmp_path, capsys):
  page = tmp_path / 'cheapest.html'
  command = [
    'plan',
    'lm.SyntheticLmTiny',
    '--cheapest',
    '--prices=h100=2',
    '--chips=1,2',
    '--tokens=1e9',
    '--nocompile',
  ]
  assert main([*command, '--search_seconds=1', f'--html={page}']) == 0
  text = capsys.readouterr().out
  assert 'to plan it: praxis-lite plan --exp=lm.SyntheticLmTiny --tokens=1e+09 --topology=h100:1x' in text
  assert f'wrote {page}' in text and 'h100:1x2' in page.read_text()
  assert main([*command, '--search_seconds=1', '--deadline=1h', '--budget=0.001']) == 1
  text = ' '.join(capsys.readouterr().out.split())
  assert 'nothing reaches the goal, 1.00B tokens within 60 min for at most 0.001; the nearest: h100:1x' in text


def test_the_page_has_ranges_and_limits(found):
  data = page_of_cheapest(dataclasses.replace(found, goal=Goal(1e9, budget=5.0)), 'x')
  assert (data['budget'], data['seconds'], data['hasGoal']) == (5.0, None, True)
  assert [o['isBest'] for o in data['options']].count(True) == 1
  for o, row in zip(found.options, data['options']):
    assert row['factors'] == [*o.factors] and math.isclose(row['money'], o.money)


_SESSION = """
  say(document.querySelectorAll('#picture circle').length, document.querySelectorAll('#picture line.range').length);
  say(document.querySelectorAll('#table tr').length - 1, document.querySelectorAll('#picture line.limit').length);
  document.querySelector('#picture circle').onmousemove({ clientX: 10, clientY: 10 }); say($('tip').hidden);
  $('theme').click();
"""


@needs_chromium
@pytest.mark.parametrize('width', [1400, 400])
def test_in_a_browser_it_draws_each_option_and_the_limits(found, width, tmp_path):
  page = render_page_of_cheapest(dataclasses.replace(found, goal=Goal(1e9, 5.0, DAY)), 'a </script> b')
  said = use_page(page, _SESSION + (IS_NARROW if width == 400 else ''), tmp_path, width=width)
  assert said[:5] == ['4', '4', '4', '2', 'false'] and {*said[5:]} <= {'true'}
