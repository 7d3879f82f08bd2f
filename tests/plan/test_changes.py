"""Searches, what-if, comparisons, meshes made to fit and prices, of a small language model; nothing is compiled."""

import dataclasses
import re
import signal
import subprocess
import sys

import optax
import pytest
from small_lm import ALL, ROWS, TOKENS, D, small_lm

from praxis_lite.cli.main import main
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.instruments.explain.report import task_and_inputs
from praxis_lite.instruments.plan import child, compilers, parse_topology, plan, searching, what_if
from praxis_lite.instruments.plan.compare import verdict
from praxis_lite.instruments.plan.fitting import fitted_mesh, made_to_fit
from praxis_lite.instruments.plan.knobs import configure_task, knobs_of, neighbours, overrides_of
from praxis_lite.instruments.plan.price import format_price, price_of
from praxis_lite.instruments.plan.searching import Correction, format_search, search
from praxis_lite.instruments.plan.what_if import Change, WhatIf


@pytest.fixture(scope='module')
def planned():
  return plan(small_lm((1, 4, 2)), None, 'h100:1x8', compile=False)


# ---------------------------------------------------------------- a mesh made to fit


@pytest.mark.parametrize(
  ('sizes', 'devices', 'fits'),
  [
    ((1, 16, 4), 64, (1, 16, 4)),
    ((1, 16, 4), 4096, (1, 1024, 4)),
    ((1, 16, 4), 2, (1, 1, 2)),
    ((2, 16, 4), 24, (2, 3, 4)),
    ((1, 16, 4), 7, (1, 7, 1)),
  ],
)
def test_the_axis_that_splits_the_batch_takes_what_the_others_leave(sizes, devices, fits):
  mesh = fitted_mesh(dict(zip(('replica', 'data', 'mdl'), sizes)), devices, 'data')
  assert tuple(mesh.values()) == fits


def test_a_mesh_made_to_fit_says_so():
  overrides, what = made_to_fit(small_lm((1, 4, 2)).task, parse_topology('h100:8x8'))
  assert overrides == ['task.ici_mesh_shape=(1, 32, 2)']
  assert re.search(
    r'data 4 x mdl 2, is made to fit 64 devices: replica 1 x data 32 x mdl 2. .* data, the largest', what
  )
  assert made_to_fit(small_lm((1, 4, 2)).task, parse_topology('h100:1x8')) == ([], '')
  overrides, _ = made_to_fit(small_lm((1, 4, 2)).task, parse_topology('v5e:4x4:2'))
  assert overrides == ['task.ici_mesh_shape=(1, 8, 2)', 'task.dcn_mesh_shape=(1, 2, 1)']


def test_a_batch_axis_that_would_leave_devices_without_a_part_of_a_weight_is_shared_with_another():
  overrides, what = made_to_fit(small_lm((1, 4, 2)).task, parse_topology('h100:64x8'))
  assert overrides == [f'task.ici_mesh_shape=(4, {D}, 2)']
  assert 'except that replica takes 4, because half of the 256 devices would have no part of a weight' in what
  broken = small_lm((1, 4, 2)).task.set(model=None)  # A plan of it says what is wrong.
  assert made_to_fit(broken, parse_topology('h100:64x8'))[0] == ['task.ici_mesh_shape=(1, 256, 2)']


# ---------------------------------------------------------------- search


def test_settings_next_to_one_differ_in_one_knob():
  knobs = knobs_of(configure_task(small_lm((1, 4, 2), remat='full')), [ROWS, 2 * ROWS])
  own = tuple(knob.own for knob in knobs)
  found = [overrides_of(knobs, near) for near in neighbours(knobs, own)]
  assert all(len(lines) == 1 for lines in found)
  lines = {line for (line,) in found}
  assert {'task.ici_mesh_shape=(1, 8, 1)', 'task.ici_mesh_shape=(2, 2, 2)', 'task.ici_mesh_shape=(1, 2, 4)'} <= lines
  assert {'task.model.lm.transformer.remat=none', 'task.train.learner.num_microbatches=2'} <= lines
  assert f'datasets[0].batch_size={2 * ROWS}' in lines
  assert overrides_of(knobs, own) == []


@pytest.mark.slow
def test_a_search_ranks_settings_and_says_how_to_have_them():
  config = small_lm((8, 1, 1), remat='none')
  found = search(config, None, 'h100:1x8', verify=0, estimates=5, seconds=600)
  assert found == sorted(found, key=lambda ranked: ranked.order)
  own = next(ranked for ranked in found if ranked.is_own)
  assert own.overrides == ()
  best = found[0]
  assert best.seconds < own.seconds
  # A step of so small a model takes as long as it has operations, and what layers keep takes one more each to copy.
  assert best.overrides[0].startswith('task.model.lm.transformer.remat=')
  again = plan(configure_task(config).change(best.overrides).explained, None, 'h100:1x8', compile=False)
  assert again.step_seconds == best.seconds
  text = format_search(found)
  assert f"--set '{best.overrides[0]}'" in text
  assert re.search(
    r'best by estimates only: \d+% less time than its own setting; \d+ settings were estimated, 0 of', text
  )
  assert config.task.ici_mesh_shape == (8, 1, 1)  # It is as it was.


def test_a_search_takes_configs(planned):
  task, _ = task_and_inputs(small_lm())
  with pytest.raises(ConfigError, match='pass its config'):
    search(task, None, 'h100:1x8')


def test_settings_with_the_same_program_are_one(planned, monkeypatch):
  monkeypatch.setattr(searching, 'plan', lambda *task, **options: planned)
  found = search(small_lm((1, 4, 2)), None, 'h100:1x8', verify=0, estimates=4)
  assert [ranked.is_own for ranked in found] == [True]


def test_estimates_are_corrected_by_the_nearest_setting_that_was_compiled(planned):
  correct = Correction()
  assert correct(planned) == pytest.approx((planned.step_seconds, planned.memory.peak))
  correct.add(planned, _slower(planned, 2.0), ('mesh', 'none'))
  correct.add(planned, _slower(planned, 8.0), ('mesh', 'full'))
  assert correct(planned, ('other', 'none'))[0] == pytest.approx(2 * planned.step_seconds)
  assert correct(planned, ('other', 'full'))[0] == pytest.approx(8 * planned.step_seconds)
  assert correct(planned, ('other', 'other'))[0] == pytest.approx(4 * planned.step_seconds)


def test_a_search_compiles_until_no_other_setting_may_be_faster(planned):
  """Estimates of settings without rematerialisation are too short, those with two microbatches right."""
  meshes = {'a': 1.0, 'b': 1.01, 'c': 1.02}
  kinds = {('none', 1): (0.9, 1.3), ('none', 2): (0.95, 1.0), ('full', 1): (1.2, 1.0)}
  made = searching._Search.__new__(searching._Search)
  made._correction, made._failed, made._verified, made._estimates = Correction(), {}, {}, {}
  made._knobs, made.fitted, made._own = [], (), ('a', 'full', 1)
  for kind, (share, _) in kinds.items():
    for mesh, more in meshes.items():
      made._estimates[mesh, *kind] = _slower(planned, share * more)
  compiled, setting = [], made._own
  while setting is not None:
    compiled.append(setting)
    estimate = made._estimates[setting]
    made._verified[setting] = _slower(estimate, kinds[setting[1:]][1])
    made._correction.add(estimate, made._verified[setting], setting)
    setting = made._most_promising()
  # The others of a kind with long times are left out; those of the fastest kind are not, since they may be faster.
  assert compiled[:3] == [('a', 'full', 1), ('a', 'none', 1), ('a', 'none', 2)]
  assert {*compiled[3:]} == {('b', 'none', 2), ('c', 'none', 2)}
  assert made._rank()[0][0] == ('a', 'none', 2)


@pytest.mark.slow
def test_a_search_compiles_what_promises_most_and_recommends_the_fastest_that_it_compiled(monkeypatch):
  """A compiler is planted that makes tensor parallel steps slower than their estimates and doubles all others."""
  compiled = []

  def planted(task, inputs, topology, **options):
    estimate = plan(task, inputs, topology, compile=False)
    if options.get('compile') is False:
      return estimate
    compiled.append(_slower(estimate, 2.0 if estimate.mesh['mdl'] == 1 else 5.0))
    return compiled[-1]

  monkeypatch.setattr(searching, 'plan', planted)
  monkeypatch.setattr(searching, 'missing_compiler', lambda topology: '')
  found = search(small_lm((1, 4, 2), remat='full'), None, 'h100:1x8', verify=2, estimates=4, seconds=600)
  assert [ranked.verified for ranked in found if ranked.is_own] == compiled[:1]
  assert sorted(r.seconds for r in found if r.verified) == sorted(p.step_seconds for p in compiled)
  assert len(compiled) == 2 and found[0].seconds == min(p.step_seconds for p in compiled)
  # The estimates of others are corrected as well; those that may take less time than the best are told.
  left = [ranked for ranked in found if not ranked.verified and ranked.least < found[0].seconds]
  text = ' '.join(format_search(found).split())
  assert 'of the 2 that were compiled' in text and f'{len(found)} settings were estimated, 2 of them compiled' in text
  assert bool(left) == ('only estimated may take less time' in text)


def test_what_was_only_estimated_and_may_be_faster_is_told(planned):
  def ranked(share, verified, is_own=False):
    made = _slower(planned, share)
    least = made.step_seconds if verified else 0.92 * made.step_seconds
    return searching.Ranked((), made, made if verified else None, made.step_seconds, 1.0, least, is_own)

  others = [ranked(0.5, False), ranked(1.05, False), ranked(1.1, False)]
  found = sorted([ranked(1.0, True, is_own=True), *others], key=lambda r: r.order)
  assert found[0].is_own  # What was compiled comes before what was only estimated.
  text = ' '.join(format_search(found).split())
  assert "the experiment's own setting is the best of the 1 that were compiled" in text
  assert '2 that were only estimated may take less time, down to 46% of this by the errors of earlier' in text
  assert '--verify=3' in text
  text = ' '.join(format_search([found[0], others[-1]]).split())
  assert 'by the errors of earlier estimates, none that was only estimated takes less time' in text


def _slower(planned, factor):
  """The plan, with this factor more time and temporaries, as if a compiler had said so."""
  cost, memory = planned.cost, planned.memory
  collectives = tuple(dataclasses.replace(c, exposed=factor * c.exposed) for c in cost.collectives)
  cost = dataclasses.replace(cost, seconds=factor * cost.seconds, collectives=collectives)
  memory = dataclasses.replace(memory, temporaries=int(factor * memory.temporaries))
  return dataclasses.replace(planned, mode='compiled', cost=cost, memory=memory)


# ---------------------------------------------------------------- what if


@pytest.mark.slow
def test_what_other_moments_save_is_exact(planned):
  config = small_lm((1, 4, 2))
  changes = {change.what: change for change in WhatIf(configure_task(config), planned).state_changes()}
  assert {'moments in bfloat16', 'moments in int8', 'with moving averages'} <= set(changes)
  for change in changes.values():
    assert change.how == 'exact'
  saved = planned.memory.peak - changes['moments in bfloat16'].peak
  assert saved == pytest.approx(planned.memory.state.slots / 2, rel=0.01)
  more = changes['with moving averages'].peak - planned.memory.peak
  assert more == pytest.approx(planned.memory.state.parameters, rel=0.01)
  again = plan(
    configure_task(config).change(changes['moments in int8'].overrides).explained,
    None,
    'h100:1x8',
    compile=False,
  )
  assert again.memory.state.total - planned.memory.state.total == changes['moments in int8'].peak - planned.memory.peak


@pytest.mark.parametrize(
  ('fields', 'proposed'),
  [
    ({}, ['ema_decay=0.9999']),
    ({'ema_decay': 0.9}, ['ema_decay=0.0']),
    ({'optimizer': Config(optax.contrib.schedule_free_adamw)}, []),
  ],
)
def test_averages_are_proposed_if_there_are_none(planned, fields, proposed):
  config = small_lm((1, 4, 2))
  config.task.train.learner.set(**fields)
  lines = [line for _, line in WhatIf(configure_task(config), planned)._state_changes() if 'ema_decay' in line]
  assert lines == [f'task.train.learner.{line}' for line in proposed]


def test_a_size_that_a_limit_of_the_search_ends_says_so(planned, monkeypatch):
  def estimated(self, what, overrides):
    return Change(what, tuple(overrides), planned.memory.peak + int(overrides[0].partition('=')[2]), 1.0, 'estimated')

  monkeypatch.setattr(WhatIf, '_estimate_change', estimated)
  largest = WhatIf(configure_task(small_lm((1, 4, 2))), planned)._largest('seq_len', 32, 32, lambda n: [f'length={n}'])
  assert largest.what.endswith(' or more') and largest.peak < planned.memory.capacity


@pytest.mark.slow
def test_the_largest_batch_fits_and_a_larger_one_does_not(planned):
  config = configure_task(small_lm((1, 4, 2)))
  largest = WhatIf(config, planned).largest_batch()
  assert largest.peak <= planned.memory.capacity
  rows = int(largest.what.split()[-1].replace(',', ''))
  assert rows % 4 == 0
  more = config.change([f'datasets[0].batch_size={int(1.05 * rows) // 4 * 4}'])
  assert not plan(more.explained, None, 'h100:1x8', compile=False).fits


def test_the_mesh_next_to_one_that_waits_least_is_found(planned, monkeypatch):
  times = {'(1, 8, 1)': 0.8, '(2, 2, 2)': 0.7, '(1, 2, 4)': 1.2}
  asked = []

  def estimated(self, what, overrides):
    asked.append(what)
    shape, too_large = what.removeprefix('mesh '), 2.0 * planned.memory.capacity
    peak = too_large if shape == '(2, 2, 2)' else 1.0
    return Change(what, tuple(overrides), peak, times[shape], 'estimated') if shape in times else None

  monkeypatch.setattr(WhatIf, '_estimate_change', estimated)
  changes = WhatIf(configure_task(small_lm((1, 4, 2))), _slower(planned, 10.0))
  assert changes.less_waiting().overrides == ('task.ici_mesh_shape=(1, 8, 1)',)
  assert len(asked) > len(times)
  times.pop('(1, 8, 1)')
  assert changes.less_waiting() is None  # The others do not fit, or take longer.
  calm = dataclasses.replace(planned, cost=dataclasses.replace(planned.cost, collectives=()))
  assert WhatIf(configure_task(small_lm((1, 4, 2))), calm).less_waiting() is None


@pytest.mark.slow
def test_a_step_that_does_not_fit_has_ways_out():
  config = configure_task(small_lm((1, 1, 1))).change(['datasets[0].batch_size=262144'])
  found = plan(config.explained, None, 'h100:1', compile=False)
  assert not found.fits
  # The compiler has refused it, and said that it needs even more.
  memory = dataclasses.replace(found.memory, temporaries=int(1.2 * found.memory.temporaries))
  ways = WhatIf(config, dataclasses.replace(found, is_refused=True, memory=memory)).ways_out()
  assert 1 <= len(ways) <= 3
  assert [way.time for way in ways] == sorted(way.time for way in ways)
  assert all(way.peak <= found.memory.capacity for way in ways)
  first = plan(config.change(ways[0].overrides).explained, None, 'h100:1', compile=False).memory
  assert ways[0].peak == pytest.approx(first.state.total + 1.2 * first.temporaries)


# ---------------------------------------------------------------- prices and comparisons


def test_prices_are_those_of_steps(planned):
  price = price_of(planned, 1e9, 2.5)
  assert price.steps == pytest.approx(1e9 / TOKENS)
  assert price.steps_seconds == pytest.approx(price.steps * planned.step_seconds)
  assert price.chip_hours == pytest.approx(price.steps_seconds / price.goodput.share / 3600 * 8)
  assert price.money == pytest.approx(2.5 * price.chip_hours)
  assert price_of(planned).tokens == 20 * ALL
  for hours, text in ((0.00471, '0.0047'), (3.21, '3.2'), (1234.5, '1,234')):
    assert f' {text} chip-hours' in format_price(planned, price=dataclasses.replace(price, chip_hours=hours))


def test_the_better_of_two_plans_is_named_with_its_reason(planned):
  slow = _slower(planned, 3.0)
  assert verdict(planned, slow).startswith(
    'the first is better: 67% less time of chips for the same tokens, most by less'
  )
  assert verdict(slow, planned).startswith('the second is better')
  assert 'the same time' in verdict(planned, planned)
  assert re.match(r'the first is better: the second does not fit, by \d+', verdict(planned, _slower(planned, 1e7)))


def test_longer_sequences_are_not_better_because_their_tokens_take_more_flops(planned):
  """As many tokens, of twice the FLOPs, in 1.5 times the time: less time for a FLOP, more for a token."""
  longer = _slower(planned, 1.5)
  longer = dataclasses.replace(longer, work=dataclasses.replace(planned.work, flops=2 * planned.work.flops))
  assert verdict(planned, longer).startswith('the first is better: 33% less time of chips for the same tokens')
  larger = dataclasses.replace(longer, work=dataclasses.replace(longer.work, parameters=2 * ALL))
  assert verdict(planned, larger).startswith('the second is better: 25% less time of chips for the same FLOPs')


# ---------------------------------------------------------------- the command


@pytest.mark.slow
def test_the_command_prints_them(capsys, monkeypatch):
  monkeypatch.setattr(WhatIf, 'largest_batch', lambda self: None)  # These take seconds, and are tested above.
  monkeypatch.setattr(WhatIf, 'largest_length', lambda self: None)
  monkeypatch.setattr(WhatIf, 'less_waiting', lambda self: Change('a mesh', ('mesh=1',), 1.0, 0.9, 'estimated'))
  monkeypatch.setattr(what_if, 'MOMENTS', ('float32', 'int8'))
  monkeypatch.setattr(searching, '_LEAST_ESTIMATES', 2)
  named = ['plan', '--exp=lm.SyntheticLmTiny', '--topology=h100:1x8', '--nocompile']
  changes = ['--compare=task.ici_mesh_shape=(8,1,1)', '--what_if', '--tokens=1e9', '--price_per_chip_hour=2']
  changes += ['--host_gigabits=1600', '--failures_per_chip_day=1', '--restart_seconds=600', '--save_seconds=3']
  assert main([*named, *changes, '--input_wait_share=0.25']) == 0
  out, err = capsys.readouterr()
  assert '1,600 Gbit/s from each host' in ' '.join(out.split())
  # The rest waits for inputs, restarts and saves.
  assert re.search(r'7\d\.\d% of this time .* some chip fails every 3\.0 h, and a save stalls the run for 3 s', out)
  assert 'is made to fit 8 devices: replica 1 x data 8 x mdl 1' in err
  assert re.search(r'1.00B tokens take [\d,]+ steps, .* chip-hours, [\d,]+ in money', out)
  assert re.search(r'moments in int8 .* exact +--set', out)
  assert re.search(r'to wait less for communication .*\n-+\na mesh +1 B .* 90% ', out)
  assert re.search(r'is better: |both take the same time', out)
  assert main([*named, '--search', '--search_seconds=1']) == 0
  assert 'settings were estimated' in capsys.readouterr().out


def test_bad_sizes_are_told(capsys):
  named = ['plan', '--exp=lm.SyntheticLmTiny', '--topology=h100:1x8', '--nocompile']
  assert main([*named, '--search', '--batch_sizes=big']) == 2
  assert '--batch_sizes: expected numbers of rows' in capsys.readouterr().err


# ---------------------------------------------------------------- a compiler in another process


def killed_by(limit):
  return [sys.executable, '-c', limit]


@pytest.mark.slow
def test_a_compiler_that_is_killed_is_told_and_formulas_take_its_place(tmp_path):
  kills_itself = killed_by(f'import os; os.kill(os.getpid(), {int(signal.SIGKILL)})')
  found = plan(
    small_lm(), None, 'cpu:8', cache=tmp_path, elsewhere=lambda: child.compile_in_child(kills_itself, tmp_path)
  )
  assert found.mode == 'analytic' and not found.is_refused
  assert found.notes[0] == (
    'the process of the compiler was ended by SIGKILL; the machine has probably not enough memory for it; the numbers '
    'are analytic'
  )


def test_a_compiler_without_memory_is_told(tmp_path):
  runs_out = 'import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 28,) * 2); x = bytearray(1 << 30)'
  with pytest.raises(compilers.CompileError, match='the process of the compiler failed: MemoryError'):
    child.compile_in_child(killed_by(runs_out), tmp_path)


def test_a_refusal_of_another_process_is_that_of_this_one(planned, tmp_path):
  refused = dataclasses.replace(planned, is_refused=True, failure='no room')
  says_so = killed_by(f'print({child.outcome_of(refused)!r})')
  with pytest.raises(compilers.CompileError, match='no room') as error:
    child.compile_in_child(says_so, tmp_path)
  assert error.value.does_not_fit
  assert subprocess.run(says_so, check=True, capture_output=True).returncode == 0
